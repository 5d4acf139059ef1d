/* Preloaded: once the file CLOCK_FILE exists, the system's clock is CLOCK_JUMP_S ahead. Other clocks run on. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, clock, now);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (status == 0 && is_wall && access(getenv("CLOCK_FILE"), F_OK) == 0) now->tv_sec += atol(getenv("CLOCK_JUMP_S"));
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    now->tv_sec = wall.tv_sec;
    now->tv_usec = wall.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    if (now) *now = wall.tv_sec;
    return wall.tv_sec;
}
