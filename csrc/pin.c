#include "pin.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

enum {
    CUDA_REGISTER_PORTABLE = 1, /* cudaHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE */
    CUDA_REGISTER_MAPPED = 2,
};

typedef int (*cuda_register_t)(void* address, size_t nbytes, unsigned flags);

/* ---- huge pages ---- */

/* "always within_size advise [never] deny force" -> "never" */
static bool
read_shmem_policy(char* policy, size_t size) {
    char line[128];
    FILE* file = fopen("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "re");
    if (file == NULL) {
        return false;
    }
    bool is_read = fgets(line, sizeof line, file) != NULL;
    fclose(file);
    char* open = is_read ? strchr(line, '[') : NULL;
    char* close = open != NULL ? strchr(open, ']') : NULL;
    if (close == NULL) {
        return false;
    }
    *close = '\0';
    snprintf(policy, size, "%s", open + 1);
    return true;
}

void
pin_huge_pages(void* address, size_t nbytes, char report[PIN_REPORT_BYTES]) {
    char policy[32] = "unknown";
    read_shmem_policy(policy, sizeof policy);
    if (madvise(address, nbytes, MADV_HUGEPAGE) != 0) {
        snprintf(report, PIN_REPORT_BYTES, "refused: %m");
    } else if (strcmp(policy, "never") == 0 || strcmp(policy, "deny") == 0) {
        snprintf(report, PIN_REPORT_BYTES, "advised, but the system's shmem_enabled is '%s'",
                 policy);
    } else {
        snprintf(report, PIN_REPORT_BYTES, "advised (shmem_enabled is '%s')", policy);
    }
}

/* ---- page lock ---- */

/* Pages are locked as they are touched: locking them all at once would block for seconds. */
void
pin_page_lock(void* address, size_t nbytes, char report[PIN_REPORT_BYTES]) {
    if (mlock2(address, nbytes, MLOCK_ONFAULT) == 0) {
        snprintf(report, PIN_REPORT_BYTES, "locked as touched");
        return;
    }
    int error = errno;
    struct rlimit limit = {0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    errno = error;
    snprintf(report, PIN_REPORT_BYTES, "refused: %m (RLIMIT_MEMLOCK is %llu bytes)",
             (unsigned long long)limit.rlim_cur);
}

/* ---- cuda ---- */

typedef struct {
    const char* library; /* used only if it is loaded already; NULL: any loaded library */
    const char* register_name;
    const char* unregister_name;
} cuda_api_t;

static const cuda_api_t CUDA_APIS[] = {
    {NULL, "cudaHostRegister", "cudaHostUnregister"},
    {"libcudart.so.13", "cudaHostRegister", "cudaHostUnregister"},
    {"libcudart.so.12", "cudaHostRegister", "cudaHostUnregister"},
    {NULL, "cuMemHostRegister_v2", "cuMemHostUnregister"},
    {"libcuda.so.1", "cuMemHostRegister_v2", "cuMemHostUnregister"},
};
enum { NUM_CUDA_APIS = sizeof CUDA_APIS / sizeof CUDA_APIS[0] };

/* POSIX lets an object pointer from dlsym carry a function; ISO C has no cast for it. */
static bool
load_symbol(void* library, const char* name, void* function_pointer) {
    void* symbol = dlsym(library, name);
    memcpy(function_pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

static bool
load_api(const cuda_api_t* api, cuda_register_t* reg, pin_unregister_t* unregister) {
    void* library = RTLD_DEFAULT;
    if (api->library != NULL) {
        library = dlopen(api->library, RTLD_NOW | RTLD_NOLOAD);
        if (library == NULL) {
            return false;
        }
    }
    /* The handle is kept: the registration must be undone by the library that made it. */
    return load_symbol(library, api->register_name, reg) &&
           load_symbol(library, api->unregister_name, unregister);
}

pin_unregister_t
pin_cuda_register(void* address, size_t nbytes, char report[PIN_REPORT_BYTES]) {
    snprintf(report, PIN_REPORT_BYTES, "no CUDA library is loaded in this process");
    for (size_t i = 0; i < NUM_CUDA_APIS; i++) {
        cuda_register_t reg = NULL;
        pin_unregister_t unregister = NULL;
        if (!load_api(&CUDA_APIS[i], &reg, &unregister)) {
            continue;
        }
        int code = reg(address, nbytes, CUDA_REGISTER_PORTABLE | CUDA_REGISTER_MAPPED);
        if (code == 0) {
            snprintf(report, PIN_REPORT_BYTES, "registered by %s", CUDA_APIS[i].register_name);
            return unregister;
        }
        snprintf(report, PIN_REPORT_BYTES, "refused: %s returned %d", CUDA_APIS[i].register_name,
                 code);
    }
    return NULL;
}
