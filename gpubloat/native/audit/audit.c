/* Entry points that the dynamic loader calls (rtld-audit(7)), and the table of loaded objects.

   la_objopen comes when an object has been mapped and before it is relocated: no code of it has run, and its pages are
   still those of the file. That is the moment to plant breakpoints, to shut pages, or to map a debloated copy. */
#include "audit.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

struct options options;
struct module modules[MAX_MODULES];
int n_modules;

static void read_options(void)
{
    const char *dir = getenv("GPUBLOAT_DIR"), *plan = getenv("GPUBLOAT_PLAN"), *guard = getenv("GPUBLOAT_GUARD");
    if (dir && strlen(dir) < sizeof options.dir)
        strcpy(options.dir, dir);
    options.trace_functions = *options.dir && getenv("GPUBLOAT_FUNCTIONS");
    options.trace_pages = *options.dir && getenv("GPUBLOAT_PAGES");
    if (guard) {
        options.guard = !strncmp(guard, "restore", 7) ? GUARD_RESTORE : !strcmp(guard, "report") ? GUARD_REPORT : GUARD_OFF;
        options.guard_pages = options.guard != GUARD_OFF && strcmp(guard, "restore-cpu");
    }
    if (plan) {
        options.swap = true;
        read_plan(plan);
    }
}

EXPORT unsigned int la_version(unsigned int version)
{
    read_options();
    char program[1024];
    ssize_t size = readlink("/proc/self/exe", program, sizeof program - 1);
    program[size < 0 ? 0 : size] = 0;
    note("proc", program);
    install_handlers();
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

/* Program headers of the file: false if it is no object that we understand. */
static bool read_segments(struct module *m)
{
    const Elf64_Ehdr *head = (const void *)m->file;
    if (m->file_size < sizeof *head || memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_ident[EI_CLASS] != ELFCLASS64 ||
        head->e_machine != EM_X86_64 || head->e_phentsize != sizeof(Elf64_Phdr) || head->e_phoff > m->file_size ||
        head->e_phnum > (m->file_size - head->e_phoff) / sizeof(Elf64_Phdr))
        return false;
    const Elf64_Phdr *p = (const void *)(m->file + head->e_phoff);
    m->begin = UINT64_MAX;
    m->end = 0;
    m->n_segments = 0;
    for (int i = 0; i < head->e_phnum; i++, p++) {
        if (p->p_type != PT_LOAD || p->p_offset > m->file_size || p->p_filesz > m->file_size - p->p_offset)
            continue;
        if (m->n_segments == MAX_SEGMENTS)
            return false;
        int prot = (p->p_flags & PF_R ? 1 : 0) | (p->p_flags & PF_W ? 2 : 0) | (p->p_flags & PF_X ? 4 : 0);
        m->segments[m->n_segments++] = (struct segment){p->p_vaddr, p->p_offset, p->p_filesz, prot};
        if (p->p_vaddr + m->bias < m->begin)
            m->begin = p->p_vaddr + m->bias;
        if (p->p_vaddr + p->p_memsz + m->bias > m->end)
            m->end = p->p_vaddr + p->p_memsz + m->bias;
    }
    return m->n_segments > 0;
}

struct module *module_at(uint64_t address)
{
    for (int i = __atomic_load_n(&n_modules, __ATOMIC_ACQUIRE) - 1; i >= 0; i--)
        if (modules[i].live && address >= modules[i].begin && address < modules[i].end)
            return &modules[i];
    return NULL;
}

const struct segment *segment_of(const struct module *m, uint64_t vaddr)
{
    for (int i = 0; i < m->n_segments; i++)
        if (vaddr >= m->segments[i].vaddr && vaddr - m->segments[i].vaddr < m->segments[i].file_size)
            return &m->segments[i];
    return NULL;
}

const struct segment *segment_at_offset(const struct module *m, uint64_t offset)
{
    for (int i = 0; i < m->n_segments; i++)
        if (offset >= m->segments[i].offset && offset - m->segments[i].offset < m->segments[i].file_size)
            return &m->segments[i];
    return NULL;
}

static void identify(const struct stat *info, uint64_t id[5])
{
    id[0] = info->st_dev;
    id[1] = info->st_ino;
    id[2] = info->st_size;
    id[3] = info->st_mtim.tv_sec;
    id[4] = info->st_mtim.tv_nsec;
}

bool is_file_of(const struct module *m, const struct stat *info)
{
    uint64_t id[5];
    identify(info, id);
    return !memcmp(id, m->file_id, sizeof id);
}

/* A library that is closed and opened again keeps its record, unless another file has its path by then. */
static struct module *slot(const char *path, const struct stat *info)
{
    for (int i = 0; i < n_modules; i++)
        if (!modules[i].live && !strcmp(modules[i].path, path) && is_file_of(&modules[i], info))
            return &modules[i];
    return n_modules < MAX_MODULES ? &modules[n_modules] : NULL;
}

static void opened(struct link_map *map)
{
    char path[PATH_MAX], text[1200];
    struct stat info;
    if (!map->l_name || !*map->l_name || !realpath(map->l_name, path) || stat(path, &info))
        return; /* the program itself, or the kernel's page */
    struct module *m = slot(path, &info);
    if (!m || strlen(path) >= sizeof m->path) {
        note("proc", m ? "problem\ta library's path is too long" : "problem\ttoo many libraries");
        return;
    }
    bool is_new = m == &modules[n_modules];
    if (is_new) {
        strcpy(m->path, path);
        identify(&info, m->file_id);
        m->file = map_file(path, &m->file_size);
    }
    m->bias = map->l_addr;
    if (!m->file) {
        snprintf(text, sizeof text, "problem\t%s cannot be mapped for reading", path);
        note("proc", text);
        return;
    }
    if (!read_segments(m))
        return;
    if (options.swap)
        swap(m);
    else if (*options.dir && describe(m)) {
        plant(m);
        shut_pages(m);
    }
    m->live = true;
    if (is_new)
        __atomic_store_n(&n_modules, n_modules + 1, __ATOMIC_RELEASE);
    const char *name = strrchr(path, '/') + 1;
    if (!strncmp(name, "libc.so", 7) || !strncmp(name, "libc-2", 6) || !strncmp(name, "libpthread", 10))
        hook_signals(m);
}

EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t lmid, uintptr_t *cookie)
{
    (void)lmid;
    opened(map);
    *cookie = map->l_addr;
    return 0;
}

EXPORT unsigned int la_objclose(uintptr_t *cookie)
{
    for (int i = 0; i < n_modules; i++)
        if (modules[i].live && modules[i].bias == *cookie)
            modules[i].live = false;
    return 0;
}
