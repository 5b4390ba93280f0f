// Rows of one shard on an SSD: a store of row images (row_codec.h) by slot, table and key, with two engines.
//
// `pages` is a log of pages with an index in memory (pages/page_log.h): about 12.5 bytes of memory a row, and the least
// work. `rocksdb` is a RocksDB (rocksdb_tier.cc): about 1.5 bytes a row, and several times the work.
//
// The folder holds SPARSEROW (which cluster, shard and format), LOCK (held while the shard lives) and rows/ (the
// engine's files). It is scratch: what it holds goes with the process, and a folder of the same cluster and shard is
// emptied when it is opened. A folder of another one, or that holds anything else, is refused and left as it is.
//
// Thread-safe; one thread writes at a time. Every wait is bounded by the disk's own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "util/hash.h"
#include "util/status.h"

namespace sparserow {

enum class SsdEngine : std::uint8_t { kPages = 0, kRocksdb = 1 };

// kInvalidArgument for another word than pages and rocksdb.
[[nodiscard]] Result<SsdEngine> ssd_engine_of(std::string_view word);

struct SsdOptions {
  std::string path;             // empty: no SSD tier
  std::uint64_t max_bytes = 0;  // of files; 0 = what the disk has
  std::uint64_t cluster_id = 0;
  std::uint16_t shard = 0;
  SsdEngine engine = SsdEngine::kPages;
  std::uint32_t slot_count = kDefaultSlotCount;
  std::uint16_t lineage = 0;
  bool direct_io = false;  // pages alone: files are read and written past the system's cache
  bool with_uring = true;  // pages alone: reads that wait go by io_uring where the kernel allows it, else by threads
};

// [slot u16 BE | table id u32 BE | row_hash u64 BE], so that a slot of a table is one range, in the order in which
// scans and saves go through it. For one table the hash is the key in another form (util/hash.h).
using SsdKey = std::array<char, 14>;
[[nodiscard]] SsdKey ssd_key_of_hash(std::uint32_t slot, std::uint32_t table_id, std::uint64_t hash) noexcept;
[[nodiscard]] inline SsdKey ssd_key(std::uint32_t slot, std::uint32_t table_id, std::uint64_t key) noexcept {
  return ssd_key_of_hash(slot, table_id, row_hash(table_id, key));
}
struct SsdKeyParts {
  std::uint32_t slot;
  std::uint32_t table_id;
  std::uint64_t hash;

  [[nodiscard]] std::uint64_t key() const noexcept { return key_of_hash(table_id, hash); }
};
[[nodiscard]] inline SsdKeyParts parts_of(const SsdKey& key) noexcept {
  const auto big_endian = [&key](std::size_t at, std::size_t count) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < count; ++i) value = value << 8 | static_cast<std::uint8_t>(key[at + i]);
    return value;
  };
  return {static_cast<std::uint32_t>(big_endian(0, 2)), static_cast<std::uint32_t>(big_endian(2, 4)), big_endian(6, 8)};
}

// Row images that a read gave, in the order of its keys; an absent one is empty.
class SsdImages {
 public:
  [[nodiscard]] std::span<const std::byte> at(std::size_t index) const noexcept { return images_[index]; }
  // The owner keeps the bytes of the images.
  void assign(std::vector<std::span<const std::byte>> images, std::shared_ptr<const void> owner) noexcept {
    images_ = std::move(images);
    owner_ = std::move(owner);
  }

 private:
  std::vector<std::span<const std::byte>> images_;
  std::shared_ptr<const void> owner_;
};

// When a row was last changed, in the steps and seconds of its table (schema.h); 0 for what its policy does not count.
struct SsdStamps {
  std::uint32_t steps = 0;
  std::uint32_t seconds = 0;
  // The older of each. They wrap, so that the older one is behind the other by less than half of all values.
  [[nodiscard]] SsdStamps older(SsdStamps other) const noexcept {
    const auto first = [](std::uint32_t left, std::uint32_t right) { return (left - right) >> 31 != 0 ? left : right; };
    return {first(steps, other.steps), first(seconds, other.seconds)};
  }
};

// Images to be written and keys to be deleted, at once. Of the images of one key the last one stays; a key that is put
// is not deleted in the same batch. Not thread-safe.
class SsdBatch {
 public:
  // Whether the SSD has an image of the key already. The caller must know.
  enum class Before : std::uint8_t { kNothing, kImage };
  struct Write {
    SsdKey key;
    bool is_put;
    Before before;
    std::size_t at;  // of its image
    std::size_t bytes;
    SsdStamps stamps;
  };

  void put(const SsdKey& key, std::span<const std::byte> image, Before before, SsdStamps stamps = {});
  void erase(const SsdKey& key);  // of which the SSD has an image, as far as the caller knows
  void clear() noexcept;
  void sort_by_key();  // writes of one key stay in their order
  [[nodiscard]] std::span<const Write> writes() const noexcept { return writes_; }
  [[nodiscard]] std::span<const std::byte> image(const Write& write) const noexcept {
    return std::span(images_).subspan(write.at, write.bytes);
  }
  [[nodiscard]] bool has_puts() const noexcept { return !images_.empty(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return writes_.size() * sizeof(SsdKey) + images_.size(); }

 private:
  std::vector<Write> writes_;
  std::vector<std::byte> images_;
};

struct SsdStats {
  std::uint64_t file_bytes = 0;     // on the disk
  std::uint64_t garbage_bytes = 0;  // of them, images of rows that were written again or deleted; those met so far
  std::uint64_t memory_bytes = 0;   // of indexes, filters, caches and what is not yet on the disk
  std::uint64_t index_bytes = 0;    // of those, what counts against the memory budget
  std::uint64_t rows_read = 0;      // found by reads
  std::uint64_t rows_waited = 0;  // of them, those that the disk had to be asked for; rocksdb: at most its 4 KiB blocks
  std::uint64_t rows_absent = 0;  // looked for and not there
  std::uint64_t rows_visited = 0;  // read by visits of slots; pages alone count it
  std::uint64_t rows_written = 0;
  std::uint64_t keys_read = 0;  // of records, to distinguish rows whose hashes an index cannot
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t reads = 0;  // batches
  std::uint64_t read_nanoseconds = 0;
  std::uint64_t writes = 0;  // batches
  std::uint64_t write_nanoseconds = 0;
  std::uint64_t disk_bytes_read = 0;     // of bytes_read and what is read beside them: what was in no cache
  std::uint64_t disk_bytes_written = 0;  // of bytes_written and what is written beside them; pages alone count it
  std::uint64_t background_jobs = 0;     // flushes and compactions that run or are wanted
};

class SsdTier {
 public:
  // Whether this build has RocksDB. Without it open_ssd_tier() with that engine is kFailedPrecondition.
  [[nodiscard]] static bool has_rocksdb() noexcept;
  SsdTier() = default;
  SsdTier(const SsdTier&) = delete;
  SsdTier& operator=(const SsdTier&) = delete;
  virtual ~SsdTier() = default;  // what is in memory goes to the disk, so that the folder can be inspected

  // keys: in any order. kDataLoss when bytes fail their checksum; kUnavailable when the disk does not answer.
  virtual Status read(std::span<const SsdKey> keys, SsdImages& out) = 0;
  // May sort the batch. kResourceExhausted when the disk, or max_bytes, has no room: then nothing is written. Deletions
  // alone are always taken while the disk takes them.
  virtual Status write(SsdBatch& batch) = 0;
  // Every row of a table.
  virtual Status erase_table(std::uint32_t table_id, std::uint32_t slot_count) = 0;
  // Rows of one slot of a table whose row_hash is at least `from`, in the order of their hashes, until visit() gives
  // false: each row that is there all the while, as it is at the moment of the call or later. Memory does not grow with
  // the slot, and `pages` holds nothing while visit() runs.
  using VisitImage = std::function<Result<bool>(std::uint64_t key, std::span<const std::byte> image)>;
  virtual Status visit_slot(std::uint32_t slot, std::uint32_t table_id, std::uint64_t from,
                            const VisitImage& visit) = 0;
  // Rows of a table in no order, until visit() gives nullopt, else the stamps of the row: each row that is there all
  // the while and, where rows are moved meanwhile, some of them twice. wants(stamps), if it is given, says whether rows
  // are wanted none of which has an older stamp. `pages` reads whole segments, passes over those without a row that is
  // wanted, and holds nothing while visit() runs; `rocksdb` goes by slot.
  using WantsStamps = std::function<bool(SsdStamps oldest)>;
  using VisitStamped =
      std::function<Result<std::optional<SsdStamps>>(std::uint64_t key, std::span<const std::byte> image)>;
  virtual Status visit_table(std::uint32_t table_id, std::uint32_t slot_count, const WantsStamps& wants,
                             const VisitStamped& visit);
  virtual Status flush() = 0;  // what is in memory goes to the disk
  [[nodiscard]] virtual SsdStats stats() const = 0;
  // The share of the rows read lately that the disk had to be asked for; 1 while too few were read to know.
  [[nodiscard]] virtual double waited_share() const noexcept = 0;
  // Whether it takes no more rows for now: a write waits for room, or found none within the last second.
  [[nodiscard]] virtual bool is_full() const noexcept { return false; }
  // How many rows of a table a batch should have so that they lie together, where images have so many bytes; 0: any.
  [[nodiscard]] virtual std::size_t rows_together(std::size_t /*image_bytes*/) const noexcept { return 0; }
  // Memory that counts against the store's budget and grows with the rows on the SSD.
  [[nodiscard]] virtual std::uint64_t index_bytes() const noexcept { return 0; }
};

}  // namespace sparserow
