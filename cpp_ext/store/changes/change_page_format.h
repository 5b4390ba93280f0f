// How a page of changes lies in memory: change_page.h says what it means.
#pragma once

#include <cstdint>

namespace sparserow {

inline constexpr std::uint32_t kPageMagic = 0x50435053;  // "SPCP"
inline constexpr std::uint16_t kPageFormat = 5;          // what is written
inline constexpr std::uint16_t kOldestPageFormat = 5;    // that is read

struct PageHead {
  std::uint32_t magic = kPageMagic;
  std::uint16_t format = kPageFormat;
  std::uint16_t zero = 0;
  std::uint32_t slots = 0;
  std::uint32_t tables = 0;
  std::uint32_t parts = 0;
  std::uint32_t zero2 = 0;
  std::uint64_t checksum = 0;
};
static_assert(sizeof(PageHead) == 32);

struct PageTable {
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 0;
  std::uint32_t dim = 0;
  std::uint8_t dtype = 0;
  std::uint8_t replaces = 0;
  std::uint8_t zero[2] = {};
  std::uint32_t n = 0;
  std::uint32_t erased = 0;
};
static_assert(sizeof(PageTable) == 24);

struct PageSlot {
  std::uint32_t slot = 0;
  std::uint8_t kind = 0;
  std::uint8_t zero[3] = {};
  std::uint32_t oldest_at_ms = 0;
  std::uint32_t zero2 = 0;
  std::uint64_t since = 0;
  std::uint64_t until = 0;
  std::uint64_t position = 0;
};
static_assert(sizeof(PageSlot) == 40);

// The range of (table, suffix) that is here, of a slot that comes in parts.
struct PagePart {
  std::uint32_t slot = 0;
  std::uint32_t zero = 0;
  std::uint32_t from_table = 0;
  std::uint32_t to_table = 0;
  std::uint64_t from_suffix = 0;
  std::uint64_t to_suffix = 0;  // not included
  std::uint64_t number = 0;     // 0: it is the slot's last
};
static_assert(sizeof(PagePart) == 40);

[[nodiscard]] constexpr std::uint64_t padded(std::uint64_t bytes) noexcept { return (bytes + 7) & ~std::uint64_t{7}; }

}  // namespace sparserow
