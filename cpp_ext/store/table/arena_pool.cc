#include "store/table/arena_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "store/table/arena_reserve.h"
#include "util/memory_advice.h"

namespace sparserow {
namespace {

constexpr std::uint64_t kSmallPool = 512;  // arenas

// Number of consecutive granules from `at` on whose bit equals `taken`, up to the end of the bitmap.
template <std::size_t kWords>
std::uint32_t run_length(const std::array<std::uint64_t, kWords>& bits, std::uint32_t at, bool taken) noexcept {
  std::uint32_t length = 0;
  while (at < kWords * 64) {
    const std::uint64_t word = (taken ? ~bits[at / 64] : bits[at / 64]) >> (at % 64);
    if (word != 0) return length + static_cast<std::uint32_t>(std::countr_zero(word));
    length += 64 - at % 64;
    at += 64 - at % 64;
  }
  return length;
}

// Number of free granules that end before `at`.
template <std::size_t kWords>
std::uint32_t free_before(const std::array<std::uint64_t, kWords>& bits, std::uint32_t at) noexcept {
  std::uint32_t length = 0;
  while (at > 0) {
    const std::uint32_t in_word = (at - 1) % 64 + 1;  // bits of this word before `at`
    const std::uint64_t word = bits[(at - 1) / 64] << (64 - in_word);
    if (word != 0) return length + static_cast<std::uint32_t>(std::countl_zero(word));
    length += in_word;
    at -= in_word;
  }
  return length;
}

}  // namespace

ArenaPool::~ArenaPool() {
  for (const Region& region : regions_) ::munmap(region.base, kArenaBytes * kArenasPerRegion);
}

std::size_t ArenaPool::bin_of(std::uint32_t run) noexcept { return static_cast<std::size_t>(std::bit_width(run)); }

std::byte* ArenaPool::allocate(std::size_t bytes) {
  const auto granules = static_cast<std::uint32_t>(round_up(bytes) / kGranuleBytes);
  const MutexLock lock(mutex_);
  Arena* arena = find_arena(granules);
  if (arena == nullptr) arena = open_arena();
  return arena == nullptr ? nullptr : cut(*arena, granules);
}

void ArenaPool::set_reserve(ArenaReserve* reserve) {
  const MutexLock lock(mutex_);
  reserve_ = reserve;
}

ArenaPool::Run ArenaPool::allocate_units(const Units& units, std::uint32_t most, std::uint32_t least) {
  const auto granules_of = [&units](std::uint32_t count) {
    return static_cast<std::uint32_t>(round_up(units.bytes(count)) / kGranuleBytes);
  };
  const MutexLock lock(mutex_);
  std::uint32_t count = most;
  Arena* arena = find_arena(granules_of(most));
  if (arena == nullptr) {
    arena = find_rest(granules_of(least));
    if (arena != nullptr) {
      count = std::min(most, units.most_in(arena->longest_free * kGranuleBytes));
    }
  }
  if (arena == nullptr) arena = open_arena();
  return arena == nullptr ? Run{} : Run{cut(*arena, granules_of(count)), count};
}

void ArenaPool::expect(std::uint64_t bytes) {
  const MutexLock lock(mutex_);
  expected_bytes_.store(bytes, std::memory_order_relaxed);
  if (reserve_ != nullptr && bytes >= kArenaBytes) reserve_->wake();
}

std::byte* ArenaPool::cut(Arena& arena, std::uint32_t granules) {
  const FreeRun run = find_run(arena, granules);
  const std::uint32_t first = run.first;
  mark(arena, first, granules, true);
  arena.taken_granules += granules;
  if (run.length == arena.longest_free) set_longest_free(arena, longest_free_run(arena));
  use(arena, first + granules);
  if (!arena.is_huge && arena.taken_granules >= kGranules / 16 * 15) {
    arena.is_huge = true;
    full_.push_back(&arena);
    has_full_.store(true, std::memory_order_relaxed);
  }
  used_bytes_.fetch_add(granules * kGranuleBytes, std::memory_order_relaxed);
  return arena.base + first * kGranuleBytes;
}

// The granules before `end` are no rest any more.
void ArenaPool::use(Arena& arena, std::uint32_t end) noexcept {
  if (end <= arena.rest_begin) return;
  rest_bytes_.fetch_sub((end - arena.rest_begin) * kGranuleBytes, std::memory_order_relaxed);
  arena.rest_begin = end;
}

void ArenaPool::free(std::byte* run, std::size_t bytes) {
  const auto granules = static_cast<std::uint32_t>(round_up(bytes) / kGranuleBytes);
  const MutexLock lock(mutex_);
  Arena* arena = arena_of(run);
  const auto first = static_cast<std::uint32_t>((run - arena->base) / kGranuleBytes);
  mark(*arena, first, granules, false);
  arena->taken_granules -= granules;
  const std::uint32_t before = free_before(arena->taken, first);
  const std::uint32_t merged = before + run_length(arena->taken, first, false);
  if (merged > arena->longest_free) set_longest_free(*arena, merged);
  used_bytes_.fetch_sub(granules * kGranuleBytes, std::memory_order_relaxed);
  if (arena->taken_granules == 0 && !arena->is_tended) close(arena);
}

// Whose last run has gone.
void ArenaPool::close(Arena* arena) {
  if (!arena->is_emptied) take_from_bin(arena);
  arena->is_emptied = false;
  give_back(arena);
}

void ArenaPool::set_longest_free(Arena& arena, std::uint32_t granules) {
  if (arena.is_emptied || bin_of(granules) == bin_of(arena.longest_free)) {
    arena.longest_free = granules;
    return;
  }
  take_from_bin(&arena);
  arena.longest_free = granules;
  put_in_bin(&arena);
}

// An arena without runs, that is in no bin.
void ArenaPool::give_back(Arena* arena) {
  use(*arena, kGranules);
  opened_arenas_.fetch_sub(1, std::memory_order_relaxed);
  if (arena->is_huge && reserve_ != nullptr && reserve_->try_keep()) {
    warm_.push_back(arena);
    warm_arenas_.fetch_add(1, std::memory_order_relaxed);
  } else {
    drop_pages(arena);
  }
  if (reserve_ != nullptr) reserve_->wake();  // its bound has shrunk
}

void ArenaPool::drop_pages(Arena* arena) {
  ::madvise(arena->base, kArenaBytes, MADV_DONTNEED);
  if (can_collapse_ && opened_arenas_.load(std::memory_order_relaxed) < kSmallPool) {
    ::madvise(arena->base, kArenaBytes, MADV_NOHUGEPAGE);
    arena->is_huge = false;
  }
  unopened_.push_back(arena);
}

ArenaPool::Warmed ArenaPool::warm_one() {
  Arena* arena = nullptr;
  {
    const MutexLock lock(mutex_);
    arena = take_unopened();
  }
  if (arena == nullptr) return Warmed::kNo;
  int error = ::mprotect(arena->base, kArenaBytes, PROT_READ | PROT_WRITE) == 0 ? 0 : errno;
  if (error == 0) {
    ::madvise(arena->base, kArenaBytes, MADV_HUGEPAGE);
    error = ::madvise(arena->base, kArenaBytes, kPopulateWrite) == 0 ? 0 : errno;
  }
  const MutexLock lock(mutex_);
  arena->is_huge = true;
  if (error == 0) {
    warm_.push_back(arena);
    warm_arenas_.fetch_add(1, std::memory_order_relaxed);
    return Warmed::kYes;
  }
  drop_pages(arena);
  return error == EINVAL ? Warmed::kRefused : Warmed::kNo;
}

bool ArenaPool::cool_one() {
  const MutexLock lock(mutex_);
  if (warm_.empty()) return false;
  Arena* arena = warm_.back();
  warm_.pop_back();
  warm_arenas_.fetch_sub(1, std::memory_order_relaxed);
  drop_pages(arena);
  return true;
}

// That an arena is huge is a hint: without it all works, slower. Pages that are there already are copied into a huge
// one, during which their rows are read and written as ever.
void ArenaPool::collapse_huge_pages() {
  while (has_full_.load(std::memory_order_relaxed)) {
    Arena* arena = nullptr;
    {
      const MutexLock lock(mutex_);
      if (full_.empty()) return;
      arena = full_.back();
      full_.pop_back();
      has_full_.store(!full_.empty(), std::memory_order_relaxed);
      if (arena->taken_granules == 0 || arena->is_tended) continue;
      arena->is_tended = true;
    }
    ::madvise(arena->base, kArenaBytes, MADV_HUGEPAGE);
    const bool cannot = ::madvise(arena->base, kArenaBytes, kCollapse) != 0 && errno == EINVAL;
    const MutexLock lock(mutex_);
    arena->is_tended = false;
    if (cannot) can_collapse_ = false;
    if (arena->taken_granules == 0) close(arena);
  }
}

// The fullest bin whose arenas all have room; before that, a few of the bin that may. Null when there is none.
ArenaPool::Arena* ArenaPool::find_arena(std::uint32_t granules) {
  const std::size_t maybe = bin_of(granules);
  const auto& candidates = bins_[maybe];
  const std::size_t tries = std::min<std::size_t>(candidates.size(), 8);
  for (std::size_t i = 0; i < tries; ++i) {
    if (candidates[i]->longest_free >= granules) return candidates[i];
  }
  for (std::size_t bin = maybe + 1; bin < kBins; ++bin) {
    if (!bins_[bin].empty()) return bins_[bin].front();
  }
  return nullptr;
}

// The longest rest that there is by bins, if it is long enough.
ArenaPool::Arena* ArenaPool::find_rest(std::uint32_t granules) {
  for (std::size_t bin = kBins; bin-- > bin_of(granules);) {
    if (bins_[bin].empty()) continue;
    Arena* arena = bins_[bin].front();
    return arena->longest_free >= granules ? arena : nullptr;
  }
  return nullptr;
}

ArenaPool::Arena* ArenaPool::take_unopened() {
  if (!unopened_.empty()) {
    Arena* arena = unopened_.back();
    unopened_.pop_back();
    return arena;
  }
  if (unmade_arenas_ == 0 && !add_region()) return nullptr;
  const std::size_t at = kArenasPerRegion - unmade_arenas_--;
  std::unique_ptr<Arena>& arena = region_of(newest_region_).arenas[at];
  arena = std::make_unique<Arena>();
  arena->base = newest_region_ + at * kArenaBytes;
  return arena.get();
}

ArenaPool::Arena* ArenaPool::open_warm() {
  if (warm_.empty()) return nullptr;
  Arena* arena = warm_.back();
  warm_.pop_back();
  warm_arenas_.fetch_sub(1, std::memory_order_relaxed);
  if (reserve_ != nullptr) reserve_->uncharge();
  arena->rest_begin = 0;
  rest_bytes_.fetch_add(kArenaBytes, std::memory_order_relaxed);
  return arena;
}

ArenaPool::Arena* ArenaPool::open_arena() {
  const std::uint64_t expected = expected_bytes_.load(std::memory_order_relaxed);
  const bool fills_soon = expected >= kArenaBytes;
  Arena* arena = open_warm();
  if (arena == nullptr) {
    arena = take_unopened();
    if (arena == nullptr) return nullptr;
    if (::mprotect(arena->base, kArenaBytes, PROT_READ | PROT_WRITE) != 0) {
      unopened_.push_back(arena);
      return nullptr;
    }
    const bool is_small_pool = opened_arenas_.load(std::memory_order_relaxed) < kSmallPool;
    if (!arena->is_huge && (fills_soon || !(can_collapse_ && is_small_pool))) {
      arena->is_huge = true;
      ::madvise(arena->base, kArenaBytes, MADV_HUGEPAGE);
    }
  }
  if (fills_soon) expected_bytes_.store(expected - kArenaBytes, std::memory_order_relaxed);
  opened_arenas_.fetch_add(1, std::memory_order_relaxed);
  opened_lately_.fetch_add(1, std::memory_order_relaxed);
  put_in_bin(arena);
  if (reserve_ != nullptr) reserve_->wake();
  return arena;
}

bool ArenaPool::add_region() {
  constexpr std::size_t kBytes = kArenaBytes * kArenasPerRegion;
  void* mapped = ::mmap(nullptr, kBytes + kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return false;
  auto* begin = static_cast<std::byte*>(mapped);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t lead = (kArenaBytes - address % kArenaBytes) % kArenaBytes;
  if (lead > 0) ::munmap(begin, lead);
  if (lead < kArenaBytes) ::munmap(begin + lead + kBytes, kArenaBytes - lead);

  Region region;
  region.base = begin + lead;
  newest_region_ = region.base;
  unmade_arenas_ = kArenasPerRegion;
  const auto place = std::upper_bound(regions_.begin(), regions_.end(), region.base,
                                      [](const std::byte* base, const Region& other) { return base < other.base; });
  regions_.insert(place, std::move(region));
  return true;
}

ArenaPool::Region& ArenaPool::region_of(const std::byte* run) noexcept {
  const auto after = std::upper_bound(regions_.begin(), regions_.end(), run,
                                      [](const std::byte* at, const Region& region) { return at < region.base; });
  return *(after - 1);
}

ArenaPool::Arena* ArenaPool::arena_of(const std::byte* run) noexcept {
  Region& region = region_of(run);
  return region.arenas[static_cast<std::size_t>(run - region.base) / kArenaBytes].get();
}

void ArenaPool::put_in_bin(Arena* arena) {
  auto& bin = bins_[bin_of(arena->longest_free)];
  arena->bin_position = static_cast<std::uint32_t>(bin.size());
  bin.push_back(arena);
}

void ArenaPool::take_from_bin(Arena* arena) {
  auto& bin = bins_[bin_of(arena->longest_free)];
  bin[arena->bin_position] = bin.back();
  bin[arena->bin_position]->bin_position = arena->bin_position;
  bin.pop_back();
}

// Best fit; the caller has checked that longest_free suffices.
ArenaPool::FreeRun ArenaPool::find_run(const Arena& arena, std::uint32_t granules) noexcept {
  FreeRun best{.length = kGranules + 1};
  for (std::uint32_t at = run_length(arena.taken, 0, true); at < kGranules && best.length > granules;) {
    const std::uint32_t length = run_length(arena.taken, at, false);
    if (length >= granules && length < best.length) best = {at, length};
    at += length;
    at += run_length(arena.taken, at, true);
  }
  return best;
}

std::uint32_t ArenaPool::longest_free_run(const Arena& arena) noexcept {
  std::uint32_t longest = 0;
  for (std::uint32_t at = run_length(arena.taken, 0, true); at < kGranules;) {
    const std::uint32_t length = run_length(arena.taken, at, false);
    longest = std::max(longest, length);
    at += length;
    at += run_length(arena.taken, at, true);
  }
  return longest;
}

void ArenaPool::mark(Arena& arena, std::uint32_t first, std::uint32_t count, bool taken) noexcept {
  for (std::uint32_t at = first; at < first + count;) {
    const std::uint32_t bits = std::min(64 - at % 64, first + count - at);
    const std::uint64_t mask = (bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1) << (at % 64);
    if (taken) {
      arena.taken[at / 64] |= mask;
    } else {
      arena.taken[at / 64] &= ~mask;
    }
    at += bits;
  }
}

}  // namespace sparserow
