#include "store/ssd/ssd_tier.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/perf_level.h>
#include <rocksdb/sst_file_manager.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>

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

template <class T>
void put_big_endian(T value, char* out) noexcept {
  for (std::size_t i = 0; i < sizeof value; ++i) out[i] = static_cast<char>(value >> (8 * (sizeof value - 1 - i)));
}

rocksdb::Slice slice_of(const SsdKey& key) noexcept { return {key.data(), key.size()}; }

// That the disk read for this thread, in all; 0 where the system does not count them.
std::uint64_t blocks_read() noexcept {
  constexpr std::uint64_t kSectorBytes = 512;
  rusage usage{};
  if (::getrusage(RUSAGE_THREAD, &usage) != 0) return 0;
  return static_cast<std::uint64_t>(usage.ru_inblock) * kSectorBytes / kBlockBytes;
}

std::uint64_t nanoseconds_since(Clock::time_point start) noexcept {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
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

}  // namespace

struct SsdImages::Impl {
  std::vector<rocksdb::PinnableSlice> values;
};
struct SsdBatch::Impl {
  struct Write {
    SsdKey key;
    bool is_put;
    std::size_t at;  // of its image
    std::size_t bytes;
  };
  std::vector<Write> writes;
  std::vector<char> images;
};

SsdKey ssd_key(std::uint32_t slot, std::uint32_t table_id, std::uint64_t key) noexcept {
  SsdKey out;
  put_big_endian(static_cast<std::uint16_t>(slot), out.data());
  put_big_endian(table_id, out.data() + 2);
  put_big_endian(key, out.data() + 6);
  return out;
}

SsdImages::SsdImages() : impl_(std::make_unique<Impl>()) {}
SsdImages::~SsdImages() = default;
std::span<const std::byte> SsdImages::at(std::size_t index) const noexcept {
  const rocksdb::PinnableSlice& value = impl_->values[index];
  return std::as_bytes(std::span(value.data(), value.size()));
}

SsdBatch::SsdBatch() : impl_(std::make_unique<Impl>()) {}
SsdBatch::~SsdBatch() = default;
void SsdBatch::put(const SsdKey& key, std::span<const std::byte> image) {
  impl_->writes.push_back({key, true, impl_->images.size(), image.size()});
  const char* const begin = reinterpret_cast<const char*>(image.data());
  impl_->images.insert(impl_->images.end(), begin, begin + image.size());
}
void SsdBatch::erase(const SsdKey& key) { impl_->writes.push_back({key, false, 0, 0}); }
void SsdBatch::clear() {
  impl_->writes.clear();
  impl_->images.clear();
}
std::size_t SsdBatch::bytes() const noexcept { return impl_->writes.size() * sizeof(SsdKey) + impl_->images.size(); }

struct SsdTier::Impl {
  SsdOptions options;
  std::unique_ptr<SsdFolder> folder;  // goes last: its lock is held while the database is open
  rocksdb::Options database;
  std::shared_ptr<rocksdb::Cache> cache;
  SsdReaders readers{kFromDisk.helpers};
  std::atomic<float> disk_share{0};             // of the rows of late reads
  std::atomic<std::uint64_t> not_looked_at{0};  // bytes written since garbage was looked for
  std::atomic<bool> collects_garbage{false};
  std::unique_ptr<rocksdb::DB> db;
  std::atomic<std::uint64_t> rows_read{0}, rows_absent{0}, rows_written{0}, bytes_read{0}, bytes_written{0};
  std::atomic<std::uint64_t> reads{0}, read_nanoseconds{0}, blocks_read{0}, writes{0}, write_nanoseconds{0};

  [[nodiscard]] std::uint64_t property(const std::string& name) const {
    std::uint64_t value = 0;
    return db->GetIntProperty(name, &value) ? value : 0;
  }
  [[nodiscard]] std::uint64_t file_bytes() const { return database.sst_file_manager->GetTotalSize(); }
  [[nodiscard]] std::uint64_t unwritten_bytes() const {
    return property(rocksdb::DB::Properties::kCurSizeAllMemTables);
  }

  void note_blocks(std::uint64_t blocks, std::size_t rows) noexcept {
    if (rows == 0) return;
    blocks_read += blocks;
    const float share = std::min(1.0f, static_cast<float>(blocks) / static_cast<float>(rows));
    disk_share = disk_share + kLateShare * (share - disk_share);  // of two at once one may be lost
  }

  // As far as compactions have met it.
  [[nodiscard]] std::uint64_t garbage_bytes() const {
    return property(rocksdb::DB::Properties::kLiveBlobFileGarbageSize);
  }

  void look_for_garbage(std::uint64_t written) {
    if (not_looked_at.fetch_add(written) + written < kLookAfter) return;
    not_looked_at = 0;
    const bool is_scarce = static_cast<double>(file_bytes()) > kScarce * static_cast<double>(options.max_bytes);
    double share = collects_garbage ? kLittleGarbage : kMuchGarbage;
    if (options.max_bytes > 0 && is_scarce) share = kSomeGarbage;
    const auto images = static_cast<double>(property(rocksdb::DB::Properties::kLiveBlobFileSize));
    const bool wanted = static_cast<double>(garbage_bytes()) > share * images;
    if (wanted == collects_garbage) return;
    const rocksdb::Status set = db->SetOptions({{"enable_blob_garbage_collection", wanted ? "true" : "false"}});
    if (set.ok()) collects_garbage = wanted;  // else at the next look
  }

  // Once a write failed the database refuses all others until it is told to go on.
  Status recover(const rocksdb::Status& failed) const {
    const rocksdb::Status resumed = db->Resume();
    if (resumed.ok()) return Status::ok();
    return {Code::kResourceExhausted, "ssd_path: " + options.path + " takes no more rows (" + failed.ToString() +
                                          "); nothing was lost; make room on the disk"};
  }
};

SsdTier::SsdTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

SsdTier::~SsdTier() {
  static_cast<void>(impl_->db->Close().ok());  // writes what is in memory
}

bool SsdTier::is_built() noexcept { return true; }

Result<std::unique_ptr<SsdTier>> SsdTier::open(const SsdOptions& options) {
  auto folder = SsdFolder::claim(options);
  if (!folder.is_ok()) return folder.status();
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->folder = std::move(folder).value();
  impl->database = database_options();
  impl->cache = impl->database.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>()->block_cache;
  rocksdb::DB* db = nullptr;
  const rocksdb::Status opened = rocksdb::DB::Open(impl->database, impl->folder->rows_path(), &db);
  if (!opened.ok()) {
    return Status(Code::kInvalidArgument, "ssd_path: " + options.path + " cannot hold a database (" +
                                              opened.ToString() +
                                              "); allowed: a folder on a disk with room, writable by this user");
  }
  impl->db.reset(db);
  // RocksDB's own low priority (nice 19) let nothing leave memory for a minute while two threads kept two CPUs busy.
  for (const auto pool : {rocksdb::Env::Priority::LOW, rocksdb::Env::Priority::HIGH}) {  // compaction, flush
    impl->database.env->Schedule([](void*) { take_ssd_priority(); }, nullptr, pool);
  }
  return std::unique_ptr<SsdTier>(new SsdTier(std::move(impl)));  // NOLINT: the constructor is private
}

Status SsdTier::read(std::span<const SsdKey> keys, SsdImages& out) {
  const auto start = Clock::now();
  std::vector<rocksdb::Slice> slices;
  slices.reserve(keys.size());
  for (const SsdKey& key : keys) slices.push_back(slice_of(key));
  std::vector<rocksdb::PinnableSlice>& values = out.impl_->values;
  values = std::vector<rocksdb::PinnableSlice>(keys.size());
  std::vector<rocksdb::Status> outcomes(keys.size());
  const ReadPlan plan = impl_->disk_share > kDiskShare ? kFromDisk : kCached;
  const std::size_t parts = std::max<std::size_t>(keys.size() / plan.rows, 1);
  std::atomic<std::uint64_t> blocks{0};
  const auto read_part = [&](std::size_t part) {
    rocksdb::SetPerfLevel(rocksdb::PerfLevel::kDisable);  // of this thread: its counts have no reader
    const std::size_t begin = part * keys.size() / parts;
    const std::size_t count = (part + 1) * keys.size() / parts - begin;
    const std::uint64_t before = blocks_read();
    impl_->db->MultiGet({}, impl_->db->DefaultColumnFamily(), count, slices.data() + begin, values.data() + begin,
                        outcomes.data() + begin, /*sorted_input=*/true);
    blocks += blocks_read() - before;
  };
  impl_->readers.run(parts, plan.helpers, read_part);
  impl_->note_blocks(blocks, keys.size());
  std::uint64_t found = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    if (outcomes[i].ok()) {
      ++found;
      bytes += values[i].size();
    } else if (outcomes[i].IsNotFound()) {
      values[i].Reset();
    } else {
      const bool is_broken = outcomes[i].IsCorruption();
      return {is_broken ? Code::kDataLoss : Code::kUnavailable,
              "the SSD tier in " + impl_->options.path + (is_broken ? " is damaged: " : " cannot be read: ") +
                  outcomes[i].ToString()};
    }
  }
  impl_->rows_read += found;
  impl_->rows_absent += keys.size() - found;
  impl_->bytes_read += bytes;
  ++impl_->reads;
  impl_->read_nanoseconds += nanoseconds_since(start);
  return Status::ok();
}

// In the order of keys: those of a batch find their places in the write buffer from the one before.
Status SsdTier::write(SsdBatch& batch) {
  std::vector<SsdBatch::Impl::Write>& writes = batch.impl_->writes;
  if (writes.empty()) return Status::ok();
  const auto start = Clock::now();
  const auto is_put = [](const SsdBatch::Impl::Write& write) { return write.is_put; };
  if (impl_->options.max_bytes > 0 && std::any_of(writes.begin(), writes.end(), is_put)) {
    const std::uint64_t taken = impl_->file_bytes() + impl_->unwritten_bytes();
    if (taken + batch.bytes() > impl_->options.max_bytes) {
      return {Code::kResourceExhausted, "ssd_bytes: " + std::to_string(impl_->options.max_bytes) + " reached (" +
                                            std::to_string(taken) + " bytes in " + impl_->options.path +
                                            "); nothing was lost; raise it, add shards, or delete rows"};
    }
  }
  std::stable_sort(writes.begin(), writes.end(),
                   [](const SsdBatch::Impl::Write& left, const SsdBatch::Impl::Write& right) {
                     return std::memcmp(left.key.data(), right.key.data(), left.key.size()) < 0;
                   });
  rocksdb::WriteBatch sorted(batch.bytes() + writes.size() * kWriteHead);
  for (const SsdBatch::Impl::Write& write : writes) {  // fails for values beyond 4 GiB only
    const rocksdb::Status added =
        write.is_put ? sorted.Put(slice_of(write.key), {batch.impl_->images.data() + write.at, write.bytes})
                     : sorted.Delete(slice_of(write.key));
    static_cast<void>(added.ok());
  }
  rocksdb::WriteOptions unlogged;
  unlogged.disableWAL = true;
  rocksdb::Status written = impl_->db->Write(unlogged, &sorted);
  if (!written.ok()) {
    SR_RETURN_IF_ERROR(impl_->recover(written));
    written = impl_->db->Write(unlogged, &sorted);
    if (!written.ok())
      return {Code::kResourceExhausted, "ssd_path: " + impl_->options.path + ": " + written.ToString()};
  }
  impl_->rows_written += writes.size();
  impl_->bytes_written += batch.bytes();
  impl_->look_for_garbage(batch.bytes());
  ++impl_->writes;
  impl_->write_nanoseconds += nanoseconds_since(start);
  return Status::ok();
}

Status SsdTier::erase_table(std::uint32_t table_id, std::uint32_t slot_count) {
  rocksdb::WriteBatch batch;
  for (std::uint32_t slot = 0; slot < slot_count; ++slot) {
    // A table's range in a slot ends before the next id's; ids end before 2^32 - 1, which is no table's.
    const SsdKey first = ssd_key(slot, table_id, 0);
    const SsdKey last = ssd_key(slot, table_id, ~std::uint64_t{0});
    static_cast<void>(batch.DeleteRange(slice_of(first), slice_of(last)).ok());
    static_cast<void>(batch.Delete(slice_of(last)).ok());
  }
  rocksdb::WriteOptions unlogged;
  unlogged.disableWAL = true;
  rocksdb::Status written = impl_->db->Write(unlogged, &batch);
  if (!written.ok()) {
    SR_RETURN_IF_ERROR(impl_->recover(written));
    written = impl_->db->Write(unlogged, &batch);
  }
  if (!written.ok()) return {Code::kResourceExhausted, "ssd_path: " + impl_->options.path + ": " + written.ToString()};
  return flush();  // ranges are found faster in files than in memory
}

Status SsdTier::visit_slot(std::uint32_t slot, std::uint32_t table_id,
                           const std::function<Status(std::uint64_t, std::span<const std::byte>)>& visit) {
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  const std::unique_ptr<rocksdb::Iterator> at(impl_->db->NewIterator(options));
  const SsdKey first = ssd_key(slot, table_id, 0);
  constexpr std::size_t kPrefix = 6;
  for (at->Seek(slice_of(first)); at->Valid(); at->Next()) {
    const rocksdb::Slice key = at->key();
    if (key.size() != first.size() || std::memcmp(key.data(), first.data(), kPrefix) != 0) break;
    std::uint64_t number = 0;
    for (std::size_t i = kPrefix; i < key.size(); ++i) number = number << 8 | static_cast<std::uint8_t>(key[i]);
    SR_RETURN_IF_ERROR(visit(number, std::as_bytes(std::span(at->value().data(), at->value().size()))));
  }
  if (at->status().ok()) return Status::ok();
  return {at->status().IsCorruption() ? Code::kDataLoss : Code::kUnavailable,
          "the SSD tier in " + impl_->options.path + " cannot be read: " + at->status().ToString()};
}

Status SsdTier::flush() {
  const rocksdb::Status flushed = impl_->db->Flush({});
  return flushed.ok() ? Status::ok() : impl_->recover(flushed);
}

SsdStats SsdTier::stats() const {
  return {.file_bytes = impl_->file_bytes(),
          .garbage_bytes = impl_->garbage_bytes(),
          .memory_bytes = impl_->unwritten_bytes() +
                          impl_->property(rocksdb::DB::Properties::kEstimateTableReadersMem) + impl_->cache->GetUsage(),
          .rows_read = impl_->rows_read,
          .rows_absent = impl_->rows_absent,
          .rows_written = impl_->rows_written,
          .bytes_read = impl_->bytes_read,
          .bytes_written = impl_->bytes_written,
          .reads = impl_->reads,
          .read_nanoseconds = impl_->read_nanoseconds,
          .writes = impl_->writes,
          .write_nanoseconds = impl_->write_nanoseconds,
          .disk_bytes_read = impl_->blocks_read * kBlockBytes,
          .background_jobs = impl_->property(rocksdb::DB::Properties::kNumRunningFlushes) +
                             impl_->property(rocksdb::DB::Properties::kNumRunningCompactions) +
                             impl_->property(rocksdb::DB::Properties::kMemTableFlushPending) +
                             impl_->property(rocksdb::DB::Properties::kCompactionPending)};
}

}  // namespace sparserow
