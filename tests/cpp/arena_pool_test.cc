#include "store/arena_pool.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

namespace sparserow {
namespace {

struct Run {
  std::byte* at;
  std::size_t bytes;
  unsigned char mark;
};

bool is_intact(const Run& run) {
  return std::all_of(run.at, run.at + run.bytes, [&](std::byte b) { return b == std::byte{run.mark}; });
}

TEST_CASE("runs do not overlap, keep their bytes, and are all given back") {
  constexpr unsigned kSeed = 3;
  MESSAGE("seed " << kSeed);
  std::mt19937 random(kSeed);
  ArenaPool pool;
  std::vector<Run> runs;
  std::uint64_t used = 0;
  for (int step = 0; step < 20'000; ++step) {
    if (runs.size() < 40 || random() % 2 == 0) {
      const std::size_t bytes = 1 + random() % (random() % 8 == 0 ? ArenaPool::kMaxRunBytes / 4 : 20'000);
      Run run{pool.allocate(bytes), bytes, static_cast<unsigned char>(step)};
      REQUIRE(run.at != nullptr);
      REQUIRE(reinterpret_cast<std::uintptr_t>(run.at) % ArenaPool::kGranuleBytes == 0);
      std::memset(run.at, run.mark, bytes);
      used += ArenaPool::round_up(bytes);
      runs.push_back(run);
    }
    if (runs.size() > 400 || random() % 3 == 0) {
      std::swap(runs[random() % runs.size()], runs.back());
      REQUIRE(is_intact(runs.back()));
      pool.free(runs.back().at, runs.back().bytes);
      used -= ArenaPool::round_up(runs.back().bytes);
      runs.pop_back();
    }
    REQUIRE(pool.used_bytes() == used);
  }
  std::map<std::byte*, std::size_t> by_address;
  for (const Run& run : runs) by_address[run.at] = run.bytes;
  std::byte* end = nullptr;
  for (const auto& [at, bytes] : by_address) {
    REQUIRE(at >= end);
    end = at + bytes;
  }
  for (const Run& run : runs) {
    REQUIRE(is_intact(run));
    pool.free(run.at, run.bytes);
  }
  CHECK(pool.used_bytes() == 0);
}

TEST_CASE("the largest run fits and freed neighbours coalesce") {
  ArenaPool pool;
  std::byte* first = pool.allocate(ArenaPool::kMaxRunBytes);
  std::byte* second = pool.allocate(ArenaPool::kMaxRunBytes);
  CHECK(std::abs(first - second) == static_cast<std::ptrdiff_t>(ArenaPool::kMaxRunBytes));  // one arena, filled
  pool.free(first, ArenaPool::kMaxRunBytes);
  std::vector<std::byte*> small;
  for (std::size_t i = 0; i < 16; ++i) small.push_back(pool.allocate(ArenaPool::kMaxRunBytes / 16));
  for (std::byte* run : small) CHECK(std::min(first, second) <= run);
  for (std::byte* run : small) pool.free(run, ArenaPool::kMaxRunBytes / 16);
  CHECK(pool.allocate(ArenaPool::kMaxRunBytes) == first);
}

}  // namespace
}  // namespace sparserow
