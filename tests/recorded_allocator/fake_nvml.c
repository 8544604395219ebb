/* An NVML of a GPU without a fabric and without other processes: asked before a segment is expanded, and out of memory. */
enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = 0; return SUCCESS; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *found) { *count = 0; return SUCCESS; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return NOT_SUPPORTED; }
