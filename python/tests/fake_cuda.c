/* libcuda.so.1 with one device that computes nothing, and libnvrtc.so.13 to which source is machine
 * code: enough to make and run plans, which shows without a GPU what kernels they load, where these
 * come from, and which they launch. FAKE_CUDA_ARCH names the device: 90 where it is not set. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int arch(void) {
  const char* text = getenv("FAKE_CUDA_ARCH");
  return text ? atoi(text) : 90;
}

static void (*on_launch)(const char* source);
/* For the tests: called with the source of each kernel that is launched. */
void fake_cuda_on_launch(void (*callback)(const char* source)) { on_launch = callback; }

static int nothing(void) { return 0; }
static int driver_version(int* version) { return *version = 13000, 0; }
static int device_count(int* count) { return *count = 1, 0; }
static int device_name(char* name, int length) {
  return strncpy(name, "a fake", (size_t)length), 0;
}
static int device_memory(size_t* bytes) { return *bytes = (size_t)1 << 37, 0; }
static int device_attribute(int* value, int attribute) {
  switch (attribute) {
    case 75:
      return *value = arch() / 10, 0; /* compute capability */
    case 76:
      return *value = arch() % 10, 0;
    case 16:
      return *value = 132, 0; /* multiprocessors */
    case 38:
      return *value = 50 << 20, 0; /* second-level cache */
    case 97:
      /* shared memory of a block */
      return *value = (arch() % 10 ? 99 : arch() == 80 ? 163 : arch() == 120 ? 99 : 227) << 10, 0;
    default:
      return *value = 1, 0;
  }
}
static int memory(uint64_t* address, size_t bytes) {
  return *address = (uint64_t)aligned_alloc(256, (bytes + 255) / 256 * 256), 0;
}
static int release(uint64_t address) { return free((void*)address), 0; }
static int handle(void** made) { return *made = (void*)made, 0; }
static int load_code(void** library, const void* code) { return *library = strdup(code), 0; }
static int same(void** to, void* from) { return *to = from, 0; }
static int launch(const void* config, void* function) {
  (void)config;
  if (on_launch) on_launch(function);
  return 0;
}
static int one(int* value) { return *value = 1, 0; }

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                        int* status) {
  static const struct {
    const char* name;
    void* function;
  } known[] = {
      {"cuDriverGetVersion", driver_version},
      {"cuDeviceGetCount", device_count},
      {"cuDeviceGetName", device_name},
      {"cuDeviceGetAttribute", device_attribute},
      {"cuDeviceTotalMem", device_memory},
      {"cuDevicePrimaryCtxRetain", handle},
      {"cuLibraryLoadData", load_code},
      {"cuLibraryGetKernel", same},
      {"cuKernelGetFunction", same},
      {"cuLaunchKernelEx", launch},
      {"cuKernelGetAttribute", one},
      {"cuOccupancyMaxActiveBlocksPerMultiprocessor", one},
      {"cuOccupancyMaxActiveClusters", one},
      {"cuMemAlloc", memory},
      {"cuMemFree", release},
      {"cuStreamCreate", handle},
      {"cuEventCreate", handle},
  };
  (void)version, (void)flags;
  *function = (void*)nothing;
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    if (strcmp(name, known[i].name) == 0) *function = known[i].function;
  }
  if (status) *status = 0;
  return 0;
}

const char* nvrtcGetErrorString(int error) { return (void)error, "a fake"; }
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = 1, 0; }
int nvrtcGetSupportedArchs(int* archs) { return *archs = arch(), 0; }
int nvrtcCreateProgram(char** program, const char* source) { return *program = strdup(source), 0; }
int nvrtcDestroyProgram(char** program) { return free(*program), *program = NULL, 0; }
int nvrtcCompileProgram(char* program) { return (void)program, 0; }
int nvrtcGetProgramLogSize(char* program, size_t* size) { return (void)program, *size = 0, 0; }
int nvrtcGetProgramLog(char* program, char* log) { return (void)program, *log = 0; }
int nvrtcGetCUBINSize(char* program, size_t* size) { return *size = strlen(program) + 1, 0; }
int nvrtcGetCUBIN(char* program, char* cubin) { return strcpy(cubin, program), 0; }
