/* libcuda.so.1 with one device of compute capability 9.0 that computes nothing, and libnvrtc.so.13
 * that compiles anything to nothing: enough to make plans, which shows without a GPU what kernels
 * they load and where these come from. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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
      return *value = 9, 0; /* compute capability */
    case 76:
      return *value = 0, 0;
    case 16:
      return *value = 132, 0; /* multiprocessors */
    case 38:
      return *value = 50 << 20, 0; /* second-level cache */
    case 97:
      return *value = 227 << 10, 0; /* shared memory of a block */
    default:
      return *value = 1, 0;
  }
}
static int memory(uint64_t* address, size_t bytes) { return *address = (uint64_t)malloc(bytes), 0; }
static int release(uint64_t address) { return free((void*)address), 0; }
static int handle(void** made) { return *made = (void*)made, 0; }
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
      {"cuLibraryLoadData", handle},
      {"cuLibraryGetKernel", handle},
      {"cuKernelGetFunction", handle},
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
int nvrtcGetSupportedArchs(int* archs) { return *archs = 90, 0; }
int nvrtcCreateProgram(void** program) { return handle(program); }
int nvrtcDestroyProgram(void** program) { return *program = NULL, 0; }
int nvrtcCompileProgram(void* program) { return (void)program, 0; }
int nvrtcGetProgramLogSize(void* program, size_t* size) { return (void)program, *size = 0, 0; }
int nvrtcGetProgramLog(void* program, char* log) { return (void)program, *log = 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) { return (void)program, *size = 1, 0; }
int nvrtcGetCUBIN(void* program, char* cubin) { return (void)program, *cubin = 0; }
