// The engine `pages` of an SSD tier: a log of pages (page_format.h) and an index in memory (page_index.h).
//
// Rows are appended to the open segment of a stream: what the store writes is `fresh`, what collection keeps is
// `kept`. A full segment is sealed; a thread of the log's own writes it whole, and collects: it moves the live records
// of the segment that has the fewest to `kept`, and the segment is used again. A record is read alone, from the
// segment's buffer while it has one, else from the file.
//
// Invariants:
//  1. A record is live while the index has its place; live_bytes of a segment is the sum of its live records.
//  2. Nothing is appended before the segments that a batch may need are reserved on the disk, and two more for
//     collection. So a batch is written whole or not at all, and collection goes on when the disk is full.
//  3. A segment or a buffer is used again when every reader that may have seen it is gone (read_tickets.h). A reader
//     has a ticket for one batch, or for kVisitedAtOnce records, and runs no callback while it has one.
//  4. What a batch must read, it reads before its first change; after that nothing fails.
//
// Locks: mutex_ (whoever appends, moves or erases), then a partition's; tables_mutex_ and the tickets' are leaves.
// A reader takes no mutex_.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "store/ssd/pages/page_file.h"
#include "store/ssd/pages/page_format.h"
#include "store/ssd/pages/page_index.h"
#include "store/ssd/pages/read_tickets.h"
#include "store/ssd/ssd_counters.h"
#include "store/ssd/ssd_folder.h"
#include "store/ssd/ssd_readers.h"
#include "store/ssd/ssd_tier.h"
#include "util/fair_mutex.h"
#include "util/mutex.h"

namespace sparserow {

// Fails as open_ssd_tier() does.
Result<std::unique_ptr<SsdTier>> open_page_log(const SsdOptions& options, std::unique_ptr<SsdFolder> folder);

class PageLog final : public SsdTier {
 public:
  PageLog(const SsdOptions& options, std::unique_ptr<SsdFolder> folder, std::unique_ptr<PageFile> file);
  ~PageLog() override;

  Status read(std::span<const SsdKey> keys, SsdImages& out) override;
  Status write(SsdBatch& batch) override;
  Status erase_table(std::uint32_t table_id, std::uint32_t slot_count) override;
  Status visit_slot(std::uint32_t slot, std::uint32_t table_id, std::uint64_t from, const VisitImage& visit) override;
  Status visit_table(std::uint32_t table_id, std::uint32_t slot_count, const WantsStamps& wants,
                     const VisitStamped& visit) override;
  Status flush() override;
  [[nodiscard]] SsdStats stats() const override;
  [[nodiscard]] double waited_share() const noexcept override { return counters_.waited_share(); }
  [[nodiscard]] bool is_full() const noexcept override {
    return std::chrono::steady_clock::now().time_since_epoch().count() < full_until_;
  }
  // Where tables have no room for their open pages in one segment, pages are closed before they are full.
  [[nodiscard]] std::size_t rows_together(std::size_t image_bytes) const noexcept override;
  [[nodiscard]] std::uint64_t index_bytes() const noexcept override {
    return index_bytes_ + (std::max(buffer_bytes_.load(), kFreeBuffers) - kFreeBuffers);
  }

 private:
  static constexpr std::uint32_t kPartitionBits = 6;
  static constexpr std::uint32_t kPartitions = 1u << kPartitionBits;
  static constexpr std::uint64_t kFreeBuffers = 16 * kSegmentBytes;  // beyond which they count in the store's budget
  enum Stream : std::uint8_t { kFresh, kKept, kStreams };

  struct Partition {
    mutable FairMutex mutex;
    PageIndex index;
  };
  struct OpenPage {
    std::uint32_t segment = 0;
    std::uint32_t unit = 0;
    std::uint32_t rows = 0;
    std::uint16_t first_slot = 0;
    std::uint16_t last_slot = 0;
  };
  struct TablePages {
    std::uint32_t id = 0;
    PageLayout layout;
    std::array<Partition, kPartitions> partitions;
    std::array<std::optional<OpenPage>, kStreams> open;  // guarded by mutex_
  };
  // Where the index has a key.
  struct Spot {
    std::uint32_t slot;
    std::uint32_t partition;
    IndexKey key;
  };
  // The oldest stamps of a table's rows in a segment, or older ones.
  struct OldestStamps {
    std::uint32_t table_id = 0;
    SsdStamps stamps;
  };
  struct Segment {
    enum class State : std::uint8_t { kFree, kOpen, kSealed, kWritten, kCollecting, kDamaged, kRetired };
    std::atomic<std::byte*> buffer{nullptr};  // null once the file has its bytes
    State state = State::kFree;               // the rest is guarded by mutex_
    std::uint32_t live_bytes = 0;
    std::uint32_t filled_bytes = 0;    // of records, and of what fresh pages have no record in
    std::uint64_t seal = 0;            // which it is of all that were sealed; 0: it is open, or free
    std::vector<OldestStamps> stamps;  // of each table that has, or had, rows in it
  };
  struct Sealed {
    std::uint64_t seal = 0;
    std::uint32_t number = 0;
  };
  struct OpenSegment {
    std::uint32_t segment = 0;                        // 0: none
    std::uint32_t units = 0;                          // that are taken
    std::vector<std::shared_ptr<TablePages>> tables;  // that have an open page in it
  };
  struct Retired {
    std::uint64_t stamp = 0;
    std::uint32_t segment = 0;    // or
    std::byte* buffer = nullptr;  // this
  };
  struct Record {
    Place place;
    std::uint32_t bytes = 0;
    std::byte* to = nullptr;
  };

  // Segments have fixed addresses, since readers look them up without a lock.
  static constexpr std::uint32_t kChunk = 4096;
  [[nodiscard]] Segment& segment(std::uint32_t number) const noexcept {
    return chunks_[number / kChunk].load(std::memory_order_acquire)[number % kChunk];
  }
  [[nodiscard]] Spot spot_of(std::uint64_t row_hash) const noexcept;
  [[nodiscard]] std::shared_ptr<TablePages> table(std::uint32_t table_id) const;

  [[nodiscard]] std::uint32_t index_hash(std::uint64_t row_hash) const noexcept {
    return static_cast<std::uint32_t>(row_hash << slot_bits_ >> 32);
  }
  [[nodiscard]] static std::uint64_t page_checksum(std::span<const std::byte> page, const PageHeader& header) noexcept;
  [[nodiscard]] static bool is_whole(std::span<const std::byte> page, const PageHeader& header) noexcept;

  // page_reads.cc
  struct Wanted;
  void find_records(std::span<const SsdKey> keys, std::uint32_t first, TablePages& table, Wanted& wanted) const;
  Status read_records(std::span<const Record> records, std::uint64_t& waited);
  Status read_late(std::span<const Record* const> records);
  Status read_from_file(const Record& record, PageFile::Wait wait, bool& would_wait) const;
  [[nodiscard]] Status unreadable(Place place, int error) const;
  Status check_page(const TablePages& table, Place place) const;
  [[nodiscard]] Status damaged(Place place, const std::string& what) const;
  Result<std::uint64_t> key_at(const TablePages& table, Place place);
  struct Visited;
  void find_visited(const TablePages& table, std::uint32_t slot, std::uint32_t from, Visited& visited) const;
  Status read_visited(const TablePages& table, std::uint32_t slot, std::span<const std::uint32_t> hashes,
                      Visited& visited);

  // page_walk.cc
  struct Walk;
  [[nodiscard]] std::vector<Sealed> sealed_until(std::uint64_t last) const;
  [[nodiscard]] std::vector<Sealed> sealed_since(Walk& walk, bool may_go_on);
  Status walk_sealed(Walk& walk, const Sealed& sealed);
  void copy_open(Walk& walk) SR_REQUIRES(mutex_);
  [[nodiscard]] static bool is_wanted(const Walk& walk, const Segment& segment);
  Status walk_segment(Walk& walk, std::uint32_t number, std::span<const std::byte> bytes);
  Status walk_page(Walk& walk, Place page, std::span<const std::byte> bytes, std::uint32_t rows);
  [[nodiscard]] static const OldestStamps* stamps_in(const Segment& segment, std::uint32_t table_id) noexcept;
  static void note_stamps(Segment& segment, std::uint32_t table_id, SsdStamps stamps);

  // page_log.cc
  Status prepare(const SsdBatch& batch, std::uint32_t& segments) SR_REQUIRES(mutex_);
  Status wait_for_writer() SR_REQUIRES(mutex_);
  Status make_room(std::uint32_t segments) SR_REQUIRES(mutex_);
  void note_full() noexcept SR_REQUIRES(mutex_);
  Status find_former(const SsdBatch& batch) SR_REQUIRES(mutex_);
  [[nodiscard]] IndexEntry find_in_memory(TablePages& table, std::uint64_t key, const Spot& spot) SR_REQUIRES(mutex_);
  void put(const std::shared_ptr<TablePages>& table, std::uint64_t key, const Spot& spot,
           std::span<const std::byte> image, Place former, SsdStamps stamps) SR_REQUIRES(mutex_);
  void move(TablePages& table, const Spot& spot, IndexEntry entry, Place to) SR_REQUIRES(mutex_);
  // Fetches what the searches of later spots read: the line of one, and the part of the index of another behind it.
  [[gnu::always_inline]] static void prefetch(const TablePages& table, std::span<const Spot> spots,
                                              std::size_t at) noexcept {
    constexpr std::size_t kPrefetched = 8;  // spots
    if (at + 2 * kPrefetched < spots.size()) {
      const Spot& spot = spots[at + 2 * kPrefetched];
      table.partitions[spot.partition].index.prefetch_part(spot.key);
    }
    if (at + kPrefetched < spots.size()) {
      const Spot& spot = spots[at + kPrefetched];
      table.partitions[spot.partition].index.prefetch(spot.key);
    }
  }
  void erase(TablePages& table, const Spot& spot, Place former) SR_REQUIRES(mutex_);
  Status find_row(const TablePages& table, std::uint64_t row_hash, std::span<const Place> places, Place& found);
  void write_index_file();

  // page_segments.cc
  [[nodiscard]] bool add_segment(Status& why) SR_REQUIRES(mutex_);
  [[nodiscard]] Status disk_full(const Status& why) const;
  Place append(const std::shared_ptr<TablePages>& table, Stream stream, std::uint64_t key, std::uint32_t slot_of_key,
               std::span<const std::byte> image, SsdStamps stamps) SR_REQUIRES(mutex_);
  [[nodiscard]] bool can_append(const TablePages& table, Stream stream) const noexcept SR_REQUIRES(mutex_);
  void open_page(const std::shared_ptr<TablePages>& table, Stream stream) SR_REQUIRES(mutex_);
  void close_page(TablePages& table, Stream stream) SR_REQUIRES(mutex_);
  void leave_page(TablePages& table, Stream stream) SR_REQUIRES(mutex_);
  void write_header(const TablePages& table, Stream stream) SR_REQUIRES(mutex_);
  void finish_headers(Stream stream) SR_REQUIRES(mutex_);
  void seal(Stream stream) SR_REQUIRES(mutex_);
  void lose(Place place, std::uint32_t bytes) SR_REQUIRES(mutex_);
  void retire(std::uint32_t number) SR_REQUIRES(mutex_);
  void reap() SR_REQUIRES(mutex_);
  [[nodiscard]] std::byte* make_buffer();
  [[nodiscard]] std::byte* take_buffer() SR_REQUIRES(mutex_);

  // page_collector.cc
  void run();
  void write_sealed() SR_REQUIRES(mutex_);
  [[nodiscard]] double garbage_share() const noexcept SR_REQUIRES(mutex_);
  [[nodiscard]] bool wants_collection() const noexcept SR_REQUIRES(mutex_);
  bool collect(double most_live) SR_REQUIRES(mutex_);
  [[nodiscard]] std::uint32_t victim(double most_live) SR_REQUIRES(mutex_);
  bool move_live_records(std::uint32_t number, std::span<const std::byte> bytes) SR_REQUIRES(mutex_);
  bool move_page(std::uint32_t number, std::uint32_t unit, std::span<const std::byte> page, const PageHeader& header)
      SR_REQUIRES(mutex_);

  const SsdOptions options_;
  const std::uint32_t slot_bits_;
  const std::uint32_t high_slot_bits_;       // those of a slot that do not choose its partition
  const std::unique_ptr<SsdFolder> folder_;  // goes after the file: its lock is held while that is open
  const std::unique_ptr<PageFile> file_;
  SsdReaders readers_;
  mutable ReadTickets tickets_;
  const std::unique_ptr<std::atomic<Segment*>[]> chunks_;

  mutable FairMutex tables_mutex_;
  std::map<std::uint32_t, std::shared_ptr<TablePages>> tables_;  // guarded by tables_mutex_

  mutable Mutex mutex_;
  CondVar changed_;
  std::array<OpenSegment, kStreams> open_ SR_GUARDED_BY(mutex_);
  std::deque<std::uint32_t> sealed_ SR_GUARDED_BY(mutex_);
  std::deque<Retired> retired_ SR_GUARDED_BY(mutex_);
  std::set<std::uint32_t> free_ SR_GUARDED_BY(mutex_);   // with bytes on the disk
  std::set<std::uint32_t> holes_ SR_GUARDED_BY(mutex_);  // without
  std::vector<std::byte*> buffers_ SR_GUARDED_BY(mutex_);
  std::uint32_t next_segment_ SR_GUARDED_BY(mutex_) = 1;
  std::uint32_t next_victim_ SR_GUARDED_BY(mutex_) = 1;
  std::uint64_t sequence_ SR_GUARDED_BY(mutex_) = 0;
  std::uint64_t seals_ SR_GUARDED_BY(mutex_) = 0;  // segments that were sealed since the start
  int walks_ SR_GUARDED_BY(mutex_) = 0;
  std::vector<Sealed> kept_ SR_GUARDED_BY(mutex_);  // those of kept rows that were sealed while there are walks
  std::uint64_t live_bytes_ SR_GUARDED_BY(mutex_) = 0;
  std::uint64_t filled_bytes_ SR_GUARDED_BY(mutex_) = 0;  // of all segments that are in use
  int collecting_ SR_GUARDED_BY(mutex_) = 0;              // segments that are collected at the moment
  bool is_ending_ SR_GUARDED_BY(mutex_) = false;
  // The last write found no room; this is its answer until a segment is freed or rows are deleted.
  Status refusal_ SR_GUARDED_BY(mutex_);
  // When a read of each segment failed, which is collected later for that.
  std::map<std::uint32_t, std::chrono::steady_clock::time_point> failed_reads_ SR_GUARDED_BY(mutex_);
  std::vector<Place> candidates_ SR_GUARDED_BY(mutex_);
  std::vector<Place> former_ SR_GUARDED_BY(mutex_);  // of the writes of a batch: where the log has their keys now
  std::vector<Spot> spots_ SR_GUARDED_BY(mutex_);    // of the same, or of a page that is collected
  Status write_failure_ SR_GUARDED_BY(mutex_);

  std::atomic<std::uint64_t> index_bytes_{0}, buffer_bytes_{0}, keys_read_{0}, rows_visited_{0};
  std::atomic<std::int64_t> full_until_{0};  // of the steady clock; past when there is room
  SsdCounters counters_;
  std::atomic<std::uint64_t> disk_bytes_read_{0}, disk_bytes_written_{0};
  std::thread thread_;  // the last: it uses all of the above
};

}  // namespace sparserow
