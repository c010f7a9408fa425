/* shares MIB [MS]: shared memory of two processes.
 *
 * Shared: MIB in a memfd and MIB in a file of /dev/shm, mapped and touched by two processes, and
 * charged once: 2 * MIB, held for MS (200) milliseconds. Each process has an RSS of 2 * MIB.
 * The processes take turns at each MiB, so that both have the same at any time.
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
    int written[2], seen[2], end[2];
    make_pipe(written);
    make_pipe(seen);
    make_pipe(end);
    for (int each = 0; each < 2; each++) {
        if (files[each] < 0 || ftruncate(files[each], (off_t)bytes))
            fail("ftruncate");
        starts[each] = mapped(bytes, MAP_SHARED, files[each]);
    }
    int is_child = !fork_child();
    for (int each = 0; each < 2; each++)
        for (size_t at = 0; at < bytes; at += MIB) {
            if (is_child) {
                wait_for(written[0]);
                read_pages(starts[each] + at, MIB);
                tell(seen[1]);
            } else {
                write_pages(starts[each] + at, MIB);
                tell(written[1]);
                wait_for(seen[0]);
            }
        }
    if (is_child) {
        wait_for(end[0]);
        return 0;
    }
    hold(argument(count, arguments, 2, 800));
    tell(end[1]);
    wait(NULL);
    return 0;
}
