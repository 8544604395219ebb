// Reads "a NUMBER BYTES STREAM" and "f NUMBER" from stdin, has c10's allocator do so, and answers each with its
// allocated and reserved bytes and the block's address, 0 where memory ran out.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <cstdio>
#include <unordered_map>

using namespace c10::cuda::CUDACachingAllocator;

int main() {
  init(1);
  c10::cuda::detail::init_p2p_access_cache(1);
  std::unordered_map<long, void *> live;
  char kind;
  long number;
  while (scanf(" %c %ld", &kind, &number) == 2) {
    void *address = nullptr;
    if (kind == 'a') {
      size_t size;
      unsigned long stream;
      if (scanf("%zu %lu", &size, &stream) != 2) return 1;
      try {
        address = live[number] = raw_alloc_with_stream(size, (cudaStream_t)stream);
      } catch (const c10::OutOfMemoryError &) {
      }
    } else {
      address = live[number];
      raw_delete(address);
    }
    auto stats = getDeviceStats(0);
    printf("%ld %ld %lu\n", (long)stats.allocated_bytes[0].current, (long)stats.reserved_bytes[0].current, (unsigned long)address);
  }
}
