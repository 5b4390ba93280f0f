// Who reads at the moment: what a reader may still look at is not used anew before its ticket is back.
//
// A reader takes its ticket before it looks up where records lie. What is taken out of use is stamped afterwards, and
// is free once every ticket of before the stamp is back. Thread-safe.
#pragma once

#include <cstdint>
#include <set>

#include "util/mutex.h"

namespace sparserow {

class ReadTickets {
 public:
  class Ticket {
   public:
    explicit Ticket(ReadTickets& tickets) : tickets_(tickets), number_(tickets.take()) {}
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket() { tickets_.give_back(number_); }

   private:
    ReadTickets& tickets_;
    std::uint64_t number_;
  };

  [[nodiscard]] std::uint64_t stamp() const {
    const MutexLock lock(mutex_);
    return next_;
  }
  [[nodiscard]] bool is_free(std::uint64_t stamp) const {
    const MutexLock lock(mutex_);
    return taken_.empty() || *taken_.begin() >= stamp;
  }

 private:
  std::uint64_t take() {
    const MutexLock lock(mutex_);
    taken_.insert(taken_.end(), next_);
    return next_++;
  }
  void give_back(std::uint64_t number) {
    const MutexLock lock(mutex_);
    taken_.erase(number);
  }

  mutable Mutex mutex_;
  std::uint64_t next_ SR_GUARDED_BY(mutex_) = 0;
  std::set<std::uint64_t> taken_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow
