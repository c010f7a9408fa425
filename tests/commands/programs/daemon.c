/* daemon MIB [SECONDS]: a process that leaves its parent, its session and its streams.
 *
 * Anonymous: MIB in the daemon. The first process ends when the daemon has held them for 2 s;
 * the daemon goes on for SECONDS (60), unless somebody ends it. Its command line is that of the
 * first process, and its parent is whoever takes orphans.
 */
#include "memory.h"

static void become_daemon(void) {
    if (setsid() < 0)
        fail("setsid");
    if (fork_child())
        _exit(0);
    for (int stream = 0; stream < 3; stream++)
        close(stream);
    if (chdir("/"))
        _exit(2);
}

int main(int count, char **arguments) {
    int ready[2];
    make_pipe(ready);
    if (!fork_child()) {
        close(ready[0]);
        become_daemon();
        take((size_t)argument(count, arguments, 1, 64) * MIB);
        hold(2000);
        tell(ready[1]);
        close(ready[1]);
        hold(argument(count, arguments, 2, 60) * 1000);
        return 0;
    }
    close(ready[1]);
    wait_for(ready[0]); /* fails if the daemon died */
    wait(NULL);
    return 0;
}
