// The file of a page log: reads that wait for the disk, by io_uring and by threads, and the end of the file.
#include "store/ssd/pages/page_file.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ssd_engines.h"
#include "store/ssd/pages/page_format.h"
#include "temporary_folder.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kSegments = 4;

std::byte expected_at(std::uint32_t segment, std::size_t at) {
  return static_cast<std::byte>(segment * 31 + at * 7 + at / kUnitBytes);
}

TEST_CASE("records are read by io_uring and by threads, from the cache and from the disk") {
  std::string path = (std::filesystem::temp_directory_path() / "sparserow-file-XXXXXX").string();
  REQUIRE(::mkstemp(path.data()) >= 0);
  using Access = PageFile::Access;
  for (const Access access : {Access{false, true}, Access{false, false}, Access{true, true}, Access{true, false}}) {
    CAPTURE(access.is_direct);
    CAPTURE(access.with_uring);
    if (access.is_direct && !has_direct_io(std::filesystem::temp_directory_path())) continue;
    auto made = PageFile::make(path, access);
    REQUIRE(made.is_ok());
    PageFile& file = *made.value();
    const std::unique_ptr<std::byte[], void (*)(void*)> memory(
        static_cast<std::byte*>(std::aligned_alloc(kUnitBytes, kSegmentBytes)), std::free);
    const std::span bytes(memory.get(), kSegmentBytes);
    for (std::uint32_t segment = 1; segment <= kSegments; ++segment) {
      for (std::size_t at = 0; at < bytes.size(); ++at) bytes[at] = expected_at(segment, at);
      REQUIRE(file.reserve(segment).is_ok());
      REQUIRE(file.write(segment, bytes).is_ok());
    }
    REQUIRE(forget_cached(path));
    std::atomic<int> wrong{0};
    SsdReaders readers(4);
    std::vector<std::thread> threads;
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937_64 random(seed);
        for (int turn = 0; turn < 5; ++turn) {
          std::vector<std::vector<std::byte>> out(300);
          std::vector<PageFile::Part> parts;
          for (auto& part : out) {
            part.resize(1 + random() % 9000);
            parts.push_back({1 + static_cast<std::uint32_t>(random() % kSegments), random() % (kSegmentBytes - 9000),
                             std::span(part)});
          }
          file.read_late(parts, readers, [&](std::size_t, int) { ++wrong; });
          for (const PageFile::Part& part : parts) {
            for (std::size_t i = 0; i < part.to.size(); ++i) {
              if (part.to[i] != expected_at(part.segment, part.at + i)) {
                ++wrong;
                break;
              }
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    // Neighbours that share units, as a scan of a slot has them.
    std::vector<std::array<std::byte, 300>> neighbours(20'000);
    std::vector<PageFile::Part> of_scan;
    for (std::size_t i = 0; i < neighbours.size(); ++i) {
      const std::size_t at = i % 3400 * 300;
      of_scan.push_back({1 + static_cast<std::uint32_t>(i / 3400) % kSegments, at, std::span(neighbours[i])});
    }
    file.read_late(of_scan, readers, [&](std::size_t, int) { ++wrong; });
    for (const PageFile::Part& part : of_scan) {
      wrong += part.to[0] != expected_at(part.segment, part.at) ? 1 : 0;
      wrong += part.to[299] != expected_at(part.segment, part.at + 299) ? 1 : 0;
    }
    CHECK(wrong == 0);
    CHECK(file.read(1, 5, neighbours[0], PageFile::Wait::kYes) == PageFile::Got::kAll);
    CHECK(neighbours[0][7] == expected_at(1, 12));
    if (access.is_direct) CHECK(file.read(1, 5, neighbours[0], PageFile::Wait::kNo) == PageFile::Got::kWouldWait);
    // Beyond the end of the file: told with its index, and the others are read.
    std::array<std::byte, 100> first{}, last{}, beyond{};
    const std::vector<PageFile::Part> parts{{1, 0, std::span(first)},
                                            {kSegments + 2, 0, std::span(beyond)},
                                            {kSegments, kSegmentBytes - 100, std::span(last)}};
    std::vector<std::pair<std::size_t, int>> failures;
    file.read_late(parts, readers, [&](std::size_t index, int error) { failures.emplace_back(index, error); });
    CHECK(failures == std::vector<std::pair<std::size_t, int>>{{1, 0}});
    CHECK(first[50] == expected_at(1, 50));
    CHECK(last[50] == expected_at(kSegments, kSegmentBytes - 50));
    CHECK(file.read(1, 0, first, PageFile::Wait::kYes) == PageFile::Got::kAll);
    CHECK(file.read(kSegments + 2, 0, first, PageFile::Wait::kYes) == PageFile::Got::kNotAll);
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace sparserow
