#include "util/hash.h"

#include <bit>

namespace sparserow {
namespace {

// Newton's iteration doubles the correct low bits: 3, 6, 12, 24, 48, 96.
constexpr std::uint64_t inverse_of(std::uint64_t odd) noexcept {
  std::uint64_t inverse = odd;
  for (int i = 0; i < 5; ++i) inverse *= 2 - odd * inverse;
  return inverse;
}
static_assert(inverse_of(kRowHashMultiplier) * kRowHashMultiplier == 1);

// What XXH3 mixes for 8 bytes, from the hash back: the halves of the input, swapped, xor a constant of the seed.
std::uint64_t unmix(std::uint64_t hash) noexcept {
  hash ^= hash >> 28 ^ hash >> 56;
  hash *= inverse_of(kRowHashMultiplier);
  hash ^= (hash >> 35) + sizeof(std::uint64_t);  // changes the low 30 bits alone, by the high 29
  hash *= inverse_of(kRowHashMultiplier);
  // x ^ rotl(x, 49) ^ rotl(x, 24) is 1 when applied 64 times (in GF(2)[r] its 64th power has exponents of
  // multiples of 64); so its inverse is its 63rd power, the product of the powers 1, 2, 4 .. 32.
  for (int power = 1; power < 64; power *= 2) {
    hash ^= std::rotl(hash, 49 * power % 64) ^ std::rotl(hash, 24 * power % 64);
  }
  return hash;
}

}  // namespace

std::uint64_t key_of_hash(std::uint32_t table_id, std::uint64_t hash) noexcept {
  return std::rotl(unmix(hash) ^ unmix(row_hash(table_id, 0)), 32);
}

// Out of line: inlined into a caller with a constant string, GCC 12 warns of reads that never happen.
std::uint32_t id_of_name(std::string_view name) noexcept {
  const auto id = static_cast<std::uint32_t>(XXH3_64bits(name.data(), name.size()));
  return id == 0 ? 1 : id;
}

}  // namespace sparserow
