// A vector whose memory, once it is large, is the system's own: given back when it is freed. malloc keeps what one
// thread asked for and another freed, and each thread's arena does so for itself.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>

namespace sparserow {

template <class T>
struct MappedAllocator {
  using value_type = T;

  MappedAllocator() = default;
  template <class Other>
  MappedAllocator(const MappedAllocator<Other>& /*other*/) noexcept {}

  [[nodiscard]] T* allocate(std::size_t count) {
    if (count * sizeof(T) < kLeastBytes) return static_cast<T*>(::operator new(count * sizeof(T)));
    void* mapped = ::mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(mapped);
  }
  void deallocate(T* at, std::size_t count) noexcept {
    if (count * sizeof(T) < kLeastBytes) {
      ::operator delete(at);
    } else {
      ::munmap(at, count * sizeof(T));
    }
  }
  template <class Other>
  bool operator==(const MappedAllocator<Other>& /*other*/) const noexcept {
    return true;
  }

 private:
  static constexpr std::size_t kLeastBytes = std::size_t{256} << 10;
};

template <class T>
using MappedVector = std::vector<T, MappedAllocator<T>>;

}  // namespace sparserow
