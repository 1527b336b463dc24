/* The lines of the log: one function for each kind of event. */
#ifndef GPUBLOAT_CUPTI_EVENTS_H
#define GPUBLOAT_CUPTI_EVENTS_H

#include <cuda.h>
#include <cupti_callbacks.h>

#include "cupti_image.h"
#include "cupti_log.h"

#define MAX_MADE 64

static struct {
    CUresult (*count)(int *);
    CUresult (*get)(CUdevice *, int);
    CUresult (*name)(char *, int, CUdevice);
    CUresult (*attribute)(int *, CUdevice_attribute, CUdevice);
} driver;

/* Cubins that the driver has loaded during the call that this thread is in. */
static __thread struct {
    int n;
    struct {
        uint32_t crc;
        uint64_t size;
    } cubin[MAX_MADE];
} made;

static void say_gpus(void)
{
    static pid_t process; /* a race writes nothing twice: lines are distinct */
    int count = 0, major, minor;
    if (process == getpid() || !driver.count || driver.count(&count))
        return;
    process = getpid();
    for (int n = 0; n < count; n++) {
        CUdevice device;
        char name[256] = "", target[32];
        if (driver.get(&device, n) || driver.attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) ||
            driver.attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
            continue;
        driver.name(name, sizeof name - 1, device);
        snprintf(target, sizeof target, "sm_%d%d", major, minor);
        struct line line;
        line_begin(&line, "gpu");
        line_number(&line, DECIMAL, (uint64_t)n);
        line_text(&line, target);
        line_text(&line, name);
        line_end(&line, digest_number('g', (uint64_t)n));
    }
}

/* Handles are pointers and come again after an unload: what is known of one ends where another image gets it. Returns
 * whether `handle` has `image` for the first time. */
static int is_new_image(const void *handle, uint64_t image)
{
    pthread_mutex_lock(&log_lock);
    uint64_t *known = seen_value(digest_number('h', (uintptr_t)handle));
    int is_new = known && *known != image;
    if (is_new)
        *known = image;
    pthread_mutex_unlock(&log_lock);
    return is_new;
}

/* The digest of a handle and its image, the start of that of everything looked up in it. */
static uint64_t handle_digest(char what, const void *handle)
{
    pthread_mutex_lock(&log_lock);
    uint64_t *known = seen_value(digest_number('h', (uintptr_t)handle));
    uint64_t image = known ? *known : 0;
    pthread_mutex_unlock(&log_lock);
    return digest_number(digest_number((unsigned char)what, (uintptr_t)handle), image);
}

/* Cubins that were loaded during a call belong to its handle. */
static void say_made(const void *handle)
{
    for (int n = 0; n < made.n; n++) {
        struct line line;
        line_begin(&line, "made");
        line_number(&line, HEX, (uintptr_t)handle);
        line_number(&line, CRC, made.cubin[n].crc);
        line_number(&line, DECIMAL, made.cubin[n].size);
        uint64_t key = digest_number(handle_digest('m', handle), made.cubin[n].crc);
        line_end(&line, digest_number(key, made.cubin[n].size));
    }
    made.n = 0;
}

static void say_load(const void *handle, const char *api, const struct image *image)
{
    uint64_t key = digest_number(digest_text(digest_text('l', image->path), image->kind), image->vaddr);
    key = digest_number(digest_number(key, image->crc), image->size);
    if (is_new_image(handle, key)) {
        struct line line;
        line_begin(&line, "load");
        line_number(&line, HEX, (uintptr_t)handle);
        line_text(&line, api);
        line_text(&line, image->path);
        line_number(&line, HEX, image->vaddr);
        line_text(&line, image->kind);
        line_number(&line, CRC, image->crc);
        line_number(&line, DECIMAL, image->size);
        line_end(&line, 0);
    }
    say_made(handle);
}

static void say_image(const void *handle, const char *api, const void *pointer)
{
    struct image image;
    image_look(pointer, &image);
    say_load(handle, api, &image);
}

static void say_file(const void *handle, const char *api, const char *name)
{
    struct image image;
    image_of_file(name, &image);
    say_load(handle, api, &image);
}

static void say_alias(const void *module, const void *library)
{
    uint64_t key = handle_digest('a', library);
    if (is_new_image(module, key)) {
        struct line line;
        line_begin(&line, "alias");
        line_number(&line, HEX, (uintptr_t)module);
        line_number(&line, HEX, (uintptr_t)library);
        line_end(&line, 0);
    }
    say_made(library);
}

/* kernel or variable of this name; all, without a name: every kernel was handed out. */
static void say_name(const char *what, const void *handle, const char *name)
{
    struct line line;
    line_begin(&line, what);
    line_number(&line, HEX, (uintptr_t)handle);
    if (name)
        line_text(&line, name);
    line_end(&line, digest_text(handle_digest(*what, handle), name ? name : ""));
    say_made(handle);
}

static void say_module(const CUpti_ModuleResourceData *module)
{
    if (!module || !module->pCubin)
        return;
    uint32_t crc = crc32_of(module->pCubin, module->cubinSize);
    pthread_mutex_lock(&log_lock);
    uint64_t *count = seen_value(digest_number(digest_number('M', crc), module->cubinSize));
    uint64_t n = count ? ++*count : 0;
    pthread_mutex_unlock(&log_lock);
    /* A program that loads one cubin for ever writes ever fewer lines; the largest number counts. */
    if (n && (n <= 64 || !(n & (n - 1)))) {
        struct line line;
        line_begin(&line, "module");
        line_number(&line, CRC, crc);
        line_number(&line, DECIMAL, module->cubinSize);
        line_number(&line, DECIMAL, n);
        line_end(&line, 0);
    }
    if (made.n < MAX_MADE) {
        made.cubin[made.n].crc = crc;
        made.cubin[made.n++].size = module->cubinSize;
    }
}

#endif
