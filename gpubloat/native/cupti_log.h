/* The log of one process: one line an event, each written once and with one write(), so that a killed process loses
 * nothing and a forked one writes to a file of its own. */
#ifndef GPUBLOAT_CUPTI_LOG_H
#define GPUBLOAT_CUPTI_LOG_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_NAME (1 << 16)    /* bytes of a name; the longest mangled kernel names have some ten thousand */
#ifndef MAX_EVENTS
#define MAX_EVENTS (1u << 20) /* distinct events of a process, 32 MiB of table; later ones are not recorded */
#endif

/* ---- one line ---- */

struct line {
    char *text;
    size_t size, room;
    int is_lost; /* no memory for it */
    char fixed[2048];
};

static void line_begin(struct line *line, const char *what)
{
    line->text = line->fixed;
    line->size = strlen(what);
    line->room = sizeof line->fixed;
    line->is_lost = 0;
    memcpy(line->text, what, line->size);
}

static void line_put(struct line *line, const char *text, size_t size)
{
    if (line->size + size > line->room) {
        size_t room = 2 * line->room + size;
        char *larger = malloc(room);
        if (!larger) {
            line->is_lost = 1;
            return;
        }
        memcpy(larger, line->text, line->size);
        if (line->text != line->fixed)
            free(line->text);
        line->text = larger;
        line->room = room;
    }
    memcpy(line->text + line->size, text, size);
    line->size += size;
}

/* A tab and `text`, with what would end a field or a line escaped as C does. */
static void line_text(struct line *line, const char *text)
{
    line_put(line, "\t", 1);
    for (size_t n = 0; text[n] && n < MAX_NAME; n++) {
        unsigned char c = (unsigned char)text[n];
        char escaped[8];
        if (c == '\\')
            line_put(line, "\\\\", 2);
        else if (c < 0x20 || c == 0x7f)
            line_put(line, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\x%02x", c));
        else
            line_put(line, text + n, 1);
    }
}

static void line_number(struct line *line, const char *format, uint64_t value)
{
    char digits[32];
    line_put(line, digits, (size_t)snprintf(digits, sizeof digits, format, (unsigned long long)value));
}

#define HEX "\t%llx"
#define CRC "\t%08llx"
#define DECIMAL "\t%llu"

/* ---- what was seen before: an open-addressing table of 64-bit digests ---- */

struct slot {
    uint64_t key, value;
};

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
static struct slot *seen;
static size_t seen_slots, seen_used;
static int seen_is_full;

static uint64_t digest(uint64_t start, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    uint64_t hash = start ^ 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    hash ^= hash >> 32; /* and a last round, since the low bits choose the slot */
    hash *= 0xd6e8feb86659fd93u;
    hash ^= hash >> 32;
    return hash ? hash : 1;
}

static uint64_t digest_text(uint64_t start, const char *text)
{
    return digest(start, text, strlen(text));
}

static uint64_t digest_number(uint64_t start, uint64_t value)
{
    return digest(start, &value, sizeof value);
}

static struct slot *seen_place(struct slot *table, size_t slots, uint64_t key)
{
    size_t at = key & (slots - 1);
    while (table[at].key && table[at].key != key)
        at = (at + 1) & (slots - 1);
    return &table[at];
}

/* The value kept for `key`, 0 at first; NULL if there is no room. The lock is held. */
static uint64_t *seen_value(uint64_t key)
{
    if (2 * (seen_used + 1) > seen_slots) {
        size_t slots = seen_slots ? 2 * seen_slots : 1024;
        struct slot *larger = slots <= 2 * MAX_EVENTS ? calloc(slots, sizeof *larger) : NULL;
        if (larger) {
            for (size_t i = 0; i < seen_slots; i++)
                if (seen[i].key)
                    *seen_place(larger, slots, seen[i].key) = seen[i];
            free(seen);
            seen = larger;
            seen_slots = slots;
        }
    }
    struct slot *slot = seen_slots ? seen_place(seen, seen_slots, key) : NULL;
    if (slot && slot->key)
        return &slot->value;
    if (!slot || 2 * (seen_used + 1) > seen_slots)
        return NULL;
    slot->key = key;
    seen_used++;
    return &slot->value;
}

/* ---- the file ---- */

static const char *log_folder; /* $GPUBLOAT_DIR, or NULL: nothing is written */
static int log_file = -1;
static pid_t log_process;
static dev_t log_device;
static ino_t log_inode;
static char log_state[1024]; /* the last line that said how the recording goes */

/* The file of this process; the lock is held. A program may close descriptors that it does not know, and the number may
 * then stand for a file of its own: it is looked at before each write. */
static int log_is_open(void)
{
    struct stat status;
    if (log_process == getpid() && log_file >= 0 && !fstat(log_file, &status) && status.st_dev == log_device &&
        status.st_ino == log_inode)
        return 1;
    char path[4096];
    int size = snprintf(path, sizeof path, "%s/%d.cupti", log_folder, (int)getpid());
    if (size < 0 || (size_t)size >= sizeof path)
        return 0;
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0)
        return 0;
    if (fstat(file, &status)) {
        close(file);
        return 0;
    }
    log_file = file;
    log_device = status.st_dev;
    log_inode = status.st_ino;
    if (log_process != getpid()) {
        log_process = getpid();
        char head[sizeof log_state + 16];
        size = snprintf(head, sizeof head, "start\t%d\n%s", (int)log_process, log_state);
        if (write(file, head, (size_t)size) < 0)
            return 0;
    }
    return 1;
}

static void log_write(const struct line *line)
{
    if (log_folder && !line->is_lost && log_is_open() && write(log_file, line->text, line->size) < 0)
        return; /* a full disk: the program goes on */
}

/* End the line and write it if `key` is new; 0: write it in any case. */
static void line_end(struct line *line, uint64_t key)
{
    line_put(line, "\n", 1);
    pthread_mutex_lock(&log_lock);
    uint64_t *count = key ? seen_value(key) : NULL;
    if (!key || (count && !*count))
        log_write(line);
    if (count)
        *count += 1;
    else if (key && !seen_is_full) {
        seen_is_full = 1;
        struct line last;
        line_begin(&last, "full\n");
        log_write(&last);
    }
    pthread_mutex_unlock(&log_lock);
    if (line->text != line->fixed)
        free(line->text);
}

/* Say how the recording goes, and keep it for the files of forked processes. */
static void log_say(const char *state, const char *reason)
{
    struct line line;
    line_begin(&line, "cupti");
    line_text(&line, state);
    line_text(&line, reason);
    if (line.size + 2 > sizeof log_state)
        line.size = sizeof log_state - 2;
    line_put(&line, "\n", 1);
    pthread_mutex_lock(&log_lock);
    memcpy(log_state, line.text, line.size);
    log_state[line.size] = 0;
    if (log_process != getpid())
        (void)(log_folder && log_is_open()); /* a new file starts with the state */
    else
        log_write(&line);
    pthread_mutex_unlock(&log_lock);
    if (line.text != line.fixed)
        free(line.text);
}

static void log_before_fork(void)
{
    pthread_mutex_lock(&log_lock);
}

static void log_after_fork(void)
{
    pthread_mutex_unlock(&log_lock);
}

/* What the parent has written is not in the child's file. */
static void log_in_child(void)
{
    if (seen)
        memset(seen, 0, seen_slots * sizeof *seen);
    seen_used = 0;
    seen_is_full = 0;
    pthread_mutex_unlock(&log_lock);
}

#endif
