/* heirs MIB OWN HOW [MS]: forked processes that copy nothing of their parent.
 *
 * Anonymous: MIB in the parent, and OWN MiB in each of three children, which they take themselves. HOW
 * says what becomes of the parent's MIB: "freed" before the forks, or "dropped" by each child before it
 * takes its own, so that only the parent has them. Held for MS (800) milliseconds.
 */
#include "memory.h"

#define CHILDREN 3

int main(int count, char **arguments) {
    size_t bytes = (size_t)argument(count, arguments, 1, 100) * MIB;
    size_t own = (size_t)argument(count, arguments, 2, 100) * MIB;
    int dropped = count > 3 && !strcmp(arguments[3], "dropped");
    int end[2];
    make_pipe(end);
    char *start = take(bytes);
    if (!dropped)
        munmap(start, bytes);
    for (int child = 0; child < CHILDREN; child++)
        if (!fork_child()) {
            if (dropped)
                munmap(start, bytes);
            take(own);
            wait_for(end[0]);
            return 0;
        }
    hold(argument(count, arguments, 4, 800));
    for (int child = 0; child < CHILDREN; child++)
        tell(end[1]);
    while (wait(NULL) > 0)
        ;
    return 0;
}
