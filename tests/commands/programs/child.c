/* child MIB [MS]: a small parent, and a large child that is another program.
 *
 * Anonymous: 8 MiB in the parent, and MIB in its child, which holds them for MS (200) milliseconds.
 * The peak is MIB + 8. The child has the command line "child of MIB MS".
 */
#include "memory.h"

int main(int count, char **arguments) {
    if (count > 3 && !strcmp(arguments[1], "of")) {
        take((size_t)argument(count, arguments, 2, 256) * MIB);
        hold(argument(count, arguments, 3, 800));
        return 0;
    }
    take(8 * MIB);
    if (!fork_child()) {
        char *mib = count > 1 ? arguments[1] : "256", *ms = count > 2 ? arguments[2] : "200";
        execl("/proc/self/exe", "child", "of", mib, ms, NULL);
        fail("execl");
    }
    int status;
    wait(&status);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
