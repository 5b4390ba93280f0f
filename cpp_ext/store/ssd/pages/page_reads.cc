// How records are found and read. A reader holds a ticket, and no lock while it reads. See page_log.h.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "store/ssd/pages/page_log.h"
#include "util/hash.h"

namespace sparserow {
namespace {

constexpr std::size_t kVisitedAtOnce = 256;    // records that are read under one ticket
constexpr std::size_t kPlannedAtOnce = 16384;  // hashes that one look through a slot's index gives
constexpr std::size_t kAlignment = 8;

std::size_t aligned_record(std::size_t bytes) noexcept { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Status PageLog::damaged(Place place, const std::string& what) const {
  return {Code::kDataLoss, "the SSD tier in " + options_.path + " is damaged: the page at byte " +
                               std::to_string(std::uint64_t{place.segment()} * kSegmentBytes + place.page_at()) + " " +
                               what};
}

// What errno says of a read that did not get all of its bytes.
Status PageLog::unreadable(Place place, int error) const {
  if (error == 0) return damaged(place, "ends too early");
  return {Code::kUnavailable, "the SSD tier in " + options_.path + " cannot be read: " + std::strerror(error)};
}

Status PageLog::read_from_file(const Record& record, PageFile::Wait wait, bool& would_wait) const {
  const std::size_t at = record.place.record_at(record.bytes);
  const PageFile::Got got = file_->read(record.place.segment(), at, std::span(record.to, record.bytes), wait);
  would_wait = got == PageFile::Got::kWouldWait;
  return got == PageFile::Got::kNotAll ? unreadable(record.place, errno) : Status::ok();
}

// Those that the disk has to be asked for are counted, and read at once, after the others.
Status PageLog::read_records(std::span<const Record> records, std::uint64_t& waited) {
  std::vector<const Record*> late;
  for (const Record& record : records) {
    const std::byte* const buffer = segment(record.place.segment()).buffer.load(std::memory_order_acquire);
    if (buffer != nullptr) {
      std::memcpy(record.to, buffer + record.place.record_at(record.bytes), record.bytes);
      continue;
    }
    bool would_wait = false;
    SR_RETURN_IF_ERROR(read_from_file(record, PageFile::Wait::kNo, would_wait));
    if (would_wait) late.push_back(&record);
  }
  waited = late.size();
  return late.empty() ? Status::ok() : read_late(late);
}

Status PageLog::read_late(std::span<const Record* const> records) {
  std::vector<PageFile::Part> parts;
  parts.reserve(records.size());
  for (const Record* record : records) {
    const std::size_t at = record->place.record_at(record->bytes);
    parts.push_back({record->place.segment(), at, std::span(record->to, record->bytes)});
    disk_bytes_read_ += ((at + record->bytes - 1) / kUnitBytes - at / kUnitBytes + 1) * kUnitBytes;
  }
  Status outcome;
  file_->read_late(parts, readers_, [&](std::size_t i, int error) { outcome = unreadable(records[i]->place, error); });
  return outcome;
}

// A record has another key than its place was found for: another key with the same hash, or damage.
Status PageLog::check_page(const TablePages& pages, Place place) const {
  if (segment(place.segment()).buffer.load(std::memory_order_acquire) != nullptr) return Status::ok();
  std::vector<std::byte> page(pages.layout.page_bytes());
  if (file_->read(place.segment(), place.page_at(), page, PageFile::Wait::kYes) != PageFile::Got::kAll) {
    return unreadable(place, errno);
  }
  PageHeader header;
  std::memcpy(&header, page.data(), sizeof header);
  const bool is_this = header.table_id == pages.id && place.row() < header.rows;
  return is_this && is_whole(page, header) ? Status::ok() : damaged(place, "fails its checksum");
}

Result<std::uint64_t> PageLog::key_at(const TablePages& pages, Place place) {
  ++keys_read_;
  const std::size_t at = place.record_at(pages.layout.record_bytes);
  if (const std::byte* const buffer = segment(place.segment()).buffer.load(std::memory_order_acquire)) {
    return record_key(buffer + at);
  }
  std::array<std::byte, kRecordKeyBytes> bytes;
  if (file_->read(place.segment(), at, bytes, PageFile::Wait::kYes) != PageFile::Got::kAll) {
    return unreadable(place, errno);
  }
  return record_key(bytes.data());
}

// Records that may be those of keys, and where they are read to.
struct PageLog::Wanted {
  struct Candidate {
    std::uint32_t key = 0;  // its number
    const TablePages* pages = nullptr;
  };
  std::vector<Candidate> candidates;
  std::vector<Record> records;  // of each candidate
  std::size_t bytes = 0;
  std::vector<Spot> spots;           // of the keys that are looked up
  std::vector<std::uint32_t> order;  // of these, by partition
};

// Keys of one table, the first of which has the number `first`. The keys of a partition are looked up together, so that
// its lock is taken once and their lines of the index are fetched at once.
void PageLog::find_records(std::span<const SsdKey> keys, std::uint32_t first, TablePages& pages, Wanted& wanted) const {
  std::array<std::uint32_t, kPartitions + 1> ends{};
  wanted.spots.clear();
  for (const SsdKey& key : keys) {
    wanted.spots.push_back(spot_of(parts_of(key).hash));
    ++ends[wanted.spots.back().partition + 1];
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  wanted.order.resize(keys.size());
  for (std::uint32_t i = 0; i < keys.size(); ++i) wanted.order[ends[wanted.spots[i].partition]++] = i;
  std::uint32_t begin = 0;
  for (std::uint32_t number = 0; number < kPartitions; begin = ends[number++]) {
    const std::span run = std::span(wanted.order).subspan(begin, ends[number] - begin);
    if (run.empty()) continue;
    const Partition& partition = pages.partitions[number];
    const std::shared_lock lock(partition.mutex);
    for (const std::uint32_t i : run) partition.index.prefetch_part(wanted.spots[i].key);
    for (const std::uint32_t i : run) partition.index.prefetch(wanted.spots[i].key);
    for (const std::uint32_t i : run) {
      partition.index.candidates(wanted.spots[i].key, [&](Place place) {
        wanted.candidates.push_back({first + i, &pages});
        wanted.records.push_back({place, pages.layout.record_bytes, nullptr});
        wanted.bytes += aligned_record(pages.layout.record_bytes);
      });
    }
  }
}

Status PageLog::read(std::span<const SsdKey> keys, SsdImages& out) {
  const auto start = SsdCounters::Clock::now();
  const ReadTickets::Ticket ticket(tickets_);
  std::vector<std::shared_ptr<TablePages>> tables;
  Wanted wanted;
  wanted.candidates.reserve(keys.size());
  wanted.records.reserve(keys.size());
  for (std::size_t begin = 0, end = 0; begin < keys.size(); begin = end) {
    const std::uint32_t table_id = parts_of(keys[begin]).table_id;
    while (end < keys.size() && parts_of(keys[end]).table_id == table_id) ++end;
    tables.push_back(table(table_id));
    if (tables.back() == nullptr) continue;
    find_records(keys.subspan(begin, end - begin), static_cast<std::uint32_t>(begin), *tables.back(), wanted);
  }
  std::vector<Record>& records = wanted.records;
  const std::shared_ptr<std::byte[]> buffer(new std::byte[std::max<std::size_t>(wanted.bytes, 1)]);
  std::byte* next = buffer.get();
  for (Record& record : records) {
    record.to = next;
    next += aligned_record(record.bytes);
  }
  std::uint64_t waited = 0;
  SR_RETURN_IF_ERROR(read_records(records, waited));
  std::vector<std::span<const std::byte>> images(keys.size());
  std::uint64_t found = 0;
  std::uint64_t found_bytes = 0;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Record& record = records[i];
    const Wanted::Candidate& candidate = wanted.candidates[i];
    if (row_hash(candidate.pages->id, record_key(record.to)) != parts_of(keys[candidate.key]).hash) {
      SR_RETURN_IF_ERROR(check_page(*candidate.pages, record.place));
      continue;
    }
    images[candidate.key] = std::span(record.to, record.bytes).subspan(kRecordKeyBytes);
    ++found;
    found_bytes += record.bytes - kRecordKeyBytes;
  }
  out.assign(std::move(images), buffer);
  counters_.note_read(keys.size(), found, waited, found_bytes, start);
  return Status::ok();
}

// What a visit of a slot has found.
struct PageLog::Visited {
  std::vector<std::uint32_t> hashes;  // of the next rows, in ascending order, each once
  bool are_all = false;               // whether there are no more rows
  std::vector<Record> records;        // of some of the hashes
  std::vector<std::byte> buffer;
};

// The next hashes from `from` on, at most kPlannedAtOnce: what is kept of a slot does not grow with it. The index of a
// slot is not in the order of hashes, so it is gone through for each so many.
void PageLog::find_visited(const TablePages& pages, std::uint32_t slot, std::uint32_t from, Visited& visited) const {
  std::vector<std::uint32_t>& hashes = visited.hashes;
  hashes.clear();
  visited.are_all = true;
  const auto keep_first = [&] {
    if (hashes.size() <= kPlannedAtOnce) return;
    std::nth_element(hashes.begin(), hashes.begin() + kPlannedAtOnce - 1, hashes.end());
    hashes.resize(kPlannedAtOnce);
    visited.are_all = false;
  };
  const Partition& partition = pages.partitions[slot % kPartitions];
  {
    const std::shared_lock lock(partition.mutex);
    partition.index.in_slot(static_cast<std::uint16_t>(slot / kPartitions), [&](std::uint32_t hash, Place) {
      if (hash < from || (!visited.are_all && hash > hashes[kPlannedAtOnce - 1])) return;
      hashes.push_back(hash);
      if (hashes.size() == 2 * kPlannedAtOnce) keep_first();
    });
  }
  keep_first();
  std::sort(hashes.begin(), hashes.end());
  hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
}

// Reads the records that these hashes have now, which other threads move meanwhile.
Status PageLog::read_visited(const TablePages& pages, std::uint32_t slot, std::span<const std::uint32_t> hashes,
                             Visited& visited) {
  const ReadTickets::Ticket ticket(tickets_);
  visited.records.clear();
  {
    const Partition& partition = pages.partitions[slot % kPartitions];
    const std::shared_lock lock(partition.mutex);
    for (const std::uint32_t hash : hashes) {
      partition.index.candidates({hash, static_cast<std::uint16_t>(slot / kPartitions)}, [&](Place place) {
        visited.records.push_back({place, pages.layout.record_bytes, nullptr});
      });
    }
  }
  rows_visited_ += visited.records.size();
  const std::size_t stride = aligned_record(pages.layout.record_bytes);
  visited.buffer.resize(visited.records.size() * stride);
  for (std::size_t i = 0; i < visited.records.size(); ++i) visited.records[i].to = visited.buffer.data() + i * stride;
  std::uint64_t waited = 0;  // a scan says nothing of what pulls wait for
  return read_records(visited.records, waited);
}

Status PageLog::visit_slot(std::uint32_t slot, std::uint32_t table_id, std::uint64_t from, const VisitImage& visit) {
  const std::shared_ptr<TablePages> pages = table(table_id);
  if (pages == nullptr) return Status::ok();
  struct Found {
    std::uint64_t hash;
    const Record* record;
  };
  std::vector<Found> found;
  Visited visited;
  for (std::uint32_t first = index_hash(from);;) {
    find_visited(*pages, slot, first, visited);
    const std::vector<std::uint32_t>& hashes = visited.hashes;
    for (std::size_t begin = 0; begin < hashes.size(); begin += kVisitedAtOnce) {
      const std::size_t count = std::min(kVisitedAtOnce, hashes.size() - begin);
      SR_RETURN_IF_ERROR(read_visited(*pages, slot, std::span(hashes).subspan(begin, count), visited));
      found.clear();
      for (const Record& record : visited.records) {
        const std::uint64_t hash = row_hash(table_id, record_key(record.to));
        if (slot_of(hash, options_.slot_count) != slot) return damaged(record.place, "has a key of another slot");
        if (hash >= from) found.push_back({hash, &record});
      }
      std::sort(found.begin(), found.end(),
                [](const Found& left, const Found& right) { return left.hash < right.hash; });
      for (const Found& each : found) {
        const std::span<const std::byte> stored(each.record->to, each.record->bytes);
        const Result<bool> goes_on = visit(record_key(stored.data()), stored.subspan(kRecordKeyBytes));
        if (!goes_on.is_ok()) return goes_on.status();
        if (!goes_on.value()) return Status::ok();
      }
    }
    if (visited.are_all || hashes.back() == ~std::uint32_t{0}) return Status::ok();
    first = hashes.back() + 1;
  }
}

}  // namespace sparserow
