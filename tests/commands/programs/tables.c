/* tables MIB [MS]: page tables, and hardly a page.
 *
 * Kernel: MIB of page tables, because the program reads one byte of every 2 MiB of a map without
 * memory: each such read needs a table of 4 KiB, and finds the kernel's page of zeros. Held for MS
 * (800) milliseconds.
 */
#include "memory.h"

#define SPAN ((size_t)2 << 20)

int main(int count, char **arguments) {
    size_t tables = (size_t)argument(count, arguments, 1, 100) * MIB / PAGE;
    char *start = mmap(NULL, tables * SPAN, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        fail("mmap");
    madvise(start, tables * SPAN, MADV_NOHUGEPAGE);
    for (size_t each = 0; each < tables; each++)
        read_pages(start + each * SPAN, PAGE);
    hold(argument(count, arguments, 2, 800));
    return 0;
}
