/* Shared by the parts of the audit library. It lives in a namespace of its own, beside the program: its libc, errno and
   heap are not the program's, and nothing here may call into the program. What runs in a signal handler (trap.c) uses
   neither heap nor locks of libc. x86-64 Linux with glibc only. */
#ifndef GPUBLOAT_AUDIT_H
#define GPUBLOAT_AUDIT_H

#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/select.h>
#include <sys/types.h>

#define PAGE 4096ul
#define MAX_MODULES 8192
#define MAX_SEGMENTS 64

enum guard { GUARD_OFF, GUARD_REPORT, GUARD_RESTORE };

/* What the environment asks for. */
struct options {
    char dir[1024];       /* GPUBLOAT_DIR: where records go; empty: none are written */
    bool trace_functions; /* GPUBLOAT_FUNCTIONS=1 */
    bool trace_pages;     /* GPUBLOAT_PAGES=1 */
    bool swap;            /* GPUBLOAT_PLAN is set: run on debloated copies */
    enum guard guard;     /* GPUBLOAT_GUARD=off|report|restore|restore-cpu */
    bool guard_pages;     /* GPU code, too: not with restore-cpu */
};
extern struct options options;

/* PT_LOAD of a module. */
struct segment {
    uint64_t vaddr, offset, file_size;
    int prot;
};

/* Removed bytes of a copy, as ranges/<n>.npy has them. */
struct range {
    uint64_t offset, size;
    uint32_t kind, id;
};
enum { RANGE_FUNCTION = 1, RANGE_ELEMENT = 2 }; /* others only say what differs */

/* A run of pages whose first touch is recorded; `first` numbers them over all runs of the library. */
struct run {
    uint64_t vaddr, n_pages, first;
};

/* Head of a .lib file: what can be observed in one library. Behind it: path, sites (uint64 addresses), runs. */
struct lib_head {
    char magic[8]; /* "GBLLIB1" */
    uint64_t size, n_sites, n_runs, n_pages, path_size;
    char problem[64];
};

/* Head of a .use file: what one process observed. Behind it: a byte per site, then a byte per page. */
struct use_head {
    char magic[8]; /* "GBLUSE1" */
    uint64_t n_sites, n_pages;
    char key[72]; /* name of the .lib file */
};

/* One loaded object. */
struct module {
    bool live;
    uint64_t bias, begin, end; /* addresses of the mapped object */
    struct segment segments[MAX_SEGMENTS];
    int n_segments;
    const uint8_t *file; /* the original, mapped for reading */
    uint64_t file_size, file_id[5]; /* device, inode, size, seconds and nanoseconds of its last change */
    char path[1024];
    char key[72];
    const uint64_t *sites; /* sorted addresses before relocation */
    uint64_t n_sites;
    uint8_t *hits;
    const struct run *runs;
    uint64_t n_runs;
    uint8_t *touched;
    const struct range *ranges; /* of a copy; sorted by offset */
    uint64_t n_ranges;
};
extern struct module modules[MAX_MODULES];
extern int n_modules;

/* audit.c */
struct module *module_at(uint64_t address);
const struct segment *segment_of(const struct module *m, uint64_t vaddr);
const struct segment *segment_at_offset(const struct module *m, uint64_t offset);
struct stat;
bool is_file_of(const struct module *m, const struct stat *info);

/* log.c: records */
const char *tag(void); /* this program in this process: it changes with fork and with exec */
void note(const char *suffix, const char *text); /* append one line to <dir>/<tag>.<suffix> */
void *map_new(const char *name, uint64_t size);  /* a new zero-filled file in dir, mapped for writing; NULL if it cannot be had */
const void *map_file(const char *path, uint64_t *size); /* a file, mapped for reading; NULL */

/* sites.c: what can be observed in a library */
bool describe(struct module *m); /* fills sites and runs from the .lib file, which it writes first if there is none */

/* plant.c */
void plant(struct module *m);     /* int3 at every site */
void shut_pages(struct module *m); /* no access to the pages of all runs */

/* swap.c: debloated copies */
void read_plan(const char *path);
void swap(struct module *m); /* if the plan has the module: map the copy over it, and guard what was removed */

/* trap.c: signals */
void install_handlers(void);
void hook_signals(struct module *libc); /* the program's own handlers and masks go through us */
uint64_t owned_signals(void);           /* those that we handle, as the kernel's mask */
int fail(int error);                    /* the program's errno; -1 */

/* waits.c: what hook_signals puts in the place of the C library's functions of that name */
struct pollfd;
struct epoll_event;
extern int (*program_set_cancel_type)(int type, int *old);
int our_sigsuspend(const sigset_t *set);
int our_ppoll(struct pollfd *files, unsigned long n, const struct timespec *timeout, const sigset_t *mask);
int our_pselect(int n, fd_set *in, fd_set *out, fd_set *other, const struct timespec *timeout, const sigset_t *mask);
int our_epoll_pwait(int file, struct epoll_event *events, int n, int timeout, const sigset_t *mask);

#endif
