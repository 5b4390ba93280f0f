// Large buffers for frame bodies, used again: the page faults of a fresh 13 MB cost as much as its copy.
//
// Capacities are powers of two from 64 KiB; those of 2 MiB and more are aligned for huge pages. Freed
// buffers are kept up to a number of bytes, the rest goes back to the system. Thread-safe; a pool must
// outlive its buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "util/mutex.h"

namespace sparserow::rpc {

class BufferPool;

// Owns its bytes; gives them back to the pool. Aligned to at least 64 bytes; content is unspecified.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }

 private:
  friend class BufferPool;
  Buffer(BufferPool* pool, std::byte* data, std::size_t capacity) : pool_(pool), data_(data), capacity_(capacity) {}
  void give_back() noexcept;
  BufferPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
};

class BufferPool {
 public:
  explicit BufferPool(std::size_t kept_bytes) : kept_limit_(kept_bytes) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();

  [[nodiscard]] Buffer acquire(std::size_t bytes);  // throws std::bad_alloc

 private:
  friend class Buffer;
  void release(std::byte* data, std::size_t capacity) noexcept;

  const std::size_t kept_limit_;
  Mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_ SR_GUARDED_BY(mutex_);
  std::size_t kept_ SR_GUARDED_BY(mutex_) = 0;
};

}  // namespace sparserow::rpc
