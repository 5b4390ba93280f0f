// Memory of rows and indexes, in runs of 128-byte granules cut from 2 MiB huge-page arenas.
//
// Address space is reserved by the region; an arena's pages are asked of the system when they are first touched,
// and given back when the arena's last run is freed. While the pool is small, an arena has small pages until it is
// nearly full and is then made one huge page, since an arena that is huge and mostly empty would be much of the whole.
// Runs of any length are cut exactly, and neighbours that are free coalesce by themselves (an arena is a bitmap), so
// that indexes of slowly growing sizes reuse each other's memory. Where memory shrinks for good, runs that are left
// here and there would keep nearly every arena: has_holes() says so, and Emptying names arenas whose runs are to move.
//
// Invariants:
//  1. used_bytes() is the sum of the lengths of all runs handed out, rounded up to granules.
//  2. A run never crosses an arena; so it is at most kMaxRunBytes long.
//  3. An arena is unopened (no pages), warm (pages, no run; arena_reserve.h) or opened, and then in a bin or emptied.
// Thread-safe; under its mutex only the reserve's budget is asked, and no arena is made huge.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "util/mutex.h"

namespace sparserow {

class ArenaReserve;

// Memory that has pages before a row needs them.
struct ReserveStats {
  std::uint64_t bytes = 0;       // of warm arenas, charged to the budget
  std::uint64_t rest_bytes = 0;  // of arenas in use that were warm: what no run has had yet
  bool is_filling = false;       // pages are being touched now
};

class ArenaPool {
 public:
  static constexpr std::size_t kGranuleBytes = 128;
  static constexpr std::size_t kArenaBytes = std::size_t{2} << 20;
  static constexpr std::size_t kMaxRunBytes = std::size_t{1} << 20;

  ArenaPool() = default;
  ArenaPool(const ArenaPool&) = delete;
  ArenaPool& operator=(const ArenaPool&) = delete;
  ~ArenaPool();

  struct Run {
    std::byte* at = nullptr;
    std::uint32_t units = 0;
  };
  // The bytes of so many units that lie in groups, each group with a head before its units. The last group's head is
  // whole, however few units it has.
  struct Units {
    std::size_t unit_bytes;
    std::size_t head_bytes;
    std::uint32_t group;

    [[nodiscard]] std::size_t bytes(std::uint64_t units) const noexcept {
      return (units + group - 1) / group * head_bytes + units * unit_bytes;
    }
    [[nodiscard]] std::uint32_t most_in(std::size_t bytes) const noexcept {
      const std::size_t group_bytes = head_bytes + group * unit_bytes;
      const std::size_t rest = bytes % group_bytes;
      return static_cast<std::uint32_t>(bytes / group_bytes * group +
                                        (rest > head_bytes ? (rest - head_bytes) / unit_bytes : 0));
    }
  };

  // Null when the system has no address space left. The content is unspecified; aligned to kGranuleBytes.
  [[nodiscard]] std::byte* allocate(std::size_t bytes);
  // `most` units, or fewer but at least `least` when that fills the rest of an arena and the other choice is a new one.
  [[nodiscard]] Run allocate_units(const Units& units, std::uint32_t most, std::uint32_t least);
  void free(std::byte* run, std::size_t bytes);  // as given out: bytes, or those of the units
  // So many bytes are about to be taken: the arenas that they fill are huge from their first page on, which saves a
  // small pool its small pages and their copying. What an earlier call has announced and was not taken is forgotten.
  void expect(std::uint64_t bytes);

  // Makes those arenas huge that have become nearly full. It copies 2 MiB for each (5 to 10 ms of a busy CPU,
  // measured), so the caller must not have a lock for which others wait. Cheap when there are none.
  void collapse_huge_pages();

  // The reserve that keeps its warm arenas, or null. It must outlive the pool or take itself out.
  void set_reserve(ArenaReserve* reserve);
  enum class Warmed : std::uint8_t { kYes, kNo, kRefused };  // kRefused: the system cannot touch pages ahead
  // Touches the pages of an unopened arena, which is warm then; the caller has charged it. No lock is held meanwhile.
  [[nodiscard]] Warmed warm_one();
  // Gives a warm arena's pages back, for the caller to uncharge; false when there is none.
  bool cool_one();
  [[nodiscard]] std::uint64_t opened_arenas() const noexcept { return opened_arenas_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t warm_arenas() const noexcept { return warm_arenas_.load(std::memory_order_relaxed); }
  // Arenas that were opened since forget_opened(), and that expect() has announced.
  [[nodiscard]] std::uint64_t opened_lately() const noexcept { return opened_lately_.load(std::memory_order_relaxed); }
  void forget_opened() noexcept { opened_lately_.store(0, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t expected_arenas() const noexcept {
    return expected_bytes_.load(std::memory_order_relaxed) / kArenaBytes;
  }
  // Bytes of opened arenas that were warm, beyond the last granule that any run has had.
  [[nodiscard]] std::uint64_t rest_bytes() const noexcept { return rest_bytes_.load(std::memory_order_relaxed); }

  // Whether a seventh of the opened arenas' bytes, and more than a few arenas, are in no run.
  [[nodiscard]] bool has_holes() const noexcept;
  class Emptying;

  [[nodiscard]] std::uint64_t used_bytes() const noexcept { return used_bytes_.load(std::memory_order_relaxed); }

  // The bytes of arenas that have pages, used or not.
  [[nodiscard]] std::uint64_t resident_bytes() const noexcept {
    return (opened_arenas() + warm_arenas()) * kArenaBytes;
  }

  [[nodiscard]] static constexpr std::size_t round_up(std::size_t bytes) noexcept {
    return (bytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  }

 private:
  static constexpr std::size_t kGranules = kArenaBytes / kGranuleBytes;
  static constexpr std::size_t kWords = kGranules / 64;
  static constexpr std::size_t kArenasPerRegion = 64;
  static constexpr std::size_t kBins = 16;  // by log2 of the longest free run

  // Kept outside of the arena, so that an arena is all payload and a scan of many touches little memory.
  struct Arena {
    std::byte* base = nullptr;
    std::array<std::uint64_t, kWords> taken{};  // one bit per granule
    std::uint32_t taken_granules = 0;
    std::uint32_t longest_free = kGranules;
    std::uint32_t bin_position = 0;        // in bins_[bin of longest_free]
    std::uint32_t rest_begin = kGranules;  // no run has had the granules from here on, though they have pages
    bool is_huge = false;                  // asked to be, or soon
    bool is_tended = false;                // its pages are being made one, without the lock
    bool is_emptied = false;               // in no bin
  };
  struct FreeRun {
    std::uint32_t first = 0;
    std::uint32_t length = 0;
  };
  struct Region {
    std::byte* base = nullptr;
    std::array<std::unique_ptr<Arena>, kArenasPerRegion> arenas;  // made when they are first used, in this order
  };

  [[nodiscard]] static std::size_t bin_of(std::uint32_t run) noexcept;
  bool add_region() SR_REQUIRES(mutex_);
  [[nodiscard]] Arena* find_arena(std::uint32_t granules) SR_REQUIRES(mutex_);
  [[nodiscard]] Arena* find_rest(std::uint32_t granules) SR_REQUIRES(mutex_);
  [[nodiscard]] std::byte* cut(Arena& arena, std::uint32_t granules) SR_REQUIRES(mutex_);
  [[nodiscard]] Arena* open_arena() SR_REQUIRES(mutex_);
  [[nodiscard]] Arena* open_warm() SR_REQUIRES(mutex_);
  [[nodiscard]] Arena* take_unopened() SR_REQUIRES(mutex_);
  void use(Arena& arena, std::uint32_t end) noexcept SR_REQUIRES(mutex_);
  void drop_pages(Arena* arena) SR_REQUIRES(mutex_);
  void close(Arena* arena) SR_REQUIRES(mutex_);
  [[nodiscard]] Region& region_of(const std::byte* run) noexcept SR_REQUIRES(mutex_);
  [[nodiscard]] Arena* arena_of(const std::byte* run) noexcept SR_REQUIRES(mutex_);
  void give_back(Arena* arena) SR_REQUIRES(mutex_);
  void put_in_bin(Arena* arena) SR_REQUIRES(mutex_);
  void take_from_bin(Arena* arena) SR_REQUIRES(mutex_);
  void set_longest_free(Arena& arena, std::uint32_t granules) SR_REQUIRES(mutex_);
  static FreeRun find_run(const Arena& arena, std::uint32_t granules) noexcept;
  static std::uint32_t longest_free_run(const Arena& arena) noexcept;
  static void mark(Arena& arena, std::uint32_t first, std::uint32_t count, bool taken) noexcept;

  std::atomic<std::uint64_t> used_bytes_{0};
  std::atomic<std::uint64_t> opened_arenas_{0};
  std::atomic<std::uint64_t> warm_arenas_{0};
  std::atomic<std::uint64_t> opened_lately_{0};
  std::atomic<std::uint64_t> expected_bytes_{0};  // written under mutex_
  std::atomic<std::uint64_t> rest_bytes_{0};
  std::atomic<bool> has_full_{false};  // full_ is not empty
  Mutex mutex_;
  ArenaReserve* reserve_ SR_GUARDED_BY(mutex_) = nullptr;
  bool can_collapse_ SR_GUARDED_BY(mutex_) = true;     // until the system says that it cannot
  std::vector<Region> regions_ SR_GUARDED_BY(mutex_);  // sorted by base
  std::byte* newest_region_ SR_GUARDED_BY(mutex_) = nullptr;
  std::size_t unmade_arenas_ SR_GUARDED_BY(mutex_) = 0;                // of it: the last ones
  std::vector<Arena*> unopened_ SR_GUARDED_BY(mutex_);                 // no pages
  std::vector<Arena*> warm_ SR_GUARDED_BY(mutex_);                     // pages, and no run
  std::vector<Arena*> full_ SR_GUARDED_BY(mutex_);                     // nearly so, of small pages, to be made huge
  std::array<std::vector<Arena*>, kBins> bins_ SR_GUARDED_BY(mutex_);  // opened arenas
};

// The emptiest arenas, a few at a time, of a pool that has holes. Nothing is allocated in them: the pool's users move
// each run that contains() names (they allocate another and free this one), and an arena without runs is given back.
// Those that have runs still when this ends are used again.
class ArenaPool::Emptying {
 public:
  explicit Emptying(ArenaPool& pool);
  Emptying(const Emptying&) = delete;
  Emptying& operator=(const Emptying&) = delete;
  ~Emptying();

  [[nodiscard]] bool is_empty() const noexcept { return bases_.empty(); }
  [[nodiscard]] bool contains(const std::byte* run) const noexcept;

 private:
  ArenaPool& pool_;
  std::vector<Arena*> arenas_;
  std::vector<const std::byte*> bases_;  // of these, ascending
};

}  // namespace sparserow
