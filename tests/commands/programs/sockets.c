/* sockets MIB [MS]: memory that the kernel keeps for a program, in sockets that nobody reads.
 *
 * Kernel: MIB of bytes, and up to 5 % for the kernel's heads of them, in pairs of Unix sockets with up
 * to 1 MiB in each; held for MS (800) milliseconds.
 */
#include "memory.h"
#include <sys/resource.h>
#include <sys/socket.h>

static size_t fill(int socket, const char *bytes, size_t most) {
    size_t written = 0;
    ssize_t now = 1;
    while (written < most && now > 0) {
        now = send(socket, bytes, 64 * 1024, MSG_DONTWAIT);
        written += now > 0 ? (size_t)now : 0;
    }
    return written;
}

int main(int count, char **arguments) {
    static char bytes[64 * 1024];
    size_t left = (size_t)argument(count, arguments, 1, 100) * MIB;
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    while (left) {
        int ends[2], size = MIB;
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
            fail("socketpair");
        setsockopt(ends[0], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size); /* only as root */
        left -= fill(ends[0], bytes, left < MIB ? left : MIB);
    }
    hold(argument(count, arguments, 2, 800));
    return 0;
}
