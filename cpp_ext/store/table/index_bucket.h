// The memory of an index (row_index.h): buckets of five suffixes and five row ids, and the segments that they are in.
//
// All functions are inlined by force, because index_probe_body.h is compiled for wide instruction sets, from which no
// function may be linked into code that runs without them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparserow {

struct alignas(64) IndexBucket {
  static constexpr std::uint32_t kEntries = 5;
  static constexpr std::uint32_t kNoRow = ~std::uint32_t{0};
  static constexpr std::uint64_t kNoSuffix = ~std::uint64_t{0};  // of an empty entry; the lowest bit of others is 0

  std::uint64_t suffixes[kEntries];
  std::uint32_t rows[kEntries];  // kNoRow = empty
  std::uint16_t passed_over;     // entries that wanted this bucket or an earlier one and sit further on
  std::uint16_t note;            // bucket 0: entries of the segment; 1: depth
};
static_assert(sizeof(IndexBucket) == 64);

// A directory entry: address in the low 48 bits, bucket count in the high 16.
class IndexSegment {
 public:
  IndexSegment(IndexBucket* buckets, std::uint32_t count) noexcept
      : packed_(reinterpret_cast<std::uintptr_t>(buckets) | static_cast<std::uint64_t>(count) << 48) {}
  [[nodiscard, gnu::always_inline]] IndexBucket* buckets() const noexcept {
    return reinterpret_cast<IndexBucket*>(packed_ & ((std::uint64_t{1} << 48) - 1));
  }
  [[nodiscard, gnu::always_inline]] std::uint32_t count() const noexcept {
    return static_cast<std::uint32_t>(packed_ >> 48);
  }
  [[nodiscard, gnu::always_inline]] std::uint32_t home(std::uint64_t suffix) const noexcept {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(static_cast<std::uint32_t>(suffix)) * count()) >> 32);
  }
  [[nodiscard]] std::uint32_t entries() const noexcept { return buckets()[0].note; }
  void set_entries(std::uint32_t entries) const noexcept { buckets()[0].note = static_cast<std::uint16_t>(entries); }
  [[nodiscard]] std::uint32_t depth() const noexcept { return buckets()[1].note; }  // bits that its suffixes share
  void set_depth(std::uint32_t depth) const noexcept { buckets()[1].note = static_cast<std::uint16_t>(depth); }

 private:
  std::uint64_t packed_;
};

// The place of a suffix's segment in a directory of 2^depth entries.
[[nodiscard, gnu::always_inline]] inline std::size_t index_directory_at(std::uint64_t suffix,
                                                                        std::uint32_t depth) noexcept {
  return depth == 0 ? 0 : suffix >> (64 - depth);
}

}  // namespace sparserow
