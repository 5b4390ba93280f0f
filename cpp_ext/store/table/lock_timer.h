// How long a lock was held: the time that passed, and how much of it the holder had a CPU. The rest is the system's:
// a thread that another one displaced holds its locks meanwhile.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace sparserow {

struct LockTimes {
  std::uint64_t wall_nanoseconds = 0;
  std::uint64_t cpu_nanoseconds = 0;
};

// Starts when it is made.
class LockTimer {
 public:
  [[nodiscard]] LockTimes elapsed() const noexcept {
    const auto wall = std::chrono::steady_clock::now() - wall_start_;
    return {static_cast<std::uint64_t>(std::chrono::nanoseconds(wall).count()), thread_nanoseconds() - cpu_start_};
  }

 private:
  static std::uint64_t thread_nanoseconds() noexcept {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
  }

  std::chrono::steady_clock::time_point wall_start_ = std::chrono::steady_clock::now();
  std::uint64_t cpu_start_ = thread_nanoseconds();
};

// The longest of many, each of the two by itself. Thread-safe.
class LongestLock {
 public:
  void note(LockTimes times) noexcept {
    raise(wall_, times.wall_nanoseconds);
    raise(cpu_, times.cpu_nanoseconds);
  }
  [[nodiscard]] LockTimes longest() const noexcept {
    return {wall_.load(std::memory_order_relaxed), cpu_.load(std::memory_order_relaxed)};
  }

 private:
  static void raise(std::atomic<std::uint64_t>& longest, std::uint64_t nanoseconds) noexcept {
    std::uint64_t known = longest.load(std::memory_order_relaxed);
    while (known < nanoseconds && !longest.compare_exchange_weak(known, nanoseconds, std::memory_order_relaxed)) {
    }
  }
  std::atomic<std::uint64_t> wall_{0}, cpu_{0};
};

}  // namespace sparserow
