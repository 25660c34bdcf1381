/* The double of NVRTC 13.0, libnvrtc.so.13: compiles CUDA C for the host, where the threads of a
 * grid run one after the other. So a kernel's own source runs, but its threads may not wait for
 * each other. Misaligned accesses and other undefined behaviour end the process. */
#include "double.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
};
enum { PATH_BYTES = 512 };

static const int ARCHITECTURES[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
enum { NUM_ARCHITECTURES = sizeof ARCHITECTURES / sizeof ARCHITECTURES[0] };

typedef struct {
    char* source;
    char log[256];
    char image[PATH_BYTES + 64];
    bool is_assembly;
} program_t;

static const char HEAD[] =
    "#include <utility>\n"
    "struct index_t { unsigned x; };\n"
    "static thread_local index_t blockIdx, threadIdx, blockDim, gridDim;\n"
    "template <typename... A> int sizes_of(void (*)(A...), unsigned* out) {\n"
    "    const unsigned all[] = {sizeof(A)...};\n"
    "    for (unsigned i = 0; i < sizeof...(A); i++) out[i] = all[i];\n"
    "    return sizeof...(A);\n"
    "}\n"
    "template <typename... A, std::size_t... I>\n"
    "void call(void (*f)(A...), void** p, std::index_sequence<I...>) { f(*(A*)p[I]...); }\n"
    "template <typename... A>\n"
    "void run_all(void (*f)(A...), void** p, unsigned blocks, unsigned threads) {\n"
    "    gridDim.x = blocks;\n"
    "    blockDim.x = threads;\n"
    "    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)\n"
    "        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)\n"
    "            call(f, p, std::index_sequence_for<A...>{});\n"
    "}\n"
    "#define __device__ static\n"
    "static unsigned atomicXor(unsigned* at, unsigned value) {\n"
    "    return __atomic_fetch_xor(at, value, __ATOMIC_RELAXED);\n"
    "}\n"
    "#define __global__\n";

int
nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}

int
nvrtcGetNumSupportedArchs(int* count) {
    *count = NUM_ARCHITECTURES;
    return NVRTC_SUCCESS;
}

int
nvrtcGetSupportedArchs(int* architectures) {
    memcpy(architectures, ARCHITECTURES, sizeof ARCHITECTURES);
    return NVRTC_SUCCESS;
}

int
nvrtcCreateProgram(program_t** out, const char* source, const char* name, int num_headers,
                   const char* const* headers, const char* const* names) {
    (void)name, (void)num_headers, (void)headers, (void)names;
    *out = calloc(1, sizeof **out);
    (*out)->source = strdup(source);
    return NVRTC_SUCCESS;
}

int
nvrtcDestroyProgram(program_t** program) {
    free((*program)->source);
    free(*program);
    *program = NULL;
    return NVRTC_SUCCESS;
}

static void
write_source(FILE* file, const char* source) {
    static const char BEGIN[] = "extern \"C\" __global__ void ";
    fprintf(file, "%s%s", HEAD, source);
    for (const char* at = source; (at = strstr(at, BEGIN)) != NULL;) {
        at += sizeof BEGIN - 1;
        int length = (int)strcspn(at, "(");
        fprintf(file,
                "extern \"C\" int %.*s_sizes(unsigned* out) { return sizes_of(%.*s, out); }\n"
                "extern \"C\" void %.*s_run(void** p, unsigned blocks, unsigned threads) {\n"
                "    run_all(%.*s, p, blocks, threads);\n}\n",
                length, at, length, at, length, at, length, at);
    }
}

/* Compiles into the folder of this library, unless it is there from an earlier run. */
static bool
compile(const char* source, char* path) {
    uint64_t hash = 14695981039346656037U;
    for (const char* each = HEAD; *each != 0; each++) {
        hash = (hash ^ (uint8_t)*each) * 1099511628211U;
    }
    for (const char* each = source; *each != 0; each++) {
        hash = (hash ^ (uint8_t)*each) * 1099511628211U;
    }
    Dl_info where;
    if (dladdr((const void*)ARCHITECTURES, &where) == 0) {
        return false;
    }
    const char* end = strrchr(where.dli_fname, '/');
    int length = end == NULL ? 0 : (int)(end - where.dli_fname);
    snprintf(path, PATH_BYTES, "%.*s/kernel-%016lx.so", length, where.dli_fname, hash);
    if (access(path, R_OK) == 0) {
        return true;
    }
    char made[PATH_BYTES + 32];
    char command[4 * PATH_BYTES];
    snprintf(made, sizeof made, "%s.%d", path, getpid());
    snprintf(command, sizeof command,
             "cc -x c++ -std=c++17 -O2 -fPIC -shared -fsanitize=undefined -fno-sanitize=vptr "
             "-fsanitize-undefined-trap-on-error - -o '%s' 2>/dev/null",
             made);
    FILE* pipe = popen(command, "w");
    if (pipe == NULL) {
        return false;
    }
    write_source(pipe, source);
    return pclose(pipe) == 0 && rename(made, path) == 0;
}

int
nvrtcCompileProgram(program_t* program, int num_options, const char* const* options) {
    int architecture = 0;
    bool is_assembly = false;
    for (int i = 0; i < num_options; i++) {
        is_assembly = sscanf(options[i], "--gpu-architecture=compute_%d", &architecture) == 1;
        if (!is_assembly && sscanf(options[i], "--gpu-architecture=sm_%d", &architecture) != 1) {
            return NVRTC_ERROR_INVALID_OPTION;
        }
    }
    bool is_known = false;
    for (int i = 0; i < NUM_ARCHITECTURES; i++) {
        is_known = is_known || ARCHITECTURES[i] == architecture;
    }
    if (!is_known) {
        strcpy(program->log, "nvrtc: error: invalid value for --gpu-architecture (-arch)\n");
        return NVRTC_ERROR_INVALID_OPTION;
    }
    char path[PATH_BYTES];
    if (atomic_load(&double_values[COMPILER_FAILS]) || !compile(program->source, path)) {
        strcpy(program->log, "p2p_engine.cu(1): error: the double cannot compile it\nmore\n");
        return NVRTC_ERROR_COMPILATION;
    }
    snprintf(program->image, sizeof program->image,
             is_assembly ? "// double of compute_%d %s" : "double of sm_%d %s", architecture, path);
    program->is_assembly = is_assembly;
    return NVRTC_SUCCESS;
}

int
nvrtcGetProgramLogSize(program_t* program, size_t* size) {
    *size = strlen(program->log) + 1;
    return NVRTC_SUCCESS;
}

int
nvrtcGetProgramLog(program_t* program, char* out) {
    strcpy(out, program->log);
    return NVRTC_SUCCESS;
}

int
nvrtcGetCUBINSize(program_t* program, size_t* size) {
    *size = program->is_assembly ? 0 : strlen(program->image) + 1;
    return NVRTC_SUCCESS;
}

int
nvrtcGetCUBIN(program_t* program, char* out) {
    memcpy(out, program->image, program->is_assembly ? 0 : strlen(program->image) + 1);
    return NVRTC_SUCCESS;
}

int
nvrtcGetPTXSize(program_t* program, size_t* size) {
    *size = strlen(program->image) + 1;
    return NVRTC_SUCCESS;
}

int
nvrtcGetPTX(program_t* program, char* out) {
    strcpy(out, program->image);
    return NVRTC_SUCCESS;
}

const char*
nvrtcGetErrorString(int code) {
    switch (code) {
    case NVRTC_SUCCESS:
        return "NVRTC_SUCCESS";
    case NVRTC_ERROR_INVALID_OPTION:
        return "NVRTC_ERROR_INVALID_OPTION";
    default:
        return "NVRTC_ERROR_COMPILATION";
    }
}
