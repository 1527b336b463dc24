/* A libcupti without a GPU: it has room for one subscriber, remembers what that enables, and fires what a test asks. */
#define __DEVICE_TYPES_H__
#define __DRIVER_TYPES_H__
#define __SURFACE_TYPES_H__
#define __TEXTURE_TYPES_H__
#define __VECTOR_TYPES_H__
#define __CUDA_API_VERSION_INTERNAL
#define cuptiSubscribe_v2 declared_subscribe_v2 /* not in all versions, and with a type of its own */
#include <cuda.h>
#include <cupti_callbacks.h>
#undef cuptiSubscribe_v2
#include <cupti_driver_cbid.h>
#include <generated_cuda_meta.h>
#include <stdlib.h>
#include <string.h>

#define ID(name) CUPTI_DRIVER_TRACE_CBID_##name

static CUpti_CallbackFunc subscriber;
static void *subscriber_data;
static char is_enabled[CUPTI_CB_DOMAIN_SIZE][2048], is_domain_enabled[CUPTI_CB_DOMAIN_SIZE];

CUptiResult cuptiSubscribe_v2(CUpti_SubscriberHandle *handle, CUpti_CallbackFunc function, void *data, void *more)
{
    (void)more;
    if (getenv("FAKE_CUPTI_ERROR"))
        return atoi(getenv("FAKE_CUPTI_ERROR"));
    if (subscriber)
        return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    subscriber = function;
    subscriber_data = data;
    *handle = (CUpti_SubscriberHandle)&subscriber;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiSubscribe(CUpti_SubscriberHandle *handle, CUpti_CallbackFunc function, void *data)
{
    return cuptiSubscribe_v2(handle, function, data, NULL);
}

CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle handle)
{
    (void)handle;
    subscriber = NULL;
    memset(is_enabled, 0, sizeof is_enabled);
    memset(is_domain_enabled, 0, sizeof is_domain_enabled);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiEnableCallback(uint32_t on, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain, uint32_t id)
{
    if (handle != (CUpti_SubscriberHandle)&subscriber || id >= sizeof *is_enabled)
        return CUPTI_ERROR_INVALID_PARAMETER;
    is_enabled[domain][id] = on;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiEnableDomain(uint32_t on, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain)
{
    (void)handle;
    is_domain_enabled[domain] = on;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiGetResultString(CUptiResult result, const char **text)
{
    *text = result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED ? "one is enough" : "something else";
    return CUPTI_SUCCESS;
}

/* ---- for the tests ---- */

int fake_is_enabled(int domain, int id) { return is_enabled[domain][id]; }
int fake_is_domain_enabled(int domain) { return is_domain_enabled[domain]; }
int fake_n_enabled(void)
{
    int n = 0;
    for (size_t i = 0; i < sizeof is_enabled; i++)
        n += ((char *)is_enabled)[i];
    return n;
}

static void fire(int domain, uint32_t id, const void *data)
{
    if (subscriber && (is_enabled[domain][id] || is_domain_enabled[domain]))
        subscriber(subscriber_data, domain, id, data);
}

static void driver(int site, uint32_t id, const void *parameters, CUresult result)
{
    CUpti_CallbackData data = {.callbackSite = site, .functionParams = parameters, .functionReturnValue = &result};
    fire(CUPTI_CB_DOMAIN_DRIVER_API, id, &data);
}

void fake_module(const char *cubin, size_t size)
{
    CUpti_ModuleResourceData module = {.cubinSize = size, .pCubin = cubin};
    CUpti_ResourceData data = {.resourceDescriptor = &module};
    fire(CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED, &data);
}

void fake_context(void)
{
    CUpti_ResourceData data = {0};
    fire(CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_CONTEXT_CREATED, &data);
}

/* A load of `image` as `handle`; the driver loads `cubin` meanwhile, if there is one. */
void fake_library(void *handle, const void *image, const char *cubin, size_t size)
{
    cuLibraryLoadData_params p = {.library = (CUlibrary *)&handle, .code = image};
    driver(CUPTI_API_ENTER, ID(cuLibraryLoadData), &p, 0);
    if (cubin)
        fake_module(cubin, size);
    driver(CUPTI_API_EXIT, ID(cuLibraryLoadData), &p, 0);
}

void fake_image(void *handle, const void *image, const char *cubin, size_t size)
{
    cuModuleLoadData_params p = {.module = (CUmodule *)&handle, .image = image};
    driver(CUPTI_API_ENTER, ID(cuModuleLoadData), &p, 0);
    if (cubin)
        fake_module(cubin, size);
    driver(CUPTI_API_EXIT, ID(cuModuleLoadData), &p, 0);
}

void fake_file(void *handle, const char *name)
{
    cuModuleLoad_params p = {.module = (CUmodule *)&handle, .fname = name};
    driver(CUPTI_API_EXIT, ID(cuModuleLoad), &p, 0);
}

void fake_alias(void *module, void *library)
{
    cuLibraryGetModule_params p = {.pMod = (CUmodule *)&module, .library = library};
    driver(CUPTI_API_EXIT, ID(cuLibraryGetModule), &p, 0);
}

void fake_kernel(void *library, const char *name, int result)
{
    cuLibraryGetKernel_params p = {.library = library, .name = name};
    driver(CUPTI_API_ENTER, ID(cuLibraryGetKernel), &p, 0);
    driver(CUPTI_API_EXIT, ID(cuLibraryGetKernel), &p, result);
}

void fake_function(void *module, const char *name)
{
    cuModuleGetFunction_params p = {.hmod = module, .name = name};
    driver(CUPTI_API_EXIT, ID(cuModuleGetFunction), &p, 0);
}

void fake_global(void *module, const char *name)
{
    cuModuleGetGlobal_v2_params p = {.hmod = module, .name = name};
    driver(CUPTI_API_EXIT, ID(cuModuleGetGlobal_v2), &p, 0);
}

void fake_all(void *library)
{
    cuLibraryEnumerateKernels_params p = {.lib = library};
    driver(CUPTI_API_EXIT, ID(cuLibraryEnumerateKernels), &p, 0);
}

void fake_launch(void)
{
    for (int n = 0; n < 100; n++)
        driver(CUPTI_API_EXIT, ID(cuLaunchKernel), NULL, 0);
}
