#include "store/table/row_slab.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>

namespace sparserow {
namespace {

// A row whose head and whose first and last data bytes are made of `mark`.
std::uint32_t add(RowSlab& slab, std::size_t data_bytes, std::uint32_t mark) {
  const std::uint32_t row = slab.allocate();
  REQUIRE(row != RowSlab::kNone);
  RowRef at = slab.at(row);
  at.set_version((std::uint64_t{1} << 40) + mark);
  at.set_update_count(mark);
  std::memcpy(at.weights(), &mark, sizeof mark);
  std::memcpy(at.weights() + data_bytes - sizeof mark, &mark, sizeof mark);
  return row;
}

bool is_intact(const RowSlab& slab, std::size_t data_bytes, std::uint32_t row, std::uint32_t mark) {
  const RowRef at = slab.at(row);
  return at.version() == (std::uint64_t{1} << 40) + mark && at.update_count() == mark &&
         std::memcmp(at.weights(), &mark, sizeof mark) == 0 &&
         std::memcmp(at.weights() + data_bytes - sizeof mark, &mark, sizeof mark) == 0;
}

TEST_CASE("random creations and deaths leave the living rows as they were") {
  for (const std::size_t data_bytes : {4, 8, 32, 64, 96, 128, 132, 512, 1024, 196608}) {
    CAPTURE(data_bytes);
    std::mt19937 random(static_cast<unsigned>(data_bytes));
    ArenaPool pool;
    RowSlab slab(pool, data_bytes);
    std::map<std::uint32_t, std::uint32_t> model;
    const std::size_t most = data_bytes > 10'000 ? 40 : 5000;
    for (std::uint32_t mark = 0; mark < 4 * most; ++mark) {
      model[mark] = add(slab, data_bytes, mark);
      while (model.size() > most || (random() % 3 == 0 && !model.empty())) {
        const auto victim =
            std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % std::min<std::size_t>(model.size(), 50)));
        REQUIRE(is_intact(slab, data_bytes, victim->second, victim->first));
        slab.free(victim->second);
        model.erase(victim);
      }
    }
    for (const auto& [mark, row] : model) REQUIRE(is_intact(slab, data_bytes, row, mark));
    CHECK(slab.rows() == model.size());
    CHECK(slab.bytes() == pool.used_bytes());
    for (const auto& [mark, row] : model) slab.free(row);
    CHECK(slab.bytes() == 0);
    CHECK(pool.used_bytes() == 0);
    (void)add(slab, data_bytes, 1);  // chunk ids are used again
    CHECK(slab.rows() == 1);
  }
}

TEST_CASE("slack is small beyond the first rows, and bytes_for is an upper bound, also where rests are filled") {
  for (const std::size_t data_bytes : {20, 96, 128, 160, 512, 3000}) {
    CAPTURE(data_bytes);
    ArenaPool pool;
    RowSlab slab(pool, data_bytes);
    RowSlab other(pool, 700);  // leaves rests of its own
    const std::size_t place = data_bytes + (data_bytes >= 128 && data_bytes % 32 == 0 ? 13 : 12);
    for (std::uint32_t mark = 0; mark < 40'000; ++mark) {
      if (mark % 500 == 0) {
        const std::uint32_t more = mark % 1500 == 0 ? 1500 : 100;
        const std::uint64_t promised = slab.bytes() + slab.bytes_for(more);
        for (std::uint32_t i = 0; i < more; ++i) (void)add(slab, data_bytes, mark);
        REQUIRE(slab.bytes() <= promised);
      }
      (void)add(slab, data_bytes, mark);
      if (mark % 3 == 0) (void)add(other, 700, mark);
      if (slab.rows() > 10'000) REQUIRE(slab.bytes() <= slab.rows() * place * 51 / 50);
    }
  }
}

// What a pull reads of a row is no line more than what a plain matrix has.
TEST_CASE("data of whole lines begin at a line, and data of half lines cross none that they need not") {
  for (const std::size_t data_bytes : {128, 192, 512}) {
    ArenaPool pool;
    RowSlab slab(pool, data_bytes);
    for (std::uint32_t mark = 0; mark < 3000; ++mark) {
      const auto at = reinterpret_cast<std::uintptr_t>(slab.data(add(slab, data_bytes, mark)));
      REQUIRE(at % 64 == 0);
    }
  }
  ArenaPool pool;
  RowSlab slab(pool, 160);
  for (std::uint32_t mark = 0; mark < 3000; ++mark) {
    REQUIRE(reinterpret_cast<std::uintptr_t>(slab.data(add(slab, 160, mark))) % 32 == 0);
  }
}

TEST_CASE("chunks that move leave rows as they were, with their ids, and an arena goes back") {
  for (const std::size_t data_bytes : {32, 128, 1000}) {
    CAPTURE(data_bytes);
    std::mt19937 random(static_cast<unsigned>(data_bytes));
    ArenaPool pool;
    RowSlab kept(pool, data_bytes, /*has_meta=*/true);
    RowSlab gone(pool, data_bytes);
    std::map<std::uint32_t, std::uint32_t> model;
    std::vector<std::uint32_t> others;
    for (std::uint32_t mark = 0; mark < 24'000'000 / data_bytes; ++mark) {
      model[mark] = add(kept, data_bytes, mark);
      kept.meta(model[mark]).reset(static_cast<std::uint16_t>(mark));
      others.push_back(add(gone, data_bytes, mark));
    }
    for (std::uint32_t mark = 0; mark < model.size(); mark += 7) {
      kept.free(model[mark]);
      model.erase(mark);
    }
    for (const std::uint32_t row : others) gone.free(row);
    const std::uint64_t opened = pool.opened_arenas();
    REQUIRE(pool.has_holes());
    for (int round = 0; pool.has_holes() && round < 100; ++round) {
      const ArenaPool::Emptying from(pool);
      std::uint32_t chunk = 0;
      do {
        chunk = kept.move_chunks(from, chunk, 100'000);
      } while (chunk != 0);
    }
    CHECK_FALSE(pool.has_holes());
    CHECK(pool.opened_arenas() < opened * 2 / 3);
    CHECK(kept.bytes() == pool.used_bytes());
    for (std::uint32_t mark = 100'000'000; mark < 100'001'000; ++mark) {  // into places that rows have left
      model[mark] = add(kept, data_bytes, mark);
      kept.meta(model[mark]).reset(static_cast<std::uint16_t>(mark));
    }
    for (const auto& [mark, row] : model) {
      REQUIRE(is_intact(kept, data_bytes, row, mark));
      REQUIRE(kept.meta(row).load() == static_cast<std::uint16_t>(mark));
    }
  }
}

}  // namespace
}  // namespace sparserow
