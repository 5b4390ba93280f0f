// The parts of a read are done once each, whoever does them.
#include "store/ssd_readers.h"

#include <doctest/doctest.h>

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
          readers.run(parts, [&](std::size_t part) { ++done[part]; });
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
  readers.run(2, [&](std::size_t part) {
    if (part == 1) second = true;
    while (!second) std::this_thread::yield();  // ends only when two threads work
  });
  CHECK(second);
}

}  // namespace
}  // namespace sparserow
