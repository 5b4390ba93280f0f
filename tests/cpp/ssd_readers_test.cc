// The parts of a read are done once each, whoever does them.
#include "store/ssd/ssd_readers.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace sparserow {
namespace {

TEST_CASE("every part of every caller's read is done once before it returns") {
  for (const std::size_t threads : {0u, 1u, 3u}) {
    SsdReaders readers(threads);
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&] {
        for (std::size_t parts = 0; parts < 40; ++parts) {
          std::vector<int> done(parts);  // read without a lock: run() must have waited for who wrote it
          readers.run(parts, parts % 5, [&](std::size_t part) { ++done[part]; });
          for (const int count : done) wrong += count == 1 ? 0 : 1;
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(wrong == 0);
  }
}

TEST_CASE("a part that waits for another one is not waited for by it") {
  SsdReaders readers(1);
  std::atomic<bool> second{false};
  readers.run(2, 1, [&](std::size_t part) {
    if (part == 1) second = true;
    while (!second) std::this_thread::yield();  // ends only when two threads work
  });
  CHECK(second);
}

TEST_CASE("as many threads work on a read as it asked for") {
  SsdReaders readers(8);
  for (const std::size_t helpers : {0u, 1u, 3u, 20u}) {
    std::atomic<std::size_t> working{0}, most{0};
    readers.run(64, helpers, [&](std::size_t) {
      const std::size_t now = ++working;
      for (std::size_t seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
      }
      const std::size_t enough = std::min<std::size_t>(helpers, 8) + 1;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (most < enough && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for one that should not be there
      --working;
    });
    CHECK(most == std::min<std::size_t>(helpers, 8) + 1);
  }
}

}  // namespace
}  // namespace sparserow
