/* Breakpoints at function starts, and pages of GPU code without access. Both are taken away at first touch (trap.c). */
#include "audit.h"

#include <stdio.h>
#include <sys/mman.h>

void plant(struct module *m)
{
    if (!m->n_sites)
        return;
    for (int i = 0; i < m->n_segments; i++) {
        const struct segment *s = &m->segments[i];
        if (!(s->prot & PROT_EXEC))
            continue;
        uint64_t begin = (m->bias + s->vaddr) & -PAGE, end = m->bias + s->vaddr + s->file_size;
        /* It stays writable, so that the handler needs no system call to take a breakpoint away. */
        if (mprotect((void *)begin, end - begin, PROT_READ | PROT_WRITE | PROT_EXEC)) {
            char text[1200];
            snprintf(text, sizeof text, "problem\tcode of %s cannot be made writable", m->path);
            note("proc", text);
            m->n_sites = 0;
            return;
        }
    }
    for (uint64_t i = 0; i < m->n_sites; i++)
        if (!m->hits[i])
            *(uint8_t *)(m->bias + m->sites[i]) = 0xcc;
}

void shut_pages(struct module *m)
{
    for (uint64_t i = 0; i < m->n_runs; i++)
        mprotect((void *)(m->bias + m->runs[i].vaddr), m->runs[i].n_pages * PAGE, PROT_NONE);
}
