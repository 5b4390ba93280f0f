// Counter-based pseudo-random bits: pure functions of a seed and a counter, equal on every machine.
//
// Always inlined, so that files compiled for a wide instruction set may include it (optim/kernels.h).
#pragma once

#include <cstdint>

namespace sparserow {

// The finalizer of SplitMix64 (Steele, Lea & Flood 2014): a bijection of 64 bits that mixes well.
[[nodiscard, gnu::always_inline]] constexpr std::uint64_t mix_bits(std::uint64_t value) noexcept {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// The `index`-th 64-bit value of the SplitMix64 stream that starts at `seed`.
[[nodiscard, gnu::always_inline]] constexpr std::uint64_t random_bits(std::uint64_t seed,
                                                                      std::uint64_t index) noexcept {
  return mix_bits(seed + (index + 1) * 0x9e3779b97f4a7c15ull);
}

}  // namespace sparserow
