// Rows of one shard on an SSD: a RocksDB that is filled with row images (row_codec.h). Only ssd_tier.cc sees RocksDB.
//
// A key is [slot u16 BE | table id u32 BE | key u64 BE], so a slot of a table is one range. The folder holds SPARSEROW
// (which cluster, shard and format), LOCK (held while the shard lives) and rows/ (the database). It is scratch:
// what it holds goes with the process, and a folder of the same cluster and shard is emptied when it is opened.
// A folder of another one, or that holds anything else, is refused and left as it is.
//
// There is no write-ahead log, and values live in blob files, so that compaction moves keys only.
//
// Thread-safe. Every wait is bounded by the disk's own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "util/status.h"

namespace sparserow {

struct SsdOptions {
  static constexpr std::uint32_t kFormat = 1;

  std::string path;             // empty: no SSD tier
  std::uint64_t max_bytes = 0;  // of files; 0 = what the disk has
  std::uint64_t cluster_id = 0;
  std::uint16_t shard = 0;
};

using SsdKey = std::array<char, 14>;
[[nodiscard]] SsdKey ssd_key(std::uint32_t slot, std::uint32_t table_id, std::uint64_t key) noexcept;

// Row images that a read gave, in the order of its keys; an absent one is empty.
class SsdImages {
 public:
  SsdImages();
  SsdImages(const SsdImages&) = delete;
  SsdImages& operator=(const SsdImages&) = delete;
  ~SsdImages();
  [[nodiscard]] std::span<const std::byte> at(std::size_t index) const noexcept;

 private:
  friend class SsdTier;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Images to be written and keys to be deleted, at once. Not thread-safe.
class SsdBatch {
 public:
  SsdBatch();
  SsdBatch(const SsdBatch&) = delete;
  SsdBatch& operator=(const SsdBatch&) = delete;
  ~SsdBatch();
  void put(const SsdKey& key, std::span<const std::byte> image);
  void erase(const SsdKey& key);
  void clear();
  [[nodiscard]] std::size_t bytes() const noexcept;

 private:
  friend class SsdTier;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct SsdStats {
  std::uint64_t file_bytes = 0;     // on the disk
  std::uint64_t garbage_bytes = 0;  // of them, images of rows that were written again or deleted; those met so far
  std::uint64_t memory_bytes = 0;   // of filters, indexes, block cache and what is not yet on the disk
  std::uint64_t rows_read = 0;      // found by reads
  std::uint64_t rows_absent = 0;    // looked for and not there
  std::uint64_t rows_written = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t reads = 0;  // batches
  std::uint64_t read_nanoseconds = 0;
  std::uint64_t writes = 0;  // batches
  std::uint64_t write_nanoseconds = 0;
  std::uint64_t disk_bytes_read = 0;  // of bytes_read and what is read beside them: what was in no cache
  std::uint64_t background_jobs = 0;  // flushes and compactions that run or are wanted
};

class SsdTier {
 public:
  // Whether this build has RocksDB. Without it open() is kFailedPrecondition.
  [[nodiscard]] static bool is_built() noexcept;
  // kInvalidArgument: the path is missing, no folder or not writable, or holds what is not this shard's;
  // kFailedPrecondition: another process has it open.
  static Result<std::unique_ptr<SsdTier>> open(const SsdOptions& options);
  ~SsdTier();  // what is in memory goes to the disk, so that the folder can be inspected

  // keys: ascending. kDataLoss when a block fails its checksum; kUnavailable when the disk does not answer.
  Status read(std::span<const SsdKey> keys, SsdImages& out);
  // kResourceExhausted when the disk, or max_bytes, has no room: then nothing is written. Deletions are always taken
  // while the disk takes them.
  Status write(SsdBatch& batch);
  // Every row of a table.
  Status erase_table(std::uint32_t table_id, std::uint32_t slot_count);
  // Rows of one slot of a table, by key, as they are at the moment of the call.
  Status visit_slot(std::uint32_t slot, std::uint32_t table_id,
                    const std::function<Status(std::uint64_t key, std::span<const std::byte> image)>& visit);
  Status flush();  // what is in memory goes to the disk
  [[nodiscard]] SsdStats stats() const;

 private:
  struct Impl;
  explicit SsdTier(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparserow
