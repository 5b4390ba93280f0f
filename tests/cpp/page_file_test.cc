// The file of a page log: reads that wait for the disk, by io_uring and by threads, and the end of the file.
#include "store/ssd/pages/page_file.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "store/ssd/pages/page_format.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kSegments = 4;

std::byte expected_at(std::uint32_t segment, std::size_t at) {
  return static_cast<std::byte>(segment * 31 + at * 7 + at / kUnitBytes);
}

void forget_cached(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(file >= 0);
  REQUIRE(::fsync(file) == 0);
  REQUIRE(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0);
  ::close(file);
}

TEST_CASE("records are read by io_uring and by threads, from the cache and from the disk") {
  std::string path = (std::filesystem::temp_directory_path() / "sparserow-file-XXXXXX").string();
  REQUIRE(::mkstemp(path.data()) >= 0);
  for (const bool with_uring : {true, false}) {
    CAPTURE(with_uring);
    auto made = PageFile::make(path, with_uring);
    REQUIRE(made.is_ok());
    PageFile& file = *made.value();
    std::vector<std::byte> bytes(kSegmentBytes);
    for (std::uint32_t segment = 1; segment <= kSegments; ++segment) {
      for (std::size_t at = 0; at < bytes.size(); ++at) bytes[at] = expected_at(segment, at);
      REQUIRE(file.reserve(segment).is_ok());
      REQUIRE(file.write(segment, bytes).is_ok());
    }
    forget_cached(path);
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
