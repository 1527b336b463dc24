/* Debloated copies in the place of the originals: the library keeps its path, its device and its place in memory, and the
   bytes of its segments come from the copy. So $ORIGIN, dladdr and every open() beside the library work as before. */
#include "audit.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* One line of the plan: original, copy, ranges, size of the original. */
struct entry {
    const char *path, *copy, *ranges;
    uint64_t size;
};
static struct entry *entries;
static size_t n_entries;

static char *field(char **at, char end)
{
    char *start = *at, *stop = start ? strchr(start, end) : NULL;
    if (stop) {
        *stop = 0;
        *at = stop + 1;
    } else {
        *at = NULL;
    }
    return start;
}

void read_plan(const char *path)
{
    uint64_t size;
    const char *data = map_file(path, &size);
    char *text = data ? malloc(size + 1) : NULL;
    if (!text) {
        note("proc", "problem\tthe plan cannot be read");
        return;
    }
    memcpy(text, data, size);
    text[size] = 0;
    size_t n_lines = 0;
    for (uint64_t i = 0; i < size; i++)
        n_lines += text[i] == '\n';
    entries = calloc(n_lines + 1, sizeof *entries);
    for (char *line; entries && n_entries < n_lines && text && (line = field(&text, '\n'));) {
        struct entry e = {field(&line, '\t'), field(&line, '\t'), field(&line, '\t'), 0};
        if (!e.path || !e.copy || !e.ranges || !line)
            continue;
        for (char *digit = line; *digit >= '0' && *digit <= '9'; digit++)
            e.size = e.size * 10 + (*digit - '0');
        entries[n_entries++] = e;
    }
}

/* Data of a .npy file of version 1 (numpy.lib.format): the magic, two version bytes, a 16-bit length, a header. */
static void read_ranges(struct module *m, const char *path)
{
    uint64_t size;
    const uint8_t *data = map_file(path, &size);
    if (!data || size < 10 || memcmp(data, "\x93NUMPY\x01", 7))
        return;
    uint64_t start = 10 + (data[8] | data[9] << 8);
    if (start > size)
        return;
    m->ranges = (const void *)(data + start);
    m->n_ranges = (size - start) / sizeof(struct range);
}

static bool copy_bytes(const struct module *m, const struct segment *s, int fd, uint64_t begin, uint64_t end)
{
    return begin >= end || pread(fd, (void *)(m->bias + begin), end - begin, s->offset + (begin - s->vaddr)) ==
                               (ssize_t)(end - begin);
}

static bool map_pages(const struct module *m, const struct segment *s, int fd, uint64_t begin, uint64_t end)
{
    uint64_t offset = s->offset + begin - s->vaddr; /* of a whole page: vaddr and offset agree within pages */
    return begin >= end || mmap((void *)(m->bias + begin), end - begin, s->prot, MAP_PRIVATE | MAP_FIXED, fd,
                                offset) != MAP_FAILED;
}

/* Take one segment from the copy. Of a writable one only the ranges, which are all that differs: the loader has written
   addresses elsewhere in it already. */
static bool take_segment(const struct module *m, const struct segment *s, int fd)
{
    if (!(s->prot & PROT_WRITE))
        return map_pages(m, s, fd, s->vaddr & -PAGE, s->vaddr + s->file_size);
    for (uint64_t i = 0; i < m->n_ranges; i++) {
        const struct range *r = &m->ranges[i];
        if (segment_at_offset(m, r->offset) != s || r->size > s->offset + s->file_size - r->offset)
            continue;
        uint64_t begin = s->vaddr + (r->offset - s->offset), end = begin + r->size;
        uint64_t first = (begin + PAGE - 1) & -PAGE, last = end & -PAGE; /* whole pages */
        if (first >= last)
            first = last = end;
        if (!copy_bytes(m, s, fd, begin, first) || !map_pages(m, s, fd, first, last) ||
            !copy_bytes(m, s, fd, last, end))
            return false;
    }
    return true;
}

/* Runs of pages that hold removed bytes of elements. */
static void find_runs(struct module *m)
{
    struct run *runs = mmap(NULL, (m->n_ranges + 1) * sizeof *runs, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t n = 0, n_pages = 0;
    if (runs == MAP_FAILED)
        return;
    for (uint64_t i = 0; i < m->n_ranges; i++) {
        const struct range *r = &m->ranges[i];
        const struct segment *s = segment_at_offset(m, r->offset);
        if (r->kind != RANGE_ELEMENT || !r->size || !s || r->size > s->offset + s->file_size - r->offset)
            continue;
        uint64_t vaddr = s->vaddr + (r->offset - s->offset);
        uint64_t begin = vaddr & -PAGE, end = (vaddr + r->size + PAGE - 1) & -PAGE;
        if (n && begin <= runs[n - 1].vaddr + runs[n - 1].n_pages * PAGE) {
            uint64_t last = runs[n - 1].vaddr + runs[n - 1].n_pages * PAGE;
            if (end > last) {
                runs[n - 1].n_pages += (end - last) / PAGE;
                n_pages += (end - last) / PAGE;
            }
        } else {
            runs[n++] = (struct run){begin, (end - begin) / PAGE, n_pages};
            n_pages += (end - begin) / PAGE;
        }
    }
    uint8_t *touched = n_pages ? mmap(NULL, n_pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                               : MAP_FAILED;
    if (touched == MAP_FAILED)
        return;
    m->touched = touched;
    m->runs = runs;
    m->n_runs = n;
}

void swap(struct module *m)
{
    const struct entry *e = entries;
    char text[1400];
    while (e < entries + n_entries && strcmp(e->path, m->path))
        e++;
    if (e == entries + n_entries)
        return;
    int fd = e->size == m->file_size ? open(e->copy, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) {
        const char *why = e->size == m->file_size ? "its copy cannot be read" : "it is another version than was debloated";
        snprintf(text, sizeof text, "problem\t%s: %s", m->path, why);
        note("proc", text);
        return;
    }
    if (!m->ranges)
        read_ranges(m, e->ranges);
    for (int i = 0; i < m->n_segments; i++) {
        if (take_segment(m, &m->segments[i], fd))
            continue;
        snprintf(text, sizeof text, "problem\t%s: the copy cannot be mapped", m->path);
        note("proc", text);
        break;
    }
    close(fd);
    snprintf(text, sizeof text, "swapped\t%s", m->path);
    note("proc", text);
    if (!m->runs && options.guard_pages)
        find_runs(m);
    if (m->touched)
        memset(m->touched, 0, m->n_runs ? m->runs[m->n_runs - 1].first + m->runs[m->n_runs - 1].n_pages : 0);
    shut_pages(m);
    if (m->ranges) { /* all were read once, and are read again only where something is missed */
        uint64_t begin = (uint64_t)m->ranges & -PAGE, end = (uint64_t)(m->ranges + m->n_ranges);
        madvise((void *)begin, end - begin, MADV_DONTNEED);
    }
}
