// A row outside of memory: the one format of the SSD tier, and of whatever else carries whole rows. Version 1:
//
//   checksum u32 | format u8 | dtype u8 | dim u16 | state floats u16 | 0 u16 | update count u32 | version u64 |
//   weights, padded to 4 bytes | state float32...
//
// Little-endian. The checksum is the low half of XXH3-64 of all that follows it, seeded with the row's hash
// (util/hash.h): so a row that is found under another key does not pass. Golden bytes are in
// tests/cpp/row_codec_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "store/table/row.h"
#include "util/dtype.h"
#include "util/status.h"

namespace sparserow {

// What a stored row says; data as in memory (row.h), inside the bytes that were decoded.
struct RowImage {
  std::uint64_t version = 0;
  std::uint32_t update_count = 0;
  const std::byte* data = nullptr;
};

class RowCodec {
 public:
  static constexpr std::uint8_t kFormat = 1;
  static constexpr std::size_t kHeaderBytes = 24;

  RowCodec(std::uint32_t table_id, std::uint32_t dim, Dtype dtype, std::uint32_t state_floats) noexcept
      : table_id_(table_id), dim_(dim), dtype_(dtype), state_floats_(state_floats), layout_(dim, dtype, state_floats) {}

  [[nodiscard]] std::size_t bytes() const noexcept { return kHeaderBytes + layout_.data_bytes; }
  // out: bytes() long.
  void encode(std::uint64_t key, RowRef row, std::byte* out) const noexcept;
  // kDataLoss when the bytes are not a whole row of this table and key.
  [[nodiscard]] Result<RowImage> decode(std::uint64_t key, std::span<const std::byte> bytes) const;

 private:
  std::uint32_t table_id_;
  std::uint32_t dim_;
  Dtype dtype_;
  std::uint32_t state_floats_;
  RowLayout layout_;
};

}  // namespace sparserow
