/* What all programs share: memory of a known size, and the wait for another process. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PAGE 4096

/* End with exit code 2 and the name of the call that failed. */
static inline void fail(const char *call) {
    perror(call);
    exit(2);
}

static inline void *mapped(size_t bytes, int flags, int file) {
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
    if (start == MAP_FAILED)
        fail("mmap");
    return start;
}

/* Write a byte to each page: from then on the pages are this process's own. */
static inline void write_pages(char *start, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PAGE)
        ((volatile char *)start)[at] = 1;
}

static inline void read_pages(const char *start, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PAGE)
        (void)((const volatile char *)start)[at];
}

/* Return anonymous memory, every page of which has been written. */
static inline char *take(size_t bytes) {
    char *start = mapped(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    write_pages(start, bytes);
    return start;
}

static inline void hold(double ms) {
    struct timespec left = {(time_t)(ms / 1000), (long)(ms * 1e6) % 1000000000};
    while (nanosleep(&left, &left))
        ;
}

/* Return argument `number`, or `otherwise` if it was not given. */
static inline double argument(int count, char **arguments, int number, double otherwise) {
    return count > number ? atof(arguments[number]) : otherwise;
}

static inline void tell(int pipe_end) {
    if (write(pipe_end, "", 1) != 1)
        fail("write");
}

static inline void wait_for(int pipe_end) {
    char byte;
    if (read(pipe_end, &byte, 1) != 1)
        fail("read");
}

static inline void make_pipe(int ends[2]) {
    if (pipe(ends))
        fail("pipe");
}

/* Return 0 in the child, its pid in the parent. */
static inline pid_t fork_child(void) {
    pid_t pid = fork();
    if (pid < 0)
        fail("fork");
    return pid;
}

static inline int opened(const char *path, size_t *bytes) {
    struct stat status;
    int file = open(path, O_RDONLY);
    if (file < 0 || fstat(file, &status))
        fail(path);
    *bytes = (size_t)status.st_size;
    return file;
}
