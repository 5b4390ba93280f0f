// A budget of bytes that peers share fairly: request bodies that come in, replies that go out.
//
// An account is one peer: a token at an address. A charge is one thing of an account that takes bytes, at once or in
// steps as they arrive.
//
// 1. All charges together never exceed the limit.
// 2. An account takes a step only while it has at most kShare times the bytes that stay free. A newcomer therefore
//    finds room at once, and an account that is alone has nearly everything.
// 3. One charge at a time has the right of way: it takes all that it announced, whatever the others have. Room for it
//    is kept free, so charges that are filled in part never wait for each other in a circle.
// 4. Waiting charges are served in the order of what their accounts have, the least first, and then of their arrival.
//
// Thread-safe. A granted wait is notified on the thread that gave the bytes back, outside of the mutex. A budget must
// outlive its charges.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "util/mutex.h"

namespace sparserow::rpc {

class FairBudget {
 public:
  // An account has at most this many times the bytes that stay free.
  static constexpr std::uint64_t kShare = 8;
  // A larger charge may be filled in steps; a smaller one is taken whole.
  static constexpr std::uint64_t kStepBytes = 1u << 20;

  struct Account {
    explicit Account(std::string account_name) : name(std::move(account_name)) {}
    const std::string name;
    std::uint64_t bytes = 0;  // guarded by the budget's mutex
  };

  // Bytes of one account. It gives them back, and stops waiting, when it is destroyed. Not thread-safe.
  class Charge {
   public:
    Charge() = default;
    Charge(Charge&& other) noexcept : budget_(std::exchange(other.budget_, nullptr)), state_(std::move(other.state_)) {}
    Charge& operator=(Charge&& other) noexcept {
      if (this != &other) {
        reset();
        budget_ = std::exchange(other.budget_, nullptr);
        state_ = std::move(other.state_);
      }
      return *this;
    }
    ~Charge() { reset(); }

    // Takes `bytes` more, in all at most what was announced. True when they are taken. Else the charge waits, and
    // `granted` is called once when they are, unless give_up() or reset() comes first.
    [[nodiscard]] bool take(std::uint64_t bytes, std::function<void()> granted);
    // Stops waiting. True when the bytes of the last take() had been granted before.
    [[nodiscard]] bool give_up();
    void reset() noexcept;

   private:
    friend class FairBudget;
    struct State;
    Charge(FairBudget* budget, std::shared_ptr<State> state) : budget_(budget), state_(std::move(state)) {}
    FairBudget* budget_ = nullptr;
    std::shared_ptr<State> state_;
  };

  explicit FairBudget(std::uint64_t limit) : limit_(limit) {}

  // Callers of one name share one account for as long as one of them has it.
  [[nodiscard]] std::shared_ptr<Account> account(const std::string& name);
  // A charge that will take `announced` bytes in all, at most limit(). It has none yet.
  [[nodiscard]] Charge charge(std::shared_ptr<Account> account, std::uint64_t announced);
  [[nodiscard]] std::uint64_t used() const;
  [[nodiscard]] bool has_waiting() const;
  [[nodiscard]] std::uint64_t limit() const noexcept { return limit_; }

 private:
  using Callbacks = std::vector<std::function<void()>>;
  [[nodiscard]] bool fits(const Charge::State& state) const SR_REQUIRES(mutex_);
  [[nodiscard]] bool fits_first(const Charge::State& state) const SR_REQUIRES(mutex_);
  void take(Charge::State& state) SR_REQUIRES(mutex_);
  // Grants what fits now, and gives the callbacks of all but `caller`.
  Callbacks grant_waiting(const Charge::State* caller) SR_REQUIRES(mutex_);
  Callbacks end(Charge::State& state) SR_REQUIRES(mutex_);

  const std::uint64_t limit_;
  mutable Mutex mutex_;
  std::uint64_t used_ SR_GUARDED_BY(mutex_) = 0;                  // by all charges
  std::multiset<std::uint64_t> announced_ SR_GUARDED_BY(mutex_);  // by charges that are filled in steps and have bytes
  const Charge::State* first_ SR_GUARDED_BY(mutex_) = nullptr;    // has the right of way
  std::list<Charge::State*> waiting_ SR_GUARDED_BY(mutex_);       // in the order of arrival
  std::unordered_map<std::string, std::weak_ptr<Account>> accounts_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow::rpc
