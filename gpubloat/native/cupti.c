/* Record which GPU code a program loads and looks up. The CUDA driver loads this library at cuInit, because
 * CUDA_INJECTION64_PATH names it; the program is not changed.
 *
 * Only the callbacks that can tell something are enabled, never whole domains. Nothing here depends on CUDA at link
 * time: CUPTI is the copy that the program itself uses, else the one that GPUBLOAT_CUPTI names. Whatever fails, the
 * program goes on.
 *
 * GPUBLOAT_DIR         folder of the logs, <pid>.cupti
 * GPUBLOAT_CUPTI       path of libcupti, for programs that bring none
 * GPUBLOAT_CUPTI_MODE  "domains": enable the whole driver and runtime domains, to measure what that costs
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <sys/mman.h>

/* Types of the CUDA runtime: none is needed, and they would take one more of NVIDIA's packages. */
#define __DEVICE_TYPES_H__
#define __DRIVER_TYPES_H__
#define __SURFACE_TYPES_H__
#define __TEXTURE_TYPES_H__
#define __VECTOR_TYPES_H__
#define __CUDA_API_VERSION_INTERNAL /* declares the types of all versions, which generated_cuda_meta.h names */
#include <cuda.h>
#include <cupti_callbacks.h>
#include <cupti_driver_cbid.h>
#include <generated_cuda_meta.h>

#include "cupti_events.h"

#define CALLBACK(name) CUPTI_DRIVER_TRACE_CBID_##name

static struct {
    CUptiResult (*subscribe)(CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *);
    CUptiResult (*unsubscribe)(CUpti_SubscriberHandle);
    CUptiResult (*enable)(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId);
    CUptiResult (*enable_domain)(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain);
    CUptiResult (*explain)(CUptiResult, const char **);
    void *subscribe_v2;
    CUpti_SubscriberHandle subscriber;
} cupti;

static uint64_t n_callbacks;

/* ---- callbacks ---- */

#define PARAMETERS(name) const name##_params *p = data->functionParams
#define API(name, statement)                                                                                           \
    case CALLBACK(name): {                                                                                             \
        PARAMETERS(name);                                                                                              \
        statement;                                                                                                     \
        break;                                                                                                         \
    }

static void at_exit_of(CUpti_CallbackId id, const CUpti_CallbackData *data)
{
    say_gpus();
    switch (id) {
        API(cuModuleLoad, say_file(*p->module, "cuModuleLoad", p->fname))
        API(cuModuleLoadData, say_image(*p->module, "cuModuleLoadData", p->image))
        API(cuModuleLoadDataEx, say_image(*p->module, "cuModuleLoadDataEx", p->image))
        API(cuModuleLoadFatBinary, say_image(*p->module, "cuModuleLoadFatBinary", p->fatCubin))
        API(cuLibraryLoadData, say_image(*p->library, "cuLibraryLoadData", p->code))
        API(cuLibraryLoadFromFile, say_file(*p->library, "cuLibraryLoadFromFile", p->fileName))
        API(cuLibraryGetModule, say_alias(*p->pMod, p->library))
        API(cuModuleGetFunction, say_name("kernel", p->hmod, p->name))
        API(cuLibraryGetKernel, say_name("kernel", p->library, p->name))
        API(cuLibraryGetUnifiedFunction, say_name("kernel", p->library, p->symbol))
        API(cuModuleGetGlobal_v2, say_name("variable", p->hmod, p->name))
        API(cuLibraryGetGlobal, say_name("variable", p->library, p->name))
        API(cuLibraryGetManaged, say_name("variable", p->library, p->name))
#if CUDA_VERSION >= 12040
        API(cuModuleEnumerateFunctions, say_name("all", p->mod, NULL))
        API(cuLibraryEnumerateKernels, say_name("all", p->lib, NULL))
#endif
    }
}

static const CUpti_CallbackId wanted[] = {
    CALLBACK(cuModuleLoad),
    CALLBACK(cuModuleLoadData),
    CALLBACK(cuModuleLoadDataEx),
    CALLBACK(cuModuleLoadFatBinary),
    CALLBACK(cuLibraryLoadData),
    CALLBACK(cuLibraryLoadFromFile),
    CALLBACK(cuLibraryGetModule),
    CALLBACK(cuModuleGetFunction),
    CALLBACK(cuLibraryGetKernel),
    CALLBACK(cuLibraryGetUnifiedFunction),
    CALLBACK(cuModuleGetGlobal_v2),
    CALLBACK(cuLibraryGetGlobal),
    CALLBACK(cuLibraryGetManaged),
#if CUDA_VERSION >= 12040
    CALLBACK(cuModuleEnumerateFunctions),
    CALLBACK(cuLibraryEnumerateKernels),
#endif
};

static int is_wanted(CUpti_CallbackId id)
{
    for (size_t n = 0; n < sizeof wanted / sizeof *wanted; n++)
        if (wanted[n] == id)
            return 1;
    return 0;
}

static void on_event(void *user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *payload)
{
    (void)user;
    __atomic_add_fetch(&n_callbacks, 1, __ATOMIC_RELAXED);
    int error = errno; /* the program's */
    if (domain == CUPTI_CB_DOMAIN_RESOURCE) {
        const CUpti_ResourceData *data = payload;
        if (id == CUPTI_CBID_RESOURCE_MODULE_LOADED && data)
            say_module(data->resourceDescriptor);
        else if (id == CUPTI_CBID_RESOURCE_CONTEXT_CREATED)
            say_gpus();
    } else if (domain == CUPTI_CB_DOMAIN_DRIVER_API && is_wanted(id)) {
        const CUpti_CallbackData *data = payload;
        if (data->callbackSite == CUPTI_API_ENTER)
            made.n = 0;
        else if (data->functionReturnValue && *(const CUresult *)data->functionReturnValue == CUDA_SUCCESS)
            at_exit_of(id, data);
    }
    errno = error;
}

/* ---- a second subscriber ---- */

/* CUPTI has room for one. Where another (a profiler) comes, it gets the place: its call to subscribe lands here first.
 * The jump that leads here replaces the first bytes of the function, which are put back before it runs. */
#define JUMP 14 /* jmp *(%rip), and the address */

struct hook {
    unsigned char *place;
    unsigned char bytes[JUMP];
};

static pthread_mutex_t hook_lock = PTHREAD_MUTEX_INITIALIZER;
static struct hook hooks[2];
static int n_hooks;

static int overwrite(unsigned char *place, const unsigned char *bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)place & -page;
    size_t size = ((uintptr_t)place + JUMP - start + page - 1) & -page;
    if (mprotect((void *)start, size, PROT_READ | PROT_WRITE | PROT_EXEC))
        return 0;
    memcpy(place, bytes, JUMP);
    mprotect((void *)start, size, PROT_READ | PROT_EXEC);
    return 1;
}

static void yield_to(const void *caller)
{
    pthread_mutex_lock(&hook_lock);
    int is_ours = n_hooks > 0;
    while (n_hooks > 0) {
        n_hooks--;
        overwrite(hooks[n_hooks].place, hooks[n_hooks].bytes);
    }
    if (is_ours) {
        struct image image;
        cupti.unsubscribe(cupti.subscriber);
        image_place(caller, &image);
        log_say("yielded", image.path);
    }
    pthread_mutex_unlock(&hook_lock);
}

static CUptiResult on_subscribe(CUpti_SubscriberHandle *subscriber, CUpti_CallbackFunc function, void *user)
{
    yield_to(__builtin_return_address(0));
    return cupti.subscribe(subscriber, function, user);
}

static CUptiResult on_subscribe_v2(CUpti_SubscriberHandle *subscriber, CUpti_CallbackFunc function, void *user, void *more)
{
    CUptiResult (*original)(CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *, void *);
    yield_to(__builtin_return_address(0));
    memcpy(&original, &cupti.subscribe_v2, sizeof original);
    return original(subscriber, function, user, more);
}

static void hook(void *function, void *ours)
{
#if defined __x86_64__
    Dl_info info;
    ElfW(Sym) *symbol = NULL;
    unsigned char jump[JUMP] = {0xff, 0x25, 0, 0, 0, 0};
    if (!function || !dladdr1(function, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol || symbol->st_size < JUMP)
        return;
    memcpy(jump + 6, &ours, sizeof ours);
    hooks[n_hooks].place = function;
    memcpy(hooks[n_hooks].bytes, function, JUMP);
    if (overwrite(function, jump))
        n_hooks++;
#else
    (void)function, (void)ours;
#endif
}

/* ---- start ---- */

static const char *explained(CUptiResult result)
{
    const char *text = NULL;
    return cupti.explain && cupti.explain(result, &text) == CUPTI_SUCCESS && text ? text : "an unknown error of CUPTI";
}

static int take(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static int loaded_cupti(struct dl_phdr_info *info, size_t size, void *path)
{
    const char *base = strrchr(info->dlpi_name, '/');
    (void)size;
    if (!base || strncmp(base + 1, "libcupti.so", 11) || strlen(info->dlpi_name) >= PATH_MAX)
        return 0;
    strcpy(path, info->dlpi_name);
    return 1;
}

/* The n-th place to look for CUPTI; the copies that the program has loaded come first. */
static void *candidate(int n, char *reason, size_t room)
{
    static const char *const names[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so"};
    const char *given = getenv("GPUBLOAT_CUPTI");
    char path[PATH_MAX] = "";
    void *library = NULL;
    if (n < 3) {
        library = dlopen(names[n], RTLD_LAZY | RTLD_NOLOAD);
    } else if (n == 3) {
        dl_iterate_phdr(loaded_cupti, path);
        library = *path ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    } else if (n > 4 || (given && *given)) {
        library = dlopen(n == 4 ? given : names[n - 5], RTLD_LAZY);
        if (!library && (n == 4 || !*reason))
            snprintf(reason, room, "%s", dlerror());
    }
    return library;
}

static int subscribe(void)
{
    char reason[512] = "";
    int is_own = 0;
    for (int n = 0; n < (is_own ? 4 : 8); n++) { /* beside a copy of the program's own, no second one is loaded */
        void *library = candidate(n, reason, sizeof reason);
        if (!library)
            continue;
        is_own = n < 4;
        if (!take(library, "cuptiSubscribe", &cupti.subscribe) ||
            !take(library, "cuptiUnsubscribe", &cupti.unsubscribe) ||
            !take(library, "cuptiEnableCallback", &cupti.enable) ||
            !take(library, "cuptiEnableDomain", &cupti.enable_domain)) {
            snprintf(reason, sizeof reason, "libcupti lacks the callback interface");
            continue;
        }
        take(library, "cuptiGetResultString", &cupti.explain);
        take(library, "cuptiSubscribe_v2", &cupti.subscribe_v2);
        CUptiResult result = cupti.subscribe(&cupti.subscriber, on_event, NULL);
        if (result == CUPTI_SUCCESS)
            return 1;
        snprintf(reason, sizeof reason, "cuptiSubscribe: %s", explained(result));
        if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED) {
            log_say("refused", reason);
            return 0;
        }
    }
    log_say("missing", reason);
    return 0;
}

static void enable(void)
{
    const char *mode = getenv("GPUBLOAT_CUPTI_MODE");
    char reason[64] = "";
    int n_failed = 0;
    if (mode && !strcmp(mode, "domains")) {
        n_failed += cupti.enable_domain(1, cupti.subscriber, CUPTI_CB_DOMAIN_DRIVER_API) != CUPTI_SUCCESS;
        n_failed += cupti.enable_domain(1, cupti.subscriber, CUPTI_CB_DOMAIN_RUNTIME_API) != CUPTI_SUCCESS;
    } else {
        for (size_t n = 0; n < sizeof wanted / sizeof *wanted; n++)
            n_failed += cupti.enable(1, cupti.subscriber, CUPTI_CB_DOMAIN_DRIVER_API, wanted[n]) != CUPTI_SUCCESS;
    }
    n_failed += cupti.enable(1, cupti.subscriber, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED) !=
                CUPTI_SUCCESS;
    n_failed += cupti.enable(1, cupti.subscriber, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_CONTEXT_CREATED) !=
                CUPTI_SUCCESS;
    if (n_failed)
        snprintf(reason, sizeof reason, "%d callbacks were not to be had", n_failed);
    log_say("recorded", reason);
}

/* How many callbacks there were: what the two modes are compared by. */
__attribute__((destructor)) static void finish(void)
{
    if (!log_folder || !n_callbacks)
        return;
    struct line line;
    line_begin(&line, "callbacks");
    line_number(&line, DECIMAL, n_callbacks);
    line_end(&line, 0);
}

__attribute__((visibility("default"))) int InitializeInjection(void)
{
    static int is_started;
    const char *folder = getenv("GPUBLOAT_DIR");
    if (!folder || !*folder || __atomic_exchange_n(&is_started, 1, __ATOMIC_SEQ_CST))
        return 1;
    log_folder = strdup(folder); /* the program may change its environment */
    crc_start();
    pthread_atfork(log_before_fork, log_after_fork, log_in_child);
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    /* Now: in a callback, a lock of the loader could be held by a thread that waits for the driver. */
    if (library && !(take(library, "cuDeviceGetCount", &driver.count) & take(library, "cuDeviceGet", &driver.get) &
                     take(library, "cuDeviceGetName", &driver.name) &
                     take(library, "cuDeviceGetAttribute", &driver.attribute)))
        driver.count = NULL;
    if (subscribe()) {
        enable();
        hook((void *)cupti.subscribe, (void *)on_subscribe);
        hook(cupti.subscribe_v2, (void *)on_subscribe_v2);
    }
    return 1;
}
