/* maps FILE [MS]: one file, mapped shared and private.
 *
 * File: the size of FILE, however often it is mapped: page cache, which can be given back.
 * Anonymous: half the size of FILE, because the program writes to the first half of the private
 * map. All pages of both maps are touched, and held for MS (200) milliseconds. The RSS is twice the
 * size of FILE.
 */
#include "memory.h"

int main(int count, char **arguments) {
    size_t bytes;
    if (count < 2)
        return 2;
    int file = opened(arguments[1], &bytes);
    char *shared = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED)
        fail("mmap");
    char *own = mapped(bytes, MAP_PRIVATE, file);
    read_pages(shared, bytes);
    read_pages(own, bytes);
    write_pages(own, bytes / 2);
    hold(argument(count, arguments, 2, 800));
    return 0;
}
