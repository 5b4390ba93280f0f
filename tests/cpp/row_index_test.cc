#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "store/row_index.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "util/hash.h"

namespace sparserow {
namespace {

// Row id = position in a vector of hashes.
struct Hashes {
  std::vector<std::uint64_t> values;
  void prefetch(std::uint32_t) const {}
  [[nodiscard]] std::uint64_t hash_of(std::uint32_t row) const { return values[row]; }
};

std::uint32_t find(const RowIndex& index, const Hashes& hashes, std::uint64_t hash) {
  return index.find(hash, [&](std::uint32_t row) { return hashes.values[row] == hash; });
}

std::uint32_t add(RowIndex& index, Hashes& hashes, std::uint64_t hash) {
  hashes.values.push_back(hash);
  const auto row = static_cast<std::uint32_t>(hashes.values.size() - 1);
  REQUIRE(index.insert(hash, row, hashes));
  return row;
}

TEST_CASE("an empty index finds nothing and costs nothing") {
  ArenaPool pool;
  const RowIndex index(pool);
  CHECK(find(index, {}, 17) == RowIndex::kNone);
  CHECK(index.bytes() == 0);
  CHECK(pool.used_bytes() == 0);
}

TEST_CASE("entries are found through growth and splits, and bytes per row stay bounded") {
  ArenaPool pool;
  RowIndex index(pool);
  Hashes hashes;
  double worst = 0;
  for (std::uint64_t key = 0; key < 300'000; ++key) {
    const std::uint64_t allowed = index.bytes() + index.bytes_for(1);
    add(index, hashes, row_hash(1, key));
    REQUIRE(index.bytes() <= allowed);
    if (key >= 20'000) worst = std::max(worst, static_cast<double>(index.bytes()) / static_cast<double>(key + 1));
  }
  for (std::uint32_t row = 0; row < hashes.values.size(); ++row)
    REQUIRE(find(index, hashes, hashes.values[row]) == row);
  for (std::uint64_t key = 300'000; key < 400'000; ++key) {
    REQUIRE(find(index, hashes, row_hash(1, key)) == RowIndex::kNone);
  }
  MESSAGE("worst bytes per row: " << worst);
  CHECK(worst < 8.0);
}

TEST_CASE("random insertions and erasures, memory given back") {
  constexpr unsigned kSeed = 5;
  MESSAGE("seed " << kSeed);
  std::mt19937_64 random(kSeed);
  ArenaPool pool;
  RowIndex index(pool);
  Hashes hashes;
  std::vector<std::uint32_t> live;
  for (int phase = 0; phase < 5; ++phase) {
    const bool grows = phase % 2 == 0;
    for (int step = 0; step < 40'000; ++step) {
      if (live.empty() || random() % 10 < (grows ? 8u : 2u)) {
        live.push_back(add(index, hashes, random()));
      } else {
        std::swap(live[random() % live.size()], live.back());
        index.erase(hashes.values[live.back()], live.back(), hashes);
        REQUIRE(find(index, hashes, hashes.values[live.back()]) == RowIndex::kNone);
        live.pop_back();
      }
    }
    for (const std::uint32_t row : live) REQUIRE(find(index, hashes, hashes.values[row]) == row);
  }
  const std::uint64_t before = index.bytes();
  while (!live.empty()) {
    index.erase(hashes.values[live.back()], live.back(), hashes);
    live.pop_back();
  }
  CHECK(index.bytes() < before);
  CHECK(pool.used_bytes() <= index.bytes());
}

TEST_CASE("hashes that agree in every bit but a few are stored until a stated limit, never lost") {
  ArenaPool pool;
  RowIndex index(pool);
  Hashes hashes;
  std::uint32_t stored = 0;
  for (std::uint64_t i = 0; i < 400'000; ++i) {  // all low 32 bits equal: one directory path, one home, one tag
    const std::uint64_t hash = (i << 48) | 0x12345678u;
    hashes.values.push_back(hash);
    if (!index.insert(hash, static_cast<std::uint32_t>(i), hashes)) break;
    ++stored;
    if (i >= 3000) break;
  }
  CHECK(stored > 3000);
  for (std::uint32_t row = 0; row < stored; ++row) {
    REQUIRE(index.find(hashes.values[row], [row](std::uint32_t other) { return other == row; }) == row);
  }
}

}  // namespace
}  // namespace sparserow
