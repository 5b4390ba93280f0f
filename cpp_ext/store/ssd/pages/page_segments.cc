// The segments of a page log: pages that are appended to, sealed, retired and used again. See page_log.h.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#include "store/ssd/pages/page_log.h"
#include "util/hash.h"

namespace sparserow {
namespace {

constexpr std::size_t kKeptBuffers = 8;  // that are used again
constexpr std::size_t kLeastFree = 64;   // free segments that keep their bytes on the disk
constexpr std::size_t kFreeShare = 8;    // or one for so many that are used
constexpr std::size_t kChecksumEnd = offsetof(PageHeader, checksum) + sizeof(PageHeader::checksum);

}  // namespace

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
    why = disk_full(reserved);
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

Status PageLog::disk_full(const Status& why) const {
  return {Code::kResourceExhausted, "ssd_path: " + options_.path + " takes no more rows (" + why.message() +
                                        "); nothing was lost; make room on the disk"};
}

bool PageLog::can_append(const TablePages& pages, Stream stream) const noexcept {
  const std::optional<OpenPage>& open = pages.open[stream];
  if (open && open->rows < pages.layout.rows) return true;
  const bool fits = open_[stream].segment != 0 && open_[stream].units + pages.layout.units <= kUnitsInSegment;
  return fits || !free_.empty();
}

Place PageLog::append(const std::shared_ptr<TablePages>& pages, Stream stream, std::uint64_t key,
                      std::uint32_t slot_of_key, std::span<const std::byte> image, SsdStamps stamps) {
  if (!pages->open[stream] || pages->open[stream]->rows == pages->layout.rows) open_page(pages, stream);
  OpenPage& open = *pages->open[stream];
  const std::uint32_t record_bytes = pages->layout.record_bytes;
  const Place place(open.segment, open.unit, open.rows++);
  Segment& target = segment(open.segment);
  std::byte* const record = target.buffer.load(std::memory_order_relaxed) + place.record_at(record_bytes);
  std::memcpy(record, &key, sizeof key);
  std::memcpy(record + kRecordKeyBytes, image.data(), image.size());
  const auto slot = static_cast<std::uint16_t>(slot_of_key);
  open.first_slot = open.rows == 1 ? slot : std::min(open.first_slot, slot);
  open.last_slot = open.rows == 1 ? slot : std::max(open.last_slot, slot);
  note_stamps(target, pages->id, stamps);
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

std::byte* PageLog::make_buffer() {
  void* const buffer = std::aligned_alloc(kUnitBytes, kSegmentBytes);
  if (buffer == nullptr) throw std::bad_alloc();
  std::memset(buffer, 0, kSegmentBytes);
  buffer_bytes_ += kSegmentBytes;
  return static_cast<std::byte*>(buffer);
}

std::byte* PageLog::take_buffer() {
  if (buffers_.empty()) return make_buffer();
  std::byte* const buffer = buffers_.back();
  buffers_.pop_back();
  return buffer;
}

void PageLog::close_page(TablePages& pages, Stream stream) {
  write_header(pages, stream);
  leave_page(pages, stream);
}

// The room that a fresh page has left counts as garbage: collection puts the rows of several such pages into one. That
// of a page of kept rows does not, because where there are more tables than a segment has pages they would be moved for
// ever.
void PageLog::leave_page(TablePages& pages, Stream stream) {
  std::optional<OpenPage>& open = pages.open[stream];
  if (!open) return;
  if (stream == kFresh) {
    const std::uint32_t left = (pages.layout.rows - open->rows) * pages.layout.record_bytes;
    segment(open->segment).filled_bytes += left;
    filled_bytes_ += left;
  }
  open.reset();
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
    if (pages->open[stream] && pages->open[stream]->segment == open.segment) leave_page(*pages, stream);
  }
  segment(open.segment).state = Segment::State::kSealed;
  segment(open.segment).seal = ++seals_;
  if (stream == kKept && walks_ > 0) kept_.push_back({seals_, open.segment});
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
  failed_reads_.erase(number);
  retired.state = Segment::State::kRetired;
  retired.seal = 0;
  retired.stamps = {};
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
      refusal_ = Status::ok();
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

}  // namespace sparserow
