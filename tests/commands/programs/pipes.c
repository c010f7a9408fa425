/* pipes MIB [MS]: memory that the kernel keeps for a program, in pipes that nobody reads.
 *
 * Kernel: MIB, as pages of MIB pipes with 1 MiB in each, held for MS (800) milliseconds.
 * Anonymous: the 1 MiB that is written into each.
 */
#include "memory.h"

int main(int count, char **arguments) {
    int number = (int)argument(count, arguments, 1, 100);
    char *buffer = take(MIB);
    for (int each = 0; each < number; each++) {
        int ends[2];
        make_pipe(ends);
        if (fcntl(ends[1], F_SETPIPE_SZ, (int)MIB) < 0)
            fail("fcntl");
        if (write(ends[1], buffer, MIB) != (ssize_t)MIB)
            fail("write");
    }
    hold(argument(count, arguments, 2, 800));
    return 0;
}
