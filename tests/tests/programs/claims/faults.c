// Loaded into replicas and agents with LD_PRELOAD. It shifts the clock of the day, and makes writes
// to the packet filter of the kernel fail, as the file HEADGATE_CLAIMS_FAULTS says: 8 bytes with a
// number of milliseconds, and 8 bytes that are not zero while writes fail.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *faults;

__attribute__((constructor)) static void map_faults(void) {
    const char *path = getenv("HEADGATE_CLAIMS_FAULTS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) faults = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = (int)syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && faults && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        time->tv_sec += faults[0] / 1000;
    return result;
}

static int is_refused(int socket) {
    int domain = 0, protocol = 0;
    socklen_t size = sizeof domain;
    if (!faults || !faults[1]) return 0;
    if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) || domain != AF_NETLINK) return 0;
    if (getsockopt(socket, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) || protocol != NETLINK_NETFILTER) return 0;
    errno = ENOMEM;
    return 1;
}

ssize_t sendto(int socket, const void *bytes, size_t length, int flags, const struct sockaddr *to, socklen_t size) {
    return is_refused(socket) ? -1 : syscall(SYS_sendto, socket, bytes, length, flags, to, size);
}

ssize_t send(int socket, const void *bytes, size_t length, int flags) {
    return sendto(socket, bytes, length, flags, NULL, 0);
}

ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    return is_refused(socket) ? -1 : syscall(SYS_sendmsg, socket, message, flags);
}

// iptables-legacy replaces a table with option 64 of a raw socket.
int setsockopt(int socket, int level, int option, const void *value, socklen_t size) {
    if (faults && faults[1] && level == 0 && option == 64) {
        errno = ENOMEM;
        return -1;
    }
    return (int)syscall(SYS_setsockopt, socket, level, option, value, size);
}
