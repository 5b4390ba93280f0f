// The layout of a row: [key u64 | version u64 | update count u32][weights, padded to 4 bytes][state float32...].
//
// Rows are 4-byte aligned and packed, so headers are read and written by memcpy. A version of 0 marks a
// place that holds no row (versions of rows have a sequence of at least 1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "util/dtype.h"

namespace sparserow {

struct RowLayout {
  static constexpr std::size_t kHeaderBytes = 20;

  RowLayout(std::uint32_t dim, Dtype dtype, std::uint32_t state_floats) noexcept
      : state_offset(kHeaderBytes + (dim * size_of(dtype) + 3) / 4 * 4),
        row_bytes(state_offset + state_floats * sizeof(float)) {}

  std::size_t state_offset;
  std::size_t row_bytes;
};

// A view of one row; as cheap as a pointer.
class RowRef {
 public:
  explicit RowRef(std::byte* at) noexcept : at_(at) {}

  [[nodiscard]] std::uint64_t key() const noexcept { return load<std::uint64_t>(0); }
  [[nodiscard]] std::uint64_t version() const noexcept { return load<std::uint64_t>(8); }
  [[nodiscard]] std::uint32_t update_count() const noexcept { return load<std::uint32_t>(16); }
  void set_key(std::uint64_t key) noexcept { store(0, key); }
  void set_version(std::uint64_t version) noexcept { store(8, version); }
  void set_update_count(std::uint32_t count) noexcept { store(16, count); }

  [[nodiscard]] std::byte* weights() const noexcept { return at_ + RowLayout::kHeaderBytes; }
  [[nodiscard]] float* state(const RowLayout& layout) const noexcept {
    return reinterpret_cast<float*>(at_ + layout.state_offset);
  }

 private:
  template <class T>
  [[nodiscard]] T load(std::size_t offset) const noexcept {
    T value;
    std::memcpy(&value, at_ + offset, sizeof value);
    return value;
  }
  template <class T>
  void store(std::size_t offset, T value) noexcept {
    std::memcpy(at_ + offset, &value, sizeof value);
  }

  std::byte* at_;
};

}  // namespace sparserow
