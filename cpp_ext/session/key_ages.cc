#include "session/key_ages.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "util/hash.h"

namespace sparserow {

void KeyAges::touch(std::span<const std::uint64_t> keys, std::uint32_t batch, std::vector<std::uint32_t>& latest) {
  constexpr std::size_t kAtOnce = 64;  // places that are on their way from memory
  make_room(keys.size(), batch);
  latest.resize(keys.size());
  const std::size_t mask = batches_.size() - 1;
  std::array<std::uint32_t*, kAtOnce> places{};
  for (std::size_t begin = 0; begin < keys.size(); begin += kAtOnce) {
    const std::size_t n = std::min(kAtOnce, keys.size() - begin);
    for (std::size_t i = 0; i < n; ++i) {
      places[i] = &batches_[row_hash(0, keys[begin + i]) & mask];
      __builtin_prefetch(places[i], 1);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t before = std::exchange(*places[i], batch);
      latest[begin + i] = before == batch ? batch - 1 : before;
    }
  }
}

// A larger table has lost the ages: all keys count as those of the batch before.
void KeyAges::make_room(std::size_t keys, std::uint32_t batch) {
  const std::size_t wanted = std::bit_ceil(std::max<std::size_t>(64, keys) * kPlacesPerKey);
  if (batches_.size() < wanted) batches_.assign(wanted, batches_.empty() ? 0 : batch - 1);
}

}  // namespace sparserow
