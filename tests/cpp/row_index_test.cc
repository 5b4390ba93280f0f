#include "store/table/row_index.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "util/hash.h"

namespace sparserow {
namespace {

TEST_CASE("an empty index finds nothing and costs nothing") {
  ArenaPool pool;
  RowIndex index(pool);
  CHECK(index.find(17) == RowIndex::kNone);
  CHECK(index.erase(17) == RowIndex::kNone);
  CHECK(index.range_at(17).entries.empty());
  CHECK(index.bytes() == 0);
  CHECK(pool.used_bytes() == 0);
}

TEST_CASE("entries are found through growth and splits, and bytes per row stay bounded") {
  ArenaPool pool;
  RowIndex index(pool);
  double worst = 0;
  for (std::uint32_t key = 0; key < 300'000; ++key) {
    const std::uint64_t allowed = index.bytes() + index.bytes_for(1);
    REQUIRE(index.insert(row_hash(1, key), key));
    REQUIRE(index.bytes() <= allowed);
    if (key >= 20'000) worst = std::max(worst, static_cast<double>(index.bytes()) / (key + 1));
  }
  for (std::uint32_t key = 0; key < 300'000; ++key) REQUIRE(index.find(row_hash(1, key)) == key);
  for (std::uint64_t key = 300'000; key < 400'000; ++key) REQUIRE(index.find(row_hash(1, key)) == RowIndex::kNone);
  MESSAGE("worst bytes per row: " << worst);
  CHECK(worst < 15.5);
}

TEST_CASE("a promise for many rows is kept, whatever the index holds") {
  ArenaPool pool;
  RowIndex index(pool);
  std::uint32_t row = 0;
  for (const std::uint32_t more : {1u, 7u, 100u, 3u, 5000u, 40u, 60'000u, 1000u, 1u, 300'000u}) {
    const std::uint64_t allowed = index.bytes() + index.bytes_for(more);
    for (std::uint32_t i = 0; i < more; ++i, ++row) REQUIRE(index.insert(row_hash(2, row), row));
    CHECK(index.bytes() <= allowed);
  }
}

std::vector<Isa> isas() {
  std::vector<Isa> supported;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (is_supported(isa)) supported.push_back(isa);
  }
  return supported;
}

// What both halves of a search of many suffixes find.
std::vector<std::uint32_t> find_together(const RowIndex& index, const std::vector<std::uint64_t>& suffixes) {
  std::vector<std::uint32_t> rows(suffixes.size(), 12345);
  for (std::size_t begin = 0; begin < suffixes.size(); begin += kMostProbed) {
    const std::span wanted = std::span(suffixes).subspan(begin, std::min(kMostProbed, suffixes.size() - begin));
    IndexProbe probe;
    index.begin_find(wanted, rows.data() + begin, probe);
    index.finish_find(wanted, rows.data() + begin, probe);
  }
  return rows;
}

TEST_CASE("many suffixes together are found as each by itself, with every instruction set") {
  const unsigned seed = std::random_device{}();
  MESSAGE("seed " << seed);
  for (const Isa isa : isas()) {
    CAPTURE(static_cast<int>(isa));
    std::mt19937_64 random(seed);
    ArenaPool pool;
    RowIndex index(pool, isa);
    CHECK(find_together(index, {2, 4}) == std::vector<std::uint32_t>(2, RowIndex::kNone));
    std::vector<std::uint64_t> known;  // some of them erased
    for (std::uint32_t round = 0; round < 40; ++round) {
      for (std::uint32_t i = 0; i < 40 * round + 1; ++i) {
        const std::uint64_t suffix = random() & ~std::uint64_t{63};
        REQUIRE(index.insert(suffix, static_cast<std::uint32_t>(known.size())));
        known.push_back(suffix);
      }
      for (std::size_t i = 0; i < known.size(); ++i) {
        if (random() % 16 == 0) index.erase(known[i]);
      }
      std::vector<std::uint64_t> wanted = known;
      for (int i = 0; i < 300; ++i) wanted.push_back(random() & ~std::uint64_t{63});
      std::shuffle(wanted.begin(), wanted.end(), random);
      std::vector<std::uint32_t> one_by_one;
      for (const std::uint64_t suffix : wanted) one_by_one.push_back(index.find(suffix));
      REQUIRE(find_together(index, wanted) == one_by_one);
    }
  }
}

TEST_CASE("a search ends also where every bucket was passed over") {
  const auto suffix = [](std::uint64_t home, std::uint64_t number) { return home << 30 | number << 6; };
  for (const Isa isa : isas()) {
    CAPTURE(static_cast<int>(isa));
    ArenaPool pool;
    RowIndex index(pool, isa);  // of four buckets of five
    std::uint32_t row = 0;
    const auto insert = [&](std::uint64_t home, std::uint64_t first, std::uint64_t last) {
      for (std::uint64_t number = first; number <= last; ++number) REQUIRE(index.insert(suffix(home, number), row++));
    };
    insert(0, 1, 6);
    insert(1, 1, 5);
    insert(2, 1, 5);
    insert(3, 1, 2);
    for (std::uint64_t number = 1; number <= 3; ++number) REQUIRE(index.erase(suffix(0, number)) == number - 1);
    insert(3, 3, 6);
    REQUIRE(index.bytes() == 4 * 64 + 8);
    for (std::uint64_t home = 0; home < 4; ++home) {
      CHECK(index.find(suffix(home, 9)) == RowIndex::kNone);
      CHECK(find_together(index, {suffix(home, 9), suffix(home, 5)}) ==
            std::vector{RowIndex::kNone, index.find(suffix(home, 5))});
    }
  }
}

TEST_CASE("random insertions and erasures, memory given back") {
  constexpr unsigned kSeed = 5;
  MESSAGE("seed " << kSeed);
  std::mt19937_64 random(kSeed);
  ArenaPool pool;
  RowIndex index(pool);
  std::vector<std::uint64_t> live;
  std::map<std::uint64_t, std::uint32_t> model;
  for (int phase = 0; phase < 5; ++phase) {
    const bool grows = phase % 2 == 0;
    for (int step = 0; step < 40'000; ++step) {
      if (live.empty() || random() % 10 < (grows ? 8u : 2u)) {
        const std::uint64_t suffix = random() << 6;
        if (!model.emplace(suffix, static_cast<std::uint32_t>(step)).second) continue;
        REQUIRE(index.insert(suffix, static_cast<std::uint32_t>(step)));
        live.push_back(suffix);
      } else {
        std::swap(live[random() % live.size()], live.back());
        REQUIRE(index.erase(live.back()) == model.at(live.back()));
        REQUIRE(index.find(live.back()) == RowIndex::kNone);
        model.erase(live.back());
        live.pop_back();
      }
    }
    for (const auto& [suffix, row] : model) REQUIRE(index.find(suffix) == row);
  }
  const std::uint64_t before = index.bytes();
  for (const std::uint64_t suffix : live) REQUIRE(index.erase(suffix) != RowIndex::kNone);
  CHECK(index.bytes() < before);
  CHECK(pool.used_bytes() <= index.bytes());
}

TEST_CASE("ranges follow each other in the order of suffixes and hold every entry once") {
  ArenaPool pool;
  RowIndex index(pool);
  std::map<std::uint64_t, std::uint32_t> model;
  for (std::uint32_t row = 0; row < 20'000; ++row) {
    model[row_hash(3, row)] = row;
    REQUIRE(index.insert(row_hash(3, row), row));
  }
  auto expected = model.begin();
  std::uint64_t suffix = 0;
  int ranges = 0;
  do {
    RowIndex::Range range = index.range_at(suffix);
    std::sort(range.entries.begin(), range.entries.end(),
              [](auto& left, auto& right) { return left.suffix < right.suffix; });
    for (const RowIndex::Entry& entry : range.entries) {
      REQUIRE(expected != model.end());
      REQUIRE(entry.suffix == expected->first);
      REQUIRE(entry.row == expected->second);
      ++expected;
    }
    suffix = range.next;
    ++ranges;
  } while (suffix != 0);
  CHECK(expected == model.end());
  CHECK(ranges > 20);
}

TEST_CASE("room made for many suffixes keeps what is there and the promise, and visits see what ranges hold") {
  ArenaPool pool;
  RowIndex index(pool);
  std::map<std::uint64_t, std::uint32_t> model;
  std::uint32_t row = 0;
  for (const std::uint32_t more : {3u, 500u, 1u, 40'000u, 128u, 128u, 20'000u}) {
    std::map<std::uint64_t, std::uint32_t> added;
    for (std::uint32_t i = 0; i < more; ++i, ++row) added[row_hash(4, row)] = row;
    std::vector<std::uint64_t> suffixes;
    for (const auto& [suffix, row] : added) suffixes.push_back(suffix);
    const std::uint64_t allowed = index.bytes() + index.bytes_for(more);
    index.make_room(suffixes);
    const std::uint64_t roomy = index.bytes();
    for (const auto& [suffix, row] : model) REQUIRE(index.find(suffix) == row);
    for (const std::uint64_t suffix : suffixes) REQUIRE(index.find(suffix) == RowIndex::kNone);
    for (const auto& [suffix, row] : added) REQUIRE(index.insert(suffix, row));
    CHECK(index.bytes() == roomy);  // there was room for all
    CHECK(index.bytes() <= allowed);
    model.merge(added);
  }
  std::map<std::uint64_t, std::uint32_t> seen;
  std::uint64_t suffix = 0;
  do {
    const RowIndex::Range range = index.range_at(suffix);
    std::size_t visited = 0;
    const std::uint64_t next = index.visit_range(suffix, [&](std::uint64_t at, std::uint32_t row) {
      ++visited;
      REQUIRE(seen.emplace(at, row).second);
    });
    REQUIRE(visited == range.entries.size());
    REQUIRE(next == range.next);
    suffix = next;
  } while (suffix != 0);
  CHECK(seen == model);
  CHECK(static_cast<double>(index.bytes()) < 16.0 * static_cast<double>(model.size()));
}

TEST_CASE("suffixes that agree in every bit but a few are stored until a stated limit, never lost") {
  ArenaPool pool;
  RowIndex index(pool);
  std::uint32_t stored = 0;
  for (; stored <= 3000; ++stored) {  // one directory entry and one home for all
    if (!index.insert(0xabc0000012345678u | static_cast<std::uint64_t>(stored) << 32, stored)) break;
  }
  CHECK(stored > 3000);
  for (std::uint32_t row = 0; row < stored; ++row) {
    REQUIRE(index.find(0xabc0000012345678u | static_cast<std::uint64_t>(row) << 32) == row);
  }
}

// The suffixes of a stripe of a shard that has some of 1,024 slots: their numbers are the first ten bits.
std::vector<std::uint64_t> suffixes_in(const std::vector<std::uint64_t>& slots, std::size_t count,
                                       std::uint64_t table) {
  std::vector<std::uint64_t> out;
  for (std::size_t i = 0; i < count; ++i) {
    out.push_back(slots[i % slots.size()] << 54 | (row_hash(table, i) >> 10 & ~std::uint64_t{63}));
  }
  return out;
}

std::vector<std::uint64_t> range_of(std::uint64_t first, std::uint64_t count) {
  std::vector<std::uint64_t> out;
  for (std::uint64_t i = 0; i < count; ++i) out.push_back(first + i);
  return out;
}

// Everything that can be asked of an index.
void check_equals(const RowIndex& index, const std::map<std::uint64_t, std::uint32_t>& model, std::mt19937_64& random) {
  std::vector<std::uint64_t> wanted;
  std::vector<std::uint32_t> expected;
  for (const auto& [suffix, row] : model) {
    for (const std::uint64_t each :
         {suffix, suffix ^ std::uint64_t{1} << 63, suffix ^ std::uint64_t{1} << 54, random() & ~std::uint64_t{63}}) {
      const auto found = model.find(each);
      wanted.push_back(each);
      expected.push_back(found == model.end() ? RowIndex::kNone : found->second);
    }
  }
  CHECK(find_together(index, wanted) == expected);
  for (std::size_t i = 0; i < wanted.size(); i += 17) REQUIRE(index.find(wanted[i]) == expected[i]);
  std::vector<RowIndex::Entry> seen;
  std::uint64_t suffix = 0;
  do {
    RowIndex::Range range = index.range_at(suffix);
    std::ranges::sort(range.entries, {}, &RowIndex::Entry::suffix);
    seen.insert(seen.end(), range.entries.begin(), range.entries.end());
    if (range.next != 0) REQUIRE(range.next > suffix);
    suffix = range.next;
  } while (suffix != 0);
  REQUIRE(seen.size() == model.size());
  std::size_t at = 0;
  for (const auto& [each, row] : model) {
    REQUIRE(seen[at].suffix == each);
    REQUIRE(seen[at++].row == row);
  }
}

TEST_CASE("an index costs as much whichever slots its shard has") {
  std::mt19937_64 random(7);
  for (const std::size_t count : {2'000u, 60'000u}) {
    for (const std::string order : {"as they come", "in their order", "in batches with room"}) {
      double all_slots = 0;
      for (const auto& slots : {range_of(0, 1024),
                                range_of(0, 256),
                                range_of(301, 256),
                                range_of(4, 4),
                                range_of(510, 4),
                                range_of(1023, 1),
                                {5, 300, 700, 1001}}) {
        std::vector<std::uint64_t> suffixes = suffixes_in(slots, count, slots[0] + 1);
        if (order == "in their order") std::ranges::sort(suffixes);
        ArenaPool pool;
        RowIndex index(pool);
        for (std::size_t begin = 0; begin < count; begin += 1000) {
          std::vector<std::uint64_t> batch(suffixes.begin() + static_cast<std::ptrdiff_t>(begin),
                                           suffixes.begin() + static_cast<std::ptrdiff_t>(begin + 1000));
          std::ranges::sort(batch);
          if (order == "in batches with room") index.make_room(batch);
          for (std::size_t i = begin; i < begin + 1000; ++i) {
            REQUIRE(index.insert(suffixes[i], static_cast<std::uint32_t>(i)));
          }
        }
        for (std::size_t i = 0; i < count; ++i) REQUIRE(index.find(suffixes[i]) == i);
        const double bytes = static_cast<double>(index.bytes()) / static_cast<double>(count);
        if (all_slots == 0) all_slots = bytes;
        CAPTURE(order);
        CAPTURE(count);
        CAPTURE(slots[0]);
        CAPTURE(slots.size());
        CAPTURE(all_slots);
        // An array of directories has at most 8 KiB, where slots are far from each other.
        CHECK(bytes <
              1.04 * all_slots + 1.0 + (slots.size() == 4 && slots[0] == 5 ? 8192.0 / static_cast<double>(count) : 0));
      }
    }
  }
}

TEST_CASE("slots that come and go leave an index that finds and visits what it has, within its promises") {
  const unsigned seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 12; ++round) {
    ArenaPool pool;
    {
      RowIndex index(pool);
      std::map<std::uint64_t, std::uint32_t> model;
      std::uint32_t row = 0;
      for (int move = 0; move < 8; ++move) {
        if (random() % 3 == 0) {  // some slots go
          const std::uint64_t from = random() % 1024;
          const std::uint64_t to = from + random() % 300;
          for (auto it = model.begin(); it != model.end();) {
            const bool goes = it->first >> 54 >= from && it->first >> 54 < to;
            if (goes) REQUIRE(index.erase(it->first) == it->second);
            it = goes ? model.erase(it) : std::next(it);
          }
          continue;
        }
        std::vector<std::uint64_t> slots;
        for (std::uint64_t i = 0; i < random() % 6 + 1; ++i) slots.push_back(random() % 1024);
        std::vector<std::uint64_t> added;
        const std::uint64_t count = random() % 2 == 0 ? random() % 40 + 1 : random() % 6000 + 1;
        for (std::uint64_t i = 0; i < count; ++i) {
          const std::uint64_t suffix = slots[random() % slots.size()] << 54 | (random() >> 10 & ~std::uint64_t{63});
          if (model.emplace(suffix, row).second) {
            added.push_back(suffix);
            ++row;
          }
        }
        const std::uint64_t allowed = index.bytes() + index.bytes_for(added.size());
        if (random() % 2 == 0) {
          std::ranges::sort(added);
          index.make_room(added);
        }
        for (const std::uint64_t suffix : added) REQUIRE(index.insert(suffix, model.at(suffix)));
        // With as many rows as one segment has at most, prefixes may be chosen in this very batch.
        if (model.size() - added.size() > 736) CHECK(index.bytes() <= allowed);
        check_equals(index, model, random);
      }
      check_equals(index, model, random);
    }
    CHECK(pool.used_bytes() == 0);
  }
}

TEST_CASE("an index costs what its rows do, whatever it held before") {
  std::mt19937_64 random(8);
  for (const std::uint32_t slot_bits : {0u, 8u, 10u}) {
    for (const bool is_sorted : {false, true}) {
      CAPTURE(slot_bits);
      CAPTURE(is_sorted);
      ArenaPool pool;
      RowIndex index(pool, best_isa(), nullptr, slot_bits);
      std::map<std::uint64_t, std::uint32_t> model;
      std::vector<std::uint64_t> suffixes;
      for (std::uint32_t row = 0; row < 100'000; ++row) suffixes.push_back(random() & ~std::uint64_t{63});
      if (is_sorted) std::ranges::sort(suffixes);
      for (std::uint32_t row = 0; row < suffixes.size(); ++row) {
        REQUIRE(index.insert(suffixes[row], row));
        model[suffixes[row]] = row;
      }
      std::ranges::shuffle(suffixes, random);
      while (model.size() > 50) {
        REQUIRE(index.erase(suffixes.back()) == model.at(suffixes.back()));
        model.erase(suffixes.back());
        suffixes.pop_back();
        // A segment has 8 rows on average and 256 bytes at least; 1,024 prefixes have 8 KiB.
        if (model.size() % 100 == 0) REQUIRE(index.bytes() <= 40 * model.size() + 9000);
      }
      check_equals(index, model, random);
      CHECK(index.bytes() <= 40 * 50 + 300);
      for (const auto& [suffix, row] : model) REQUIRE(index.erase(suffix) == row);
      check_equals(index, {}, random);
      CHECK(index.bytes() <= 300);
    }
  }
}

TEST_CASE("rows that pass in the order of suffixes, as a checkpoint brings them, leave no promise of many prefixes") {
  constexpr std::size_t kInMemory = 800;  // rows; the others leave for the SSD
  for (const std::uint32_t slot_bits : {0u, 4u}) {
    CAPTURE(slot_bits);
    std::vector<std::uint64_t> suffixes;
    for (std::uint32_t i = 0; i < 15'000; ++i) suffixes.push_back(row_hash(9, i) & ~std::uint64_t{63});
    std::ranges::sort(suffixes);
    ArenaPool pool;
    RowIndex index(pool, best_isa(), nullptr, slot_bits);
    for (std::uint32_t i = 0; i < suffixes.size(); ++i) {
      REQUIRE(index.insert(suffixes[i], i));
      if (i >= kInMemory) REQUIRE(index.erase(suffixes[i - kInMemory]) == i - kInMemory);
    }
    for (std::size_t i = suffixes.size() - kInMemory; i < suffixes.size() - 3; ++i) {
      REQUIRE(index.erase(suffixes[i]) == i);
    }
    CHECK(index.bytes() < 1000);
    CHECK(index.lasting_bytes_for(50) < 3000 + (16 * 264 + 256 * 2) * (slot_bits > 0 ? 1 : 0));
  }
}

TEST_CASE("segments that move leave the index as it was, and an arena goes back") {
  std::mt19937_64 random(9);
  for (const auto& slots : {range_of(0, 1024), range_of(4, 4), std::vector<std::uint64_t>{5, 300, 700, 1001}}) {
    CAPTURE(slots.size());
    ArenaPool pool;
    RowIndex gone(pool);
    RowIndex kept(pool);
    std::map<std::uint64_t, std::uint32_t> model;
    const std::vector<std::uint64_t> suffixes = suffixes_in(slots, 600'000, 11);
    for (std::uint32_t i = 0; i < suffixes.size(); ++i) {
      REQUIRE(gone.insert(suffixes[i], i));
      if (i % 4 != 0) continue;
      REQUIRE(kept.insert(suffixes[i], i));
      model[suffixes[i]] = i;
    }
    for (const std::uint64_t suffix : suffixes) REQUIRE(gone.erase(suffix) != RowIndex::kNone);
    REQUIRE(pool.has_holes());
    const std::uint64_t bytes = kept.bytes();
    for (int round = 0; pool.has_holes() && round < 100; ++round) {
      const ArenaPool::Emptying from(pool);
      std::uint64_t suffix = 0;
      do {
        suffix = kept.move_segments(from, suffix, 20'000);
      } while (suffix != 0);
    }
    CHECK_FALSE(pool.has_holes());
    CHECK(kept.bytes() == bytes);
    check_equals(kept, model, random);
  }
}

}  // namespace
}  // namespace sparserow
