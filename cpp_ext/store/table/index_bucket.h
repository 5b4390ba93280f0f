// The memory of an index (row_index.h): buckets of five suffixes and five row ids, the segments that they are in, and
// the directories of segments.
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

// An address in the low 48 bits, and a number in the high 16.
template <class T>
class NumberedPointer {
 public:
  NumberedPointer() noexcept = default;
  NumberedPointer(T* at, std::uint32_t number) noexcept
      : packed_(reinterpret_cast<std::uintptr_t>(at) | static_cast<std::uint64_t>(number) << 48) {}
  [[nodiscard, gnu::always_inline]] T* at() const noexcept {
    return reinterpret_cast<T*>(packed_ & ((std::uint64_t{1} << 48) - 1));
  }
  [[nodiscard, gnu::always_inline]] std::uint32_t number() const noexcept {
    return static_cast<std::uint32_t>(packed_ >> 48);
  }

 private:
  std::uint64_t packed_ = 0;
};

// An entry of a directory: its buckets, and how many there are.
class IndexSegment : NumberedPointer<IndexBucket> {
 public:
  static constexpr std::uint32_t kStep = 4;  // bucket counts are multiples of it

  using NumberedPointer::NumberedPointer;
  [[nodiscard, gnu::always_inline]] IndexBucket* buckets() const noexcept { return at(); }
  [[nodiscard, gnu::always_inline]] std::uint32_t count() const noexcept { return number(); }
  [[nodiscard, gnu::always_inline]] std::uint32_t home(std::uint64_t suffix) const noexcept {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(static_cast<std::uint32_t>(suffix)) * count()) >> 32);
  }
  [[nodiscard]] std::uint32_t entries() const noexcept { return buckets()[0].note; }
  void set_entries(std::uint32_t entries) const noexcept { buckets()[0].note = static_cast<std::uint16_t>(entries); }
  [[nodiscard]] std::uint32_t depth() const noexcept { return buckets()[1].note; }  // bits that its suffixes share
  void set_depth(std::uint32_t depth) const noexcept { buckets()[1].note = static_cast<std::uint16_t>(depth); }
};

// The segments of the suffixes that begin with one prefix: 2^depth of them, by the bits behind it.
class IndexDirectory : NumberedPointer<IndexSegment> {
 public:
  using NumberedPointer::NumberedPointer;
  [[nodiscard, gnu::always_inline]] IndexSegment* segments() const noexcept { return at(); }
  [[nodiscard, gnu::always_inline]] std::uint32_t depth() const noexcept { return number(); }
  [[nodiscard]] std::size_t size() const noexcept { return std::size_t{1} << depth(); }
};

[[nodiscard, gnu::always_inline]] inline std::uint64_t first_bits(std::uint64_t suffix, std::uint32_t bits) noexcept {
  return suffix >> 1 >> (63 - bits);  // a shift by 64 is none
}

// The directories of an index: one for each prefix in [first, first + last].
struct IndexTop {
  const IndexDirectory* directories;
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  std::uint32_t prefix_bits = 0;

  // The segment in which `suffix` is if it is anywhere; of a prefix beyond the last one, some other segment.
  [[nodiscard, gnu::always_inline]] IndexSegment segment_of(std::uint64_t suffix) const noexcept {
    const std::uint64_t at = first_bits(suffix, prefix_bits) - first;
    const IndexDirectory directory = directories[at < last ? at : last];
    return directory.segments()[first_bits(suffix << prefix_bits, directory.depth())];
  }
};

}  // namespace sparserow
