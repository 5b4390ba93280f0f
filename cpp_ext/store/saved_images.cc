#include "store/saved_images.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "util/memory_advice.h"

namespace sparserow {
namespace {

// Pages come some at a time, which costs a writer less than to fault on each.
constexpr std::size_t kPopulatedBytes = 64u << 10;

}  // namespace

SavedImage* SavedImagePool::take() {
  const MutexLock lock(mutex_);
  SavedImage* taken = nullptr;
  for (std::size_t i = 0; i < kTaken; ++i) {
    SavedImage* image = free_;
    if (image != nullptr) {
      free_ = image->next;
      --free_count_;
    } else if (image = cut(); image == nullptr) {
      break;
    }
    image->next = taken;
    taken = image;
  }
  if (taken == nullptr) throw std::bad_alloc();
  return taken;
}

void SavedImagePool::give(SavedImage* first, SavedImage* last, std::size_t count) noexcept {
  if (first == nullptr) return;
  const MutexLock lock(mutex_);
  last->next = free_;
  free_ = first;
  free_count_ += count;
}

void SavedImagePool::touch_ahead(std::size_t bytes) noexcept {
  for (;;) {
    {
      const MutexLock lock(mutex_);
      if (regions_.empty()) return;
      const std::size_t ahead = free_count_ * place_bytes_ + populated_ - std::min(populated_, used_);
      if (ahead + touched_.size() * kMostRegionBytes >= bytes) return;
    }
    const Region region = map(std::max(kMostRegionBytes, place_bytes_ * kTaken));
    if (region.at == nullptr) return;
    ::madvise(region.at, region.bytes, kPopulateWrite);  // a wish
    const MutexLock lock(mutex_);
    touched_.push_back(region);
  }
}

std::size_t SavedImagePool::touched_bytes() const noexcept {
  const MutexLock lock(mutex_);
  std::size_t bytes = 0;
  for (const Region& region : touched_) bytes += region.bytes;
  return bytes;
}

void SavedImagePool::clear() noexcept {
  const MutexLock lock(mutex_);
  for (const auto* regions : {&regions_, &touched_}) {
    for (const Region& region : *regions) ::munmap(region.at, region.bytes);
  }
  regions_.clear();
  touched_.clear();
  free_ = nullptr;
  used_ = populated_ = free_count_ = 0;
}

SavedImagePool::Region SavedImagePool::map(std::size_t bytes) noexcept {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? Region{} : Region{static_cast<std::byte*>(mapped), bytes};
}

// Begins the next region, which has pages when touch_ahead() made it; false when the system has no memory.
bool SavedImagePool::begin_region() {
  regions_.reserve(regions_.size() + 1);
  if (!touched_.empty()) {
    regions_.push_back(touched_.back());
    touched_.pop_back();
    used_ = 0;
    populated_ = regions_.back().bytes;
    return true;
  }
  const std::size_t wished =
      regions_.empty() ? kLeastRegionBytes : std::min(regions_.back().bytes * 2, kMostRegionBytes);
  const Region region = map(std::max(wished, place_bytes_ * kTaken));
  if (region.at == nullptr) return false;
  regions_.push_back(region);
  used_ = populated_ = 0;
  return true;
}

// Returns a new place; null when the system has no memory.
SavedImage* SavedImagePool::cut() {
  if ((regions_.empty() || used_ + place_bytes_ > regions_.back().bytes) && !begin_region()) return nullptr;
  if (used_ + place_bytes_ > populated_ && populated_ < regions_.back().bytes) {
    const std::size_t bytes = std::min(kPopulatedBytes, regions_.back().bytes - populated_);
    ::madvise(regions_.back().at + populated_, bytes, kPopulateWrite);  // a wish
    populated_ += bytes;
  }
  auto* image = new (regions_.back().at + used_) SavedImage;
  used_ += place_bytes_;
  return image;
}

}  // namespace sparserow
