// A row in memory: its data, [weights, padded to 4 bytes][state float32...][stamps u32...], and its head, [version u64
// | update count u32]. The stamps say when the row was last changed, where the table's policy asks for it. A pull reads
// weights and nothing else. The key is known from the index (util/hash.h).
//
// Data are 4-byte aligned, heads are packed, so they are read and written by memcpy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "util/dtype.h"

namespace sparserow {

// The part of a version that is the slot's sequence; the lineage is above it.
inline constexpr std::uint64_t kSequence = (std::uint64_t{1} << 48) - 1;

struct RowLayout {
  static constexpr std::size_t kHeadBytes = 12;

  RowLayout(std::uint32_t dim, Dtype dtype, std::uint32_t state_floats, std::uint32_t stamps = 0) noexcept
      : state_offset((row_bytes(dtype, dim) + 3) / 4 * 4),
        stamp_offset(state_offset + state_floats * sizeof(float)),
        data_bytes(stamp_offset + stamps * sizeof(std::uint32_t)) {}

  std::size_t state_offset;
  std::size_t stamp_offset;
  std::size_t data_bytes;
};

// A view of one row; as cheap as two pointers.
class RowRef {
 public:
  RowRef(std::byte* data, std::byte* head) noexcept : data_(data), head_(head) {}

  [[nodiscard]] std::byte* weights() const noexcept { return data_; }
  [[nodiscard]] float* state(const RowLayout& layout) const noexcept {
    return reinterpret_cast<float*>(data_ + layout.state_offset);
  }

  [[nodiscard]] std::uint32_t* stamps(const RowLayout& layout) const noexcept {
    return reinterpret_cast<std::uint32_t*>(data_ + layout.stamp_offset);
  }

  [[nodiscard]] std::uint64_t version() const noexcept { return load<std::uint64_t>(0); }
  [[nodiscard]] std::uint32_t update_count() const noexcept { return load<std::uint32_t>(8); }
  void set_version(std::uint64_t version) noexcept { std::memcpy(head_, &version, sizeof version); }
  void set_update_count(std::uint32_t count) noexcept { std::memcpy(head_ + 8, &count, sizeof count); }

 private:
  template <class T>
  [[nodiscard]] T load(std::size_t offset) const noexcept {
    T value;
    std::memcpy(&value, head_ + offset, sizeof value);
    return value;
  }

  std::byte* data_;
  std::byte* head_;
};

}  // namespace sparserow
