/* The double of the driver, as far as it loads and launches kernels. What it launches was made by
 * the double of NVRTC: a library of the host's with the same source. */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ARGUMENTS = 8, MAX_THREADS = 1024, NAME_BYTES = 128 };

typedef struct {
    void* library;
    int device;
} module_t;

typedef struct {
    module_t* module;
    unsigned sizes[MAX_ARGUMENTS];
    int num_arguments;
    void (*run)(void** arguments, unsigned blocks, unsigned threads);
    bool is_loaded;
} function_t;

typedef struct {
    operation_t base;
    function_t* function;
    int device;
    unsigned blocks;
    unsigned threads;
    uint64_t values[MAX_ARGUMENTS];
} launch_t;

/* The image names the architecture and the library: "... sm_90 /path". Machine code runs on its own
 * architecture only, assembly ("compute_") on that and newer ones. */
int
cuModuleLoadData(module_t** out, const char* image) {
    ENTER();
    int capability = (int)atomic_load(&double_values[CAPABILITY]);
    int made_for = 0;
    char path[512];
    bool runs = false;
    if (sscanf(image, "double of sm_%d %511s", &made_for, path) == 2) {
        runs = made_for == capability;
    } else if (sscanf(image, "// double of compute_%d %511s", &made_for, path) == 2) {
        runs = made_for <= capability;
    }
    void* library = runs ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL) {
        return NO_BINARY_FOR_GPU;
    }
    module_t* module = calloc(1, sizeof *module);
    *module = (module_t){library, current_device()};
    atomic_fetch_add(&double_values[LIVE_MODULES], 1);
    *out = module;
    return SUCCESS;
}

int
cuModuleGetFunction(function_t** out, module_t* module, const char* name) {
    char symbol[NAME_BYTES];
    snprintf(symbol, sizeof symbol, "%s_run", name);
    void* run = dlsym(module->library, symbol);
    snprintf(symbol, sizeof symbol, "%s_sizes", name);
    void* sizes = dlsym(module->library, symbol);
    if (run == NULL || sizes == NULL) {
        return NOT_FOUND;
    }
    function_t* function = calloc(1, sizeof *function);
    function->module = module;
    memcpy(&function->run, &run, sizeof run);
    int (*get_sizes)(unsigned*);
    memcpy(&get_sizes, &sizes, sizeof sizes);
    function->num_arguments = get_sizes(function->sizes);
    *out = function;
    return SUCCESS;
}

int
cuModuleUnload(module_t* module) {
    ENTER();
    wait_for_device(module->device); /* whoever unloads what runs would crash */
    atomic_fetch_sub(&double_values[LIVE_MODULES], 1);
    free(module); /* its library stays: it is needed again soon */
    return SUCCESS;
}

/* A kernel needs a multiprocessor; others may have them all until their peers come. */
static bool
is_processor_free(operation_t* base) {
    (void)base;
    return atomic_load(&double_values[RESIDENT_KERNELS]) <
           atomic_load(&double_values[KERNEL_SLOTS]);
}

static void
run_kernel(operation_t* base) {
    launch_t* self = (launch_t*)base;
    void* arguments[MAX_ARGUMENTS];
    for (int i = 0; i < MAX_ARGUMENTS; i++) {
        arguments[i] = &self->values[i];
    }
    if (failure_of(STICKY_ERROR) != 0) {
        return;
    }
    self->function->run(arguments, self->blocks, self->threads);
    atomic_fetch_add(&double_values[KERNELS], 1);
}

int
cuLaunchKernel(function_t* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
               stream_t* stream, void** arguments, void** extra) {
    ENTER();
    if (failure_of(KERNEL_FAILS) != 0) {
        return failure_of(KERNEL_FAILS);
    }
    int device = current_device();
    if (function->module->device != device || device_of(stream) != device) {
        return INVALID_HANDLE;
    }
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > MAX_THREADS ||
        block_y != 1 || block_z != 1 || shared_bytes != 0 || extra != NULL) {
        return INVALID_VALUE;
    }
    if (!function->is_loaded) { /* lazily, which needs the device to be idle */
        wait_for_device(device);
        function->is_loaded = true;
    }
    launch_t* launch = calloc(1, sizeof *launch);
    *launch = (launch_t){.function = function, .blocks = grid_x, .threads = block_x};
    launch->base.start = is_processor_free;
    launch->base.run = run_kernel;
    for (int i = 0; i < function->num_arguments; i++) { /* the caller's may go after the call */
        memcpy(&launch->values[i], arguments[i], function->sizes[i]);
    }
    stream_enqueue(stream, &launch->base);
    return SUCCESS;
}
