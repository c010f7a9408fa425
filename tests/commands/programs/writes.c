/* writes MIB [PATH] [MS]: a file in memory that nobody maps.
 *
 * Shared: MIB in the file PATH of a tmpfs, which is left there, or in a memfd if PATH is "-"; held for
 * MS (800) milliseconds. Anonymous: the 1 MiB that is written.
 */
#include "memory.h"

int main(int count, char **arguments) {
    int number = (int)argument(count, arguments, 1, 100);
    const char *path = count > 2 ? arguments[2] : "-";
    int file = strcmp(path, "-") ? open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600) : memfd_create("writes", 0);
    char *buffer = take(MIB);
    if (file < 0)
        fail(path);
    for (int each = 0; each < number; each++)
        if (write(file, buffer, MIB) != (ssize_t)MIB)
            fail("write");
    hold(argument(count, arguments, 3, 800));
    return 0;
}
