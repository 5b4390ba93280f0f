#include "store/ssd/rocksdb_tier.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/perf_level.h>
#include <rocksdb/sst_file_manager.h>
#include <rocksdb/table.h>
#include <rocksdb/version.h>
#include <rocksdb/write_batch.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <numeric>

#include "store/ssd/ssd_counters.h"
#include "store/ssd/ssd_folder.h"
#include "store/ssd/ssd_readers.h"

namespace sparserow {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBlockCacheBytes = std::size_t{32} << 20;
constexpr std::size_t kWriteBufferBytes = std::size_t{32} << 20;
constexpr std::uint64_t kBlockBytes = 4096;  // that the disk reads at once, at least
constexpr std::size_t kWriteHead = 8;        // bytes of a write beside key and image
constexpr double kBufferFilter = 0.01;       // of a write buffer: 27 bits for each of its rows, of 296 bytes
// While rows come from the system's cache a read is work for CPUs; while they come from the disk it is waiting, and the
// more of it at once the better: a disk's latency of 0.1 to 3 ms against 5 to 10 us of CPU a row.
struct ReadPlan {
  std::size_t rows;     // of a part
  std::size_t helpers;  // threads beside the caller's
};
constexpr ReadPlan kCached{64, 8};
constexpr ReadPlan kFromDisk{2, 31};
constexpr float kDiskShare = 0.05f;  // of rows, from which on they come from the disk
constexpr float kLateShare = 0.1f;   // that the latest read has of the share
constexpr std::uint64_t kFileBytes = std::uint64_t{64} << 20;
// Flushed buffers that no compaction has taken yet: from the first number on RocksDB slows writes down, from the second
// on it stops them. Its own numbers (20, 36) are for files with values; here such a file is 3 MB of keys.
constexpr int kManyFlushed = 64;
constexpr int kTooManyFlushed = 128;
// Garbage: images of rows that were written again. To collect it the other images of the same files are copied, at each
// compaction, be there much of it or none; so that begins and ends at these shares of all images' bytes.
constexpr double kMuchGarbage = 0.25;
constexpr double kLittleGarbage = 0.15;
constexpr double kSomeGarbage = 0.05;  // instead of both where files take more of max_bytes than kScarce
constexpr double kScarce = 0.75;
constexpr std::uint64_t kLookAfter = kWriteBufferBytes;  // bytes written

rocksdb::Slice slice_of(const SsdKey& key) noexcept { return {key.data(), key.size()}; }

rocksdb::Slice slice_of(std::span<const std::byte> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// That the disk read for this thread, in all; 0 where the system does not count them.
std::uint64_t blocks_read() noexcept {
  constexpr std::uint64_t kSectorBytes = 512;
  rusage usage{};
  if (::getrusage(RUSAGE_THREAD, &usage) != 0) return 0;
  return static_cast<std::uint64_t>(usage.ru_inblock) * kSectorBytes / kBlockBytes;
}

rocksdb::Options database_options() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;
  options.max_background_jobs = 2;
  options.write_buffer_size = kWriteBufferBytes;
  options.max_write_buffer_number = 3;
  // Most of the rows that are read are in no buffer, and a search of one that finds nothing costs the most.
  options.memtable_prefix_bloom_size_ratio = kBufferFilter;
  options.memtable_whole_key_filtering = true;
  options.allow_concurrent_memtable_write = false;  // one thread evicts
  options.target_file_size_base = kFileBytes;
  options.level0_slowdown_writes_trigger = kManyFlushed;
  options.level0_stop_writes_trigger = kTooManyFlushed;
  options.level_compaction_dynamic_level_bytes = true;
  options.max_open_files = -1;
  options.enable_blob_files = true;
  options.blob_file_size = kFileBytes;
  options.enable_blob_garbage_collection = false;  // look_for_garbage() begins and ends it
  options.blob_garbage_collection_age_cutoff = 0.25;
  options.blob_garbage_collection_force_threshold = 0.5;
  options.keep_log_file_num = 2;
  options.sst_file_manager.reset(rocksdb::NewSstFileManager(rocksdb::Env::Default()));  // recovers from a full disk
  rocksdb::BlockBasedTableOptions blocks;
  blocks.block_size = 16u << 10;
  blocks.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  blocks.block_cache = rocksdb::NewLRUCache(kBlockCacheBytes);
  blocks.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
  blocks.format_version = 5;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(blocks));
  return options;
}

class RocksdbTier final : public SsdTier {
 public:
  RocksdbTier(const SsdOptions& ssd_options, std::unique_ptr<SsdFolder> ssd_folder)
      : options_(ssd_options), folder_(std::move(ssd_folder)) {}
  ~RocksdbTier() override {
    if (db_ != nullptr) static_cast<void>(db_->Close().ok());  // writes what is in memory
  }
  Status start();

  Status read(std::span<const SsdKey> keys, SsdImages& out) override;
  Status write(SsdBatch& batch) override;
  Status erase_table(std::uint32_t table_id, std::uint32_t slot_count) override;
  Status visit_slot(std::uint32_t slot, std::uint32_t table_id, std::uint64_t from, const VisitImage& visit) override;
  Status flush() override;
  [[nodiscard]] SsdStats stats() const override;
  [[nodiscard]] double waited_share() const noexcept override { return counters_.waited_share(); }

 private:
  SsdOptions options_;
  std::unique_ptr<SsdFolder> folder_;  // goes last: its lock is held while the database is open
  rocksdb::Options database_;
  std::shared_ptr<rocksdb::Cache> cache_;
  SsdReaders readers_{kFromDisk.helpers};
  std::atomic<float> disk_share_{0};             // of the rows of late reads
  std::atomic<std::uint64_t> not_looked_at_{0};  // bytes written since garbage was looked for
  std::atomic<bool> collects_garbage_{false};
  std::unique_ptr<rocksdb::DB> db_;
  std::atomic<std::uint64_t> blocks_read_{0};
  SsdCounters counters_;

  [[nodiscard]] std::uint64_t property(const std::string& name) const {
    std::uint64_t value = 0;
    return db_->GetIntProperty(name, &value) ? value : 0;
  }
  [[nodiscard]] std::uint64_t file_bytes() const { return database_.sst_file_manager->GetTotalSize(); }
  [[nodiscard]] std::uint64_t unwritten_bytes() const {
    return property(rocksdb::DB::Properties::kCurSizeAllMemTables);
  }

  void note_blocks(std::uint64_t blocks, std::size_t rows) noexcept {
    if (rows == 0) return;
    blocks_read_ += blocks;
    const float share = std::min(1.0f, static_cast<float>(blocks) / static_cast<float>(rows));
    disk_share_ = disk_share_ + kLateShare * (share - disk_share_);  // of two at once one may be lost
  }

  // As far as compactions have met it.
  [[nodiscard]] std::uint64_t garbage_bytes() const {
    return property(rocksdb::DB::Properties::kLiveBlobFileGarbageSize);
  }

  void look_for_garbage(std::uint64_t written) {
    if (not_looked_at_.fetch_add(written) + written < kLookAfter) return;
    not_looked_at_ = 0;
    const bool is_scarce = static_cast<double>(file_bytes()) > kScarce * static_cast<double>(options_.max_bytes);
    double share = collects_garbage_ ? kLittleGarbage : kMuchGarbage;
    if (options_.max_bytes > 0 && is_scarce) share = kSomeGarbage;
    const auto images = static_cast<double>(property(rocksdb::DB::Properties::kLiveBlobFileSize));
    const bool wanted = static_cast<double>(garbage_bytes()) > share * images;
    if (wanted == collects_garbage_) return;
    const rocksdb::Status set = db_->SetOptions({{"enable_blob_garbage_collection", wanted ? "true" : "false"}});
    if (set.ok()) collects_garbage_ = wanted;  // else at the next look
  }

  // Once a write failed the database refuses all others until it is resumed.
  Status recover(const rocksdb::Status& failed) const {
    const rocksdb::Status resumed = db_->Resume();
    if (resumed.ok()) return Status::ok();
    return {Code::kResourceExhausted, "ssd_path: " + options_.path + " takes no more rows (" + failed.ToString() +
                                          "); nothing was lost; make room on the disk"};
  }
};

Status RocksdbTier::start() {
  database_ = database_options();
  cache_ = database_.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>()->block_cache;
  rocksdb::DB* opened = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(database_, folder_->rows_path(), &opened);
  if (!status.ok()) {
    return {Code::kInvalidArgument, "ssd_path: " + options_.path + " cannot hold a database (" + status.ToString() +
                                        "); allowed: a folder on a disk with room, writable by this user"};
  }
  db_.reset(opened);
  // RocksDB's own low priority (nice 19) let nothing leave memory for a minute while two threads kept two CPUs busy.
  for (const auto pool : {rocksdb::Env::Priority::LOW, rocksdb::Env::Priority::HIGH}) {  // compaction, flush
    database_.env->Schedule([](void*) { take_ssd_priority(); }, nullptr, pool);
  }
  return Status::ok();
}

Status RocksdbTier::read(std::span<const SsdKey> keys, SsdImages& out) {
  const auto start = Clock::now();
  std::vector<std::uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](std::uint32_t left, std::uint32_t right) {
    return std::memcmp(keys[left].data(), keys[right].data(), keys[left].size()) < 0;
  });
  std::vector<rocksdb::Slice> slices;
  slices.reserve(keys.size());
  for (const std::uint32_t i : order) slices.push_back(slice_of(keys[i]));
  const auto owner = std::make_shared<std::vector<rocksdb::PinnableSlice>>(keys.size());
  std::vector<rocksdb::PinnableSlice>& values = *owner;
  std::vector<std::span<const std::byte>> images(keys.size());
  std::vector<rocksdb::Status> outcomes(keys.size());
  const ReadPlan plan = disk_share_ > kDiskShare ? kFromDisk : kCached;
  const std::size_t parts = std::max<std::size_t>(keys.size() / plan.rows, 1);
  std::atomic<std::uint64_t> blocks{0}, waited{0};
  const auto read_part = [&](std::size_t part) {
    rocksdb::SetPerfLevel(rocksdb::PerfLevel::kDisable);  // of this thread: its counts have no reader
    const std::size_t begin = part * keys.size() / parts;
    const std::size_t count = (part + 1) * keys.size() / parts - begin;
    const std::uint64_t before = blocks_read();
    db_->MultiGet({}, db_->DefaultColumnFamily(), count, slices.data() + begin, values.data() + begin,
                  outcomes.data() + begin, /*sorted_input=*/true);
    const std::uint64_t read = blocks_read() - before;
    blocks += read;
    waited += std::min<std::uint64_t>(read, count);
  };
  readers_.run(parts, plan.helpers, read_part);
  note_blocks(blocks, keys.size());
  std::uint64_t found = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    if (outcomes[i].ok()) {
      ++found;
      bytes += values[i].size();
      images[order[i]] = std::as_bytes(std::span(values[i].data(), values[i].size()));
    } else if (!outcomes[i].IsNotFound()) {
      const bool is_broken = outcomes[i].IsCorruption();
      return {is_broken ? Code::kDataLoss : Code::kUnavailable,
              "the SSD tier in " + options_.path + (is_broken ? " is damaged: " : " cannot be read: ") +
                  outcomes[i].ToString()};
    }
  }
  out.assign(std::move(images), owner);
  counters_.note_read(keys.size(), found, waited, bytes, start);
  return Status::ok();
}

// In the order of keys: those of a batch find their places in the write buffer from the one before.
Status RocksdbTier::write(SsdBatch& batch) {
  if (batch.writes().empty()) return Status::ok();
  const auto start = Clock::now();
  if (options_.max_bytes > 0 && batch.has_puts()) {
    const std::uint64_t taken = file_bytes() + unwritten_bytes();
    if (taken + batch.bytes() > options_.max_bytes) {
      return {Code::kResourceExhausted, "ssd_bytes: " + std::to_string(options_.max_bytes) + " reached (" +
                                            std::to_string(taken) + " bytes in " + options_.path +
                                            "); nothing was lost; raise it, add shards, or delete rows"};
    }
  }
  batch.sort_by_key();
  rocksdb::WriteBatch sorted(batch.bytes() + batch.writes().size() * kWriteHead);
  for (const SsdBatch::Write& write : batch.writes()) {  // fails for values beyond 4 GiB only
    const rocksdb::Status added = write.is_put ? sorted.Put(slice_of(write.key), slice_of(batch.image(write)))
                                               : sorted.Delete(slice_of(write.key));
    static_cast<void>(added.ok());
  }
  rocksdb::WriteOptions unlogged;
  unlogged.disableWAL = true;
  rocksdb::Status written = db_->Write(unlogged, &sorted);
  if (!written.ok()) {
    SR_RETURN_IF_ERROR(recover(written));
    written = db_->Write(unlogged, &sorted);
    if (!written.ok()) return {Code::kResourceExhausted, "ssd_path: " + options_.path + ": " + written.ToString()};
  }
  look_for_garbage(batch.bytes());
  counters_.note_write(batch, start);
  return Status::ok();
}

Status RocksdbTier::erase_table(std::uint32_t table_id, std::uint32_t slot_count) {
  rocksdb::WriteBatch batch;
  for (std::uint32_t slot = 0; slot < slot_count; ++slot) {
    // A table's range in a slot ends before the next id's; ids end before 2^32 - 1, which is no table's.
    const SsdKey first = ssd_key_of_hash(slot, table_id, 0);
    const SsdKey last = ssd_key_of_hash(slot, table_id, ~std::uint64_t{0});
    static_cast<void>(batch.DeleteRange(slice_of(first), slice_of(last)).ok());
    static_cast<void>(batch.Delete(slice_of(last)).ok());
  }
  rocksdb::WriteOptions unlogged;
  unlogged.disableWAL = true;
  rocksdb::Status written = db_->Write(unlogged, &batch);
  if (!written.ok()) {
    SR_RETURN_IF_ERROR(recover(written));
    written = db_->Write(unlogged, &batch);
  }
  if (!written.ok()) return {Code::kResourceExhausted, "ssd_path: " + options_.path + ": " + written.ToString()};
  return flush();  // ranges are found faster in files than in memory
}

Status RocksdbTier::visit_slot(std::uint32_t slot, std::uint32_t table_id, std::uint64_t from,
                               const VisitImage& visit) {
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  const std::unique_ptr<rocksdb::Iterator> at(db_->NewIterator(options));
  const SsdKey first = ssd_key_of_hash(slot, table_id, from);
  constexpr std::size_t kPrefix = 6;
  for (at->Seek(slice_of(first)); at->Valid(); at->Next()) {
    const rocksdb::Slice key = at->key();
    if (key.size() != first.size() || std::memcmp(key.data(), first.data(), kPrefix) != 0) break;
    SsdKey found;
    std::memcpy(found.data(), key.data(), found.size());
    const Result<bool> goes_on =
        visit(parts_of(found).key(), std::as_bytes(std::span(at->value().data(), at->value().size())));
    if (!goes_on.is_ok()) return goes_on.status();
    if (!goes_on.value()) return Status::ok();
  }
  if (at->status().ok()) return Status::ok();
  return {at->status().IsCorruption() ? Code::kDataLoss : Code::kUnavailable,
          "the SSD tier in " + options_.path + " cannot be read: " + at->status().ToString()};
}

Status RocksdbTier::flush() {
  const rocksdb::Status flushed = db_->Flush({});
  return flushed.ok() ? Status::ok() : recover(flushed);
}

SsdStats RocksdbTier::stats() const {
  SsdStats stats{.file_bytes = file_bytes(),
                 .garbage_bytes = garbage_bytes(),
                 .memory_bytes = unwritten_bytes() + property(rocksdb::DB::Properties::kEstimateTableReadersMem) +
                                 cache_->GetUsage(),
                 .disk_bytes_read = blocks_read_ * kBlockBytes,
                 .background_jobs = property(rocksdb::DB::Properties::kNumRunningFlushes) +
                                    property(rocksdb::DB::Properties::kNumRunningCompactions) +
                                    property(rocksdb::DB::Properties::kMemTableFlushPending) +
                                    property(rocksdb::DB::Properties::kCompactionPending)};
  counters_.fill(stats);
  return stats;
}

}  // namespace

std::string_view rocksdb_version() noexcept {
  static const std::string version = rocksdb::GetRocksVersionAsString();
  return version;
}

Result<std::unique_ptr<SsdTier>> open_rocksdb(const SsdOptions& options, std::unique_ptr<SsdFolder> folder) {
  auto tier = std::make_unique<RocksdbTier>(options, std::move(folder));
  SR_RETURN_IF_ERROR(tier->start());
  return std::unique_ptr<SsdTier>(std::move(tier));
}

}  // namespace sparserow
