/* shares MIB [MS]: shared memory of two processes.
 *
 * Shared: MIB in a memfd and MIB in a file of /dev/shm, mapped and touched by two processes, and
 * charged once: 2 * MIB, held for MS (200) milliseconds. Each process has an RSS of 2 * MIB.
 * The file in /dev/shm has no name any more when the memory is taken.
 */
#include "memory.h"

static int unnamed_shm(void) {
    char path[] = "/dev/shm/shares-XXXXXX";
    int file = mkstemp(path);
    if (file < 0 || unlink(path))
        fail(path);
    return file;
}

int main(int count, char **arguments) {
    size_t bytes = (size_t)argument(count, arguments, 1, 128) * MIB;
    int files[2] = {memfd_create("shares", 0), unnamed_shm()};
    char *starts[2];
    int ready[2], end[2];
    make_pipe(ready);
    make_pipe(end);
    for (int each = 0; each < 2; each++) {
        if (files[each] < 0 || ftruncate(files[each], (off_t)bytes))
            fail("ftruncate");
        starts[each] = mapped(bytes, MAP_SHARED, files[each]);
        write_pages(starts[each], bytes);
    }
    if (!fork_child()) {
        for (int each = 0; each < 2; each++)
            read_pages(starts[each], bytes);
        tell(ready[1]);
        wait_for(end[0]);
        return 0;
    }
    wait_for(ready[0]);
    hold(argument(count, arguments, 2, 800));
    tell(end[1]);
    wait(NULL);
    return 0;
}
