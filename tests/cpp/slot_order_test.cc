#include "store/table/slot_order.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

namespace sparserow {
namespace {

TEST_CASE("stripe and suffix are the hash again, and positions visit a stripe slot by slot") {
  constexpr unsigned kSeed = 11;
  MESSAGE("seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (std::uint32_t slot_count = 2; slot_count <= 65536; slot_count *= 2) {
    CAPTURE(slot_count);
    const SlotOrder order(slot_count);
    std::vector<std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>> visited;  // position, slot, hash
    for (int i = 0; i < 2000; ++i) {
      const std::uint64_t hash = i == 0 ? 0 : i == 1 ? ~std::uint64_t{0} : random();
      const std::uint32_t stripe = order.stripe(hash);
      const std::uint64_t suffix = order.suffix(hash);
      const std::uint32_t slot = slot_of(hash, slot_count);
      REQUIRE(order.slot(hash) == slot);
      REQUIRE(stripe == slot % kStripes);
      REQUIRE(stripe < order.stripe_count());
      REQUIRE(order.slot_in_stripe(suffix) == slot / kStripes);
      REQUIRE(order.hash(stripe, suffix) == hash);
      const std::uint64_t position = order.position(stripe, suffix);
      REQUIRE(order.stripe_at(position) == stripe);
      REQUIRE(order.path_at(position) == suffix);
      visited.emplace_back(position, slot, hash);
    }
    std::sort(visited.begin(), visited.end());
    for (std::size_t i = 1; i < visited.size(); ++i) {
      const auto [position, slot, hash] = visited[i - 1];
      const auto [next_position, next_slot, next_hash] = visited[i];
      REQUIRE(std::tuple(slot % kStripes, slot, hash) <= std::tuple(next_slot % kStripes, next_slot, next_hash));
    }
  }
}

}  // namespace
}  // namespace sparserow
