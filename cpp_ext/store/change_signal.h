// A descriptor that wakes a reader when something changed in a store, in place of looks at all of its slots.
//
// The reader arms the signal, looks for changes, and waits where it finds none. A writer shows a change under the lock
// of the stripe, and then asks whether the signal is armed. So a change that the look did not see finds it armed, as
// the look took the same lock before; and a change without a waiting reader costs one load.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "util/file_descriptor.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

class ChangeSignal {
 public:
  // A descriptor that can be read (8 bytes) when something changed since arm(); it ends with the store.
  Result<int> descriptor() {
    const MutexLock lock(mutex_);
    if (!event_.is_open()) {
      event_ = FileDescriptor(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
      if (!event_.is_open()) {
        return Status(Code::kResourceExhausted, "a descriptor for changes: " + std::string(std::strerror(errno)));
      }
      fd_.store(event_.get(), std::memory_order_release);
    }
    return event_.get();
  }
  // The next change can be read from the descriptor, once.
  void arm() noexcept { armed_.store(true, std::memory_order_release); }
  void changed() noexcept {
    if (!armed_.load(std::memory_order_relaxed) || !armed_.exchange(false, std::memory_order_acq_rel)) return;
    const std::uint64_t one = 1;
    // It fails only where the descriptor can be read already.
    [[maybe_unused]] const auto written = ::write(fd_.load(std::memory_order_acquire), &one, sizeof(one));
  }

 private:
  std::atomic<bool> armed_ = false;
  std::atomic<int> fd_ = -1;
  Mutex mutex_;
  FileDescriptor event_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow
