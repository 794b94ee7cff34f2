// Memory straight from the kernel: zeroed, page-aligned, resident only where touched.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tidemill {

// Throws std::bad_alloc.
void* map_memory(size_t bytes, bool huge_pages = false);
void unmap_memory(void* memory, size_t bytes) noexcept;

// Memory for the weights, one after another in the order in which a step reads them, in huge
// pages where the kernel has them. Freed as a whole.
class WeightMemory {
 public:
  WeightMemory() = default;
  ~WeightMemory();
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;

  // Aligned to 64. Throws std::bad_alloc.
  uint8_t* take(size_t bytes);

 private:
  struct Region {
    uint8_t* at;
    size_t bytes;
  };

  std::vector<Region> regions_;
  size_t used_ = 0;  // of the last region
};

// An array that grows to the next power of two. What it held is lost when it grows; new memory is
// zero.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept : at_(other.at_), bytes_(other.bytes_) {
    other.at_ = nullptr;
    other.bytes_ = 0;
  }
  ~Buffer() { unmap_memory(at_, bytes_); }

  void* reserve(size_t bytes) {
    if (bytes > bytes_) {
      unmap_memory(at_, bytes_);
      at_ = nullptr;
      bytes_ = 0;
      const size_t size = std::bit_ceil(bytes);  // what is not touched takes no memory
      at_ = map_memory(size);
      bytes_ = size;
    }
    return at_;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(at_);
  }

 private:
  void* at_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tidemill
