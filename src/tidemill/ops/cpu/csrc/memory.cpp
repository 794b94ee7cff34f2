#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace tidemill {
namespace {

constexpr size_t kRegionBytes = 64 << 20;
constexpr size_t kHugePage = 2 << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void* map_memory(size_t bytes, bool huge_pages) {
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (huge_pages) madvise(memory, bytes, MADV_HUGEPAGE);  // a wish: small pages work too
  return memory;
}

void unmap_memory(void* memory, size_t bytes) noexcept {
  if (memory != nullptr) munmap(memory, bytes);
}

WeightMemory::~WeightMemory() {
  for (const Region& region : regions_) unmap_memory(region.at, region.bytes);
}

uint8_t* WeightMemory::take(size_t bytes) {
  bytes = round_up(bytes, 64);
  if (regions_.empty() || used_ + bytes > regions_.back().bytes) {
    const size_t size = round_up(std::max(bytes, kRegionBytes), kHugePage);
    regions_.reserve(regions_.size() + 1);
    regions_.push_back({static_cast<uint8_t*>(map_memory(size, true)), size});
    used_ = 0;
  }
  uint8_t* at = regions_.back().at + used_;
  used_ += bytes;
  return at;
}

}  // namespace tidemill
