/* locks FILE [MS]: a file, mapped and locked in memory.
 *
 * File: the size of FILE, as page cache, which cannot be given back while the program holds it, for MS
 * (800) milliseconds.
 */
#include "memory.h"

int main(int count, char **arguments) {
    size_t bytes;
    if (count < 2)
        return 2;
    int file = opened(arguments[1], &bytes);
    char *start = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
    if (start == MAP_FAILED || mlock(start, bytes))
        fail("mlock");
    hold(argument(count, arguments, 2, 800));
    return 0;
}
