// A walk over the rows of a table, by segment. See page_log.h.
//
// Segments are read in the order in which they were sealed, then those that collection has sealed meanwhile, then the
// open ones. Collection moves a row to a segment that is sealed later than its own, so a walk passes no row by that is
// there all the while; one that is moved behind the walk's place is met again.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "store/ssd/pages/page_log.h"
#include "util/hash.h"

namespace sparserow {
namespace {

constexpr std::size_t kMostMoved = 4;  // segments of kept rows that a walk follows, for each that it began with

}  // namespace

struct PageLog::Walk {
  const std::shared_ptr<TablePages> pages;
  const WantsStamps& wants;
  const VisitStamped& visit;
  std::uint32_t open = 0;           // the segment of fresh rows that was open at the start; 0: none, or it is done with
  std::size_t kept = 0;             // of kept_ that are done with
  bool is_over = false;             // nothing is sealed that is to be read
  bool goes_on = true;              // visit() has said so
  bool is_whole = true;             // every page of the segment that is read could be
  std::optional<SsdStamps> oldest;  // of the segment that is read
  std::vector<std::byte> bytes;     // of that segment, or at the end of the open ones
  std::array<std::uint32_t, kStreams> opened{};  // whose bytes these are, one behind the other; 0: none
};

const PageLog::OldestStamps* PageLog::stamps_in(const Segment& segment, std::uint32_t table_id) noexcept {
  const auto found = std::ranges::find(segment.stamps, table_id, &OldestStamps::table_id);
  return found == segment.stamps.end() ? nullptr : &*found;
}

void PageLog::note_stamps(Segment& segment, std::uint32_t table_id, SsdStamps stamps) {
  const auto found = std::ranges::find(segment.stamps, table_id, &OldestStamps::table_id);
  if (found == segment.stamps.end()) {
    segment.stamps.push_back({table_id, stamps});
  } else {
    found->stamps = found->stamps.older(stamps);
  }
}

bool PageLog::is_wanted(const Walk& walk, const Segment& segment) {
  const OldestStamps* const known = stamps_in(segment, walk.pages->id);
  return known != nullptr && (walk.wants == nullptr || walk.wants(known->stamps));
}

// In the order in which they were sealed. The lock is given back now and then: what is sealed anew meanwhile has a
// later seal.
std::vector<PageLog::Sealed> PageLog::sealed_until(std::uint64_t last) const {
  std::vector<Sealed> found;
  std::uint32_t number = 1;
  for (bool is_all = false; !is_all;) {
    const MutexLock lock(mutex_);
    const std::uint32_t end = std::min(next_segment_, number + kChunk);
    for (; number < end; ++number) {
      const Segment& each = segment(number);
      if (each.seal != 0 && each.seal <= last) found.push_back({each.seal, number});
    }
    is_all = number >= next_segment_;
  }
  std::sort(found.begin(), found.end(), [](const Sealed& one, const Sealed& other) { return one.seal < other.seal; });
  return found;
}

// What was sealed since the start of a walk, and is to be read. Where there is nothing, or the walk has gone on for
// long, it is over, and has copies of the open segments under the same lock.
std::vector<PageLog::Sealed> PageLog::sealed_since(Walk& walk, bool may_go_on) {
  const MutexLock lock(mutex_);
  std::vector<Sealed> found;
  if (walk.open != 0 && walk.open != open_[kFresh].segment) {
    if (segment(walk.open).seal != 0) found.push_back({segment(walk.open).seal, walk.open});
    walk.open = 0;
  }
  if (may_go_on) found.insert(found.end(), kept_.begin() + static_cast<std::ptrdiff_t>(walk.kept), kept_.end());
  walk.kept = kept_.size();
  walk.is_over = found.empty();
  if (walk.is_over) copy_open(walk);
  return found;
}

void PageLog::copy_open(Walk& walk) {
  walk.bytes.resize(kStreams * kSegmentBytes);
  for (const Stream stream : {kFresh, kKept}) {
    const std::uint32_t number = open_[stream].segment;
    if (number == 0 || (stream == kFresh && walk.open == 0) || !is_wanted(walk, segment(number))) continue;
    finish_headers(stream);
    std::memcpy(walk.bytes.data() + stream * kSegmentBytes, segment(number).buffer.load(std::memory_order_relaxed),
                kSegmentBytes);
    walk.opened[stream] = number;
  }
}

Status PageLog::visit_table(std::uint32_t table_id, std::uint32_t /*slot_count*/, const WantsStamps& wants,
                            const VisitStamped& visit) {
  Walk walk{.pages = table(table_id), .wants = wants, .visit = visit, .oldest = {}, .bytes = {}};
  if (walk.pages == nullptr) return Status::ok();
  std::uint64_t last = 0;
  {
    const MutexLock lock(mutex_);
    ++walks_;
    walk.open = open_[kFresh].segment;
    walk.kept = kept_.size();
    last = seals_;
  }
  const auto end = [this](const void*) {
    const MutexLock lock(mutex_);
    if (--walks_ == 0) kept_ = {};
  };
  const std::unique_ptr<const void, decltype(end)> ended(this, end);
  std::vector<Sealed> sealed = sealed_until(last);
  std::size_t left = kMostMoved * (sealed.size() + kUnitsInSegment);
  while (!walk.is_over) {
    for (const Sealed& each : sealed) {
      if (!walk.goes_on) return Status::ok();
      SR_RETURN_IF_ERROR(walk_sealed(walk, each));
    }
    sealed = sealed_since(walk, left > 0);
    left -= std::min(left, sealed.size());
  }
  for (const Stream stream : {kFresh, kKept}) {
    if (walk.opened[stream] == 0) continue;
    const std::span bytes = std::span<const std::byte>(walk.bytes).subspan(stream * kSegmentBytes, kSegmentBytes);
    SR_RETURN_IF_ERROR(walk_segment(walk, walk.opened[stream], bytes));
  }
  return Status::ok();
}

// Reads a segment unless no row of it is wanted, or its rows have been moved. What it has is known better afterwards.
Status PageLog::walk_sealed(Walk& walk, const Sealed& sealed) {
  {
    const ReadTickets::Ticket ticket(tickets_);
    const std::byte* buffer = nullptr;
    {
      const MutexLock lock(mutex_);
      const Segment& each = segment(sealed.number);
      if (each.seal != sealed.seal || !is_wanted(walk, each)) return Status::ok();
      buffer = each.buffer.load(std::memory_order_relaxed);
    }
    walk.bytes.resize(kSegmentBytes);
    if (buffer != nullptr) {
      std::memcpy(walk.bytes.data(), buffer, kSegmentBytes);
    } else if (file_->read(sealed.number, 0, walk.bytes, PageFile::Wait::kYes) == PageFile::Got::kAll) {
      disk_bytes_read_ += kSegmentBytes;
    } else {
      return unreadable(Place(sealed.number, 0, 0), errno);
    }
  }
  SR_RETURN_IF_ERROR(walk_segment(walk, sealed.number, walk.bytes));
  const MutexLock lock(mutex_);
  Segment& each = segment(sealed.number);
  const bool is_same = each.seal == sealed.seal && table(walk.pages->id) == walk.pages;  // else others have come
  if (!is_same || !walk.is_whole || !walk.goes_on) return Status::ok();
  std::erase_if(each.stamps, [&](const OldestStamps& one) { return one.table_id == walk.pages->id; });
  if (walk.oldest) each.stamps.push_back({walk.pages->id, *walk.oldest});
  return Status::ok();
}

Status PageLog::walk_segment(Walk& walk, std::uint32_t number, std::span<const std::byte> bytes) {
  walk.is_whole = true;
  walk.oldest.reset();
  for (std::uint32_t unit = 0; unit < kUnitsInSegment && walk.goes_on;) {
    const std::span<const std::byte> page = bytes.subspan(unit * kUnitBytes);
    PageHeader header;
    std::memcpy(&header, page.data(), sizeof header);
    if (header.magic != PageHeader::kMagic || header.units == 0) {
      walk.is_whole = header.magic == 0;  // else a page that may have been anyone's: the segment is read again
      break;
    }
    if (header.table_id == walk.pages->id && header.record_bytes == walk.pages->layout.record_bytes) {
      if (!is_whole(page, header)) return damaged(Place(number, unit, 0), "fails its checksum");
      SR_RETURN_IF_ERROR(walk_page(walk, Place(number, unit, 0), page, header.rows));
    }
    unit += header.units;
  }
  return Status::ok();
}

Status PageLog::walk_page(Walk& walk, Place page, std::span<const std::byte> bytes, std::uint32_t rows) {
  const TablePages& pages = *walk.pages;
  for (std::uint32_t row = 0; row < rows && walk.goes_on; ++row) {
    const Place place(page.segment(), page.unit(), row);
    const std::span record =
        bytes.subspan(place.record_at(pages.layout.record_bytes) - place.page_at(), pages.layout.record_bytes);
    const std::uint64_t key = record_key(record.data());
    const Spot spot = spot_of(row_hash(pages.id, key));
    const Partition& partition = pages.partitions[spot.partition];
    bool is_live = false;
    {
      const std::shared_lock lock(partition.mutex);
      partition.index.candidates(spot.key, [&](Place each) { is_live = is_live || each == place; });
    }
    if (!is_live) continue;
    ++rows_visited_;
    const auto stamps = walk.visit(key, record.subspan(kRecordKeyBytes));
    if (!stamps.is_ok()) return stamps.status();
    walk.goes_on = stamps.value().has_value();
    if (walk.goes_on) walk.oldest = walk.oldest ? walk.oldest->older(*stamps.value()) : *stamps.value();
  }
  return Status::ok();
}

}  // namespace sparserow
