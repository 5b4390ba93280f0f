// Fetches memory ahead of its use, by cache lines.
#pragma once

#include <cstddef>

namespace sparserow {

inline constexpr std::size_t kLine = 64;  // bytes of a cache line

// The bytes of one row that are fetched; beyond them the hardware's own prefetcher follows.
inline constexpr std::size_t kMaxFetched = 1024;

// kIsWritten: the lines are fetched to be written. bytes > 0.
// Always inlined: the compiler deems a function that only prefetches to be without effect, and drops its calls.
template <bool kIsWritten = false>
[[gnu::always_inline]] inline void fetch_lines(const std::byte* at, std::size_t bytes) noexcept {
  for (std::size_t offset = 0; offset < bytes; offset += kLine) __builtin_prefetch(at + offset, kIsWritten);
  __builtin_prefetch(at + bytes - 1, kIsWritten);
}

}  // namespace sparserow
