// How the log takes rows: room for a batch, pages of open segments, the end. See page_log.h.
#include "store/ssd/pages/page_log.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>

#include "util/hash.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

constexpr std::size_t kPrefetched = 8;     // writes ahead, whose lines of the index are fetched
constexpr std::size_t kMostSealed = 8;     // segments that wait for the disk before a write waits for them
constexpr std::size_t kSpareSegments = 2;  // that collection alone may take
constexpr std::size_t kKeptBuffers = 8;    // that are used again
constexpr std::size_t kLeastFree = 64;     // free segments that keep their bytes on the disk
constexpr std::size_t kFreeShare = 8;      // or one for so many that are used
constexpr double kAlmostAll = 15.0 / 16;   // live records of a segment that is collected for want of room
constexpr std::size_t kHelpers = 31;       // threads for reads that wait for the disk
constexpr std::chrono::seconds kLongestWrite{60};
constexpr std::chrono::seconds kLongestWaitForRoom{10};
constexpr std::chrono::milliseconds kRoomStep{2};
constexpr std::size_t kChecksumEnd = offsetof(PageHeader, checksum) + sizeof(PageHeader::checksum);
// The file of the index that a clean end leaves, for `sparserow inspect`: "SRIX", format, and for each table its id,
// record length and 64 partitions, each a number of lines (u64) and the lines. A larger index is not written.
constexpr std::uint32_t kIndexMagic = 0x58495253;
constexpr std::uint32_t kIndexFormat = 1;
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
  auto file = PageFile::make((rows / "pages").string());
  if (!file.is_ok()) return Status(file.status().code(), "ssd_path: " + file.status().message());
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
    const std::lock_guard lock(mutex_);
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

// The top bits of the hash are the slot's, less its partition's, so that an index has a slot's rows together.
PageLog::Spot PageLog::spot_of(std::uint32_t table_id, std::uint64_t key) const noexcept {
  const std::uint64_t hash = row_hash(table_id, key);
  const std::uint32_t slot = slot_of(hash, options_.slot_count);
  const auto low = static_cast<std::uint32_t>(hash << high_slot_bits_) >> high_slot_bits_;
  const std::uint32_t high = high_slot_bits_ == 0 ? 0 : slot / kPartitions << (32 - high_slot_bits_);
  return {slot % kPartitions, high | low};
}

Status PageLog::write(SsdBatch& batch) {
  if (batch.writes().empty()) return Status::ok();
  const auto start = std::chrono::steady_clock::now();
  batch.sort_by_key();
  Lock lock(mutex_);
  if (batch.has_puts()) {
    std::uint32_t segments = 0;
    SR_RETURN_IF_ERROR(prepare(batch, segments));
    SR_RETURN_IF_ERROR(wait_for_writer(lock));
    SR_RETURN_IF_ERROR(make_room(lock, segments));
  }
  std::shared_ptr<TablePages> pages;
  const std::span<const SsdBatch::Write> writes = batch.writes();
  for (std::size_t i = 0; i < writes.size(); ++i) {
    const SsdBatch::Write& write = writes[i];
    const SsdKeyParts parts = parts_of(write.key);
    if (pages == nullptr || pages->id != parts.table_id) pages = table(parts.table_id);
    if (pages != nullptr && i + kPrefetched < writes.size())
      prefetch(*pages, parts_of(writes[i + kPrefetched].key).key);
    if (write.is_put && pages == nullptr) {
      return {Code::kInternal, "table id " + std::to_string(parts.table_id) + " went while its rows were written"};
    }
    if (write.is_put) {
      SR_RETURN_IF_ERROR(put(pages, parts.key, batch.image(write), write.before));
    } else if (pages != nullptr) {
      SR_RETURN_IF_ERROR(erase(*pages, parts.key));
    }
  }
  rows_written_ += batch.writes().size();
  bytes_written_ += batch.bytes();
  if (wants_collection()) changed_.notify_all();
  ++writes_;
  write_nanoseconds_ +=
      static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count());
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
    for (Partition& partition : pages->partitions) partition.index = PageIndex(high_slot_bits_);
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

Status PageLog::wait_for_writer(Lock& lock) {
  const bool goes_on = changed_.wait_for(lock, kLongestWrite,
                                         [this] { return sealed_.size() <= kMostSealed || !write_failure_.is_ok(); });
  if (sealed_.size() <= kMostSealed) return Status::ok();
  if (goes_on) return write_failure_;
  return {Code::kUnavailable, "the SSD tier in " + options_.path + " did not write a segment in " +
                                  std::to_string(kLongestWrite.count()) + " s"};
}

// False, and why, when the disk or max_bytes has no room for one more.
bool PageLog::add_segment(Status& why) {
  const bool is_new = holes_.empty();
  const std::uint32_t number = is_new ? next_segment_ : *holes_.begin();
  const std::uint64_t on_disk = next_segment_ - 1 - holes_.size();
  if (options_.max_bytes > 0 && (on_disk + 1) * kSegmentBytes > options_.max_bytes) {
    why = {Code::kResourceExhausted, "ssd_bytes: " + std::to_string(options_.max_bytes) + " reached (" +
                                         std::to_string(on_disk * kSegmentBytes) + " bytes in " + options_.path +
                                         "); nothing was lost; raise it, add shards, or delete rows"};
    return false;
  }
  if (number == kMostSegments) {
    why = {Code::kResourceExhausted, "ssd_path: " + options_.path + " has the 16 TiB that a shard can use"};
    return false;
  }
  if (const Status reserved = file_->reserve(number); !reserved.is_ok()) {
    why = {Code::kResourceExhausted, "ssd_path: " + options_.path + " takes no more rows (" + reserved.message() +
                                         "); nothing was lost; make room on the disk"};
    return false;
  }
  if (is_new) {
    std::atomic<Segment*>& chunk = chunks_[number / kChunk];
    if (chunk.load(std::memory_order_relaxed) == nullptr) chunk.store(new Segment[kChunk], std::memory_order_release);
    ++next_segment_;
  } else {
    holes_.erase(holes_.begin());
  }
  free_.insert(number);
  return true;
}

// Segments and buffers for so many more, and segments for collection beside them.
Status PageLog::make_room(Lock& lock, std::uint32_t segments) {
  const auto deadline = std::chrono::steady_clock::now() + kLongestWaitForRoom;
  for (;;) {
    reap();
    Status why;
    while (free_.size() < segments + kSpareSegments && add_segment(why)) {
    }
    if (free_.size() >= segments + kSpareSegments) break;
    if (collect(lock, kAlmostAll)) continue;
    const bool may_come = collecting_ > 0 || !sealed_.empty() || !retired_.empty();
    if (!may_come || !write_failure_.is_ok() || std::chrono::steady_clock::now() > deadline) return why;
    changed_.notify_all();
    changed_.wait_for(lock, kRoomStep);
  }
  while (buffers_.size() < segments) {
    void* const buffer = std::aligned_alloc(kUnitBytes, kSegmentBytes);
    if (buffer == nullptr) throw std::bad_alloc();
    std::memset(buffer, 0, kSegmentBytes);
    buffers_.push_back(static_cast<std::byte*>(buffer));
    buffer_bytes_ += kSegmentBytes;
  }
  return Status::ok();
}

Status PageLog::put(const std::shared_ptr<TablePages>& pages, std::uint64_t key, std::span<const std::byte> image,
                    SsdBatch::Before before) {
  const Spot spot = spot_of(pages->id, key);
  Partition& partition = pages->partitions[spot.partition];
  const std::span<const Place> places = candidates(partition, spot.hash);
  Place old;
  if (places.size() == 1 && before == SsdBatch::Before::kImage) {
    old = places[0];  // the caller knows of an image, and this is the only one that it can be
  } else {
    for (const Place place : places) {
      const Result<std::uint64_t> found = key_at(*pages, place);
      if (!found.is_ok()) return found.status();
      if (found.value() == key) old = place;
    }
  }
  const Place place = append(pages, kFresh, key, image);
  {
    const std::unique_lock lock(partition.mutex);
    const std::uint64_t before_bytes = partition.index.bytes();
    old.is_somewhere() ? static_cast<void>(partition.index.move(spot.hash, old, place))
                       : partition.index.insert(spot.hash, place);
    index_bytes_ += partition.index.bytes() - before_bytes;
  }
  if (old.is_somewhere()) lose(old, pages->layout.record_bytes);
  return Status::ok();
}

// With mutex_, so that the index stays where it is.
void PageLog::prefetch(const TablePages& pages, std::uint64_t key) const noexcept {
  const Spot spot = spot_of(pages.id, key);
  pages.partitions[spot.partition].index.prefetch(spot.hash);
}

Status PageLog::erase(TablePages& pages, std::uint64_t key) {
  const Spot spot = spot_of(pages.id, key);
  Partition& partition = pages.partitions[spot.partition];
  for (const Place place : candidates(partition, spot.hash)) {
    const Result<std::uint64_t> found = key_at(pages, place);
    if (!found.is_ok()) return found.status();
    if (found.value() != key) continue;
    {
      const std::unique_lock lock(partition.mutex);
      static_cast<void>(partition.index.erase(spot.hash, place));
    }
    lose(place, pages.layout.record_bytes);
    return Status::ok();
  }
  return Status::ok();
}

std::span<const Place> PageLog::candidates(const Partition& partition, std::uint32_t hash) {
  candidates_.clear();
  partition.index.candidates(hash, [this](Place place) { candidates_.push_back(place); });
  return candidates_;
}

bool PageLog::can_append(const TablePages& pages, Stream stream) const noexcept {
  const std::optional<OpenPage>& open = pages.open[stream];
  if (open && open->rows < pages.layout.rows) return true;
  const bool fits = open_[stream].segment != 0 && open_[stream].units + pages.layout.units <= kUnitsInSegment;
  return fits || !free_.empty();
}

Place PageLog::append(const std::shared_ptr<TablePages>& pages, Stream stream, std::uint64_t key,
                      std::span<const std::byte> image) {
  if (!pages->open[stream] || pages->open[stream]->rows == pages->layout.rows) open_page(pages, stream);
  OpenPage& open = *pages->open[stream];
  const std::uint32_t record_bytes = pages->layout.record_bytes;
  const Place place(open.segment, open.unit, open.rows++);
  Segment& target = segment(open.segment);
  std::byte* const record = target.buffer.load(std::memory_order_relaxed) + place.record_at(record_bytes);
  std::memcpy(record, &key, sizeof key);
  std::memcpy(record + kRecordKeyBytes, image.data(), image.size());
  const auto slot = static_cast<std::uint16_t>(slot_of(row_hash(pages->id, key), options_.slot_count));
  open.first_slot = open.rows == 1 ? slot : std::min(open.first_slot, slot);
  open.last_slot = open.rows == 1 ? slot : std::max(open.last_slot, slot);
  target.live_bytes += record_bytes;
  target.filled_bytes += record_bytes;
  live_bytes_ += record_bytes;
  filled_bytes_ += record_bytes;
  return place;
}

void PageLog::open_page(const std::shared_ptr<TablePages>& pages, Stream stream) {
  close_page(*pages, stream);
  OpenSegment& open = open_[stream];
  if (open.segment == 0 || open.units + pages->layout.units > kUnitsInSegment) {
    seal(stream);
    open.segment = *free_.begin();  // make_room() and can_append() left one
    free_.erase(free_.begin());
    Segment& fresh = segment(open.segment);
    fresh.state = Segment::State::kOpen;
    fresh.buffer.store(take_buffer(), std::memory_order_release);
  }
  pages->open[stream] = OpenPage{.segment = open.segment, .unit = open.units};
  open.units += pages->layout.units;
  if (std::find(open.tables.begin(), open.tables.end(), pages) == open.tables.end()) open.tables.push_back(pages);
}

std::byte* PageLog::take_buffer() {
  if (buffers_.empty()) {
    void* const buffer = std::aligned_alloc(kUnitBytes, kSegmentBytes);
    if (buffer == nullptr) throw std::bad_alloc();
    buffer_bytes_ += kSegmentBytes;
    return static_cast<std::byte*>(buffer);
  }
  std::byte* const buffer = buffers_.back();
  buffers_.pop_back();
  return buffer;
}

void PageLog::close_page(TablePages& pages, Stream stream) {
  write_header(pages, stream);
  pages.open[stream].reset();
}

void PageLog::write_header(const TablePages& pages, Stream stream) {
  const std::optional<OpenPage>& open = pages.open[stream];
  if (!open) return;
  std::byte* const page =
      segment(open->segment).buffer.load(std::memory_order_relaxed) + Place(open->segment, open->unit, 0).page_at();
  PageHeader header;
  header.units = static_cast<std::uint16_t>(pages.layout.units);
  header.sequence = ++sequence_;
  header.cluster_id = options_.cluster_id;
  header.table_id = pages.id;
  header.record_bytes = pages.layout.record_bytes;
  header.rows = static_cast<std::uint16_t>(open->rows);
  header.shard = options_.shard;
  header.lineage = options_.lineage;
  header.first_slot = open->first_slot;
  header.last_slot = open->last_slot;
  header.slot_bits = static_cast<std::uint16_t>(slot_bits_);
  std::memcpy(page, &header, sizeof header);
  header.checksum = page_checksum(std::span(page, pages.layout.page_bytes()), header);
  std::memcpy(page, &header, sizeof header);
}

std::uint64_t PageLog::page_checksum(std::span<const std::byte> page, const PageHeader& header) noexcept {
  const std::size_t end = sizeof(PageHeader) + std::size_t{header.rows} * header.record_bytes;
  return XXH3_64bits(page.data() + kChecksumEnd, end - kChecksumEnd);
}

void PageLog::seal(Stream stream) {
  OpenSegment& open = open_[stream];
  if (open.segment == 0) return;
  finish_headers(stream);
  for (const auto& pages : open.tables) {
    if (pages->open[stream] && pages->open[stream]->segment == open.segment) pages->open[stream].reset();
  }
  segment(open.segment).state = Segment::State::kSealed;
  sealed_.push_back(open.segment);
  open = OpenSegment{};
  changed_.notify_all();
}

// Every page of the open segment can be read from its bytes, and nothing follows them.
void PageLog::finish_headers(Stream stream) {
  const OpenSegment& open = open_[stream];
  for (const auto& pages : open.tables) {
    if (pages->open[stream] && pages->open[stream]->segment == open.segment) write_header(*pages, stream);
  }
  std::byte* const bytes = segment(open.segment).buffer.load(std::memory_order_relaxed);
  std::memset(bytes + open.units * kUnitBytes, 0, kSegmentBytes - open.units * kUnitBytes);
}

void PageLog::lose(Place place, std::uint32_t bytes) {
  Segment& loser = segment(place.segment());
  loser.live_bytes -= bytes;
  live_bytes_ -= bytes;
  if (loser.live_bytes == 0 && loser.state == Segment::State::kWritten) retire(place.segment());
}

void PageLog::retire(std::uint32_t number) {
  Segment& retired = segment(number);
  filled_bytes_ -= retired.filled_bytes;
  retired.filled_bytes = 0;
  retired.state = Segment::State::kRetired;
  retired_.push_back({.stamp = tickets_.stamp(), .segment = number});
}

// What no reader can see any more is free; the disk gets back what is far more than will be wanted.
void PageLog::reap() {
  while (!retired_.empty() && tickets_.is_free(retired_.front().stamp)) {
    const Retired retired = retired_.front();
    retired_.pop_front();
    if (retired.buffer == nullptr) {
      segment(retired.segment).state = Segment::State::kFree;
      free_.insert(retired.segment);
    } else if (buffers_.size() < kKeptBuffers) {
      buffers_.push_back(retired.buffer);
    } else {
      std::free(retired.buffer);
      buffer_bytes_ -= kSegmentBytes;
    }
  }
  const std::size_t used = next_segment_ - 1 - free_.size() - holes_.size();
  while (free_.size() > std::max(kLeastFree, used / kFreeShare)) {
    const std::uint32_t number = *std::prev(free_.end());
    file_->release(number);
    free_.erase(number);
    holes_.insert(number);
  }
}

Status PageLog::erase_table(std::uint32_t table_id, std::uint32_t /*slot_count*/) {
  const Lock lock(mutex_);
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
    partition.index.in_range(0, ~std::uint32_t{0}, [&](Place place) { lose(place, pages->layout.record_bytes); });
    index_bytes_ -= partition.index.bytes();
  }
  if (wants_collection()) changed_.notify_all();
  return Status::ok();
}

Status PageLog::flush() {
  Lock lock(mutex_);
  const bool is_done =
      changed_.wait_for(lock, kLongestWrite, [this] { return sealed_.empty() || !write_failure_.is_ok(); });
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
      std::uint64_t lines = 0;
      for (const IndexPart& part : partition.index.parts()) lines += part.line_count();
      write(&lines, sizeof lines);
      for (const IndexPart& part : partition.index.parts()) write(part.lines().data(), part.lines().size());
    }
  }
}

SsdStats PageLog::stats() const {
  const std::lock_guard lock(mutex_);
  const bool is_busy = collecting_ > 0 || wants_collection();
  return {.file_bytes = (next_segment_ - 1 - holes_.size()) * kSegmentBytes,
          .garbage_bytes = filled_bytes_ - live_bytes_,
          .memory_bytes = index_bytes_ + buffer_bytes_,
          .index_bytes = index_bytes_,
          .rows_read = rows_read_,
          .rows_absent = rows_absent_,
          .rows_written = rows_written_,
          .bytes_read = bytes_read_,
          .bytes_written = bytes_written_,
          .reads = reads_,
          .read_nanoseconds = read_nanoseconds_,
          .writes = writes_,
          .write_nanoseconds = write_nanoseconds_,
          .disk_bytes_read = disk_bytes_read_,
          .disk_bytes_written = disk_bytes_written_,
          .background_jobs = sealed_.size() + (is_busy ? 1 : 0)};
}

}  // namespace sparserow
