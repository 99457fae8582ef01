/* Moves the wall clock of one process by as many seconds as the file FAULT_CLOCK holds (a double),
 * from the moment it is written. For LD_PRELOAD. The monotonic clock stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *offset;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("FAULT_CLOCK");
    int fd = path ? open(path, O_RDONLY) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) offset = mapped;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_gettime(id, now);
    if (!failed && offset && id == CLOCK_REALTIME) now->tv_sec += (time_t)*offset;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
