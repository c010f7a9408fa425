/* leaves GROUP MIB HOW [MS]: a program that gets out of its cgroup.
 *
 * Anonymous: MIB, which is charged to the cgroup with the folder GROUP. HOW is "stays" if the program
 * stays there, "returns" if it enters its own cgroup HOME again, a further argument, before it holds the
 * memory for MS (400) milliseconds, "child" if only a child goes there, and "late" if the child does so
 * after 100 ms.
 */
#include "memory.h"

static void enter(const char *group) {
    char path[4096];
    snprintf(path, sizeof path, "%s/cgroup.procs", group);
    FILE *file = fopen(path, "w");
    if (!file || fputs("0", file) < 0 || fclose(file))
        fail(path);
}

int main(int count, char **arguments) {
    if (count < 4)
        return 2;
    const char *how = arguments[3];
    int late = !strcmp(how, "late");
    if ((late || !strcmp(how, "child")) && fork_child()) {
        int status;
        wait(&status);
        return status ? 1 : 0;
    }
    if (late)
        hold(100);
    enter(arguments[1]);
    take((size_t)argument(count, arguments, 2, 100) * MIB);
    if (!strcmp(how, "returns"))
        enter(count > 5 ? arguments[5] : "");
    hold(argument(count, arguments, 4, 400));
    return 0;
}
