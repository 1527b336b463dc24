/* Files that the audit library writes and reads. All of them survive a killed process: lines go out with one write each,
   and the rest is shared memory. */
#include "audit.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

const char *tag(void)
{
    static char text[40];
    const uint8_t *random = (const void *)getauxval(AT_RANDOM);
    uint32_t word = 0;
    if (random)
        memcpy(&word, random, sizeof word);
    snprintf(text, sizeof text, "%d-%08x", (int)getpid(), word);
    return text;
}

/* Whether the program may write files of that size: more is answered with SIGXFSZ, which ends it. */
static bool may_grow_to(uint64_t size)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) || size <= limit.rlim_cur;
}

/* Little of the stack is used: handlers run on the program's alternate stack, which can be of 8 KiB. */
void note(const char *suffix, const char *text)
{
    char path[1100];
    if (!*options.dir)
        return;
    snprintf(path, sizeof path, "%s/%s.%s", options.dir, tag(), suffix);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0)
        return;
    struct stat info;
    struct iovec parts[] = {{(void *)text, strlen(text)}, {"\n", 1}};
    if (!fstat(fd, &info) && may_grow_to(info.st_size + parts[0].iov_len + 1))
        (void)!writev(fd, parts, 2);
    close(fd);
}

void *map_new(const char *name, uint64_t size)
{
    char path[1200];
    if (!may_grow_to(size))
        return NULL;
    snprintf(path, sizeof path, "%s/%s", options.dir, name);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return NULL;
    /* Blocks are reserved now: a hole that cannot be filled later, on a full disk, would kill the program. */
    void *data = MAP_FAILED;
    if (!posix_fallocate(fd, 0, size))
        data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (data == MAP_FAILED) {
        unlink(path);
        return NULL;
    }
    return data;
}

const void *map_file(const char *path, uint64_t *size)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    void *data = MAP_FAILED;
    if (!fstat(fd, &info) && info.st_size > 0)
        data = mmap(NULL, info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (data == MAP_FAILED)
        return NULL;
    *size = info.st_size;
    return data;
}
