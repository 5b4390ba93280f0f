// The connections that a server serves, shared fairly between accounts.
//
// A connection takes its seat when its HELLO is accepted. When all seats are taken, an account that has fewer than
// another one gets a seat all the same: the other one loses the connection of its own that has been idle longest.
// An account that is alone may have every seat.
//
// Thread-safe. What a seat closes is called under the mutex, so it must not come back here.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "util/mutex.h"
#include "util/status.h"

namespace sparserow::rpc {

class Seats {
 public:
  // What is asked of the connection on a seat.
  struct Sitter {
    // When it became idle, in milliseconds of the steady clock; nullopt while a request of its own is under way.
    std::function<std::optional<std::int64_t>()> idle_since_ms;
    std::function<void()> close;
  };

  // Given back when destroyed.
  class Seat {
   public:
    Seat() = default;
    Seat(Seat&& other) noexcept
        : seats_(std::exchange(other.seats_, nullptr)), account_(std::move(other.account_)), at_(other.at_) {}
    Seat& operator=(Seat&& other) noexcept {
      if (this != &other) {
        leave();
        seats_ = std::exchange(other.seats_, nullptr);
        account_ = std::move(other.account_);
        at_ = other.at_;
      }
      return *this;
    }
    ~Seat() { leave(); }

   private:
    friend class Seats;
    struct Taken {
      Sitter sitter;
      bool is_closed = false;  // for the sake of another account
    };
    Seat(Seats* seats, std::string account, std::list<Taken>::iterator at)
        : seats_(seats), account_(std::move(account)), at_(at) {}
    void leave() noexcept;
    Seats* seats_ = nullptr;
    std::string account_;
    std::list<Taken>::iterator at_;
  };

  explicit Seats(std::uint32_t limit) : limit_(limit) {}
  // kResourceExhausted when all seats are taken and none becomes free for this account.
  Result<Seat> take(const std::string& account, Sitter sitter);

 private:
  struct Account {
    std::list<Seat::Taken> seats;
    std::uint32_t open = 0;  // seats that are not closed
  };
  bool close_one_for(const std::string& account) SR_REQUIRES(mutex_);

  const std::uint32_t limit_;
  Mutex mutex_;
  std::uint32_t open_ SR_GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::string, Account> accounts_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow::rpc
