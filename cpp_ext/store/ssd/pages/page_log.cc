// How the log takes rows: room for a batch, its writes, a dropped table, the end. See page_log.h.
#include "store/ssd/pages/page_log.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "util/hash.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

constexpr std::size_t kMostSealed = 8;     // segments that wait for the disk before a write waits for them
constexpr std::size_t kSpareSegments = 2;  // that collection alone may take
constexpr double kAlmostAll = 15.0 / 16;   // live records of a segment that is collected for want of room
constexpr std::size_t kHelpers = 31;       // threads for reads that wait for the disk
constexpr std::chrono::seconds kLongestWrite{60};
constexpr std::chrono::seconds kLongestWaitForRoom{10};
constexpr std::chrono::seconds kRefusalHolds{1};
constexpr std::chrono::milliseconds kRoomStep{2};
// The file of the index that a clean end leaves, for `sparserow inspect`: "SRIX", format, and for each table its id,
// record length and 64 partitions, each a number of places (u64) and the places (40 bits). A larger index is not
// written.
constexpr std::uint32_t kIndexMagic = 0x58495253;
constexpr std::uint32_t kIndexFormat = 2;
constexpr std::uint64_t kMostIndexBytes = std::uint64_t{256} << 20;

}  // namespace

Result<std::unique_ptr<SsdTier>> open_page_log(const SsdOptions& options, std::unique_ptr<SsdFolder> folder) {
  constexpr std::uint64_t kLeastBytes = 8 * kSegmentBytes;
  if (options.max_bytes > 0 && options.max_bytes < kLeastBytes) {
    return not_allowed("ssd_bytes", options.max_bytes, ">= " + std::to_string(kLeastBytes) + " with ssd_engine pages");
  }
  const std::filesystem::path rows(folder->rows_path());
  std::error_code error;
  std::filesystem::create_directory(rows, error);
  if (error) return Status(Code::kInvalidArgument, "ssd_path: " + rows.string() + ": " + error.message());
  auto file =
      PageFile::make((rows / "pages").string(), {.is_direct = options.direct_io, .with_uring = options.with_uring});
  if (!file.is_ok()) {
    const bool is_direct_refused = file.status().code() == Code::kFailedPrecondition;
    return Status(file.status().code(),
                  (is_direct_refused ? "ssd_direct_io: " : "ssd_path: ") + file.status().message());
  }
  return std::unique_ptr<SsdTier>(std::make_unique<PageLog>(options, std::move(folder), std::move(file).value()));
}

PageLog::PageLog(const SsdOptions& options, std::unique_ptr<SsdFolder> folder, std::unique_ptr<PageFile> file)
    : options_(options),
      slot_bits_(static_cast<std::uint32_t>(std::countr_zero(options.slot_count))),
      high_slot_bits_(slot_bits_ > kPartitionBits ? slot_bits_ - kPartitionBits : 0),
      folder_(std::move(folder)),
      file_(std::move(file)),
      readers_(kHelpers),
      chunks_(std::make_unique<std::atomic<Segment*>[]>(kMostSegments / kChunk)),
      thread_([this] { run(); }) {}

PageLog::~PageLog() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  if (flush().is_ok()) write_index_file();
  for (std::uint32_t number = 1; number < next_segment_; ++number) std::free(segment(number).buffer);
  for (const Retired& retired : retired_) std::free(retired.buffer);
  for (std::byte* const buffer : buffers_) std::free(buffer);
  for (std::uint32_t chunk = 0; chunk <= next_segment_ / kChunk; ++chunk) delete[] chunks_[chunk].load();
}

std::shared_ptr<PageLog::TablePages> PageLog::table(std::uint32_t table_id) const {
  const std::shared_lock lock(tables_mutex_);
  const auto found = tables_.find(table_id);
  return found == tables_.end() ? nullptr : found->second;
}

PageLog::Spot PageLog::spot_of(std::uint64_t row_hash) const noexcept {
  const std::uint32_t slot = slot_of(row_hash, options_.slot_count);
  return {slot, slot % kPartitions, {index_hash(row_hash), static_cast<std::uint16_t>(slot / kPartitions)}};
}

Status PageLog::write(SsdBatch& batch) {
  if (batch.writes().empty()) return Status::ok();
  const auto start = SsdCounters::Clock::now();
  const MutexLock lock(mutex_);
  if (batch.has_puts()) {
    std::uint32_t segments = 0;
    SR_RETURN_IF_ERROR(prepare(batch, segments));
    SR_RETURN_IF_ERROR(wait_for_writer());
    SR_RETURN_IF_ERROR(make_room(segments));
  }
  std::shared_ptr<TablePages> pages;
  const std::span<const SsdBatch::Write> writes = batch.writes();
  spots_.clear();
  for (const SsdBatch::Write& write : writes) spots_.push_back(spot_of(parts_of(write.key).hash));
  SR_RETURN_IF_ERROR(find_former(batch));
  for (std::size_t i = 0; i < writes.size(); ++i) {
    const SsdBatch::Write& write = writes[i];
    const SsdKeyParts parts = parts_of(write.key);
    if (pages == nullptr || pages->id != parts.table_id) pages = table(parts.table_id);
    if (write.is_put) {
      put(pages, parts.key(), spots_[i], batch.image(write), former_[i], write.stamps);
    } else if (former_[i].is_somewhere()) {
      erase(*pages, spots_[i], former_[i]);
    }
  }
  if (wants_collection()) changed_.notify_all();
  counters_.note_write(batch, start);
  return Status::ok();
}

// Makes the tables of a batch, and counts the segments that it needs at most.
Status PageLog::prepare(const SsdBatch& batch, std::uint32_t& segments) {
  std::map<std::uint32_t, std::uint64_t> rows;
  for (const SsdBatch::Write& write : batch.writes()) {
    if (!write.is_put) continue;
    const std::uint32_t table_id = parts_of(write.key).table_id;
    if (rows[table_id]++ > 0) continue;
    const std::optional<PageLayout> layout = page_layout(write.bytes);
    if (!layout) {
      return not_allowed("bytes of a stored row", write.bytes, "at most 1 MiB less a header");
    }
    const std::unique_lock lock(tables_mutex_);
    std::shared_ptr<TablePages>& pages = tables_[table_id];
    if (pages != nullptr && pages->layout.record_bytes == layout->record_bytes) continue;
    if (pages != nullptr) return {Code::kInternal, "rows of table id " + std::to_string(table_id) + " changed length"};
    pages = std::make_shared<TablePages>();
    for (Partition& partition : pages->partitions) {
      partition.index = PageIndex(high_slot_bits_);
      index_bytes_ += partition.index.bytes();
    }
    pages->id = table_id;
    pages->layout = *layout;
  }
  std::uint64_t units = 0;
  std::uint32_t largest = 1;
  for (const auto& [table_id, count] : rows) {
    const PageLayout& layout = table(table_id)->layout;
    units += (count / layout.rows + 2) * layout.units;
    largest = std::max(largest, layout.units);
  }
  segments = static_cast<std::uint32_t>(units / (kUnitsInSegment - largest + 1) + 1);
  return Status::ok();
}

std::size_t PageLog::rows_together(std::size_t image_bytes) const noexcept {
  constexpr std::size_t kPagesTogether = 2;
  const std::optional<PageLayout> layout = page_layout(image_bytes);
  const std::shared_lock lock(tables_mutex_);
  if (!layout || tables_.size() * layout->units <= kUnitsInSegment / 2) return 0;
  return kPagesTogether * layout->rows;
}

Status PageLog::wait_for_writer() {
  const bool goes_on = changed_.wait_for(mutex_, kLongestWrite, [this]() SR_REQUIRES(mutex_) {
    return sealed_.size() <= kMostSealed || !write_failure_.is_ok();
  });
  if (sealed_.size() <= kMostSealed) return Status::ok();
  if (goes_on) return write_failure_;
  return {Code::kUnavailable, "the SSD tier in " + options_.path + " did not write a segment in " +
                                  std::to_string(kLongestWrite.count()) + " s"};
}

// For a second, unless a segment is freed before.
void PageLog::note_full() noexcept {
  full_until_ = (std::chrono::steady_clock::now() + kRefusalHolds).time_since_epoch().count();
}

// Segments and buffers for so many more, and segments for collection beside them. Where a write has just waited for
// room in vain, the next ones are refused at once.
Status PageLog::make_room(std::uint32_t segments) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    reap();
    if (!refusal_.is_ok() && is_full()) return refusal_;
    Status why;
    while (free_.size() < segments + kSpareSegments && add_segment(why)) {
    }
    if (free_.size() >= segments + kSpareSegments) break;
    note_full();
    if (collect(kAlmostAll)) continue;
    const bool may_come = collecting_ > 0 || !sealed_.empty() || !retired_.empty();
    if (!may_come || !write_failure_.is_ok() || std::chrono::steady_clock::now() > start + kLongestWaitForRoom) {
      refusal_ = why;
      note_full();
      return why;
    }
    changed_.notify_all();
    changed_.wait_for(mutex_, kRoomStep);
  }
  refusal_ = Status::ok();
  full_until_ = 0;
  while (buffers_.size() < segments) buffers_.push_back(make_buffer());
  return Status::ok();
}

// Where the log has each key of a batch, whose spots are known. A key that the caller knows to be here and that has one
// entry is not read: the entry is then of that key.
Status PageLog::find_former(const SsdBatch& batch) {
  const std::span<const SsdBatch::Write> writes = batch.writes();
  former_.assign(writes.size(), Place());
  std::shared_ptr<TablePages> pages;
  for (std::size_t i = 0; i < writes.size(); ++i) {
    const SsdKeyParts parts = parts_of(writes[i].key);
    if (pages == nullptr || pages->id != parts.table_id) pages = table(parts.table_id);
    if (pages == nullptr && writes[i].is_put) {
      return {Code::kInternal, "table id " + std::to_string(parts.table_id) + " went while its rows were written"};
    }
    if (pages == nullptr) continue;
    prefetch(*pages, spots_, i);
    candidates_.clear();
    const PageIndex& index = pages->partitions[spots_[i].partition].index;
    index.candidates(spots_[i].key, [this](Place place) {
      mutex_.assume_locked();
      candidates_.push_back(place);
    });
    if (candidates_.size() == 1 && writes[i].before == SsdBatch::Before::kImage) {
      former_[i] = candidates_.front();
    } else if (!candidates_.empty()) {
      SR_RETURN_IF_ERROR(find_row(*pages, parts.hash, candidates_, former_[i]));
    }
  }
  return Status::ok();
}

// The entry of a key whose record a buffer still has.
IndexEntry PageLog::find_in_memory(TablePages& pages, std::uint64_t key, const Spot& spot) {
  PageIndex& index = pages.partitions[spot.partition].index;
  Place found;
  index.candidates(spot.key, [&](Place place) {
    const std::byte* const buffer = segment(place.segment()).buffer.load(std::memory_order_relaxed);
    if (buffer != nullptr && record_key(buffer + place.record_at(pages.layout.record_bytes)) == key) found = place;
  });
  return found.is_somewhere() ? index.find(spot.key, found) : IndexEntry();
}

void PageLog::put(const std::shared_ptr<TablePages>& pages, std::uint64_t key, const Spot& spot,
                  std::span<const std::byte> image, Place former, SsdStamps stamps) {
  Partition& partition = pages->partitions[spot.partition];
  IndexEntry entry = former.is_somewhere() ? partition.index.find(spot.key, former) : IndexEntry();
  if (!entry) entry = find_in_memory(*pages, key, spot);  // a batch that puts a key twice
  const Place place = append(pages, kFresh, key, spot.slot, image, stamps);
  if (entry) {
    move(*pages, spot, entry, place);
    return;
  }
  const std::unique_lock lock(partition.mutex);
  const std::uint64_t before_bytes = partition.index.bytes();
  partition.index.insert(spot.key, place);
  index_bytes_ += partition.index.bytes() - before_bytes;
}

// The record of an entry is at another place from now on.
void PageLog::move(TablePages& pages, const Spot& spot, IndexEntry entry, Place to) {
  const Place from = entry.place();
  {
    const std::unique_lock lock(pages.partitions[spot.partition].mutex);
    entry.move_to(to);
  }
  lose(from, pages.layout.record_bytes);
}

void PageLog::erase(TablePages& pages, const Spot& spot, Place former) {
  Partition& partition = pages.partitions[spot.partition];
  {
    const std::unique_lock lock(partition.mutex);
    const std::uint64_t before_bytes = partition.index.bytes();
    if (!partition.index.erase(spot.key, former)) return;  // the key came twice
    index_bytes_ -= before_bytes - partition.index.bytes();
  }
  lose(former, pages.layout.record_bytes);
  refusal_ = Status::ok();  // what was deleted may make room
}

// Which of the places has the record of this row, if one has.
Status PageLog::find_row(const TablePages& pages, std::uint64_t hash, std::span<const Place> places, Place& found) {
  for (const Place place : places) {
    const Result<std::uint64_t> key = key_at(pages, place);
    if (!key.is_ok()) return key.status();
    if (row_hash(pages.id, key.value()) == hash) found = place;
  }
  return Status::ok();
}

Status PageLog::erase_table(std::uint32_t table_id, std::uint32_t /*slot_count*/) {
  const MutexLock lock(mutex_);
  std::shared_ptr<TablePages> pages;
  {
    const std::unique_lock tables_lock(tables_mutex_);
    const auto found = tables_.find(table_id);
    if (found == tables_.end()) return Status::ok();
    pages = std::move(found->second);
    tables_.erase(found);
  }
  for (const Stream stream : {kFresh, kKept}) close_page(*pages, stream);
  for (Partition& partition : pages->partitions) {
    const std::shared_lock partition_lock(partition.mutex);
    partition.index.each([&](Place place) {
      mutex_.assume_locked();
      lose(place, pages->layout.record_bytes);
    });
    index_bytes_ -= partition.index.bytes();
  }
  refusal_ = Status::ok();
  if (wants_collection()) changed_.notify_all();
  return Status::ok();
}

Status PageLog::flush() {
  const MutexLock lock(mutex_);
  const bool is_done = changed_.wait_for(
      mutex_, kLongestWrite, [this]() SR_REQUIRES(mutex_) { return sealed_.empty() || !write_failure_.is_ok(); });
  if (!write_failure_.is_ok()) return write_failure_;
  if (!is_done) return {Code::kUnavailable, "the SSD tier in " + options_.path + " did not write what it has in time"};
  for (const Stream stream : {kFresh, kKept}) {
    const std::uint32_t number = open_[stream].segment;
    if (number == 0) continue;
    finish_headers(stream);
    const std::byte* const bytes = segment(number).buffer.load(std::memory_order_relaxed);
    SR_RETURN_IF_ERROR(file_->write(number, std::span(bytes, kSegmentBytes)));
    disk_bytes_written_ += kSegmentBytes;
  }
  return Status::ok();
}

void PageLog::write_index_file() {
  if (index_bytes_ > kMostIndexBytes) return;
  std::ofstream file(std::filesystem::path(folder_->rows_path()) / "index", std::ios::binary);
  const auto write = [&file](const void* bytes, std::size_t count) {
    file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
  };
  const std::uint32_t head[] = {kIndexMagic, kIndexFormat, static_cast<std::uint32_t>(tables_.size()), kPartitions};
  write(head, sizeof head);
  for (const auto& [table_id, pages] : tables_) {
    const std::uint32_t facts[] = {table_id, pages->layout.record_bytes};
    write(facts, sizeof facts);
    for (const Partition& partition : pages->partitions) {
      const std::uint64_t places = partition.index.size();
      write(&places, sizeof places);
      partition.index.each([&](Place place) {
        PlaceBytes bytes;
        set_place(bytes, place);
        write(bytes.data(), bytes.size());
      });
    }
  }
}

SsdStats PageLog::stats() const {
  const MutexLock lock(mutex_);
  const bool is_busy = collecting_ > 0 || wants_collection();
  SsdStats stats{.file_bytes = (next_segment_ - 1 - holes_.size()) * kSegmentBytes,
                 .garbage_bytes = filled_bytes_ - live_bytes_,
                 .memory_bytes = index_bytes_ + buffer_bytes_,
                 .index_bytes = index_bytes(),
                 .rows_visited = rows_visited_,
                 .keys_read = keys_read_,
                 .disk_bytes_read = disk_bytes_read_,
                 .disk_bytes_written = disk_bytes_written_,
                 .background_jobs = sealed_.size() + (is_busy ? 1 : 0)};
  counters_.fill(stats);
  return stats;
}

}  // namespace sparserow
