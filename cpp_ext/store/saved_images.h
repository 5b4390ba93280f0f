// Images of rows that change during a save, until the save takes them (snapshot.h).
//
// All images of a table are of one size, and come and go in their tens of thousands a second between threads that write
// and the one that dumps. Their memory is mapped for them alone: in malloc's arenas it stayed with the process, spread
// among what else the threads had asked for (1 M rows x 64, pushes during saves: 215 MB beyond what was in use).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "util/mutex.h"

namespace sparserow {

struct SavedImage {
  SavedImage* next = nullptr;
  std::uint64_t suffix = 0;
  std::uint64_t version = 0;
  std::uint32_t update_count = 0;

  [[nodiscard]] std::byte* data() noexcept { return reinterpret_cast<std::byte*>(this + 1); }
};

// Places for images, free ones last in, first out. Their pages are touched ahead by the thread that dumps, as a writer
// that needs a place holds a stripe's lock. Thread-safe; its mutexes are leaves.
class SavedImagePool {
 public:
  explicit SavedImagePool(std::size_t data_bytes) noexcept
      : place_bytes_((sizeof(SavedImage) + data_bytes + kAlignment - 1) / kAlignment * kAlignment) {}
  SavedImagePool(const SavedImagePool&) = delete;
  SavedImagePool& operator=(const SavedImagePool&) = delete;
  ~SavedImagePool() { clear(); }

  // A chain of some places. Throws std::bad_alloc.
  [[nodiscard]] SavedImage* take();
  // A chain of `count` from first to last; null: none.
  void give(SavedImage* first, SavedImage* last, std::size_t count) noexcept;
  // Touches pages for places to come, so that `bytes` of places are free or have pages; nothing before the first image
  // was taken. take() goes on meanwhile. One thread at a time.
  void touch_ahead(std::size_t bytes) noexcept;
  // Bytes of regions that are touched and that no place was cut from.
  [[nodiscard]] std::size_t touched_bytes() const noexcept;
  // Gives all memory back to the system. No image may be in use.
  void clear() noexcept;

 private:
  struct Region {
    std::byte* at = nullptr;  // null: the system has no memory
    std::size_t bytes = 0;
  };
  static constexpr std::size_t kAlignment = 16;
  static constexpr std::size_t kTaken = 8;  // places at once
  static constexpr std::size_t kLeastRegionBytes = 64u << 10;
  static constexpr std::size_t kMostRegionBytes = 4u << 20;

  [[nodiscard]] static Region map(std::size_t bytes) noexcept;
  [[nodiscard]] bool begin_region() SR_REQUIRES(mutex_);
  [[nodiscard]] SavedImage* cut() SR_REQUIRES(mutex_);

  const std::size_t place_bytes_;
  mutable Mutex mutex_;
  SavedImage* free_ SR_GUARDED_BY(mutex_) = nullptr;
  std::size_t free_count_ SR_GUARDED_BY(mutex_) = 0;
  std::vector<Region> regions_ SR_GUARDED_BY(mutex_);
  std::size_t used_ SR_GUARDED_BY(mutex_) = 0;         // bytes of the last region
  std::size_t populated_ SR_GUARDED_BY(mutex_) = 0;    // likewise
  std::vector<Region> touched_ SR_GUARDED_BY(mutex_);  // the next regions, whose pages are there
};

}  // namespace sparserow
