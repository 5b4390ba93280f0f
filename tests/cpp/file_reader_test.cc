// Files that are read whole: their bytes, sizes and hashes from the system's cache and around it.
#include "util/file_reader.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "temporary_folder.h"
#include "util/hash.h"

namespace sparserow {
namespace {

std::string write(const Folder& folder, const std::string& name, std::span<const std::byte> bytes) {
  const std::string path = folder.path() / name;
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  return path;
}

std::vector<std::byte> random_bytes(std::size_t count, std::mt19937_64& random) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST_CASE("a file's bytes and hash are what was written, whatever its size, in the cache and not") {
  const unsigned seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const Folder folder;
  FileReader reader;
  for (const std::size_t around :
       {std::size_t{0}, std::size_t{4096}, std::size_t{1} << 20, std::size_t{4} << 20, (std::size_t{5} << 20) + 8192}) {
    for (const int off : {-1, 0, 1, static_cast<int>(random() % 4000)}) {
      if (around == 0 && off < 0) continue;
      CAPTURE(around);
      CAPTURE(off);
      const std::vector<std::byte> bytes = random_bytes(around + off, random);
      const std::string path = write(folder, "file", bytes);
      for (const bool is_cached : {true, false}) {
        if (!is_cached) REQUIRE(forget_cached(path));
        const auto got = reader.read(path, bytes.size());
        REQUIRE(got.is_ok());
        REQUIRE(got.value().size == bytes.size());
        REQUIRE(std::ranges::equal(got.value().bytes, bytes));
        REQUIRE(got.value().xxh3 == XXH3_64bits(bytes.data(), bytes.size()));
      }
    }
  }
}

TEST_CASE("a file of another size gives that size and no bytes") {
  const Folder folder;
  FileReader reader;
  std::mt19937_64 random(1);
  const std::string path = write(folder, "file", random_bytes(5000, random));
  for (const std::uint64_t asked : {0, 4096, 4999, 5001, 1 << 20}) {
    const auto got = reader.read(path, asked);
    REQUIRE(got.is_ok());
    CHECK(got.value().size == 5000);
    CHECK(got.value().bytes.empty());
  }
}

TEST_CASE("what is no file is refused by its name") {
  const Folder folder;
  FileReader reader;
  const std::string absent = write(folder, "file", {}) + ".absent";
  CHECK(reader.read(absent, 1).status().code() == Code::kNotFound);
  CHECK(reader.read(absent, 1).status().message().starts_with(absent));
  CHECK(reader.read(std::filesystem::temp_directory_path(), 1).status().code() == Code::kFailedPrecondition);
}

TEST_CASE("a file in use keeps its memory, and memory that is used again has the next file alone") {
  const Folder folder;
  FileReader reader;
  std::mt19937_64 random(2);
  const std::vector<std::byte> large = random_bytes(3 << 20, random);
  const std::vector<std::byte> small = random_bytes(70'000, random);
  const std::string first = write(folder, "large", large);
  const std::string second = write(folder, "small", small);
  const std::byte* memory = nullptr;
  {
    const auto held = reader.read(first, large.size());
    REQUIRE(held.is_ok());
    memory = held.value().bytes.data();
    const auto other = reader.read(second, small.size());
    REQUIRE(other.is_ok());
    REQUIRE(other.value().bytes.data() != memory);
    REQUIRE(std::ranges::equal(held.value().bytes, large));
  }
  bool is_used_again = false;
  for (int i = 0; i < 2; ++i) {
    const auto got = reader.read(second, small.size());
    REQUIRE(got.is_ok());
    REQUIRE(std::ranges::equal(got.value().bytes, small));
    REQUIRE(got.value().xxh3 == XXH3_64bits(small.data(), small.size()));
    is_used_again = is_used_again || got.value().bytes.data() == memory;
  }
  CHECK(is_used_again);
  std::vector<FileReader::File> outlives;
  {
    FileReader ends;
    auto got = ends.read(first, large.size());
    REQUIRE(got.is_ok());
    outlives.push_back(std::move(got).value());
  }
  CHECK(std::ranges::equal(outlives[0].bytes, large));
}

TEST_CASE("a file that is cut short or grows while it is read gives another size or what it had, and no fault") {
  const Folder folder;
  FileReader reader;
  std::mt19937_64 random(3);
  const std::vector<std::byte> bytes = random_bytes(8 << 20, random);
  const std::uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
  for (const std::size_t becomes : {std::size_t{0}, std::size_t{4096}, bytes.size() / 2 + 77, bytes.size() + 5}) {
    for (int round = 0; round < 6; ++round) {
      const std::string path = write(folder, "file", bytes);
      if (round % 2 == 0) REQUIRE(forget_cached(path));
      std::atomic<bool> begins{false};
      std::thread writer([&] {
        while (!begins.load()) std::this_thread::yield();
        std::filesystem::resize_file(path, becomes);
      });
      begins = true;
      const auto got = reader.read(path, bytes.size());
      writer.join();
      REQUIRE(got.is_ok());
      const FileReader::File& file = got.value();
      REQUIRE((file.size != bytes.size() || file.xxh3 == hash || becomes < bytes.size()));
      if (file.size == bytes.size() && file.xxh3 == hash) REQUIRE(std::ranges::equal(file.bytes, bytes));
      REQUIRE(reader.read(path, bytes.size()).value().size == becomes);
    }
  }
}

TEST_CASE("threads share a reader") {
  const Folder folder;
  FileReader reader;
  std::mt19937_64 random(4);
  std::vector<std::pair<std::string, std::vector<std::byte>>> files;
  for (int i = 0; i < 6; ++i) {
    files.emplace_back("", random_bytes(random() % (2 << 20) + 1, random));
    files.back().first = write(folder, std::to_string(i), files.back().second);
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t round = 0; round < 20; ++round) {
        const auto& [path, bytes] = files[(thread + round) % files.size()];
        const auto got = reader.read(path, bytes.size());
        if (!got.is_ok() || !std::ranges::equal(got.value().bytes, bytes)) wrong.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace sparserow
