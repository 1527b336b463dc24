/* Files that the audit library writes and reads. All of them survive a killed process: lines go out with one write each,
   and the rest is shared memory. */
#include "audit.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
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

void note(const char *suffix, const char *text)
{
    char path[2200], line[MAX_LINE];
    if (!*options.dir)
        return;
    snprintf(path, sizeof path, "%s/%s.%s", options.dir, tag(), suffix);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0)
        return;
    int size = snprintf(line, sizeof line, "%s\n", text);
    if (size >= (int)sizeof line)
        size = sizeof line - 1;
    (void)!write(fd, line, size);
    close(fd);
}

void *map_new(const char *name, uint64_t size)
{
    char path[2200];
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
