// std::mutex and std::condition_variable with annotations, so that lint finds a member that is used without its lock.
// Nothing is added to what they do. FairMutex is the lock of readers and writers (fair_mutex.h).
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "util/lock_annotations.h"

namespace sparserow {

class SR_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() SR_ACQUIRE() { mutex_.lock(); }
  bool try_lock() SR_TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() SR_RELEASE() { mutex_.unlock(); }

  // Does nothing. It says to clang, in a callback whose caller has the mutex, what clang cannot see.
  void assume_locked() const noexcept SR_ASSERT(this) {}

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Has a mutex until its scope ends.
class SR_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) SR_ACQUIRE(mutex) : lock_(mutex) {}
  MutexLock(Mutex& mutex, std::adopt_lock_t adopt) SR_REQUIRES(mutex) : lock_(mutex, adopt) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  ~MutexLock() SR_RELEASE() {}

  void unlock() SR_RELEASE() { lock_.unlock(); }
  void lock() SR_ACQUIRE() { lock_.lock(); }

 private:
  std::unique_lock<Mutex> lock_;
};

// Gives the caller's mutex back until its scope ends, also when the scope ends by an exception.
class SR_SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) SR_RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;
  ~MutexUnlock() SR_RELEASE() { mutex_.lock(); }

 private:
  Mutex& mutex_;
};

// Waits with the caller's mutex, which is free meanwhile. A predicate runs under it, so it is written
// [&]() SR_REQUIRES(mutex) { ... }.
class CondVar {
 public:
  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

  // Until it is notified, or sooner.
  void wait(Mutex& mutex) SR_REQUIRES(mutex) {
    Borrowed lock(mutex);
    condition_.wait(lock.lock);
  }
  template <class Predicate>
  void wait(Mutex& mutex, Predicate predicate) SR_REQUIRES(mutex) {
    Borrowed lock(mutex);
    condition_.wait(lock.lock, std::move(predicate));
  }
  // Until it is notified, or sooner, at most until the deadline.
  template <class Clock, class Duration>
  void wait_until(Mutex& mutex, const std::chrono::time_point<Clock, Duration>& deadline) SR_REQUIRES(mutex) {
    Borrowed lock(mutex);
    condition_.wait_until(lock.lock, deadline);
  }
  template <class Clock, class Duration, class Predicate>
  bool wait_until(Mutex& mutex, const std::chrono::time_point<Clock, Duration>& deadline, Predicate predicate)
      SR_REQUIRES(mutex) {
    Borrowed lock(mutex);
    return condition_.wait_until(lock.lock, deadline, std::move(predicate));
  }
  // Until it is notified, or sooner, at most so long.
  template <class Rep, class Period>
  void wait_for(Mutex& mutex, const std::chrono::duration<Rep, Period>& most) SR_REQUIRES(mutex) {
    Borrowed lock(mutex);
    condition_.wait_for(lock.lock, most);
  }
  template <class Rep, class Period, class Predicate>
  bool wait_for(Mutex& mutex, const std::chrono::duration<Rep, Period>& most, Predicate predicate) SR_REQUIRES(mutex) {
    Borrowed lock(mutex);
    return condition_.wait_for(lock.lock, most, std::move(predicate));
  }

 private:
  // What std::condition_variable waits with; the caller keeps the mutex, also when a predicate throws.
  struct Borrowed {
    explicit Borrowed(Mutex& mutex) : lock(mutex.mutex_, std::adopt_lock) {}
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() { lock.release(); }
    std::unique_lock<std::mutex> lock;
  };

  std::condition_variable condition_;
};

}  // namespace sparserow
