// The bytes of a page log: segments of 1 MiB in one file, pages in segments, records in pages.
//
// A page has rows of one table: a header, then records of equal length, each a key (u64) and a row image
// (table/row_codec.h). No record crosses a page. A page takes whole units of 4 KiB, the fewest of which at most an
// eighth is waste. Little-endian. The checksum is XXH3-64 of what follows it, to the end of the last record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

namespace sparserow {

inline constexpr std::size_t kUnitBytes = 4096;
inline constexpr std::size_t kSegmentBytes = std::size_t{1} << 20;
inline constexpr std::uint32_t kUnitsInSegment = kSegmentBytes / kUnitBytes;
inline constexpr std::uint32_t kMostSegments = 1u << 24;  // 16 TiB; segment 0 is never used
inline constexpr std::uint32_t kMostRowsInPage = 255;
inline constexpr std::size_t kRecordKeyBytes = sizeof(std::uint64_t);

struct PageHeader {
  static constexpr std::uint32_t kMagic = 0x47505253;  // "SRPG"
  static constexpr std::uint16_t kFormat = 1;

  std::uint32_t magic = kMagic;
  std::uint16_t format = kFormat;
  std::uint16_t units = 0;
  std::uint64_t checksum = 0;
  std::uint64_t sequence = 0;  // grows from page to page of the log; a copy of a row has that of its new page
  std::uint64_t cluster_id = 0;
  std::uint32_t table_id = 0;
  std::uint32_t record_bytes = 0;
  std::uint16_t rows = 0;
  std::uint16_t shard = 0;
  std::uint16_t lineage = 0;
  std::uint16_t first_slot = 0;
  std::uint16_t last_slot = 0;
  std::uint16_t slot_bits = 0;  // of a key's hash, the highest, that are its slot
  std::uint16_t zero[6] = {};
};
static_assert(sizeof(PageHeader) == 64);

// The layout of a table's pages.
struct PageLayout {
  std::uint32_t record_bytes = 0;
  std::uint32_t units = 0;
  std::uint32_t rows = 0;  // of a full page

  [[nodiscard]] std::size_t page_bytes() const noexcept { return units * kUnitBytes; }
};

// nullopt for an image that no segment has room for.
[[nodiscard]] inline std::optional<PageLayout> page_layout(std::size_t image_bytes) noexcept {
  constexpr std::size_t kMostWaste = 8;  // one part in so many
  const std::size_t record = kRecordKeyBytes + image_bytes;
  for (std::uint32_t units = 1; units <= kUnitsInSegment; ++units) {
    const std::size_t room = units * kUnitBytes - sizeof(PageHeader);
    const std::size_t rows = room / record;
    if (rows == 0) continue;
    if (rows > kMostRowsInPage || (room - rows * record) * kMostWaste <= room || units == kUnitsInSegment) {
      return PageLayout{static_cast<std::uint32_t>(record), units,
                        static_cast<std::uint32_t>(rows < kMostRowsInPage ? rows : kMostRowsInPage)};
    }
  }
  return std::nullopt;
}

[[nodiscard]] inline std::uint64_t record_key(const std::byte* record) noexcept {
  std::uint64_t key = 0;
  std::memcpy(&key, record, sizeof key);
  return key;
}

// Where a record lies, in 40 bits: segment (24), first unit of its page (8), number in the page (8). 0 is nowhere.
class Place {
 public:
  constexpr Place() noexcept = default;
  explicit constexpr Place(std::uint64_t bits) noexcept : bits_(bits) {}
  constexpr Place(std::uint32_t segment, std::uint32_t unit, std::uint32_t row) noexcept
      : bits_(std::uint64_t{segment} << 16 | unit << 8 | row) {}

  [[nodiscard]] constexpr std::uint64_t bits() const noexcept { return bits_; }
  [[nodiscard]] constexpr std::uint32_t segment() const noexcept { return static_cast<std::uint32_t>(bits_ >> 16); }
  [[nodiscard]] constexpr std::uint32_t unit() const noexcept { return bits_ >> 8 & 0xff; }
  [[nodiscard]] constexpr std::uint32_t row() const noexcept { return bits_ & 0xff; }
  [[nodiscard]] constexpr bool is_somewhere() const noexcept { return bits_ != 0; }
  constexpr bool operator==(const Place&) const noexcept = default;

  [[nodiscard]] constexpr std::size_t page_at() const noexcept { return unit() * kUnitBytes; }  // in its segment
  [[nodiscard]] constexpr std::size_t record_at(std::uint32_t record_bytes) const noexcept {
    return page_at() + sizeof(PageHeader) + std::size_t{row()} * record_bytes;
  }

 private:
  std::uint64_t bits_ = 0;
};

}  // namespace sparserow
