// The one hash of Sparserow, version 1: where a row lives, in every process and every language.
//
//   row_hash(table, key) = XXH3_64bits_withSeed(key as 8 little-endian bytes, seed = table)
//   slot                 = row_hash >> (64 - log2(slot_count))
//
// Slots, stripes, index positions and initial rows derive from it, so it can never change under
// stored data: kHashVersion is written into every manifest and checked at HELLO. Golden values are in
// tests/cpp/hash_test.cc and, against the Python package `xxhash`, in tests/contract.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace sparserow {

inline constexpr std::uint32_t kHashVersion = 1;
inline constexpr std::uint32_t kDefaultSlotCount = 16384;
static_assert(std::endian::native == std::endian::little, "keys are hashed as little-endian bytes");

inline constexpr std::uint64_t kRowHashMultiplier = 0x9FB21C651E98DF25ull;  // XXH3's for inputs of 4 to 8 bytes

// XXH3's path for 4 to 8 bytes (xxHash, doc/xxhash_spec.md, "XXH3, small inputs"), for 8 of them: the library's own
// function is not inlined, so that its compiler reads the secret and the length anew for each key.
[[nodiscard, gnu::always_inline]] inline std::uint64_t row_hash(std::uint32_t table_id, std::uint64_t key) noexcept {
  constexpr std::uint64_t kSecret = 0x1cad21f72c81017cull ^ 0xdb979083e96dd4deull;  // bytes 8 to 23 of the default one
  const std::uint64_t seed = table_id ^ static_cast<std::uint64_t>(__builtin_bswap32(table_id)) << 32;
  std::uint64_t hash = std::rotl(key, 32) ^ (kSecret - seed);
  hash ^= std::rotl(hash, 49) ^ std::rotl(hash, 24);
  hash *= kRowHashMultiplier;
  hash ^= (hash >> 35) + sizeof key;
  hash *= kRowHashMultiplier;
  return hash ^ hash >> 28;
}

// The key whose row_hash is `hash`: for one table the hash of 8 bytes is a bijection, so an index that holds hashes
// need hold no keys. Inverts the steps of XXH3's 4-to-8-byte path (xxHash, doc/xxhash_spec.md, "XXH3, small inputs").
[[nodiscard]] std::uint64_t key_of_hash(std::uint32_t table_id, std::uint64_t hash) noexcept;

// What an error says of a number of slots that is refused.
inline constexpr std::string_view kSlotCounts = "a power of two in [2, 65536]";

// slot_count must be a power of two in [2, 65536].
[[nodiscard]] inline std::uint32_t slot_of(std::uint64_t hash, std::uint32_t slot_count) noexcept {
  return static_cast<std::uint32_t>(hash >> (64 - std::countr_zero(slot_count)));
}

// The key of a text, 63 bits so that it is a non-negative torch id: XXH3_64bits(text) >> 1. proto/row_keys.py has the
// same function for processes without the native code.
[[nodiscard]] inline std::uint64_t key_of_text(std::string_view text) noexcept {
  return XXH3_64bits(text.data(), text.size()) >> 1;
}

// 32-bit id of "namespace/name"; collisions are refused by the coordinator. Zero is reserved.
[[nodiscard]] std::uint32_t id_of_name(std::string_view name) noexcept;

}  // namespace sparserow
