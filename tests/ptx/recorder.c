/* A CUDA runtime that launches nothing and records what it was asked to launch; no driver, no GPU.

   It is linked with the object of one compiled kernel, whose host code calls the runtime by the names below. The
   layouts are those of cudaLaunchConfig_t and cudaLaunchAttribute (CUDA Runtime API, driver_types.h). */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MAX_ATTRIBUTES = 16, MAX_ARGUMENTS = 64, MAX_ARGUMENT_BYTES = 4096, MAX_SHARED_BYTES = 232448, FAILURE = 1 };

struct attribute {
    int32_t id, padding;
    uint8_t value[64];
};

struct config {
    uint32_t grid[3], block[3];
    size_t shared_bytes;
    void *stream;
    const struct attribute *attributes;
    uint32_t attribute_count;
};

struct record {
    uint32_t launches, attribute_count, grid[3], block[3];
    uint64_t shared_bytes;
    struct attribute attributes[MAX_ATTRIBUTES];
    uint8_t arguments[MAX_ARGUMENT_BYTES];
    char kernel[1024];
};

/* Set before a launch: the number of bytes of each argument. */
uint32_t recorder_argument_count, recorder_argument_bytes[MAX_ARGUMENTS];
struct record recorder_last;

int _cudaLaunchKernelEx(const struct config *config, const char *kernel, void **arguments) {
    struct record *last = &recorder_last;
    size_t used = 0;
    if (config->attribute_count > MAX_ATTRIBUTES || recorder_argument_count > MAX_ARGUMENTS) return FAILURE;
    memcpy(last->grid, config->grid, sizeof last->grid);
    memcpy(last->block, config->block, sizeof last->block);
    last->shared_bytes = config->shared_bytes;
    last->attribute_count = config->attribute_count;
    if (config->attribute_count)
        memcpy(last->attributes, config->attributes, config->attribute_count * sizeof *config->attributes);
    for (uint32_t i = 0; i < recorder_argument_count; i++) {
        if (used + recorder_argument_bytes[i] > sizeof last->arguments) return FAILURE;
        memcpy(last->arguments + used, arguments[i], recorder_argument_bytes[i]);
        used += recorder_argument_bytes[i];
    }
    strncpy(last->kernel, kernel, sizeof last->kernel - 1);
    last->launches++;
    return 0;
}

/* A library is a non-null pointer, a kernel is its name: the host code builds the name on its stack, so it is copied. */
static char library, kernel_name[1024];

int _cudaLibraryLoadData(void **made, const void *code) {
    (void)code;
    *made = &library;
    return 0;
}

int _cudaLibraryGetKernel(void **kernel, void *from, const char *name) {
    (void)from;
    strncpy(kernel_name, name, sizeof kernel_name - 1);
    *kernel = kernel_name;
    return 0;
}

int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int), void *error) {
    (void)error;
    if (*state) return 0;
    int code = init(state);
    return code ? code : load(state, 0);
}

void cuda_dialect_unload_library_once(void **state) { *state = NULL; }

int _cudaGetDevice(int *device) { return *device = 0; }

int _cudaGetDeviceCount(int *count) {
    *count = 1;
    return 0;
}

int _cudaSetDevice(int device) { return device ? FAILURE : 0; }

/* The host code asks for the largest shared memory of a CTA only. */
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = MAX_SHARED_BYTES;
    return attribute == 97 /* cudaDevAttrMaxSharedMemoryPerBlockOptin */ ? 0 : FAILURE;
}

/* It asks for the static shared memory of a kernel only, which has none. */
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)kernel, (void)device;
    *value = 0;
    return attribute == 1 /* CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES */ ? 0 : FAILURE;
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    (void)kernel, (void)attribute, (void)value;
    return 0;
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    (void)device;
    return _cudaFuncSetAttribute(kernel, attribute, value);
}

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

int CuteDSLRT_TVMFFISetRaisedCudaError(int code) {
    (void)code;
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", "the recording runtime refused a call");
    return -1;
}
