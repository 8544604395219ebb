/* A CUDA runtime and driver that only count bytes: all that c10's caching allocator needs to run without a GPU.
   FAKE_TOTAL_BYTES: memory of the GPU, any amount if unset. Addresses are those of titan_tools/memory/replay. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define LARGE_SEGMENT 20971520ull
#define FIRST_ADDRESS (LARGE_SEGMENT << 16)
#define ANY ((size_t)1 << 46)

static size_t total = ANY, used = 0;
static unsigned long long next_address = FIRST_ADDRESS, next_space = FIRST_ADDRESS;
static struct { void *address; size_t size; } taken[1 << 16];
static int num_taken = 0;

__attribute__((constructor)) static void start(void) {
  const char *text = getenv("FAKE_TOTAL_BYTES");
  if (text) total = strtoull(text, 0, 10);
}

cudaError_t cudaMalloc(void **address, size_t size) {
  if (used + size > total) return cudaErrorMemoryAllocation;
  used += size;
  taken[num_taken].address = *address = (void *)next_address;
  taken[num_taken++].size = size;
  next_address += size + LARGE_SEGMENT;
  return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
  for (int i = 0; i < num_taken; i++)
    if (taken[i].address == address) {
      used -= taken[i].size;
      taken[i] = taken[--num_taken];
      return cudaSuccess;
    }
  return cudaErrorInvalidValue;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *total_bytes = total;
  *free_bytes = total - used;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  found->totalGlobalMem = total == ANY ? (size_t)1 << 42 : total;
  found->major = 9;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) { return *device = 0; }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "fake"; }
const char *cudaGetErrorName(cudaError_t error) { return "fake"; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = *greatest = 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

static CUresult reserve(CUdeviceptr *address, size_t size, size_t align, CUdeviceptr at, unsigned long long flags) {
  if (total == ANY) size = LARGE_SEGMENT << 18;
  *address = next_space;
  next_space += (size + LARGE_SEGMENT - 1) / LARGE_SEGMENT * LARGE_SEGMENT + LARGE_SEGMENT;
  return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *made, size_t size, const CUmemAllocationProp *of, unsigned long long flags) {
  if (used + size > total) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  *made = size;
  return CUDA_SUCCESS;
}

static CUresult give_back(CUmemGenericAllocationHandle made) { used -= made; return CUDA_SUCCESS; }
static CUresult attribute(int *value, int which, int device) { return *value = 0; }
static CUresult granularity(size_t *size, const CUmemAllocationProp *of, int which) { *size = 2097152; return CUDA_SUCCESS; }
static CUresult text(CUresult error, const char **found) { *found = "fake"; return CUDA_SUCCESS; }
static CUresult nothing() { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
  const struct { const char *name; void *function; } all[] = {
      {"cuMemAddressReserve", reserve}, {"cuMemCreate", create}, {"cuMemRelease", give_back}, {"cuDeviceGetAttribute", attribute},
      {"cuMemGetAllocationGranularity", granularity}, {"cuGetErrorString", text}};
  *found = nothing;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!strcmp(name, all[i].name)) *found = all[i].function;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
