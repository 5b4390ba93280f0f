// Places for images of rows: what is touched ahead is used, and places come back.
#include "store/saved_images.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstring>
#include <set>
#include <thread>
#include <vector>

using namespace sparserow;

namespace {

constexpr std::size_t kDataBytes = 500;
constexpr std::size_t kMiB = 1u << 20;

// Takes `chains` of places; returns all places, each with its data written.
std::vector<SavedImage*> taken(SavedImagePool& pool, std::size_t chains) {
  std::vector<SavedImage*> places;
  for (std::size_t i = 0; i < chains; ++i) {
    for (SavedImage* image = pool.take(); image != nullptr; image = image->next) places.push_back(image);
  }
  for (std::size_t i = 0; i < places.size(); ++i) std::memset(places[i]->data(), static_cast<int>(i), kDataBytes);
  return places;
}

void give_all(SavedImagePool& pool, std::vector<SavedImage*>& places) {
  for (std::size_t i = 0; i < places.size(); ++i) places[i]->next = i + 1 < places.size() ? places[i + 1] : nullptr;
  pool.give(places.front(), places.back(), places.size());
}

bool has_page(const SavedImage* image) {
  unsigned char state = 0;
  const auto at = reinterpret_cast<std::uintptr_t>(image) & ~std::uintptr_t{4095};
  REQUIRE(::mincore(reinterpret_cast<void*>(at), 1, &state) == 0);
  return (state & 1) != 0;
}

}  // namespace

TEST_CASE("places are apart from each other, and those that come back are given first") {
  SavedImagePool pool(kDataBytes);
  std::vector<SavedImage*> places = taken(pool, 3000);
  const std::set<SavedImage*> distinct(places.begin(), places.end());
  CHECK(distinct.size() == places.size());
  for (std::size_t i = 0; i < places.size(); ++i) {
    REQUIRE(std::to_integer<unsigned>(*places[i]->data()) == (i & 255));
    REQUIRE(std::to_integer<unsigned>(places[i]->data()[kDataBytes - 1]) == (i & 255));
  }
  give_all(pool, places);
  for (SavedImage* image : taken(pool, 3000)) CHECK(distinct.contains(image));
}

TEST_CASE("pages are touched ahead of the places that are taken, and not before the first") {
  SavedImagePool pool(kDataBytes);
  pool.touch_ahead(4 * kMiB);
  CHECK(pool.touched_bytes() == 0);
  std::vector<SavedImage*> places = taken(pool, 1);
  pool.touch_ahead(4 * kMiB);
  CHECK(pool.touched_bytes() == 4 * kMiB);
  pool.touch_ahead(4 * kMiB);
  CHECK(pool.touched_bytes() == 4 * kMiB);
  while (pool.touched_bytes() > 0) static_cast<void>(taken(pool, 1));
  SavedImage* const chain = pool.take();  // of the region that was touched
  for (SavedImage* image = chain; image != nullptr; image = image->next) CHECK(has_page(image));
  give_all(pool, places);
  pool.clear();
  CHECK(pool.touched_bytes() == 0);
  CHECK(pool.take() != nullptr);  // it goes on
}

TEST_CASE("free places need no pages ahead") {
  SavedImagePool pool(kDataBytes);
  std::vector<SavedImage*> places = taken(pool, 2000);  // 8 MB
  give_all(pool, places);
  pool.touch_ahead(4 * kMiB);
  CHECK(pool.touched_bytes() == 0);
}

TEST_CASE("places larger than a region are taken and touched ahead") {
  SavedImagePool pool(kMiB);
  SavedImage* const chain = pool.take();
  REQUIRE(chain != nullptr);
  std::memset(chain->data(), 1, kMiB);
  pool.touch_ahead(4 * kMiB);
  std::memset(pool.take()->data(), 2, kMiB);
}

TEST_CASE("one thread touches ahead while others take and give") {
  SavedImagePool pool(kDataBytes);
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&pool] {
      for (int round = 0; round < 40; ++round) {
        std::vector<SavedImage*> places = taken(pool, 200);
        give_all(pool, places);
      }
    });
  }
  for (int round = 0; round < 100; ++round) pool.touch_ahead(4 * kMiB);
  for (std::thread& thread : threads) thread.join();
}
