#include "util/hash.h"

namespace sparserow {

// Out of line: inlined into a caller with a constant string, GCC 12 warns of reads that never happen.

std::uint64_t key_of_bytes(std::string_view bytes) noexcept { return XXH3_64bits(bytes.data(), bytes.size()) >> 1; }

std::uint32_t id_of_name(std::string_view name) noexcept {
  const auto id = static_cast<std::uint32_t>(XXH3_64bits(name.data(), name.size()));
  return id == 0 ? 1 : id;
}

}  // namespace sparserow
