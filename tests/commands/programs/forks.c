/* forks MIB [CHILDREN] [MS] [FIRST]: copy-on-write copies, all at the same time.
 *
 * Anonymous: the parent writes MIB, and each of CHILDREN (3) children overwrites the first half.
 * The peak is MIB + CHILDREN * MIB / 2, held for MS (300) milliseconds. The sum of all processes'
 * RSS is then (CHILDREN + 1) * MIB. FIRST (0) milliseconds lie between the parent's memory and the forks: what a
 * process takes just before a fork can't be told from what its child takes just after it.
 */
#include "memory.h"

int main(int count, char **arguments) {
    size_t bytes = (size_t)argument(count, arguments, 1, 128) * MIB;
    int children = (int)argument(count, arguments, 2, 3);
    int ready[2], end[2];
    make_pipe(ready);
    make_pipe(end);
    char *start = take(bytes);
    hold(argument(count, arguments, 4, 0));
    for (int child = 0; child < children; child++)
        if (!fork_child()) {
            write_pages(start, bytes / 2);
            tell(ready[1]);
            wait_for(end[0]);
            return 0;
        }
    for (int child = 0; child < children; child++)
        wait_for(ready[0]);
    hold(argument(count, arguments, 3, 800));
    for (int child = 0; child < children; child++)
        tell(end[1]);
    while (wait(NULL) > 0)
        ;
    return 0;
}
