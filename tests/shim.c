/* Read and write calls that fail on demand, for LD_PRELOAD. FAULT_PATH: files whose path ends so. FAULT_FROM: calls on them that
   work. FAULT_KIND: short, eintr (every other call), eio, enospc. FAULT_LOG: a file for how many calls of each kind were failed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls, of_pread, of_preadv;

__attribute__((destructor)) static void tell(void)
{
    FILE *log = getenv("FAULT_LOG") ? fopen(getenv("FAULT_LOG"), "w") : NULL;
    if (log)
        fprintf(log, "%ld %ld", of_pread, of_preadv), fclose(log);
}

static int chosen(int fd)
{
    char link[64], path[4096];
    const char *want = getenv("FAULT_PATH"), *from = getenv("FAULT_FROM");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (!want || n < (ssize_t)strlen(want) || strncmp(path + n - strlen(want), want, strlen(want)))
        return 0;
    return atomic_fetch_add(&calls, 1) >= (from ? atol(from) : 0);
}

/* What a call on `fd` for `n` bytes may do: bytes to ask for, or -1 with errno. */
static ssize_t admitted(int fd, size_t n, int writing)
{
    const char *kind = getenv("FAULT_KIND");
    if (!kind || !*kind || writing != !strcmp(kind, "enospc") || !chosen(fd))
        return n;
    if (!strcmp(kind, "short"))
        return n > 4096 ? (n / 2 + 4095) / 4096 * 4096 : n;
    if (!strcmp(kind, "eintr") && calls % 2)
        return n;
    errno = !strcmp(kind, "eintr") ? EINTR : writing ? ENOSPC : EIO;
    return -1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t pread(int fd, void *to, size_t n, off_t at)
{
    REAL(pread);
    ssize_t most = admitted(fd, n, 0);
    of_pread += most != (ssize_t)n;
    return most < 0 ? -1 : real(fd, to, most, at);
}

ssize_t pread64(int fd, void *to, size_t n, off64_t at) { return pread(fd, to, n, at); }

ssize_t preadv2(int fd, const struct iovec *to, int count, off_t at, int flags)
{
    REAL(preadv2);
    struct iovec first = to[0];
    ssize_t most = admitted(fd, first.iov_len, 0);
    of_preadv += most != (ssize_t)first.iov_len;
    if (most < 0)
        return -1;
    first.iov_len = most;
    return real(fd, &first, 1, at, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *to, int count, off64_t at, int flags) { return preadv2(fd, to, count, at, flags); }
ssize_t preadv(int fd, const struct iovec *to, int count, off_t at) { return preadv2(fd, to, count, at, 0); }
ssize_t preadv64(int fd, const struct iovec *to, int count, off64_t at) { return preadv2(fd, to, count, at, 0); }

ssize_t write(int fd, const void *from, size_t n)
{
    REAL(write);
    ssize_t most = admitted(fd, n, 1);
    return most < 0 ? -1 : real(fd, from, most);
}
