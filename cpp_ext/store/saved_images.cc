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
  const std::lock_guard lock(mutex_);
  SavedImage* taken = nullptr;
  for (std::size_t i = 0; i < kTaken; ++i) {
    SavedImage* image = free_;
    if (image != nullptr) {
      free_ = image->next;
    } else if (image = cut(); image == nullptr) {
      break;
    }
    image->next = taken;
    taken = image;
  }
  if (taken == nullptr) throw std::bad_alloc();
  return taken;
}

void SavedImagePool::give(SavedImage* first, SavedImage* last) noexcept {
  if (first == nullptr) return;
  const std::lock_guard lock(mutex_);
  last->next = free_;
  free_ = first;
}

void SavedImagePool::clear() noexcept {
  const std::lock_guard lock(mutex_);
  for (const Region& region : regions_) ::munmap(region.at, region.bytes);
  regions_.clear();
  free_ = nullptr;
  used_ = populated_ = 0;
}

// Returns a new place; null when the system has no memory.
SavedImage* SavedImagePool::cut() {
  if (regions_.empty() || used_ + place_bytes_ > regions_.back().bytes) {
    const std::size_t wished =
        regions_.empty() ? kLeastRegionBytes : std::min(regions_.back().bytes * 2, kMostRegionBytes);
    const std::size_t bytes = std::max(wished, place_bytes_ * kTaken);
    regions_.reserve(regions_.size() + 1);
    void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    regions_.push_back({static_cast<std::byte*>(mapped), bytes});
    used_ = populated_ = 0;
  }
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
