/* spend MIB MS [BASE_MIB]: a base that stays, and a spike on top of it.
 *
 * Anonymous: BASE_MIB (64) from the start to the end, and MIB on top of it for MS milliseconds.
 * The peak is BASE_MIB + MIB. Before and after the spike, the program holds its base for 100 ms.
 * The spike lasts longer than MS: the kernel needs time to clear its pages.
 */
#include "memory.h"

int main(int count, char **arguments) {
    size_t spike = (size_t)argument(count, arguments, 1, 256) * MIB;
    take((size_t)argument(count, arguments, 3, 64) * MIB);
    hold(100);
    char *start = take(spike);
    hold(argument(count, arguments, 2, 5));
    munmap(start, spike);
    hold(100);
    return 0;
}
