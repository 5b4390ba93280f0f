// A lock of readers and writers in which neither starves: while both wait, a phase of all readers that are there
// alternates with one writer (phase-fair). So a reader waits for one writer at most, and a writer for the readers that
// came before it and for one phase of each writer before it, whatever others do. glibc's prefers readers: where they
// overlap all the time, a writer never comes.
//
// The counters are those of algorithm PF-T (Brandenburg & Anderson, "Spin-based reader-writer synchronization for
// multiprocessor real-time systems", Real-Time Systems 46, 2010); here threads that wait sleep. Without a writer a
// reader changes one word when it comes and one when it goes, both in the line of the lock.
//
// A thread that has it must not ask for it again, also not to read: between the two a writer may have come, which waits
// for the first and is waited for by the second. Builds with sanitizers end the process there.
#pragma once

#include <atomic>
#include <cstdint>

#include "util/held_locks.h"
#include "util/lock_annotations.h"

namespace sparserow {

class SR_CAPABILITY("mutex") FairMutex {
 public:
  FairMutex() = default;
  FairMutex(const FairMutex&) = delete;
  FairMutex& operator=(const FairMutex&) = delete;

  void lock_shared() noexcept SR_ACQUIRE_SHARED() {
    note_lock(this);
    const std::uint32_t writer = readers_in_.fetch_add(kReader, std::memory_order_seq_cst) & kWriter;
    if (writer != 0) [[unlikely]]
      wait_for_end_of(writer);
  }

  void unlock_shared() noexcept SR_RELEASE_SHARED() {
    note_unlock(this);
    // Both in the one order that all threads see: a writer either sees this reader gone, or is seen and woken by it.
    readers_out_.fetch_add(kReader, std::memory_order_seq_cst);
    if ((readers_in_.load(std::memory_order_seq_cst) & kPresent) != 0) [[unlikely]]
      readers_out_.notify_all();
  }

  void lock() noexcept SR_ACQUIRE() {
    note_lock(this);
    const std::uint32_t ticket = writers_in_.fetch_add(1, std::memory_order_relaxed);
    wait_until(writers_out_, ticket);
    wait_until(readers_out_, enter(ticket));
  }

  // False also where it would be free in a moment.
  bool try_lock() noexcept SR_TRY_ACQUIRE(true) {
    std::uint32_t ticket = writers_out_.load(std::memory_order_acquire);
    // A look before anything changes, since readers wait for a writer that has entered. Who left is read before who
    // came: equal counts are then of no reader, because a later one can only make them differ.
    const std::uint32_t left = readers_out_.load(std::memory_order_acquire);
    if (readers_in_.load(std::memory_order_acquire) != left) return false;
    if (!writers_in_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acquire)) return false;
    if (readers_out_.load(std::memory_order_seq_cst) == enter(ticket)) {
      note_lock(this);
      return true;
    }
    leave();
    return false;
  }

  void unlock() noexcept SR_RELEASE() {
    note_unlock(this);
    leave();
  }

  // Whether a writer has it, or is the next one.
  [[nodiscard]] bool has_writer() const noexcept {
    return (readers_in_.load(std::memory_order_acquire) & kPresent) != 0;
  }

  // The readers, and the writers, that have it or wait for it.
  [[nodiscard]] std::uint32_t readers() const noexcept {
    return (readers_in_.load(std::memory_order_acquire) - readers_out_.load(std::memory_order_acquire)) / kReader;
  }
  [[nodiscard]] std::uint32_t writers() const noexcept {
    return writers_in_.load(std::memory_order_acquire) - writers_out_.load(std::memory_order_acquire);
  }

 private:
  // readers_in_ holds two bits of the writer that has entered, which differ between one and the next, and the readers.
  static constexpr std::uint32_t kPhase = 1, kPresent = 2, kWriter = kPhase | kPresent, kReader = 4;

  // Readers that come from now on wait; returns what readers_out_ is when those before have gone.
  std::uint32_t enter(std::uint32_t ticket) noexcept {
    return readers_in_.fetch_add(kPresent | (ticket & kPhase), std::memory_order_seq_cst) & ~kWriter;
  }

  void leave() noexcept {
    readers_in_.fetch_and(~kWriter, std::memory_order_seq_cst);
    readers_in_.notify_all();
    writers_out_.fetch_add(1, std::memory_order_release);
    writers_out_.notify_all();
  }

  static void wait_until(const std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept {
    for (std::uint32_t now; (now = word.load(std::memory_order_seq_cst)) != value;) {
      word.wait(now, std::memory_order_seq_cst);
    }
  }

  [[gnu::noinline]] void wait_for_end_of(std::uint32_t writer) const noexcept {
    for (std::uint32_t now; ((now = readers_in_.load(std::memory_order_acquire)) & kWriter) == writer;) {
      readers_in_.wait(now, std::memory_order_acquire);
    }
  }

  std::atomic<std::uint32_t> readers_in_ = 0;
  std::atomic<std::uint32_t> readers_out_ = 0;
  std::atomic<std::uint32_t> writers_in_ = 0;
  std::atomic<std::uint32_t> writers_out_ = 0;
};

}  // namespace sparserow
