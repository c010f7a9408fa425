/* reads FILE [MS]: a file, read from its beginning to its end into a buffer of 1 MiB.
 *
 * File: the size of FILE, as page cache, which can be given back. Anonymous: the buffer, 1 MiB.
 * The program holds its buffer for MS (200) milliseconds after it.
 */
#include "memory.h"

int main(int count, char **arguments) {
    size_t bytes;
    if (count < 2)
        return 2;
    int file = opened(arguments[1], &bytes);
    char *buffer = take(MIB);
    while (read(file, buffer, MIB) > 0)
        ;
    hold(argument(count, arguments, 2, 800));
    return 0;
}
