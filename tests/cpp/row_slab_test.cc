#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "store/row_slab.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace sparserow {
namespace {

std::uint32_t add(RowSlab& slab, std::uint64_t key) {
  const std::uint32_t row = slab.allocate();
  REQUIRE(row != RowSlab::kNone);
  RowRef(slab.at(row)).set_key(key);
  RowRef(slab.at(row)).set_version(1);
  return row;
}

std::set<std::uint64_t> keys_in_order_of_ids(const RowSlab& slab) {
  std::set<std::uint64_t> keys;
  for (std::uint32_t row = slab.next(0); row != RowSlab::kNone; row = slab.next(row + 1)) {
    REQUIRE(keys.insert(RowRef(slab.at(row)).key()).second);
  }
  return keys;
}

TEST_CASE("random births and deaths leave exactly the living rows") {
  for (const std::size_t row_bytes : {24, 84, 532, 196628}) {
    CAPTURE(row_bytes);
    std::mt19937 random(static_cast<unsigned>(row_bytes));
    ArenaPool pool;
    RowSlab slab(pool, row_bytes);
    std::map<std::uint64_t, std::uint32_t> model;
    const std::size_t most = row_bytes > 10'000 ? 40 : 5000;
    for (std::uint64_t key = 0; key < 4 * most; ++key) {
      model[key] = add(slab, key);
      while (model.size() > most || (random() % 3 == 0 && !model.empty())) {
        const auto victim =
            std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % std::min<std::size_t>(model.size(), 50)));
        REQUIRE(RowRef(slab.at(victim->second)).key() == victim->first);
        slab.free(victim->second);
        model.erase(victim);
      }
    }
    std::set<std::uint64_t> expected;
    for (const auto& [key, row] : model) expected.insert(key);
    CHECK(keys_in_order_of_ids(slab) == expected);
    CHECK(slab.rows() == model.size());
    CHECK(slab.bytes() == pool.used_bytes());
    for (const auto& [key, row] : model) slab.free(row);
    CHECK(slab.bytes() == 0);
    CHECK(pool.used_bytes() == 0);
    CHECK(slab.next(0) == RowSlab::kNone);
    add(slab, 1);  // chunk ids are used again
    CHECK(slab.rows() == 1);
  }
}

TEST_CASE("slack is small beyond the first rows, and bytes_for is an upper bound") {
  ArenaPool pool;
  RowSlab slab(pool, 532);
  for (std::uint64_t key = 0; key < 50'000; ++key) {
    const std::uint64_t promised = slab.bytes() + slab.bytes_for(100);
    if (key % 1000 == 0) {
      for (int i = 0; i < 100; ++i) add(slab, key);
      REQUIRE(slab.bytes() <= promised);
    }
    add(slab, key);
    if (slab.rows() > 2000) REQUIRE(slab.bytes() - slab.rows() * 532 <= slab.rows() * 532 / 16);
  }
}

}  // namespace
}  // namespace sparserow
