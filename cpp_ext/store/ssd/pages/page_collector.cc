// The thread of a page log: it writes sealed segments, and frees those that are mostly garbage. See page_log.h.
#include <algorithm>
#include <cstring>

#include "store/ssd/pages/page_log.h"
#include "util/hash.h"

namespace sparserow {
namespace {

// Garbage is collected from this share of all records' bytes on; docs/measurements/tiers.md has what that writes.
constexpr double kSomeGarbage = 1.0 / 3;
constexpr double kMuchGarbage = 0.45;  // from here on before sealed segments are written, so that writers wait for it
constexpr double kMostLive = 0.9;      // live records of a segment that is worth it
constexpr std::uint64_t kLeastSegments = 16;
constexpr std::uint32_t kSearched = 1u << 16;  // segments that one choice looks at
constexpr std::chrono::milliseconds kWriteRetry{100};
constexpr std::chrono::milliseconds kReadRetry{10'000};  // after which a segment that could not be read is tried again
constexpr std::chrono::milliseconds kTicketStep{2};

}  // namespace

void PageLog::run() {
  take_ssd_priority();
  const MutexLock lock(mutex_);
  bool is_nothing_to_collect = false;
  for (;;) {
    reap();
    if (is_ending_ && (sealed_.empty() || !write_failure_.is_ok())) return;
    const bool is_urgent = !is_ending_ && garbage_share() > kMuchGarbage && !is_nothing_to_collect;
    if (!sealed_.empty() && !(is_urgent && wants_collection())) {
      write_sealed();
      is_nothing_to_collect = false;
      continue;
    }
    if (!is_ending_ && wants_collection() && !is_nothing_to_collect) {
      is_nothing_to_collect = !collect(kMostLive);
      continue;
    }
    const auto has_work = [&]() SR_REQUIRES(mutex_) {
      return is_ending_ || !sealed_.empty() || (wants_collection() && !is_nothing_to_collect);
    };
    if (is_nothing_to_collect && !failed_reads_.empty()) {
      changed_.wait_for(mutex_, retired_.empty() ? kReadRetry : kTicketStep, has_work);
      is_nothing_to_collect = false;
    } else if (retired_.empty()) {
      changed_.wait(mutex_, [&]() SR_REQUIRES(mutex_) { return has_work() || !retired_.empty(); });
    } else {
      changed_.wait_for(mutex_, kTicketStep, has_work);
    }
  }
}

void PageLog::write_sealed() {
  const std::uint32_t number = sealed_.front();
  Segment& written = segment(number);
  std::byte* const buffer = written.buffer.load(std::memory_order_relaxed);
  Status status;
  {
    const MutexUnlock unlocked(mutex_);
    status = file_->write(number, std::span(buffer, kSegmentBytes));
  }
  if (!status.is_ok()) {
    write_failure_ = disk_full(status);
    changed_.notify_all();
    changed_.wait_for(mutex_, kWriteRetry, [this]() SR_REQUIRES(mutex_) { return is_ending_; });
    return;
  }
  write_failure_ = Status::ok();
  disk_bytes_written_ += kSegmentBytes;
  sealed_.pop_front();
  written.buffer.store(nullptr, std::memory_order_release);
  retired_.push_back({.stamp = tickets_.stamp(), .buffer = buffer});
  written.state = Segment::State::kWritten;
  if (written.live_bytes == 0) retire(number);
  changed_.notify_all();
}

double PageLog::garbage_share() const noexcept {
  if (filled_bytes_ == 0) return 0;
  return static_cast<double>(filled_bytes_ - live_bytes_) / static_cast<double>(filled_bytes_);
}

bool PageLog::wants_collection() const noexcept {
  return filled_bytes_ > kLeastSegments * kSegmentBytes && garbage_share() > kSomeGarbage;
}

// The written segment with the smallest share of live records, of many that are looked at; 0 for none.
std::uint32_t PageLog::victim(double most_live) {
  std::uint32_t best = 0;
  double least = most_live;
  const std::uint32_t looked_at = std::min(next_segment_ - 1, kSearched);
  for (std::uint32_t i = 0; i < looked_at; ++i) {
    next_victim_ = next_victim_ + 1 < next_segment_ ? next_victim_ + 1 : 1;
    const Segment& each = segment(next_victim_);
    if (each.state != Segment::State::kWritten || each.filled_bytes == 0) continue;
    if (const auto failed = failed_reads_.find(next_victim_); failed != failed_reads_.end()) {
      if (std::chrono::steady_clock::now() - failed->second < kReadRetry) continue;
      failed_reads_.erase(failed);
    }
    const double live = static_cast<double>(each.live_bytes) / static_cast<double>(each.filled_bytes);
    if (live < least) {
      least = live;
      best = next_victim_;
    }
  }
  return best;
}

// Moves what is live in one segment and frees it. The lock is given back while the disk is asked, and between pages.
bool PageLog::collect(double most_live) {
  const std::uint32_t number = victim(most_live);
  if (number == 0) return false;
  Segment& collected = segment(number);
  collected.state = Segment::State::kCollecting;
  ++collecting_;
  std::byte* const buffer = take_buffer();
  bool is_read = false;
  {
    const MutexUnlock unlocked(mutex_);
    is_read = file_->read(number, 0, std::span(buffer, kSegmentBytes), PageFile::Wait::kYes) == PageFile::Got::kAll;
  }
  const bool has_room = is_read && move_live_records(number, std::span(buffer, kSegmentBytes));
  buffers_.push_back(buffer);
  --collecting_;
  if (collected.live_bytes == 0) {
    retire(number);
  } else {  // what is whole has been moved
    collected.state = has_room ? Segment::State::kDamaged : Segment::State::kWritten;
  }
  if (!is_read) failed_reads_[number] = std::chrono::steady_clock::now();
  changed_.notify_all();
  return has_room || !is_read;
}

// False when there is no room for what is kept.
bool PageLog::move_live_records(std::uint32_t number, std::span<const std::byte> bytes) {
  for (std::uint32_t unit = 0; unit < kUnitsInSegment && segment(number).live_bytes > 0;) {
    PageHeader header;
    const std::span<const std::byte> page = bytes.subspan(unit * kUnitBytes);
    std::memcpy(&header, page.data(), sizeof header);
    if (!is_whole(page, header)) break;
    if (!move_page(number, unit, page, header)) return false;
    unit += header.units;
    const MutexUnlock others_go_on(mutex_);
  }
  return true;
}

bool PageLog::is_whole(std::span<const std::byte> page, const PageHeader& header) noexcept {
  if (header.magic != PageHeader::kMagic || header.format != PageHeader::kFormat || header.units == 0) return false;
  const std::size_t end = sizeof(PageHeader) + std::size_t{header.rows} * header.record_bytes;
  return end <= page.size() && end <= header.units * kUnitBytes && page_checksum(page, header) == header.checksum;
}

bool PageLog::move_page(std::uint32_t number, std::uint32_t unit, std::span<const std::byte> page,
                        const PageHeader& header) {
  const std::shared_ptr<TablePages> pages = table(header.table_id);
  if (pages == nullptr || pages->layout.record_bytes != header.record_bytes) return true;
  const auto record_of = [&](std::uint32_t row) {
    return page.subspan(sizeof(PageHeader) + std::size_t{row} * header.record_bytes, header.record_bytes);
  };
  spots_.clear();
  for (std::uint32_t row = 0; row < header.rows; ++row) {
    spots_.push_back(spot_of(row_hash(pages->id, record_key(record_of(row).data()))));
  }
  const OldestStamps* const stamped = stamps_in(segment(number), pages->id);
  const SsdStamps stamps = stamped != nullptr ? stamped->stamps : SsdStamps();
  const auto index_of = [&](const Spot& spot) -> PageIndex& { return pages->partitions[spot.partition].index; };
  for (const Spot& spot : spots_) index_of(spot).prefetch_part(spot.key);
  for (const Spot& spot : spots_) index_of(spot).prefetch(spot.key);
  for (std::uint32_t row = 0; row < header.rows; ++row) {
    const Spot& spot = spots_[row];
    const IndexEntry entry = index_of(spot).find(spot.key, Place(number, unit, row));
    if (!entry) continue;
    if (!can_append(*pages, kKept)) return false;
    const std::span<const std::byte> record = record_of(row);
    const Place to =
        append(pages, kKept, record_key(record.data()), spot.slot, record.subspan(kRecordKeyBytes), stamps);
    move(*pages, spot, entry, to);
  }
  return true;
}

}  // namespace sparserow
