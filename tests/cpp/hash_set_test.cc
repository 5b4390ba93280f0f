// A set of hashes against std::unordered_set.
#include "util/hash_set.h"

#include <doctest/doctest.h>

#include <random>
#include <unordered_set>

namespace sparserow {

TEST_CASE("random operations on a set of hashes equal those on a std::unordered_set") {
  const std::uint64_t seed = std::random_device()();
  MESSAGE("seed " << seed);
  for (const std::uint64_t mask : {std::uint64_t{0x1f}, std::uint64_t{0xfff}, std::uint64_t{0xf000'0000'0000'000f}}) {
    CAPTURE(mask);
    std::mt19937_64 random(seed);
    HashSet set;
    std::unordered_set<std::uint64_t> model;
    for (int step = 0; step < 20'000; ++step) {
      const std::uint64_t hash = random() & mask;
      if (random() % 2 == 0) {
        REQUIRE(set.insert(hash) == model.insert(hash).second);
      } else {
        REQUIRE(set.erase(hash) == (model.erase(hash) > 0));
      }
      REQUIRE(set.size() == model.size());
      const std::uint64_t other = random() & mask;
      REQUIRE(set.contains(other) == model.contains(other));
    }
    for (const std::uint64_t hash : model) REQUIRE(set.contains(hash));
    for (const std::uint64_t hash : std::unordered_set(model)) REQUIRE(set.erase(hash));
    CHECK(set.size() == 0);
  }
}

}  // namespace sparserow
