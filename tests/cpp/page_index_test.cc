// The index of a page log against a multimap, with hashes that many entries share and lines that overflow.
#include "store/ssd/pages/page_index.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace sparserow {
namespace {

std::set<std::uint64_t> candidates(const PageIndex& index, IndexKey key) {
  std::set<std::uint64_t> places;
  index.candidates(key, [&](Place place) { REQUIRE(places.insert(place.bits()).second); });
  return places;
}

struct Before {
  bool operator()(const IndexKey& left, const IndexKey& right) const {
    return std::pair(left.slot, left.hash) < std::pair(right.slot, right.hash);
  }
};

std::size_t bytes_of_parts(const PageIndex& index) {
  std::size_t bytes =
      index.shared().capacity() * sizeof(index.shared()[0]) + index.by_slot().capacity() * sizeof(index.by_slot()[0]);
  for (const auto& part : index.shared()) bytes += part.bytes();
  for (const auto& part : index.by_slot()) bytes += part.bytes();
  return bytes;
}

TEST_CASE("random operations on an index equal those on a multimap") {
  const std::uint64_t seed = std::random_device()();
  MESSAGE("seed " << seed);
  for (const std::uint32_t mask : {~0u, 0xff00'00ffu, 0x0000'0003u, 0xffff'f000u}) {  // few or crowded hashes
    for (const std::uint32_t slot_bits : {0u, 4u, 10u}) {
      CAPTURE(mask);
      CAPTURE(slot_bits);
      std::mt19937_64 random(seed);
      PageIndex index(slot_bits);
      std::map<IndexKey, std::set<std::uint64_t>, Before> model;
      std::vector<std::pair<IndexKey, std::uint64_t>> all;
      const auto any_key = [&] {
        const auto slot = static_cast<std::uint16_t>(random() & ((1u << slot_bits) - 1));
        return IndexKey{static_cast<std::uint32_t>(random()) & mask, slot};
      };
      const std::size_t most = mask == 3 ? 300 : 3000;
      for (std::uint64_t step = 1; step < 8'000; ++step) {
        const auto act = random() % 10;
        if (act < 6 && all.size() < most && step < 6'000) {
          const IndexKey key = any_key();
          const Place place(step << 8 & 0xff'ffff'ffff);
          index.insert(key, place);
          REQUIRE(model[key].insert(place.bits()).second);
          all.emplace_back(key, place.bits());
        } else if (!all.empty()) {
          const std::size_t at = random() % all.size();
          auto& [key, bits] = all[at];
          if (act < 8 && step < 6'000) {
            const Place to(bits ^ 0x80);
            const IndexEntry entry = index.find(key, Place(bits));
            REQUIRE(entry);
            entry.move_to(to);
            CHECK(entry.place() == to);
            CHECK_FALSE(index.find(key, Place(bits)));
            model[key].erase(bits);
            model[key].insert(bits = to.bits());
          } else {
            REQUIRE(index.erase(key, Place(bits)));
            CHECK_FALSE(index.erase(key, Place(bits)));
            model[key].erase(bits);
            all[at] = all.back();
            all.pop_back();
          }
        }
        const IndexKey key = any_key();
        REQUIRE(candidates(index, key) == model[key]);
      }
      CHECK(index.size() == all.size());
      CHECK(index.bytes() == bytes_of_parts(index));
      for (const auto& [key, places] : model) REQUIRE(candidates(index, key) == places);
      std::set<std::uint64_t> every;
      index.each([&](Place place) { REQUIRE(every.insert(place.bits()).second); });
      CHECK(every.size() == all.size());
      for (std::uint32_t slot = 0; slot < 1u << slot_bits; slot += 1 + (1u << slot_bits) / 16) {
        std::set<std::pair<std::uint32_t, std::uint64_t>> found;
        std::set<std::pair<std::uint32_t, std::uint64_t>> expected;
        index.in_slot(static_cast<std::uint16_t>(slot),
                      [&](std::uint32_t hash, Place place) { REQUIRE(found.emplace(hash, place.bits()).second); });
        for (const auto& [key, bits] : all) {
          if (key.slot == slot) expected.emplace(key.hash, bits);
        }
        REQUIRE(found == expected);
      }
    }
  }
}

// Rows of a shard that has one slot in `shards` of all, as a partition of its index sees them.
std::pair<std::size_t, std::size_t> shared_entries_and_bytes(std::uint32_t slot_bits, std::uint32_t shards,
                                                             std::size_t rows) {
  PageIndex index(slot_bits);
  std::mt19937_64 random(1);
  const std::uint32_t owned = std::max(1u, (1u << slot_bits) / shards);
  std::size_t shared = 0;
  for (std::uint64_t row = 1; row <= rows; ++row) {
    const IndexKey key{static_cast<std::uint32_t>(random()), static_cast<std::uint16_t>(random() % owned)};
    bool is_shared = false;
    index.candidates(key, [&](Place) { is_shared = true; });
    shared += is_shared ? 1 : 0;
    index.insert(key, Place(row));
  }
  return {shared, index.bytes()};
}

TEST_CASE("rows share an entry's bits as seldom with a thousand shards as with four") {
  constexpr std::size_t kRows = 150'000;  // of one of 64 partitions
  for (const auto& [slot_bits, shards] : {std::pair(8u, 4u), std::pair(10u, 256u), std::pair(10u, 1024u)}) {
    CAPTURE(shards);
    const auto [shared, bytes] = shared_entries_and_bytes(slot_bits, shards, kRows);
    const std::uint32_t slots = std::max(1u, (1u << slot_bits) / shards);
    MESSAGE(shared << " of " << kRows << " rows, " << double(bytes) / kRows << " bytes a row");
    // n rows of a slot are n^2 / 2 pairs, each alike in one case of 2^32: 3 where a slot has all rows.
    CHECK(static_cast<double>(shared) < 20 + 2 * (0.5 * kRows / slots * kRows / 4294967296.0));
    CHECK(static_cast<double>(bytes) / kRows < 15);
  }
}

TEST_CASE("an index takes about twelve bytes an entry, at the worst point of its growth fifteen") {
  PageIndex index(8);
  std::mt19937_64 random(1);
  double worst = 0;
  double sum = 0;
  constexpr std::uint64_t kRows = 200'000, kFrom = 40'000;
  for (std::uint64_t row = 1; row <= kRows; ++row) {
    index.insert({static_cast<std::uint32_t>(random()), static_cast<std::uint16_t>(random() % 256)}, Place(row));
    if (row < kFrom) continue;
    const double bytes = static_cast<double>(index.bytes()) / static_cast<double>(row);
    worst = std::max(worst, bytes);
    sum += bytes;
  }
  MESSAGE("mean " << sum / (kRows - kFrom) << ", worst " << worst);
  CHECK(sum / (kRows - kFrom) < 12.6);
  CHECK(worst < 15);
}

TEST_CASE("rows that are few share parts, and take no more than twenty bytes each") {
  PageIndex index(10);
  std::mt19937_64 random(3);
  for (std::uint64_t row = 1; row <= 20'000; ++row) {
    index.insert({static_cast<std::uint32_t>(random()), static_cast<std::uint16_t>(random() % 1024)}, Place(row));
    if (row >= 500) REQUIRE(static_cast<double>(index.bytes()) / static_cast<double>(row) < 20);
  }
}

TEST_CASE("an index shrinks when its rows have gone") {
  PageIndex index(8);
  std::mt19937_64 random(4);
  std::vector<IndexKey> keys;
  constexpr std::size_t kRows = 40'000;
  for (std::uint64_t row = 1; row <= kRows; ++row) {
    keys.push_back({static_cast<std::uint32_t>(random()), static_cast<std::uint16_t>(random() % 256)});
    index.insert(keys.back(), Place(row));
  }
  const std::size_t full = index.bytes();
  for (std::size_t i = 0; i < kRows; ++i) {
    if (i % 100 != 0) REQUIRE(index.erase(keys[i], Place(i + 1)));
  }
  CHECK(index.size() == kRows / 100);
  CHECK(index.bytes() < full / 20);
  CHECK(index.bytes() == bytes_of_parts(index));
  for (std::size_t i = 0; i < kRows; i += 100) REQUIRE(candidates(index, keys[i]).contains(i + 1));
}

TEST_CASE("rows that come slot by slot, as a checkpoint brings them, are found as soon as others") {
  constexpr std::uint32_t kSlotBits = 8, kRowsOfSlot = 200;
  PageIndex index(kSlotBits);
  std::mt19937_64 random(2);
  std::uint64_t row = 0;
  std::size_t longest = 0;
  for (std::uint32_t slot = 0; slot < 1u << kSlotBits; ++slot) {
    for (std::uint32_t i = 0; i < kRowsOfSlot; ++i) {
      index.insert({static_cast<std::uint32_t>(random()), static_cast<std::uint16_t>(slot)}, Place(++row));
    }
    for (const auto& part : index.shared()) longest = std::max(longest, part.longest_search());
    for (const auto& part : index.by_slot()) longest = std::max(longest, part.longest_search());
  }
  CHECK(longest <= 40);  // lines; with homes in the order of slots it was hundreds
  CHECK(static_cast<double>(index.bytes()) / static_cast<double>(row) < 15);
}

TEST_CASE("pages waste an eighth at most, and every length of row has one") {
  for (std::size_t image = 28; image <= 4 * 16384 * 4 + 64; image += 4) {
    const auto layout = page_layout(image);
    REQUIRE(layout.has_value());
    REQUIRE(layout->record_bytes == image + 8);
    REQUIRE(layout->rows >= 1);
    REQUIRE(layout->units <= kUnitsInSegment);
    const std::size_t room = layout->page_bytes() - sizeof(PageHeader);
    REQUIRE(layout->rows * std::size_t{layout->record_bytes} <= room);
    if (layout->rows < kMostRowsInPage) REQUIRE((room - layout->rows * layout->record_bytes) * 8 <= room);
  }
  CHECK(page_layout(kSegmentBytes - sizeof(PageHeader) - 8).has_value());
  CHECK_FALSE(page_layout(kSegmentBytes - sizeof(PageHeader) - 7).has_value());
}

}  // namespace
}  // namespace sparserow
