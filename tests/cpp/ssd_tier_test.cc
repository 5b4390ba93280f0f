// The engines of the SSD tier against a map: random batches, visits of slots, dropped tables, readers beside writers.
// Pages alone: keys whose hashes are the same, a full disk, damage, and garbage that is collected.
#include "store/ssd/ssd_tier.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "ssd_engines.h"
#include "store/open_ssd_tier.h"
#include "store/ssd/pages/page_format.h"
#include "temporary_folder.h"

namespace sparserow {
namespace {

namespace fs = std::filesystem;
using Key = std::pair<std::uint32_t, std::uint64_t>;  // table, key
using Image = std::vector<std::byte>;

constexpr std::uint32_t kSlots = 256;

std::unique_ptr<SsdTier> open(const Folder& folder, std::uint64_t max_bytes = 0, std::uint32_t slots = kSlots) {
  auto opened = open_ssd_tier({.path = folder.path(),
                               .max_bytes = max_bytes,
                               .engine = ssd_engine,
                               .slot_count = slots,
                               .direct_io = ssd_direct_io});
  INFO(opened.status().message());
  REQUIRE(opened.is_ok());
  return std::move(opened).value();
}

SsdKey ssd_key_of(const Key& key, std::uint32_t slots = kSlots) {
  return ssd_key(slot_of(row_hash(key.first, key.second), slots), key.first, key.second);
}

// The image says which row and which write of it this is.
Image image_of(const Key& key, std::uint64_t turn, std::size_t bytes) {
  Image image(bytes, static_cast<std::byte>(key.second * 31 + turn));
  std::memcpy(image.data(), &key.second, sizeof key.second);
  std::memcpy(image.data() + sizeof key.second, &turn, sizeof turn);
  return image;
}

bool is_before(const SsdKey& left, const SsdKey& right) {
  return std::memcmp(left.data(), right.data(), left.size()) < 0;
}

std::vector<Image> read(SsdTier& ssd, std::vector<SsdKey> keys) {
  SsdImages images;
  const Status status = ssd.read(keys, images);
  INFO(status.message());
  REQUIRE(status.is_ok());
  std::vector<Image> out;
  for (std::size_t i = 0; i < keys.size(); ++i) out.emplace_back(images.at(i).begin(), images.at(i).end());
  return out;
}

class Model {
 public:
  explicit Model(SsdTier& ssd, std::uint32_t slots = kSlots) : ssd_(ssd), slots_(slots) {}

  void put(SsdBatch& batch, const Key& key, std::uint64_t turn, std::size_t bytes) {
    const auto before = rows.contains(key) ? SsdBatch::Before::kImage : SsdBatch::Before::kNothing;
    rows[key] = image_of(key, turn, bytes);
    batch.put(ssd_key_of(key, slots_), rows[key], before);
  }
  void erase(SsdBatch& batch, const Key& key) {
    rows.erase(key);
    batch.erase(ssd_key_of(key, slots_));
  }
  void write(SsdBatch& batch) {
    const Status status = ssd_.write(batch);
    INFO(status.message());
    REQUIRE(status.is_ok());
    batch.clear();
  }
  void check(const std::vector<Key>& keys) const {
    std::vector<Key> sorted = keys;
    std::sort(sorted.begin(), sorted.end(), [&](const Key& left, const Key& right) {
      return is_before(ssd_key_of(left, slots_), ssd_key_of(right, slots_));
    });
    std::vector<SsdKey> asked;
    for (const Key& key : sorted) asked.push_back(ssd_key_of(key, slots_));
    const auto images = read(ssd_, asked);
    for (std::size_t i = 0; i < sorted.size(); ++i) {
      const auto found = rows.find(sorted[i]);
      REQUIRE(images[i] == (found == rows.end() ? Image{} : found->second));
    }
  }
  void check_slot(std::uint32_t slot, std::uint32_t table) const {
    std::map<std::uint64_t, Image> visited;
    std::uint64_t last = 0;
    const auto visit = [&](std::uint64_t key, std::span<const std::byte> image) -> Result<bool> {
      REQUIRE(visited.emplace(key, Image(image.begin(), image.end())).second);
      REQUIRE(std::exchange(last, row_hash(table, key)) < row_hash(table, key));
      return true;
    };
    const Status status = ssd_.visit_slot(slot, table, 0, visit);
    INFO(status.message());
    REQUIRE(status.is_ok());
    std::map<std::uint64_t, Image> expected;
    for (const auto& [key, image] : rows) {
      if (key.first == table && slot_of(row_hash(table, key.second), slots_) == slot) expected[key.second] = image;
    }
    REQUIRE(visited == expected);
  }

  std::map<Key, Image> rows;

 private:
  SsdTier& ssd_;
  std::uint32_t slots_;
};

TEST_CASE("random batches equal a map, and garbage does not pile up") {
  const std::uint64_t seed = std::random_device()();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const Folder folder;
  const auto ssd = open(folder);
  Model model(*ssd);
  constexpr std::uint64_t kKeys = 9000;
  const std::map<std::uint32_t, std::size_t> bytes{{1, 300}, {2, 1504}, {3, 40}, {4, 20'000}};
  std::uint64_t turn = 0;
  const auto random_key = [&] {
    const std::uint32_t table = random() % 40 == 0 ? 4 : 1 + static_cast<std::uint32_t>(random() % 3);
    return Key{table, random() % (table == 4 ? 300 : kKeys)};
  };
  for (int step = 0; step < 500; ++step) {
    SsdBatch batch;
    std::map<Key, bool> chosen;  // each key of a batch once
    for (std::size_t i = 0; i < 1 + random() % 400; ++i) chosen[random_key()] = random() % 8 != 0;
    for (const auto& [key, is_put] : chosen) {
      if (is_put) model.put(batch, key, ++turn, bytes.at(key.first));
      if (!is_put && model.rows.contains(key)) model.erase(batch, key);
    }
    model.write(batch);
    std::vector<Key> keys;
    for (int i = 0; i < 200; ++i) keys.push_back(random_key());
    model.check(keys);
    if (step % 20 == 0) model.check_slot(static_cast<std::uint32_t>(random() % kSlots), 1 + random() % 4);
    if (step % 100 == 50) REQUIRE(ssd->flush().is_ok());
    if (step % 170 == 100) {
      REQUIRE(ssd->erase_table(2, kSlots).is_ok());
      std::erase_if(model.rows, [](const auto& row) { return row.first.first == 2; });
    }
  }
  std::vector<Key> all;
  for (const auto& [table, image] : bytes) {
    for (std::uint64_t key = 0; key < (table == 4 ? 300 : kKeys); ++key) all.emplace_back(table, key);
  }
  model.check(all);
  for (std::uint32_t slot = 0; slot < kSlots; slot += 7) model.check_slot(slot, 1);
}

TEST_CASE("readers and visitors beside a writer that rewrites everything see whole rows of some write") {
  const Folder folder;
  const auto ssd = open(folder);
  constexpr std::uint64_t kKeys = 20'000;
  constexpr std::size_t kBytes = 1000;
  SsdBatch batch;
  for (std::uint64_t key = 0; key < kKeys; ++key) {
    batch.put(ssd_key_of({1, key}), image_of({1, key}, 0, kBytes), SsdBatch::Before::kNothing);
  }
  REQUIRE(ssd->write(batch).is_ok());
  std::atomic<bool> is_over{false};
  std::atomic<std::uint64_t> wrong{0}, seen{0};
  const auto look_at = [&](std::uint64_t key, std::span<const std::byte> image) {
    std::uint64_t turn = 0;
    if (image.size() == kBytes) std::memcpy(&turn, image.data() + sizeof key, sizeof turn);
    const Image expected = image_of({1, key}, turn, kBytes);
    if (!std::equal(image.begin(), image.end(), expected.begin(), expected.end())) ++wrong;
    ++seen;
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(static_cast<std::uint64_t>(thread));
      while (!is_over) {
        if (thread == 2) {
          const auto slot = static_cast<std::uint32_t>(random() % kSlots);
          std::uint64_t rows = 0;
          const auto visit = [&](std::uint64_t key, std::span<const std::byte> image) -> Result<bool> {
            look_at(key, image);
            ++rows;
            return true;
          };
          const Status status = ssd->visit_slot(slot, 1, 0, visit);
          std::uint64_t expected = 0;
          for (std::uint64_t key = 0; key < kKeys; ++key) expected += slot_of(row_hash(1, key), kSlots) == slot ? 1 : 0;
          if (!status.is_ok() || rows != expected) ++wrong;
          continue;
        }
        std::vector<std::pair<SsdKey, std::uint64_t>> keys(200);
        for (auto& [ssd_key, key] : keys) ssd_key = ssd_key_of({1, key = random() % kKeys});
        std::vector<SsdKey> asked;
        for (const auto& key : keys) asked.push_back(key.first);
        SsdImages images;
        if (!ssd->read(asked, images).is_ok()) ++wrong;
        for (std::size_t i = 0; i < keys.size(); ++i) look_at(keys[i].second, images.at(i));
      }
    });
  }
  std::mt19937_64 random(9);
  for (std::uint64_t turn = 1; turn <= 300; ++turn) {
    batch.clear();
    std::map<std::uint64_t, bool> chosen;
    for (int i = 0; i < 600; ++i) chosen[random() % kKeys] = true;
    for (const auto& [key, is_chosen] : chosen) {
      batch.put(ssd_key_of({1, key}), image_of({1, key}, turn, kBytes), SsdBatch::Before::kImage);
    }
    REQUIRE(ssd->write(batch).is_ok());
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(seen > 1000);
  if (ssd_engine == SsdEngine::kPages) {
    CHECK(ssd->stats().disk_bytes_written > 0);
    CHECK(ssd->stats().file_bytes < 3 * kKeys * kBytes);  // 180 MB went through it
  }
}

TEST_CASE("a visitor that waits holds nothing: what is written meanwhile is reclaimed") {
  constexpr std::uint64_t kKeys = 8000, kTimes = 10, kMost = 24 << 20;
  constexpr std::size_t kBytes = 500;
  const Folder folder;
  const bool is_pages = ssd_engine == SsdEngine::kPages;
  const auto ssd = open(folder, is_pages ? 32 << 20 : 0, 2);  // eight times what is live
  const auto write_all = [&](std::uint64_t turn) {
    SsdBatch batch;
    for (std::uint64_t key = 0; key < kKeys; ++key) {
      const auto before = turn == 0 ? SsdBatch::Before::kNothing : SsdBatch::Before::kImage;
      batch.put(ssd_key_of({1, key}, 2), image_of({1, key}, turn, kBytes), before);
      if (batch.writes().size() < 500) continue;
      const Status status = ssd->write(batch);
      INFO(status.message());
      REQUIRE(status.is_ok());
      batch.clear();
    }
  };
  write_all(0);
  std::uint64_t most = 0;
  std::set<std::uint64_t> seen;
  std::uint64_t older = 0;
  const auto visit = [&](std::uint64_t key, std::span<const std::byte> image) -> Result<bool> {
    if (seen.empty()) {
      std::thread writer([&] {
        for (std::uint64_t turn = 1; turn <= kTimes; ++turn) {
          write_all(turn);
          most = std::max(most, ssd->stats().memory_bytes);
        }
      });
      writer.join();
    }
    std::uint64_t turn = 0;
    std::memcpy(&turn, image.data() + sizeof key, sizeof turn);
    older += turn < kTimes ? 1 : 0;
    REQUIRE(seen.insert(key).second);
    return true;
  };
  REQUIRE(ssd->visit_slot(0, 1, 0, visit).is_ok());
  std::uint64_t expected = 0;
  for (std::uint64_t key = 0; key < kKeys; ++key) expected += slot_of(row_hash(1, key), 2) == 0 ? 1 : 0;
  CHECK(seen.size() == expected);
  if (is_pages) CHECK(older <= 256);  // those that were read before the writes; RocksDB shows a state of one moment
  MESSAGE("memory " << most << " bytes, file " << ssd->stats().file_bytes);
  if (is_pages) CHECK(most < kMost);
}

TEST_CASE("a visit goes on from any hash, and ends where it is told to") {
  const std::uint64_t seed = std::random_device()();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const Folder folder;
  const auto ssd = open(folder, 0, 4);
  SsdBatch batch;
  constexpr std::uint64_t kKeys = 30'000;
  for (std::uint64_t key = 0; key < kKeys; ++key) {
    batch.put(ssd_key_of({1, key}, 4), image_of({1, key}, 0, 40), SsdBatch::Before::kNothing);
  }
  REQUIRE(ssd->write(batch).is_ok());
  std::vector<std::uint64_t> hashes;
  for (std::uint64_t key = 0; key < kKeys; ++key) {
    if (const std::uint64_t hash = row_hash(1, key); slot_of(hash, 4) == 2) hashes.push_back(hash);
  }
  std::sort(hashes.begin(), hashes.end());
  for (int turn = 0; turn < 30; ++turn) {
    const std::size_t begin = random() % hashes.size();
    const std::size_t most = random() % 6000 + 1;
    const std::uint64_t from = hashes[begin] - (turn % 2 == 0 ? 0 : 1);
    std::vector<std::uint64_t> found;
    const auto visit = [&](std::uint64_t key, std::span<const std::byte>) -> Result<bool> {
      found.push_back(row_hash(1, key));
      return found.size() < most;
    };
    REQUIRE(ssd->visit_slot(2, 1, from, visit).is_ok());
    const std::size_t count = std::min(most, hashes.size() - begin);
    const auto first = hashes.begin() + static_cast<std::ptrdiff_t>(begin);
    REQUIRE(found == std::vector(first, first + static_cast<std::ptrdiff_t>(count)));
  }
}

TEST_CASE("a walk over a table meets every row, those too that are moved meanwhile") {
  constexpr std::uint64_t kKeys = 30'000;
  constexpr std::size_t kBytes = 500;
  const Folder folder;
  const auto ssd = open(folder, 0, 2);
  const auto write = [&](std::uint64_t turn, std::uint64_t begin, std::uint64_t step) {
    SsdBatch batch;
    for (std::uint64_t key = begin; key < kKeys; key += step) {
      const auto before = turn == 0 ? SsdBatch::Before::kNothing : SsdBatch::Before::kImage;
      batch.put(ssd_key_of({1, key}, 2), image_of({1, key}, turn, kBytes), before, {.steps = 7});
      batch.put(ssd_key_of({2, key}, 2), image_of({2, key}, turn, kBytes), before, {.steps = 7});
      if (batch.writes().size() < 500) continue;
      REQUIRE(ssd->write(batch).is_ok());
      batch.clear();
    }
    REQUIRE(ssd->write(batch).is_ok());
  };
  write(0, 0, 1);
  std::set<std::uint64_t> seen;
  std::uint64_t visits = 0;
  std::uint64_t turn = 0;
  const auto visit = [&](std::uint64_t key, std::span<const std::byte> image) -> Result<std::optional<SsdStamps>> {
    if (++visits % 500 == 0 && turn < 20) write(++turn, 1, 2);  // odd keys: the even ones are moved as these go
    seen.insert(key);
    CHECK(image.size() == kBytes);
    return std::optional(SsdStamps{.steps = 7});
  };
  REQUIRE(ssd->visit_table(1, 2, nullptr, visit).is_ok());
  for (std::uint64_t key = 0; key < kKeys; key += 2) REQUIRE(seen.contains(key));
  CHECK(turn == 20);  // of each odd key
  CHECK(visits >= kKeys / 2);
  MESSAGE("visits " << visits << " of " << kKeys << " rows");
  visits = 0;
  REQUIRE(ssd->visit_table(1, 2, nullptr,
                           [&](std::uint64_t, std::span<const std::byte>) {
                             ++visits;
                             return Result<std::optional<SsdStamps>>(visits < 10 ? std::optional(SsdStamps{})
                                                                                 : std::nullopt);
                           })
              .is_ok());
  CHECK(visits == 10);  // nullopt ends it
  const auto refuse = [](std::uint64_t, std::span<const std::byte>) {
    return Result<std::optional<SsdStamps>>(Status(Code::kInternal, "no"));
  };
  CHECK(ssd->visit_table(1, 2, nullptr, refuse).code() == Code::kInternal);
  CHECK(ssd->visit_table(9, 2, nullptr, refuse).is_ok());  // it has no rows
}

TEST_CASE("a walk passes over segments without an old row, and learns what each has") {
  if (ssd_engine != SsdEngine::kPages) return;
  constexpr std::uint64_t kKeys = 20'000;
  constexpr std::size_t kBytes = 500;
  const Folder folder;
  const auto ssd = open(folder, 0, 2);
  const auto stamps_of = [](std::uint64_t turn) { return SsdStamps{.steps = static_cast<std::uint32_t>(turn)}; };
  const auto write = [&](std::uint32_t table, std::uint64_t begin, std::uint64_t end, std::uint64_t turn,
                         SsdBatch::Before before) {
    SsdBatch batch;
    for (std::uint64_t key = begin; key < end; ++key) {
      batch.put(ssd_key_of({table, key}, 2), image_of({table, key}, turn, kBytes), before, stamps_of(turn));
    }
    REQUIRE(ssd->write(batch).is_ok());
  };
  const auto visits = [&](std::uint32_t before) {
    std::set<std::uint64_t> seen;
    const auto wants = [&](SsdStamps oldest) { return oldest.steps < before; };
    const auto visit = [&](std::uint64_t key, std::span<const std::byte> image) -> Result<std::optional<SsdStamps>> {
      std::uint64_t turn = 0;
      std::memcpy(&turn, image.data() + sizeof key, sizeof turn);
      CHECK(seen.insert(key).second);
      return std::optional(stamps_of(turn));
    };
    REQUIRE(ssd->visit_table(1, 2, wants, visit).is_ok());
    return seen;
  };
  constexpr std::size_t kInSegment = kSegmentBytes / kBytes;
  write(1, 0, kKeys / 2, 5, SsdBatch::Before::kNothing);
  write(1, kKeys / 2, kKeys, 9, SsdBatch::Before::kNothing);
  write(2, 0, kKeys, 1, SsdBatch::Before::kNothing);  // of another table, whose stamps say nothing here
  CHECK(visits(5).empty());
  const std::set<std::uint64_t> old = visits(6);
  for (std::uint64_t key = 0; key < kKeys / 2; ++key) REQUIRE(old.contains(key));
  CHECK(old.size() <= kKeys / 2 + 2 * kInSegment);
  CHECK(visits(100).size() == kKeys);
  write(1, 0, 100, 3, SsdBatch::Before::kImage);
  write(1, 0, 100, 9, SsdBatch::Before::kImage);  // the older ones are in a segment still, which says 3
  write(2, 0, 3 * kInSegment, 1, SsdBatch::Before::kImage);
  CHECK(ssd->flush().is_ok());
  CHECK(visits(4).size() <= 2 * kInSegment);
  CHECK(visits(4).empty());  // what was read is known
  CHECK(ssd->stats().rows_visited <= 2 * kKeys);
}

TEST_CASE("a walk over a table that is dropped and made anew meanwhile says nothing of the new one's rows") {
  if (ssd_engine != SsdEngine::kPages) return;
  constexpr std::uint64_t kKeys = 20'000;
  const Folder folder;
  const auto ssd = open(folder, 0, 2);
  const auto write = [&](std::uint32_t step) {
    SsdBatch batch;
    for (std::uint64_t key = 0; key < kKeys; ++key) {
      batch.put(ssd_key_of({1, key}, 2), image_of({1, key}, 0, 500), SsdBatch::Before::kNothing, {.steps = step});
    }
    REQUIRE(ssd->write(batch).is_ok());
  };
  write(1);
  std::uint64_t visits = 0;
  const auto visit = [&](std::uint64_t, std::span<const std::byte>) -> Result<std::optional<SsdStamps>> {
    if (visits++ == 0) {
      REQUIRE(ssd->erase_table(1, 2).is_ok());
      write(1);  // the first of them in the segment that was open when the walk began
    }
    return std::optional(SsdStamps{.steps = 9});
  };
  REQUIRE(ssd->visit_table(1, 2, nullptr, visit).is_ok());
  std::set<std::uint64_t> seen;
  const auto note = [&](std::uint64_t key, std::span<const std::byte>) -> Result<std::optional<SsdStamps>> {
    seen.insert(key);
    return std::optional(SsdStamps{.steps = 1});
  };
  REQUIRE(ssd->visit_table(1, 2, [](SsdStamps oldest) { return oldest.steps <= 1; }, note).is_ok());
  CHECK(seen.size() == kKeys);
}

TEST_CASE("of the images of one key in a batch the last one stays") {
  const Folder folder;
  const auto ssd = open(folder);
  Model model(*ssd);
  SsdBatch batch;
  std::vector<Key> keys;
  for (std::uint64_t key = 0; key < 300; ++key) keys.emplace_back(3, key);
  for (std::uint64_t turn = 0; turn < 8; ++turn) {
    for (const Key& key : keys) model.put(batch, key, turn, 100);
    if (turn % 3 != 1) model.write(batch);  // one batch has the keys twice
    for (std::size_t i = 0; turn > 4 && i < 50; ++i) {
      if (turn % 3 != 1 && model.rows.contains(keys[i])) model.erase(batch, keys[i]);
      if (turn % 3 != 1) batch.erase(ssd_key_of(keys[i]));
    }
    model.write(batch);
    model.check(keys);
  }
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) model.check_slot(slot, 3);
}

TEST_CASE("deletions and rewrites of known rows read nothing") {
  if (ssd_engine != SsdEngine::kPages) return;
  const Folder folder;
  const auto ssd = open(folder, 0, 64);
  Model model(*ssd, 64);
  SsdBatch batch;
  std::vector<Key> keys;
  for (std::uint64_t key = 0; key < 20'000; ++key) keys.emplace_back(3, key);
  for (const Key& key : keys) model.put(batch, key, 0, 100);
  model.write(batch);
  REQUIRE(ssd->flush().is_ok());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i % 3 == 0) model.erase(batch, keys[i]);
    if (i % 3 == 1) model.put(batch, keys[i], 1, 100);
  }
  const SsdStats before = ssd->stats();
  model.write(batch);
  CHECK(ssd->stats().keys_read == 0);
  CHECK(ssd->stats().disk_bytes_read == before.disk_bytes_read);
  model.check(keys);
}

TEST_CASE("keys whose hashes are the same are told apart") {
  constexpr std::uint32_t kTable = 5, kTwoSlots = 2;
  const Folder folder;
  const auto ssd = open(folder, 0, kTwoSlots);
  Model model(*ssd, kTwoSlots);
  std::mt19937_64 random(3);
  std::vector<Key> keys;  // ten hashes of the index, each of 40 keys
  for (std::uint64_t hash = 0; hash < 10; ++hash) {
    for (std::uint64_t high = 0; high < 40; ++high) {
      keys.emplace_back(kTable, key_of_hash(kTable, hash << 40 | high << 20 | 0x12345));
    }
  }
  SsdBatch batch;
  for (std::uint64_t turn = 0; turn < 60; ++turn) {
    std::map<Key, bool> chosen;
    for (int i = 0; i < 40; ++i) chosen[keys[random() % keys.size()]] = random() % 4 != 0;
    for (const auto& [key, is_put] : chosen) {
      if (is_put) model.put(batch, key, turn, 200);
      if (!is_put && model.rows.contains(key)) model.erase(batch, key);
    }
    model.write(batch);
    if (turn % 20 == 10) REQUIRE(ssd->flush().is_ok());
    model.check(keys);
  }
  // A row that the caller believes to be new, while an image of it is there: the image is replaced.
  for (const Key& key : keys) batch.put(ssd_key_of(key, kTwoSlots), image_of(key, 99, 200), SsdBatch::Before::kNothing);
  REQUIRE(ssd->write(batch).is_ok());
  for (const Key& key : keys) model.rows[key] = image_of(key, 99, 200);
  model.check(keys);
  model.check_slot(0, kTable);
}

TEST_CASE("files are bounded: what is garbage makes room, and what is not is refused whole") {
  if (ssd_engine != SsdEngine::kPages) return;  // RocksDB's bound is tested in tiering_test.cc
  constexpr std::uint64_t kMost = 32 * kSegmentBytes;
  constexpr std::size_t kBytes = 1000;
  const Folder folder;
  const auto ssd = open(folder, kMost);
  Model model(*ssd);
  std::uint64_t next = 0;
  SsdBatch batch;
  Status status;
  std::vector<Key> refused;
  while (status.is_ok()) {
    batch.clear();
    refused.clear();
    for (int i = 0; i < 700; ++i) {
      refused.emplace_back(1, next++);
      batch.put(ssd_key_of(refused.back()), image_of(refused.back(), 0, kBytes), SsdBatch::Before::kNothing);
    }
    status = ssd->write(batch);
    if (status.is_ok()) {
      for (const Key& key : refused) model.rows[key] = image_of(key, 0, kBytes);
    }
    REQUIRE(next < kMost / kBytes);
  }
  CHECK(status.code() == Code::kResourceExhausted);
  CHECK(status.message().find("ssd_bytes") != std::string::npos);
  CHECK(ssd->stats().file_bytes <= kMost);
  CHECK(model.rows.size() * kBytes > kMost * 3 / 4);
  model.check(refused);  // none of them is there
  // Rewriting goes on at nine tenths of the bound, by collection.
  batch.clear();
  std::vector<Key> all;
  for (const auto& [key, image] : model.rows) all.push_back(key);
  for (std::size_t i = 0; i < all.size() / 5; ++i) model.erase(batch, all[i * 5]);
  model.write(batch);
  std::mt19937_64 random(4);
  for (std::uint64_t turn = 1; turn < 150; ++turn) {
    std::map<Key, bool> chosen;
    for (int i = 0; i < 300; ++i) {
      if (const Key key = all[random() % all.size()]; model.rows.contains(key)) chosen[key] = true;
    }
    for (const auto& [key, is_chosen] : chosen) model.put(batch, key, turn, kBytes);
    model.write(batch);
  }
  CHECK(ssd->stats().file_bytes <= kMost);
  model.check(all);
}

TEST_CASE("a damaged page is told and never taken for an absent row") {
  if (ssd_engine != SsdEngine::kPages) return;
  const Folder folder;
  const auto ssd = open(folder);
  Model model(*ssd);
  SsdBatch batch;
  std::vector<Key> keys;
  for (std::uint64_t key = 0; key < 20'000; ++key) keys.emplace_back(1, key);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    model.put(batch, keys[i], 0, 300);
    if (i % 1000 == 999) model.write(batch);
  }
  REQUIRE(ssd->flush().is_ok());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (ssd->stats().background_jobs > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  {
    std::fstream file(fs::path(folder.path()) / "rows" / "pages", std::ios::in | std::ios::out | std::ios::binary);
    // The keys of the first records of many pages; images have checksums of their own (row_codec.h).
    for (std::uint64_t at = kSegmentBytes; at < 5 * kSegmentBytes; at += kUnitBytes) {
      file.seekp(static_cast<std::streamoff>(at + sizeof(PageHeader)));
      file.put('!');
    }
  }
  int damaged = 0;
  int absent = 0;
  for (const Key& key : keys) {
    SsdImages images;
    const std::vector<SsdKey> asked{ssd_key_of(key)};
    const Status status = ssd->read(asked, images);
    if (status.code() == Code::kDataLoss) {
      ++damaged;
      CHECK(status.message().find("checksum") != std::string::npos);
    } else {
      REQUIRE(status.is_ok());
      absent += images.at(0).empty() ? 1 : 0;
    }
  }
  CHECK(damaged > 500);
  CHECK(absent == 0);
}

TEST_CASE("what waits to be written and the index are what pages have in memory") {
  if (ssd_engine != SsdEngine::kPages) return;
  const Folder folder;
  const auto ssd = open(folder);
  CHECK(ssd->index_bytes() == 0);
  SsdBatch batch;
  for (std::uint64_t key = 0; key < 50'000; ++key) {
    batch.put(ssd_key_of({1, key}), image_of({1, key}, 0, 100), SsdBatch::Before::kNothing);
  }
  REQUIRE(ssd->write(batch).is_ok());
  CHECK(ssd->index_bytes() > 50'000 * 9);
  CHECK(ssd->index_bytes() < 50'000 * 15);
  REQUIRE(ssd->flush().is_ok());
  CHECK(ssd->stats().memory_bytes <= ssd->index_bytes() + 16 * kSegmentBytes);
  REQUIRE(ssd->erase_table(1, kSlots).is_ok());
  CHECK(ssd->index_bytes() == 0);
  CHECK(ssd->stats().garbage_bytes + ssd->stats().file_bytes < 40 * kSegmentBytes);
}

TEST_CASE("rows that the system's cache has not are counted as waited, and with direct I/O all are") {
  if (ssd_engine != SsdEngine::kPages) return;
  const Folder folder;
  const auto ssd = open(folder);
  SsdBatch batch;
  std::vector<SsdKey> keys;
  for (std::uint64_t key = 0; key < 20'000; ++key) {
    batch.put(ssd_key_of({1, key}), image_of({1, key}, 0, 300), SsdBatch::Before::kNothing);
    if (key % 100 == 0) keys.push_back(ssd_key_of({1, key}));
  }
  std::sort(keys.begin(), keys.end());
  REQUIRE(ssd->write(batch).is_ok());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (ssd->stats().background_jobs > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(ssd->waited_share() == 1);  // too few were read to tell
  const auto waited_of_next = [&] {
    const std::uint64_t before = ssd->stats().rows_waited;
    SsdImages images;
    REQUIRE(ssd->read(keys, images).is_ok());
    return ssd->stats().rows_waited - before;
  };
  std::uint64_t waited = 0;
  while (waited <= keys.size() / 2 && std::chrono::steady_clock::now() < deadline) {  // the system may decline advice
    REQUIRE(forget_cached(fs::path(folder.path()) / "rows" / "pages"));
    waited = waited_of_next();
  }
  CHECK(waited > keys.size() / 2);  // the others share a unit, or are in memory still
  const std::uint64_t again = waited_of_next();
  CHECK((ssd_direct_io ? again > keys.size() / 2 : again == 0));
  for (int turn = 0; turn < 200; ++turn) static_cast<void>(waited_of_next());
  CHECK((ssd_direct_io ? ssd->waited_share() > 0.5 : ssd->waited_share() < 0.01));
}

TEST_CASE("direct I/O is refused by name where the engine or the file system has none") {
  if (ssd_direct_io) return;
  const Folder folder;
  if (ssd_engine == SsdEngine::kRocksdb) {
    const auto refused = open_ssd_tier({.path = folder.path(), .engine = ssd_engine, .direct_io = true}).status();
    CHECK(refused.code() == Code::kInvalidArgument);
    CHECK(refused.message().starts_with("ssd_direct_io: true is not allowed with ssd_engine rocksdb"));
    return;
  }
  const fs::path in_memory = fs::path("/dev/shm") / ("sparserow-direct-" + std::to_string(::getpid()));
  std::error_code error;
  if (!fs::create_directory(in_memory, error) || has_direct_io(in_memory)) {
    MESSAGE("no file system without direct I/O is here");
  } else {
    const auto refused = open_ssd_tier({.path = in_memory.string(), .engine = ssd_engine, .direct_io = true}).status();
    CHECK(refused.code() == Code::kFailedPrecondition);
    CHECK(refused.message().starts_with("ssd_direct_io: true is not allowed"));
  }
  fs::remove_all(in_memory, error);
}

}  // namespace
}  // namespace sparserow

int main(int argc, char** argv) { return sparserow::run_with_each_engine(argc, argv, sparserow::DirectRun::kAlways); }
