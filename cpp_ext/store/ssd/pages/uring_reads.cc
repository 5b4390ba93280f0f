#include "store/ssd/pages/uring_reads.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

namespace sparserow {
namespace {

constexpr unsigned kDepth = 128;  // reads at once; a disk takes about as many

class Mapping {
 public:
  Mapping(int ring, std::size_t bytes, off_t what) noexcept : bytes_(bytes) {
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
    at_ = at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (at_ != nullptr) ::munmap(at_, bytes_);
  }
  [[nodiscard]] std::byte* at() const noexcept { return at_; }

 private:
  std::byte* at_;
  std::size_t bytes_;
};

}  // namespace

// The two queues that this process and the kernel share (io_uring(7)).
class UringReads::Ring {
 public:
  static std::unique_ptr<Ring> make() {
    io_uring_params params{};
    const auto file = static_cast<int>(::syscall(SYS_io_uring_setup, kDepth, &params));
    if (file < 0) return nullptr;
    auto ring = std::unique_ptr<Ring>(new Ring(file, params));  // NOLINT: the constructor is private
    return ring->is_mapped() ? std::move(ring) : nullptr;
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { ::close(file_); }

  void run(int file, std::span<FileRead> reads) noexcept {
    std::size_t next = 0;
    std::size_t done = 0;
    while (done < reads.size()) {
      const unsigned mask = *sq_mask_;
      unsigned tail = std::atomic_ref(*sq_tail_).load(std::memory_order_relaxed);
      unsigned added = 0;
      for (; next < reads.size() && next - done < kDepth; ++next, ++added) {
        io_uring_sqe& entry = entries_[tail & mask];
        entry = io_uring_sqe{};
        entry.opcode = IORING_OP_READ;
        entry.fd = file;
        entry.off = reads[next].offset;
        entry.addr = reinterpret_cast<std::uint64_t>(reads[next].to.data());
        entry.len = static_cast<unsigned>(reads[next].to.size());
        entry.user_data = next;
        sq_array_[tail & mask] = tail & mask;
        ++tail;
      }
      std::atomic_ref(*sq_tail_).store(tail, std::memory_order_release);
      submit(added);
      done += take_completions(reads);
    }
  }

 private:
  Ring(int file, const io_uring_params& params) noexcept
      : file_(file),
        submissions_(file, params.sq_off.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING),
        completions_(file, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING),
        entry_memory_(file, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
    if (!is_mapped()) return;
    sq_tail_ = reinterpret_cast<unsigned*>(submissions_.at() + params.sq_off.tail);
    sq_mask_ = reinterpret_cast<unsigned*>(submissions_.at() + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(submissions_.at() + params.sq_off.array);
    entries_ = reinterpret_cast<io_uring_sqe*>(entry_memory_.at());
    cq_head_ = reinterpret_cast<unsigned*>(completions_.at() + params.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned*>(completions_.at() + params.cq_off.tail);
    cq_mask_ = reinterpret_cast<unsigned*>(completions_.at() + params.cq_off.ring_mask);
    results_ = reinterpret_cast<io_uring_cqe*>(completions_.at() + params.cq_off.cqes);
  }

  [[nodiscard]] bool is_mapped() const noexcept {
    return submissions_.at() != nullptr && completions_.at() != nullptr && entry_memory_.at() != nullptr;
  }

  // Hands entries to the kernel and waits for a completion; what an interrupted call left is handed over by the next.
  void submit(unsigned added) noexcept {
    pending_ += added;
    const long taken = ::syscall(SYS_io_uring_enter, file_, pending_, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken > 0) pending_ -= std::min(pending_, static_cast<unsigned>(taken));
  }

  std::size_t take_completions(std::span<FileRead> reads) noexcept {
    unsigned head = std::atomic_ref(*cq_head_).load(std::memory_order_relaxed);
    const unsigned tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
    const unsigned count = tail - head;
    for (; head != tail; ++head) {
      const io_uring_cqe& result = results_[head & *cq_mask_];
      reads[result.user_data].result = result.res;
    }
    std::atomic_ref(*cq_head_).store(head, std::memory_order_release);
    return count;
  }

  const int file_;
  Mapping submissions_;
  Mapping completions_;
  Mapping entry_memory_;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_mask_ = nullptr;
  unsigned* sq_array_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned* cq_mask_ = nullptr;
  io_uring_cqe* results_ = nullptr;
  unsigned pending_ = 0;  // entries that the kernel has not taken yet
};

UringReads::UringReads(std::unique_ptr<Ring> first) { idle_.push_back(std::move(first)); }
UringReads::~UringReads() = default;

std::unique_ptr<UringReads> UringReads::open() {
  auto ring = Ring::make();
  if (ring == nullptr) return nullptr;
  return std::unique_ptr<UringReads>(new UringReads(std::move(ring)));
}

std::unique_ptr<UringReads::Ring> UringReads::take() {
  {
    const MutexLock lock(mutex_);
    if (!idle_.empty()) {
      auto ring = std::move(idle_.back());
      idle_.pop_back();
      return ring;
    }
  }
  return Ring::make();
}

bool UringReads::run(int file, std::span<FileRead> reads) {
  auto ring = take();
  if (ring == nullptr) return false;
  ring->run(file, reads);
  const MutexLock lock(mutex_);
  idle_.push_back(std::move(ring));
  return true;
}

}  // namespace sparserow
