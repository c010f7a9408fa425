/* returns FREED TAKEN [MS]: memory that is given back, but stays until somebody needs it.
 *
 * Anonymous: FREED MiB, given back with MADV_FREE, and TAKEN MiB after it, held for MS (800)
 * milliseconds. The kernel counts both until memory is short; the program needs the larger of them.
 */
#include "memory.h"

int main(int count, char **arguments) {
    size_t freed = (size_t)argument(count, arguments, 1, 100) * MIB;
    char *start = take(freed);
    if (madvise(start, freed, MADV_FREE))
        fail("madvise");
    take((size_t)argument(count, arguments, 2, 100) * MIB);
    hold(argument(count, arguments, 3, 800));
    return 0;
}
