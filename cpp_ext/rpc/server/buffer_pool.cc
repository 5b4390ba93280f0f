#include "rpc/server/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

namespace sparserow::rpc {
namespace {

constexpr std::size_t kMinCapacity = 64u << 10;
constexpr std::size_t kHugePage = 2u << 20;

std::align_val_t alignment(std::size_t capacity) { return std::align_val_t{capacity >= kHugePage ? kHugePage : 64}; }

}  // namespace

Buffer::Buffer(Buffer&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    give_back();
    pool_ = std::exchange(other.pool_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    capacity_ = std::exchange(other.capacity_, 0);
  }
  return *this;
}

Buffer::~Buffer() { give_back(); }

void Buffer::give_back() noexcept {
  if (data_ != nullptr) pool_->release(data_, capacity_);
}

BufferPool::~BufferPool() {
  for (const auto& [capacity, buffers] : free_) {
    for (std::byte* data : buffers) ::operator delete(data, alignment(capacity));
  }
}

Buffer BufferPool::acquire(std::size_t bytes) {
  const std::size_t capacity = std::bit_ceil(std::max(bytes, kMinCapacity));
  {
    const MutexLock lock(mutex_);
    auto& free = free_[capacity];
    if (!free.empty()) {
      std::byte* data = free.back();
      free.pop_back();
      kept_ -= capacity;
      return Buffer(this, data, capacity);
    }
  }
  auto* data = static_cast<std::byte*>(::operator new(capacity, alignment(capacity)));
  if (capacity >= kHugePage) ::madvise(data, capacity, MADV_HUGEPAGE);
  return Buffer(this, data, capacity);
}

void BufferPool::release(std::byte* data, std::size_t capacity) noexcept {
  try {
    const MutexLock lock(mutex_);
    if (kept_ + capacity <= kept_limit_) {
      free_[capacity].push_back(data);
      kept_ += capacity;
      return;
    }
  } catch (const std::bad_alloc&) {
    // No room to remember it: it goes back to the system instead.
  }
  ::operator delete(data, alignment(capacity));
}

}  // namespace sparserow::rpc
