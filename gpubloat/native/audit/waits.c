/* Functions that wait with another signal mask: a handler that runs meanwhile has that mask, and the kernel ends a program
   that meets a breakpoint whose signal is blocked. So they are called without our signals in the mask. The system calls
   are glibc's own; like it in its older versions, we let a thread be cancelled at any time while it waits. */
#include "audit.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <time.h>

/* pthread_setcanceltype of the program's C library. */
int (*program_set_cancel_type)(int type, int *old);

/* `mask` without our signals, in `room`; NULL stays NULL. */
static const uint64_t *without_ours(const sigset_t *mask, uint64_t *room)
{
    if (!mask)
        return NULL;
    memcpy(room, mask, sizeof *room);
    *room &= ~owned_signals();
    return room;
}

static int call(long number, long a, long b, long c, long d, long e, long f)
{
    int before = 0;
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    if (program_set_cancel_type)
        program_set_cancel_type(PTHREAD_CANCEL_ASYNCHRONOUS, &before);
    r10 = d, r8 = e, r9 = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (program_set_cancel_type)
        program_set_cancel_type(before, NULL);
    return result < 0 ? fail((int)-result) : (int)result;
}

int our_sigsuspend(const sigset_t *set)
{
    uint64_t room;
    return call(SYS_rt_sigsuspend, (long)without_ours(set, &room), sizeof room, 0, 0, 0, 0);
}

int our_ppoll(struct pollfd *files, nfds_t n, const struct timespec *timeout, const sigset_t *mask)
{
    uint64_t room;
    struct timespec left = timeout ? *timeout : (struct timespec){0}; /* the kernel writes into it */
    return call(SYS_ppoll, (long)files, n, timeout ? (long)&left : 0, (long)without_ours(mask, &room), sizeof room, 0);
}

int our_pselect(int n, fd_set *in, fd_set *out, fd_set *other, const struct timespec *timeout, const sigset_t *mask)
{
    uint64_t room;
    struct timespec left = timeout ? *timeout : (struct timespec){0};
    struct {
        const uint64_t *mask;
        size_t size;
    } both = {without_ours(mask, &room), sizeof room};
    return call(SYS_pselect6, n, (long)in, (long)out, (long)other, timeout ? (long)&left : 0, (long)&both);
}

int our_epoll_pwait(int file, struct epoll_event *events, int n, int timeout, const sigset_t *mask)
{
    uint64_t room;
    return call(SYS_epoll_pwait, file, (long)events, n, timeout, (long)without_ours(mask, &room), sizeof room);
}
