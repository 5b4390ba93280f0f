#include "store/table/arena_pool.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <thread>
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

TEST_CASE("arenas are made huge while runs come, change and go") {
  ArenaPool pool;
  std::atomic<bool> is_over{false};
  std::thread tender([&] {
    while (!is_over) pool.collapse_huge_pages();
  });
  constexpr std::size_t kBytes = 100'000;
  constexpr std::size_t kPage = 4096;
  const auto fill = [](const Run& run) {
    for (std::size_t at = 0; at < run.bytes; at += kPage) run.at[at] = std::byte{run.mark};
  };
  const auto is_filled = [](const Run& run) {
    for (std::size_t at = 0; at < run.bytes; at += kPage) {
      if (run.at[at] != std::byte{run.mark}) return false;
    }
    return true;
  };
  std::vector<Run> runs;
  bool all_filled = true;
  for (unsigned turn = 0; turn < 30; ++turn) {
    while (runs.size() < 100) {  // five arenas, full
      runs.push_back({pool.allocate(kBytes), kBytes, static_cast<unsigned char>(turn + runs.size())});
      fill(runs.back());
    }
    for (Run& run : runs) {
      all_filled = all_filled && is_filled(run);
      ++run.mark;
      fill(run);
    }
    all_filled = all_filled && std::all_of(runs.begin(), runs.end(), is_filled);
    const std::size_t kept = turn % 3 == 0 ? 0 : 30;
    for (; runs.size() > kept; runs.pop_back()) pool.free(runs.back().at, kBytes);
  }
  is_over = true;
  tender.join();
  CHECK(all_filled);
  for (const Run& run : runs) pool.free(run.at, kBytes);
  pool.collapse_huge_pages();
  CHECK(pool.used_bytes() == 0);
  CHECK(pool.resident_bytes() == 0);
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

TEST_CASE("arenas with holes are emptied a few at a time, beside threads that allocate and free") {
  const unsigned seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937 random(seed);
  ArenaPool pool;
  std::vector<Run> runs;
  for (int i = 0; i < 12'000; ++i) {
    const std::size_t bytes = 4000 + random() % 16'000;
    runs.push_back({pool.allocate(bytes), bytes, static_cast<unsigned char>(i)});
    std::memset(runs.back().at, runs.back().mark, bytes);
  }
  CHECK_FALSE(pool.has_holes());
  CHECK(ArenaPool::Emptying(pool).is_empty());
  std::ranges::shuffle(runs, random);
  for (; runs.size() > 5'000; runs.pop_back()) pool.free(runs.back().at, runs.back().bytes);
  const std::uint64_t before = pool.opened_arenas();
  const std::uint64_t used = pool.used_bytes();
  REQUIRE(pool.has_holes());
  {
    const ArenaPool::Emptying from(pool);
    std::vector<std::byte*> small;  // for which there is room elsewhere
    for (int i = 0; i < 1000; ++i) small.push_back(pool.allocate(1000));
    for (std::byte* const at : small) {
      CHECK_FALSE(from.contains(at));
      pool.free(at, 1000);
    }
  }
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    while (!is_over) {
      std::byte* const at = pool.allocate(30'000);
      pool.collapse_huge_pages();
      pool.free(at, 30'000);
    }
  });
  const auto empty = [&] {
    for (int round = 0; pool.has_holes() && round < 100; ++round) {
      const ArenaPool::Emptying from(pool);
      REQUIRE_FALSE(from.is_empty());
      for (Run& run : runs) {
        if (!from.contains(run.at)) continue;
        if (random() % 50 == 0) continue;  // one that cannot move keeps its arena
        std::byte* const at = pool.allocate(run.bytes);
        std::memcpy(at, run.at, run.bytes);
        pool.free(run.at, run.bytes);
        run.at = at;
      }
    }
  };
  empty();
  is_over = true;
  other.join();
  empty();  // because what the other thread frees last may leave one more arena with holes
  CHECK_FALSE(pool.has_holes());
  CHECK(pool.opened_arenas() < before * 6 / 10);
  CHECK(pool.used_bytes() == used);
  for (const Run& run : runs) REQUIRE(is_intact(run));
  for (const Run& run : runs) pool.free(run.at, run.bytes);
  CHECK(pool.used_bytes() == 0);
  CHECK(pool.resident_bytes() == 0);
}

}  // namespace
}  // namespace sparserow
