// The index of a page log against a multimap, with hashes that many entries share and lines that overflow.
#include "store/ssd/pages/page_index.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace sparserow {
namespace {

std::set<std::uint64_t> candidates(const PageIndex& index, std::uint32_t hash) {
  std::set<std::uint64_t> places;
  index.candidates(hash, [&](Place place) { REQUIRE(places.insert(place.bits()).second); });
  return places;
}

TEST_CASE("random operations on an index equal those on a multimap") {
  const std::uint64_t seed = std::random_device()();
  MESSAGE("seed " << seed);
  for (const std::uint32_t mask : {~0u, 0xff00'00ffu, 0x0000'0003u, 0xffff'f000u}) {  // few or crowded hashes
    CAPTURE(mask);
    std::mt19937_64 random(seed);
    PageIndex index(mask == 3 ? 0 : 8);
    std::map<std::uint32_t, std::set<std::uint64_t>> model;
    std::vector<std::pair<std::uint32_t, std::uint64_t>> all;
    const std::size_t most = mask == 3 ? 300 : 4000;
    for (std::uint64_t step = 1; step < 30'000; ++step) {
      const auto act = random() % 10;
      if (act < 6 && all.size() < most) {
        const auto hash = static_cast<std::uint32_t>(random()) & mask;
        const Place place(step << 8 & 0xff'ffff'ffff);
        index.insert(hash, place);
        REQUIRE(model[hash].insert(place.bits()).second);
        all.emplace_back(hash, place.bits());
      } else if (!all.empty()) {
        const std::size_t at = random() % all.size();
        auto& [hash, bits] = all[at];
        if (act < 8) {
          const Place to(bits ^ 0x80);
          const IndexEntry entry = index.find(hash, Place(bits));
          REQUIRE(entry);
          entry.move_to(to);
          CHECK(entry.place() == to);
          CHECK_FALSE(index.find(hash, Place(bits)));
          model[hash].erase(bits);
          model[hash].insert(bits = to.bits());
        } else {
          REQUIRE(index.erase(hash, Place(bits)));
          CHECK_FALSE(index.erase(hash, Place(bits)));
          model[hash].erase(bits);
          all[at] = all.back();
          all.pop_back();
        }
      }
      const auto hash = static_cast<std::uint32_t>(random()) & mask;
      REQUIRE(candidates(index, hash) == model[hash]);
      const IndexEntry only = index.find_only(hash);
      REQUIRE(static_cast<bool>(only) == (model[hash].size() == 1));
      if (only) REQUIRE(only.place().bits() == *model[hash].begin());
    }
    CHECK(index.size() == all.size());
    for (const auto& [hash, places] : model) REQUIRE(candidates(index, hash) == places);
    for (int turn = 0; turn < 200; ++turn) {
      std::uint32_t first = static_cast<std::uint32_t>(random()) & mask;
      std::uint32_t last = static_cast<std::uint32_t>(random()) & mask;
      if (first > last) std::swap(first, last);
      std::set<std::uint64_t> found;
      std::set<std::uint64_t> expected;
      index.in_range(first, last, [&](Place place) { REQUIRE(found.insert(place.bits()).second); });
      for (const auto& [hash_of, places] : model) {
        if (hash_of >= first && hash_of <= last) expected.insert(places.begin(), places.end());
      }
      REQUIRE(found == expected);
    }
  }
}

TEST_CASE("an index takes about twelve bytes an entry, at the worst point of its growth fourteen") {
  PageIndex index(8);
  std::mt19937_64 random(1);
  double worst = 0;
  double sum = 0;
  constexpr std::uint64_t kRows = 200'000, kFrom = 10'000;
  for (std::uint64_t row = 1; row <= kRows; ++row) {
    index.insert(static_cast<std::uint32_t>(random()), Place(row));
    if (row < kFrom) continue;
    const double bytes = static_cast<double>(index.bytes()) / static_cast<double>(row);
    worst = std::max(worst, bytes);
    sum += bytes;
  }
  MESSAGE("mean " << sum / (kRows - kFrom) << ", worst " << worst);
  CHECK(sum / (kRows - kFrom) < 12.6);
  CHECK(worst < 14);
}

TEST_CASE("rows that come slot by slot, as a checkpoint brings them, are found as soon as others") {
  constexpr std::uint32_t kSlotBits = 8, kRowsOfSlot = 200;
  PageIndex index(kSlotBits);
  std::mt19937_64 random(2);
  std::uint64_t row = 0;
  std::size_t longest = 0;
  for (std::uint32_t slot = 0; slot < 1u << kSlotBits; ++slot) {
    for (std::uint32_t i = 0; i < kRowsOfSlot; ++i) {
      const std::uint32_t hash = slot << (32 - kSlotBits) | static_cast<std::uint32_t>(random()) >> kSlotBits;
      index.insert(hash, Place(++row));
    }
    for (const IndexPart& part : index.parts()) longest = std::max(longest, part.longest_search());
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
