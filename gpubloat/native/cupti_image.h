/* What the driver was given to load: which mapped file a pointer lies in, and what kind of code is there. */
#ifndef GPUBLOAT_CUPTI_IMAGE_H
#define GPUBLOAT_CUPTI_IMAGE_H

#include <elf.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WRAPPER_MAGIC 0x466243b1u
#define REGION_MAGIC 0xba55ed50u

#ifndef EM_CUDA
#define EM_CUDA 190
#endif

/* ---- CRC-32 of zlib, eight bytes at a time ---- */

static uint32_t crc_table[8][256];

static void crc_start(void)
{
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int k = 0; k < 8; k++)
            c = c & 1 ? 0xedb88320u ^ c >> 1 : c >> 1;
        crc_table[0][n] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int n = 0; n < 256; n++)
            crc_table[k][n] = crc_table[0][crc_table[k - 1][n] & 255] ^ crc_table[k - 1][n] >> 8;
}

static uint32_t crc32_of(const void *data, size_t size)
{
    const unsigned char *at = data;
    uint32_t crc = 0xffffffffu;
    for (; size >= 8; at += 8, size -= 8) {
        uint32_t low, high; /* little endian, as every host of a GPU */
        memcpy(&low, at, 4);
        memcpy(&high, at + 4, 4);
        low ^= crc;
        crc = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^ crc_table[5][low >> 16 & 255] ^
              crc_table[4][low >> 24] ^ crc_table[3][high & 255] ^ crc_table[2][high >> 8 & 255] ^
              crc_table[1][high >> 16 & 255] ^ crc_table[0][high >> 24];
    }
    for (; size; size--)
        crc = crc_table[0][(crc ^ *at++) & 255] ^ crc >> 8;
    return ~crc;
}

/* ---- where a pointer lies ---- */

struct image {
    const char *kind;    /* fatbin, cubin, ptx, mapped (read-only data of a library, not looked at), file, unknown */
    char path[PATH_MAX]; /* of the mapped object, or "-" */
    uint64_t vaddr;      /* relative to its load bias, as in its program headers */
    int is_writable;     /* lies in a segment that is */
    uint32_t crc;        /* of a cubin on the heap, with its size; 0 otherwise */
    uint64_t size;
};

struct search {
    uintptr_t pointer;
    struct image *image;
    int is_found;
};

/* The path of one object at a time is kept: libraries register all their code in one go. */
static struct {
    pthread_mutex_t lock;
    ElfW(Addr) base;
    char name[PATH_MAX], path[PATH_MAX];
} last_object = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void object_path(const struct dl_phdr_info *info, char *path)
{
    pthread_mutex_lock(&last_object.lock);
    if (!*last_object.path || last_object.base != info->dlpi_addr ||
        strncmp(last_object.name, info->dlpi_name, PATH_MAX)) {
        const char *name = *info->dlpi_name ? info->dlpi_name : "/proc/self/exe"; /* "" is the program itself */
        if (!realpath(name, last_object.path)) {
            strncpy(last_object.path, name, PATH_MAX - 1);
            last_object.path[PATH_MAX - 1] = 0;
        }
        strncpy(last_object.name, info->dlpi_name, PATH_MAX - 1);
        last_object.base = info->dlpi_addr;
    }
    memcpy(path, last_object.path, PATH_MAX);
    pthread_mutex_unlock(&last_object.lock);
}

static int holds_pointer(struct dl_phdr_info *info, size_t size, void *data)
{
    struct search *search = data;
    (void)size;
    uintptr_t vaddr = search->pointer - info->dlpi_addr;
    for (int n = 0; n < info->dlpi_phnum; n++) {
        const ElfW(Phdr) *head = &info->dlpi_phdr[n];
        if (head->p_type == PT_LOAD && vaddr - head->p_vaddr < head->p_memsz) {
            search->is_found = 1;
            search->image->vaddr = vaddr;
            search->image->is_writable = !!(head->p_flags & PF_W);
            object_path(info, search->image->path);
            return 1;
        }
    }
    return 0;
}

/* Fill path, vaddr and is_writable; the path is "-" if no mapped object holds the pointer. Only the lock of
 * dl_iterate_phdr is taken, never the one that dlopen holds while it runs constructors. */
static int image_place(const void *pointer, struct image *image)
{
    struct search search = {(uintptr_t)pointer, image, 0};
    strcpy(image->path, "-");
    image->vaddr = 0;
    image->is_writable = 1;
    dl_iterate_phdr(holds_pointer, &search);
    return search.is_found;
}

/* ---- what is there ---- */

/* Length of the cubin at `data`; 0 if there is none. The driver has accepted it before. */
static uint64_t cubin_size(const unsigned char *data)
{
    const Elf64_Ehdr *head = (const void *)data;
    if (memcmp(data, ELFMAG, SELFMAG) || head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_machine != EM_CUDA)
        return 0;
    uint64_t end = head->e_phoff + (uint64_t)head->e_phnum * sizeof(Elf64_Phdr);
    uint64_t table = head->e_shoff + (uint64_t)head->e_shnum * sizeof(Elf64_Shdr);
    end = table > end ? table : end;
    if (!head->e_shoff || head->e_shentsize != sizeof(Elf64_Shdr))
        return end;
    for (int n = 0; n < head->e_shnum; n++) {
        Elf64_Shdr section;
        memcpy(&section, data + head->e_shoff + (uint64_t)n * sizeof section, sizeof section);
        uint64_t stop = section.sh_offset + section.sh_size;
        if (section.sh_type != SHT_NOBITS && section.sh_type != SHT_NULL && stop > end)
            end = stop;
    }
    return end;
}

/* Describe what lies at `pointer`, which the driver has taken for an image.
 *
 * Read-only pages of a library are not touched: where first touches are recorded, they are evidence of their own. */
static void image_look(const void *pointer, struct image *image)
{
    uint32_t magic;
    image->kind = "mapped";
    image->crc = 0;
    image->size = 0;
    image_place(pointer, image);
    if (!image->is_writable)
        return;
    if ((uintptr_t)pointer % 4 == 0 && (memcpy(&magic, pointer, 4), magic == WRAPPER_MAGIC)) {
        const void *inner;
        memcpy(&inner, (const char *)pointer + 8, sizeof inner);
        image_place(inner, image);
        image->kind = "fatbin";
        return;
    }
    const unsigned char *bytes = pointer;
    if (bytes[0] == (REGION_MAGIC & 255) && bytes[1] == (REGION_MAGIC >> 8 & 255)) {
        image->kind = "fatbin";
    } else if (bytes[0] == 0x7f && bytes[1] == 'E') {
        image->kind = "cubin";
        if (*image->path == '-' && (image->size = cubin_size(bytes)))
            image->crc = crc32_of(bytes, image->size);
    } else if (bytes[0] == '\t' || bytes[0] == '\n' || bytes[0] == '\r' || (bytes[0] >= ' ' && bytes[0] < 0x7f)) {
        image->kind = "ptx";
    } else {
        image->kind = "unknown";
    }
}

static void image_of_file(const char *name, struct image *image)
{
    image->kind = "file";
    image->vaddr = image->crc = 0;
    image->size = 0;
    if (!realpath(name, image->path)) {
        strncpy(image->path, name, PATH_MAX - 1);
        image->path[PATH_MAX - 1] = 0;
    }
}

#endif
