/* What can be observed in a library: the starts of its functions, and the pages of its GPU code.

   Function starts are those of .eh_frame_hdr (LSB, "Exception Frames": a table sorted by address), and function symbols
   with a size (hand-written assembly often has nothing else), inside executable segments, without the .plt* sections,
   which are entered in the middle. Described once per library and kept in the record folder as a .lib file, which all
   processes share. */
#include "audit.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The C library runs where no signal may come (all blocked, or no stack of its own); the driver is the host's. */
static const char *const NOT_WATCHED[][2] = {
    {"ld-linux", "part of the C library"}, {"ld-2.", "part of the C library"},
    {"libc.so", "part of the C library"}, {"libc-2.", "part of the C library"},
    {"libpthread", "part of the C library"}, {"libdl.so", "part of the C library"},
    {"libdl-2.", "part of the C library"}, {"librt.so", "part of the C library"},
    {"librt-2.", "part of the C library"}, {"libm.so", "part of the C library"},
    {"libm-2.", "part of the C library"}, {"libmvec", "part of the C library"},
    {"libresolv", "part of the C library"}, {"libnss_", "part of the C library"},
    {"libutil.so", "part of the C library"}, {"libutil-2.", "part of the C library"},
    {"libanl.so", "part of the C library"}, {"libcuda.so", "part of the driver"},
    {"libnvidia-", "part of the driver"}, {"libcudadebugger", "part of the driver"},
    {"libasan", "a sanitizer"}, {"libtsan", "a sanitizer"},
};
static const char *const GPU_SECTIONS[] = {".nv_fatbin", "__nv_relfatbin", ".ldata", ".lrodata", ".cask_resource"};
#define MAX_RUNS 64
#define MAX_STUBS 64

struct span {
    uint64_t begin, end;
};

static const char *section_name(const struct module *m, const Elf64_Shdr *names, const Elf64_Shdr *s)
{
    if (names->sh_offset >= m->file_size || s->sh_name >= m->file_size - names->sh_offset)
        return "";
    const char *name = (const char *)m->file + names->sh_offset + s->sh_name;
    return memchr(name, 0, m->file_size - (name - (const char *)m->file)) ? name : "";
}

static bool is_executable(const struct module *m, uint64_t vaddr)
{
    const struct segment *s = segment_of(m, vaddr);
    return s && s->prot & PROT_EXEC;
}

/* Stubs, with all else in executable segments that is no code, and runs by section name; false without a section table:
   then nothing tells stubs from functions. */
static bool read_sections(const struct module *m, struct span *stubs, int *n_stubs, struct run *runs, int *n_runs)
{
    const Elf64_Ehdr *head = (const void *)m->file;
    *n_stubs = *n_runs = 0;
    if (!head->e_shnum || head->e_shentsize != sizeof(Elf64_Shdr) || head->e_shstrndx >= head->e_shnum ||
        head->e_shoff > m->file_size || head->e_shnum > (m->file_size - head->e_shoff) / sizeof(Elf64_Shdr))
        return false;
    const Elf64_Shdr *sections = (const void *)(m->file + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        const Elf64_Shdr *s = &sections[i];
        const char *name = section_name(m, &sections[head->e_shstrndx], s);
        if (!(s->sh_flags & SHF_ALLOC) || s->sh_type == SHT_NOBITS)
            continue;
        bool is_code = s->sh_flags & SHF_EXECINSTR;
        if (is_code ? !strncmp(name, ".plt", 4) : s->sh_size && is_executable(m, s->sh_addr)) {
            if (*n_stubs == MAX_STUBS)
                return false;
            stubs[(*n_stubs)++] = (struct span){s->sh_addr, s->sh_addr + s->sh_size};
        }
        for (size_t k = 0; k < sizeof GPU_SECTIONS / sizeof *GPU_SECTIONS; k++) {
            if (strcmp(name, GPU_SECTIONS[k]) || *n_runs == MAX_RUNS)
                continue;
            uint64_t begin = (s->sh_addr + PAGE - 1) & -PAGE, end = (s->sh_addr + s->sh_size) & -PAGE;
            if (begin < end && segment_of(m, begin) && segment_of(m, end - 1))
                runs[(*n_runs)++] = (struct run){begin, (end - begin) / PAGE, 0};
        }
    }
    return true;
}

/* The table of .eh_frame_hdr: pairs of 32-bit offsets from its own address. NULL if it has another form. */
static const int32_t *search_table(const struct module *m, uint64_t *address, uint64_t *count)
{
    const Elf64_Ehdr *head = (const void *)m->file;
    const Elf64_Phdr *p = (const void *)(m->file + head->e_phoff);
    for (int i = 0; i < head->e_phnum; i++, p++) {
        if (p->p_type != PT_GNU_EH_FRAME)
            continue;
        if (p->p_filesz < 12 || p->p_offset > m->file_size || p->p_filesz > m->file_size - p->p_offset)
            return NULL;
        const uint8_t *h = m->file + p->p_offset;
        uint32_t n;
        memcpy(&n, h + 8, 4);
        if (h[0] != 1 || (h[1] & 0xf) != 0xb || h[2] != 0x03 || h[3] != 0x3b || n > (p->p_filesz - 12) / 8)
            return NULL;
        *address = p->p_vaddr;
        *count = n;
        return (const int32_t *)(h + 12);
    }
    return NULL;
}

static bool is_site(const struct module *m, const struct span *stubs, int n_stubs, uint64_t vaddr)
{
    for (int i = 0; i < n_stubs; i++)
        if (vaddr >= stubs[i].begin && vaddr < stubs[i].end)
            return false;
    return is_executable(m, vaddr);
}

/* Whether the loader writes addresses into code: it takes the right to write away when it has done so, and the bytes of
   the file are not those that run. */
static bool has_text_relocations(const struct module *m)
{
    const Elf64_Ehdr *head = (const void *)m->file;
    const Elf64_Phdr *p = (const void *)(m->file + head->e_phoff);
    for (int i = 0; i < head->e_phnum; i++, p++) {
        if (p->p_type != PT_DYNAMIC || p->p_offset > m->file_size || p->p_filesz > m->file_size - p->p_offset)
            continue;
        const Elf64_Dyn *d = (const void *)(m->file + p->p_offset), *end = d + p->p_filesz / sizeof *d;
        for (; d < end && d->d_tag != DT_NULL; d++)
            if (d->d_tag == DT_TEXTREL || (d->d_tag == DT_FLAGS && d->d_un.d_val & DF_TEXTREL))
                return true;
    }
    return false;
}

/* The symbols of one section; none if it is no symbol table. */
static const Elf64_Sym *symbols(const struct module *m, int section, uint64_t *count)
{
    const Elf64_Ehdr *head = (const void *)m->file;
    const Elf64_Shdr *s = (const Elf64_Shdr *)(m->file + head->e_shoff) + section;
    *count = 0;
    if ((s->sh_type != SHT_SYMTAB && s->sh_type != SHT_DYNSYM) || s->sh_offset > m->file_size ||
        s->sh_size > m->file_size - s->sh_offset)
        return NULL;
    *count = s->sh_size / sizeof(Elf64_Sym);
    return (const void *)(m->file + s->sh_offset);
}

static int by_address(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Sorted addresses of all sites, each once, in `room` bytes of memory; NULL if there is none for it. */
static uint64_t *find_sites(const struct module *m, const struct span *stubs, int n_stubs, const int32_t *table,
                            uint64_t address, uint64_t count, uint64_t *n_sites, uint64_t *room)
{
    const int n_sections = ((const Elf64_Ehdr *)m->file)->e_shnum;
    uint64_t n_symbols, n = 0, kept = 0, most = count + 1;
    for (int k = 0; k < n_sections; k++) {
        symbols(m, k, &n_symbols);
        most += n_symbols;
    }
    *room = most * sizeof(uint64_t);
    uint64_t *sites = mmap(NULL, *room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (sites == MAP_FAILED)
        return NULL;
    for (uint64_t i = 0; i < count; i++)
        if (is_site(m, stubs, n_stubs, address + table[2 * i]))
            sites[n++] = address + table[2 * i];
    for (int k = 0; k < n_sections; k++) {
        const Elf64_Sym *symbol = symbols(m, k, &n_symbols);
        for (uint64_t i = 0; i < n_symbols; i++, symbol++)
            if (ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && symbol->st_size && symbol->st_shndx != SHN_UNDEF &&
                is_site(m, stubs, n_stubs, symbol->st_value))
                sites[n++] = symbol->st_value;
    }
    qsort(sites, n, sizeof *sites, by_address);
    for (uint64_t i = 0; i < n; i++)
        if (!kept || sites[i] != sites[kept - 1])
            sites[kept++] = sites[i];
    *n_sites = kept;
    return sites;
}

static bool write_lib(const struct module *m, const char *name)
{
    struct span stubs[MAX_STUBS];
    struct run runs[MAX_RUNS];
    int n_stubs = 0, n_runs = 0;
    uint64_t address = 0, count = 0, n_sites = 0, n_pages = 0;
    const int32_t *table = NULL;
    const char *problem = "", *base = strrchr(m->path, '/') + 1;
    for (size_t i = 0; i < sizeof NOT_WATCHED / sizeof *NOT_WATCHED; i++)
        if (!strncmp(base, NOT_WATCHED[i][0], strlen(NOT_WATCHED[i][0])))
            problem = NOT_WATCHED[i][1];
    if (!*problem) {
        if (!read_sections(m, stubs, &n_stubs, runs, &n_runs))
            problem = "no section table";
        else if (has_text_relocations(m))
            problem = "relocations of code";
        else if (!(table = search_table(m, &address, &count)))
            problem = "no search table of unwind entries";
    }
    if (!options.trace_pages)
        n_runs = 0;
    for (int i = 0; i < n_runs; i++) {
        runs[i].first = n_pages;
        n_pages += runs[i].n_pages;
    }
    uint64_t *found = NULL, room = 0;
    if (!*problem && options.trace_functions &&
        !(found = find_sites(m, stubs, n_stubs, table, address, count, &n_sites, &room)))
        problem = "no memory for its function starts";

    char temporary[128], from[1200], to[1200];
    uint64_t path_size = (strlen(m->path) + 8) & -8ul;
    uint64_t size = sizeof(struct lib_head) + path_size + 8 * n_sites + n_runs * sizeof(struct run);
    snprintf(temporary, sizeof temporary, "%s-%s.new", tag(), name);
    uint8_t *data = map_new(temporary, size);
    if (!data) {
        if (found)
            munmap(found, room);
        return false;
    }
    struct lib_head *out = (void *)data;
    *out = (struct lib_head){"GBLLIB1", m->file_size, n_sites, n_runs, n_pages, path_size, ""};
    snprintf(out->problem, sizeof out->problem, "%s", problem);
    strcpy((char *)data + sizeof *out, m->path);
    uint64_t *sites = (void *)(data + sizeof *out + path_size);
    if (found) {
        memcpy(sites, found, n_sites * sizeof *sites);
        munmap(found, room);
    }
    if (n_runs)
        memcpy(sites + n_sites, runs, n_runs * sizeof(struct run));
    munmap(data, size);
    snprintf(from, sizeof from, "%s/%s", options.dir, temporary);
    snprintf(to, sizeof to, "%s/%s", options.dir, name);
    return !rename(from, to);
}

bool describe(struct module *m)
{
    char path[1200], use[80];
    struct stat info;
    static int n_uses;
    if (!m->sites) {
        if (stat(m->path, &info))
            return false;
        snprintf(m->key, sizeof m->key, "%lx-%lx-%lx-%lx.lib", (long)info.st_dev, (long)info.st_ino, (long)info.st_size,
                 (long)info.st_mtim.tv_sec * 1000 + info.st_mtim.tv_nsec / 1000000);
        snprintf(path, sizeof path, "%s/%s", options.dir, m->key);
        uint64_t size;
        const uint8_t *data = map_file(path, &size);
        if (!data && (!write_lib(m, m->key) || !(data = map_file(path, &size)))) {
            note("proc", "problem\tthe record folder cannot be written");
            return false;
        }
        const struct lib_head *head = (const void *)data;
        m->n_sites = head->n_sites;
        m->sites = (const void *)(data + sizeof *head + head->path_size);
        m->n_runs = head->n_runs;
        m->runs = (const void *)(m->sites + m->n_sites);
        snprintf(use, sizeof use, "%s-%d.use", tag(), n_uses++);
        uint8_t *record = map_new(use, sizeof(struct use_head) + head->n_sites + head->n_pages);
        if (!record) {
            note("proc", "problem\tthe record folder is full");
            m->n_sites = m->n_runs = 0;
            return false;
        }
        struct use_head *out = (void *)record;
        *out = (struct use_head){"GBLUSE1", head->n_sites, head->n_pages, ""};
        memcpy(out->key, m->key, sizeof out->key);
        m->hits = record + sizeof *out;
        m->touched = m->hits + head->n_sites;
    }
    return true;
}
