/* Signals: a breakpoint that was met, a shut page that was touched, removed code that was called.

   The program may have handlers of its own for SIGTRAP and SIGSEGV, and may block signals: its calls of sigaction and
   pthread_sigmask come here. It is told what it asked for, gets the signals that are not ours, and cannot block ours
   (the kernel kills a process whose breakpoint is blocked). */
#include "audit.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

static bool owned[65];
static struct sigaction wanted[65]; /* what the program asked for */
static volatile char wanted_lock;
static int *(*program_errno)(void);

/* --- the signal was not for us --------------------------------------------------------------------------------- */

/* End the program by a signal, as if nobody had a handler for it. */
static void end(int number)
{
    struct sigaction plain = {.sa_handler = SIG_DFL};
    sigaction(number, &plain, NULL);
    syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), number); /* comes when this handler returns, or at once */
}

static void pass_on(int number, siginfo_t *info, void *context)
{
    struct sigaction action = wanted[number];
    bool is_fault = info->si_code > 0; /* raised by an instruction, which would be met again and again */
    if (action.sa_handler == SIG_IGN && !is_fault)
        return;
    if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) {
        if (number != SIGSEGV || !is_fault) {
            end(number);
        } else { /* the instruction is met again, and the kernel says what it was */
            struct sigaction plain = {.sa_handler = SIG_DFL};
            sigaction(number, &plain, NULL);
        }
        return;
    }
    if (action.sa_flags & SA_RESETHAND)
        wanted[number] = (struct sigaction){.sa_handler = SIG_DFL};
    if (action.sa_flags & SA_NODEFER)
        sigdelset(&action.sa_mask, number);
    sigset_t before;
    sigprocmask(SIG_BLOCK, &action.sa_mask, &before);
    if (action.sa_flags & SA_SIGINFO)
        action.sa_sigaction(number, info, context);
    else
        action.sa_handler(number);
    sigprocmask(SIG_SETMASK, &before, NULL);
}

/* --- CPU code ---------------------------------------------------------------------------------------------------- */

static int64_t site_at(const struct module *m, uint64_t vaddr)
{
    uint64_t low = 0, high = m->n_sites;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (m->sites[middle] < vaddr)
            low = middle + 1;
        else
            high = middle;
    }
    return low < m->n_sites && m->sites[low] == vaddr ? (int64_t)low : -1;
}

/* First range that ends behind `offset`. */
static uint64_t range_from(const struct module *m, uint64_t offset)
{
    uint64_t low = 0, high = m->n_ranges;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (m->ranges[middle].offset + m->ranges[middle].size <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static const char *function_name(const struct module *m, uint64_t vaddr)
{
    const Elf64_Ehdr *head = (const void *)m->file;
    if (head->e_shentsize != sizeof(Elf64_Shdr) || head->e_shoff > m->file_size ||
        head->e_shnum > (m->file_size - head->e_shoff) / sizeof(Elf64_Shdr))
        return "";
    const Elf64_Shdr *sections = (const void *)(m->file + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        const Elf64_Shdr *s = &sections[i], *names = &sections[s->sh_link < head->e_shnum ? s->sh_link : 0];
        if ((s->sh_type != SHT_SYMTAB && s->sh_type != SHT_DYNSYM) || s->sh_offset > m->file_size ||
            s->sh_size > m->file_size - s->sh_offset || names->sh_offset > m->file_size)
            continue;
        const Elf64_Sym *symbols = (const void *)(m->file + s->sh_offset);
        for (uint64_t k = 0; k < s->sh_size / sizeof *symbols; k++)
            if (symbols[k].st_value == vaddr && ELF64_ST_TYPE(symbols[k].st_info) == STT_FUNC &&
                symbols[k].st_name < m->file_size - names->sh_offset)
                return (const char *)m->file + names->sh_offset + symbols[k].st_name;
    }
    return "";
}

static void log_function(const struct module *m, const struct range *r, const char *action)
{
    char text[1200];
    snprintf(text, sizeof text, "function\t%s\t%lu\t%s\t%s", action, r->offset, "-", m->path);
    note("miss", text);
}

/* Bring back all ranges of one function; its first byte last, so that no thread runs into half of it. */
static bool restore_function(const struct module *m, uint64_t index)
{
    uint32_t id = m->ranges[index].id;
    uint64_t first = index, last = index;
    while (first > 0 && m->ranges[first - 1].id == id && m->ranges[first - 1].kind == RANGE_FUNCTION)
        first--;
    while (last + 1 < m->n_ranges && m->ranges[last + 1].id == id && m->ranges[last + 1].kind == RANGE_FUNCTION)
        last++;
    for (uint64_t i = last + 1; i-- > first;) {
        const struct range *r = &m->ranges[i];
        const struct segment *s = segment_at_offset(m, r->offset);
        if (!s || r->size > s->offset + s->file_size - r->offset || !r->size)
            return false;
        uint8_t *code = (uint8_t *)(m->bias + s->vaddr + (r->offset - s->offset));
        uint64_t page = (uint64_t)code & -PAGE;
        if (mprotect((void *)page, (uint64_t)code + r->size - page, PROT_READ | PROT_WRITE | PROT_EXEC))
            return false;
        memcpy(code + 1, m->file + r->offset + 1, r->size - 1);
        __atomic_store_n(code, m->file[r->offset], __ATOMIC_SEQ_CST);
    }
    return true;
}

/* One line on stderr, in one step. */
static void say(const struct module *m, const char *what, const char *name, uint64_t offset, const char *how)
{
    char place[64];
    snprintf(place, sizeof place, "%sat offset 0x%lx", *name ? " " : "", offset);
    const char *words[] = {"gpubloat: ", m->path, ": ", what, name, place,
                           " was removed (unused in the traced runs) and is ", how,
                           " now; trace this command, too: gpubloat libraries trace --out RUN -- COMMAND\n"};
    struct iovec parts[sizeof words / sizeof *words];
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        parts[i] = (struct iovec){(void *)words[i], strlen(words[i])};
    (void)!writev(STDERR_FILENO, parts, sizeof words / sizeof *words);
}

enum met { NOT_OURS, GONE, BACK };

/* What is at `vaddr`, where a trap was met: nothing that was removed; removed code; removed code that is there again. */
static enum met meet_removed(const struct module *m, uint64_t vaddr)
{
    const struct segment *s = segment_of(m, vaddr);
    uint64_t offset = s ? s->offset + (vaddr - s->vaddr) : 0, index = s ? range_from(m, offset) : m->n_ranges;
    if (index == m->n_ranges || m->ranges[index].offset > offset || m->ranges[index].kind != RANGE_FUNCTION)
        return NOT_OURS;
    if (options.guard == GUARD_RESTORE) {
        if (!restore_function(m, index))
            return GONE;
        log_function(m, &m->ranges[index], "restored");
        return BACK;
    }
    say(m, "function ", function_name(m, vaddr), offset, "called");
    log_function(m, &m->ranges[index], "reported");
    return GONE;
}

static void on_trap(int number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    uint64_t address = registers[REG_RIP] - 1;
    int before = errno;
    const struct module *m = info->si_code == SI_KERNEL ? module_at(address) : NULL;
    int64_t site = m && m->hits ? site_at(m, address - m->bias) : -1;
    const struct segment *s = site >= 0 ? segment_of(m, m->sites[site]) : NULL;
    uint8_t original = s ? m->file[s->offset + (m->sites[site] - s->vaddr)] : 0xcc;
    if (s)
        m->hits[site] = 1;
    if (original != 0xcc) { /* else the trap is the file's own: of a debloated copy that was put in place, say */
        *(volatile uint8_t *)address = original;
        registers[REG_RIP] = address;
    } else {
        enum met met = m && m->n_ranges ? meet_removed(m, address - m->bias) : NOT_OURS;
        if (met == BACK)
            registers[REG_RIP] = address;
        else
            pass_on(number, info, context);
        if (met == GONE)
            end(number); /* a handler that returns would lead through what was removed into other code */
    }
    errno = before;
}

/* --- GPU code ---------------------------------------------------------------------------------------------------- */

/* Copy the removed bytes of one page of a writable segment from the original. */
static void fill_page(const struct module *m, uint64_t offset, uint8_t *to)
{
    for (uint64_t i = range_from(m, offset); i < m->n_ranges && m->ranges[i].offset < offset + PAGE; i++) {
        const struct range *r = &m->ranges[i];
        uint64_t begin = r->offset > offset ? r->offset : offset;
        uint64_t end = r->offset + r->size < offset + PAGE ? r->offset + r->size : offset + PAGE;
        if (end > m->file_size)
            end = m->file_size;
        if (r->kind == RANGE_ELEMENT && end > begin)
            memcpy(to + (begin - offset), m->file + begin, end - begin);
    }
}

/* The removed element that has the page at `offset` for itself, or NULL. */
static const struct range *owner(const struct module *m, uint64_t offset)
{
    uint64_t i = range_from(m, offset);
    const struct range *r = i < m->n_ranges ? &m->ranges[i] : NULL;
    bool is_whole = r && r->kind == RANGE_ELEMENT && r->offset <= offset && r->offset + r->size >= offset + PAGE;
    return is_whole ? r : NULL;
}

/* The same from our own mapping of the original: its path leads elsewhere by now (it was replaced, the program changed its
   root), or no file can be opened. All pages appear in one step. */
static bool copy_pages(const struct module *m, const struct segment *s, uint64_t vaddr, uint64_t end)
{
    uint64_t offset = s->offset + vaddr - s->vaddr, size = end - vaddr;
    uint64_t left = offset < m->file_size ? m->file_size - offset : 0;
    void *new = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (new == MAP_FAILED)
        return false;
    memcpy(new, m->file + offset, size < left ? size : left);
    if (!mprotect(new, size, s->prot) &&
        mremap(new, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(m->bias + vaddr)) != MAP_FAILED)
        return true;
    munmap(new, size);
    return false;
}

/* Pages [vaddr, end) of the original in the place of the copy's. Where the segment is not writable nothing in it was
   changed since it was mapped, so these are the file's pages, shared and in one step. */
static bool restore_pages(const struct module *m, const struct segment *s, uint64_t vaddr, uint64_t end)
{
    void *first = (void *)(m->bias + vaddr);
    uint64_t offset = s->offset + vaddr - s->vaddr;
    if (s->prot & PROT_WRITE) {
        if (mprotect(first, end - vaddr, PROT_READ | PROT_WRITE))
            return false;
        for (uint64_t at = 0; at < end - vaddr; at += PAGE)
            fill_page(m, offset + at, (uint8_t *)first + at);
        return !mprotect(first, end - vaddr, s->prot);
    }
    struct stat info;
    int fd = open(m->path, O_RDONLY | O_CLOEXEC);
    bool is_same = fd >= 0 && !fstat(fd, &info) && is_file_of(m, &info);
    void *got = is_same ? mmap(first, end - vaddr, s->prot, MAP_PRIVATE | MAP_FIXED, fd, offset) : MAP_FAILED;
    if (fd >= 0)
        close(fd);
    return got != MAP_FAILED || copy_pages(m, s, vaddr, end);
}

static const struct run *run_of(const struct module *m, uint64_t vaddr)
{
    for (uint64_t low = 0, high = m->n_runs; low < high;) {
        uint64_t middle = (low + high) / 2;
        const struct run *r = &m->runs[middle];
        if (vaddr < r->vaddr)
            high = middle;
        else if (vaddr >= r->vaddr + r->n_pages * PAGE)
            low = middle + 1;
        else
            return r;
    }
    return NULL;
}

/* A shut page of a copy was touched: log it, and bring the original back, with all pages that only the same element has. */
static bool meet_removed_page(const struct module *m, const struct segment *s, const struct run *run, uint64_t vaddr,
                              bool is_first)
{
    uint64_t offset = s->offset + vaddr - s->vaddr, begin = vaddr, end = vaddr + PAGE;
    const struct range *r = owner(m, offset);
    if (r) {
        uint64_t low = s->vaddr + (r->offset - s->offset), high = low + r->size;
        begin = (low + PAGE - 1) & -PAGE;
        end = high & -PAGE;
        if (begin < run->vaddr)
            begin = run->vaddr;
        if (end > run->vaddr + run->n_pages * PAGE)
            end = run->vaddr + run->n_pages * PAGE;
        for (uint64_t at = begin; at < end; at += PAGE)
            if (at != vaddr)
                m->touched[run->first + (at - run->vaddr) / PAGE] = 1;
    }
    if (is_first) {
        char text[1400];
        snprintf(text, sizeof text, "page\t%s\t%lu\t%s\t%s", options.guard == GUARD_RESTORE ? "restored" : "reported",
                 offset, r ? "whole" : "edge", m->path);
        note("miss", text);
        if (r && options.guard == GUARD_REPORT)
            say(m, "GPU code ", "", offset, "loaded");
    }
    if (options.guard == GUARD_RESTORE && restore_pages(m, s, begin, end))
        return true;
    return !mprotect((void *)(m->bias + begin), end - begin, s->prot);
}

/* True if `address` was on a shut page, which is open now. `needed` is the right that the access needs. */
static bool open_page(const struct module *m, uint64_t address, int needed)
{
    uint64_t vaddr = (address - m->bias) & -PAGE;
    const struct run *run = run_of(m, vaddr);
    if (!run)
        return false;
    uint8_t *touched = &m->touched[run->first + (vaddr - run->vaddr) / PAGE];
    const struct segment *s = segment_of(m, vaddr + PAGE - 1);
    if (!s)
        s = segment_of(m, vaddr);
    if (!s || !(s->prot & needed))
        return false; /* would fault on the open page, too */
    bool is_first = !__atomic_exchange_n(touched, 1, __ATOMIC_RELAXED);
    if (options.swap)
        return meet_removed_page(m, s, run, vaddr, is_first);
    if (!mprotect((void *)(m->bias + vaddr), PAGE, s->prot))
        return true;
    /* More mappings than the kernel allows: give up the rest of this run. */
    return !mprotect((void *)(m->bias + run->vaddr), run->n_pages * PAGE, s->prot);
}

/* Where this library is. */
extern const char __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));

/* True if it was on_trap that could not write: the program has taken the right to do so from its code (one that patches
   functions does), and has it again. */
static bool allow_own_write(const struct module *m, uint64_t address, uint64_t from)
{
    return m->hits && site_at(m, address - m->bias) >= 0 && from >= (uint64_t)__ehdr_start && from < (uint64_t)_end &&
           !mprotect((void *)(address & -PAGE), PAGE, PROT_READ | PROT_WRITE | PROT_EXEC);
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    const greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    int before = errno, error = registers[REG_ERR]; /* Intel SDM 3A, 4.7: bit 1 writes, bit 4 instruction fetches */
    int needed = error & 2 ? PROT_WRITE : error & 16 ? PROT_EXEC : PROT_READ;
    uint64_t address = (uint64_t)info->si_addr;
    const struct module *m = info->si_code == SEGV_ACCERR ? module_at(address) : NULL;
    bool is_ours = m && ((m->n_runs && open_page(m, address, needed)) ||
                         (needed == PROT_WRITE && allow_own_write(m, address, registers[REG_RIP])));
    if (!is_ours)
        pass_on(number, info, context);
    errno = before;
}

/* --- the program's own handlers and masks ------------------------------------------------------------------------- */

int fail(int error)
{
    if (program_errno)
        *program_errno() = error;
    return -1;
}

uint64_t owned_signals(void)
{
    uint64_t mask = 0;
    for (int i = 1; i < 65; i++)
        mask |= (uint64_t)owned[i] << (i - 1);
    return mask;
}

static int our_sigaction(int number, const struct sigaction *action, struct sigaction *old)
{
    if (number < 1 || number > 64)
        return fail(EINVAL);
    struct sigaction plain;
    if (action) {
        plain = *action;
        for (int i = 1; i < 65; i++)
            if (owned[i])
                sigdelset(&plain.sa_mask, i);
    }
    if (!owned[number])
        return sigaction(number, action ? &plain : NULL, old) ? fail(errno) : 0;
    while (__atomic_test_and_set(&wanted_lock, __ATOMIC_ACQUIRE))
        ;
    struct sigaction was = wanted[number];
    if (action)
        wanted[number] = plain;
    __atomic_clear(&wanted_lock, __ATOMIC_RELEASE);
    if (old)
        *old = was;
    return 0;
}

static int our_sigmask(int how, const sigset_t *set, sigset_t *old)
{
    uint64_t mask = 0;
    if (set) {
        memcpy(&mask, set, sizeof mask);
        mask &= ~(3ul << 31); /* 32 and 33 are the C library's own */
        if (how != SIG_UNBLOCK)
            mask &= ~owned_signals();
    }
    long result;
    register long size __asm__("r10") = 8;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"((long)SYS_rt_sigprocmask), "D"((long)how), "S"(set ? &mask : NULL), "d"(old), "r"(size)
                     : "rcx", "r11", "memory");
    return (int)-result;
}

static int our_sigprocmask(int how, const sigset_t *set, sigset_t *old)
{
    int error = our_sigmask(how, set, old);
    return error ? fail(error) : 0;
}

/* A jump over the first bytes of a function: the calls of the C library itself come along, too. */
static bool redirect(uint64_t function, const void *to)
{
    uint8_t code[14] = {0xff, 0x25, 0, 0, 0, 0};
    uint64_t page = function & -PAGE, end = function + sizeof code;
    memcpy(code + 6, &to, 8);
    if (mprotect((void *)page, end - page, PROT_READ | PROT_WRITE | PROT_EXEC))
        return false;
    memcpy((void *)function, code, sizeof code);
    mprotect((void *)page, end - page, PROT_READ | PROT_EXEC);
    return true;
}

void hook_signals(struct module *m)
{
    static const struct {
        const char *name;
        const void *to;
    } hooks[] = {
        {"sigaction", our_sigaction}, {"pthread_sigmask", our_sigmask}, {"sigprocmask", our_sigprocmask},
        {"sigsuspend", our_sigsuspend}, {"ppoll", our_ppoll}, {"pselect", our_pselect},
        {"epoll_pwait", our_epoll_pwait},
    };
    const Elf64_Ehdr *head = (const void *)m->file;
    if (!owned[SIGTRAP] && !owned[SIGSEGV])
        return;
    if (head->e_shentsize != sizeof(Elf64_Shdr) || head->e_shoff > m->file_size ||
        head->e_shnum > (m->file_size - head->e_shoff) / sizeof(Elf64_Shdr)) {
        note("proc", "problem\tthe C library has no section table: a handler of the program can end the record");
        return;
    }
    const Elf64_Shdr *sections = (const void *)(m->file + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        const Elf64_Shdr *s = &sections[i];
        if (s->sh_type != SHT_DYNSYM || s->sh_link >= head->e_shnum || s->sh_offset > m->file_size ||
            s->sh_size > m->file_size - s->sh_offset)
            continue;
        const Elf64_Sym *symbols = (const void *)(m->file + s->sh_offset);
        const char *names = (const char *)m->file + sections[s->sh_link].sh_offset;
        for (uint64_t k = 0; k < s->sh_size / sizeof *symbols; k++) {
            const Elf64_Sym *symbol = &symbols[k];
            if (!symbol->st_value || symbol->st_name >= sections[s->sh_link].sh_size)
                continue;
            const char *name = names + symbol->st_name;
            if (!strcmp(name, "__errno_location"))
                program_errno = (int *(*)(void))(m->bias + symbol->st_value);
            if (!strcmp(name, "pthread_setcanceltype"))
                program_set_cancel_type = (int (*)(int, int *))(m->bias + symbol->st_value);
            for (size_t h = 0; h < sizeof hooks / sizeof *hooks; h++)
                if (!strcmp(name, hooks[h].name) &&
                    (symbol->st_size < 14 || !redirect(m->bias + symbol->st_value, hooks[h].to)))
                    note("proc", "problem\ta signal function of the C library cannot be redirected");
        }
    }
}

static void own(int number, void (*handler)(int, siginfo_t *, void *))
{
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    sigprocmask(SIG_UNBLOCK, &set, NULL); /* a mask survives exec */
    owned[number] = !sigaction(number, &action, &wanted[number]);
}

void install_handlers(void)
{
    if (options.trace_functions || (options.swap && options.guard != GUARD_OFF))
        own(SIGTRAP, on_trap);
    if (options.trace_functions || options.trace_pages || (options.swap && options.guard_pages))
        own(SIGSEGV, on_fault);
}
