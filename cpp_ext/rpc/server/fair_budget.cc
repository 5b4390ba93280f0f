#include "rpc/server/fair_budget.h"

#include <algorithm>
#include <new>

namespace sparserow::rpc {

struct FairBudget::Charge::State {
  std::shared_ptr<Account> account;
  std::uint64_t announced = 0;
  std::uint64_t bytes = 0;   // taken
  std::uint64_t wanted = 0;  // by the take() that waits
  bool waits = false;
  std::function<void()> granted;

  [[nodiscard]] bool is_stepwise() const noexcept { return announced > kStepBytes; }
};

bool FairBudget::Charge::take(std::uint64_t bytes, std::function<void()> granted) {
  Callbacks others;
  bool waits = false;
  {
    const MutexLock lock(budget_->mutex_);
    state_->wanted = bytes;
    if (budget_->waiting_.empty() && (budget_->first_ == state_.get() || budget_->fits(*state_))) {
      budget_->take(*state_);
      return true;
    }
    state_->granted = std::move(granted);
    state_->waits = true;
    budget_->waiting_.push_back(state_.get());
    others = budget_->grant_waiting(state_.get());
    waits = state_->waits;
  }
  for (const auto& notify : others) notify();
  return !waits;
}

bool FairBudget::Charge::give_up() {
  const MutexLock lock(budget_->mutex_);
  if (!state_->waits) return true;
  state_->waits = false;
  budget_->waiting_.remove(state_.get());
  return false;
}

void FairBudget::Charge::reset() noexcept {
  if (budget_ == nullptr) return;
  Callbacks others;
  try {
    const MutexLock lock(budget_->mutex_);
    others = budget_->end(*state_);
  } catch (const std::bad_alloc&) {  // the bytes are given back; those that wait are served when another charge ends
  }
  for (const auto& notify : others) notify();
  budget_ = nullptr;
  state_.reset();
}

std::shared_ptr<FairBudget::Account> FairBudget::account(const std::string& name) {
  const MutexLock lock(mutex_);
  if (auto known = accounts_[name].lock()) return known;
  std::erase_if(accounts_, [](const auto& entry) { return entry.second.expired(); });
  auto account = std::make_shared<Account>(name);
  accounts_[name] = account;
  return account;
}

FairBudget::Charge FairBudget::charge(std::shared_ptr<Account> account, std::uint64_t announced) {
  auto state = std::make_shared<Charge::State>();
  state->account = std::move(account);
  state->announced = announced;
  return {this, std::move(state)};
}

std::uint64_t FairBudget::used() const {
  const MutexLock lock(mutex_);
  return used_;
}

bool FairBudget::has_waiting() const {
  const MutexLock lock(mutex_);
  return !waiting_.empty();
}

// Room stays for the charge that has the right of way, and for the largest one that may get it.
bool FairBudget::fits(const Charge::State& state) const {
  std::uint64_t kept = announced_.empty() ? 0 : *announced_.rbegin();
  if (state.is_stepwise()) kept = std::max(kept, state.announced);
  std::uint64_t others = used_;
  if (first_ != nullptr) {
    others -= first_->bytes;
    kept = std::max(kept, first_->announced);
  }
  if (others + state.wanted + kept > limit_) return false;
  const std::uint64_t free = limit_ - used_ - state.wanted;
  return (state.account->bytes + state.wanted + kShare - 1) / kShare <= free;
}

bool FairBudget::fits_first(const Charge::State& state) const {
  return first_ == nullptr && used_ - state.bytes + state.announced <= limit_;
}

void FairBudget::take(Charge::State& state) {
  if (state.is_stepwise() && state.bytes == 0) announced_.insert(state.announced);
  state.bytes += state.wanted;
  state.account->bytes += state.wanted;
  used_ += state.wanted;
}

FairBudget::Callbacks FairBudget::grant_waiting(const Charge::State* caller) {
  Callbacks callbacks;
  if (waiting_.empty()) return callbacks;
  std::vector<Charge::State*> order(waiting_.begin(), waiting_.end());
  std::stable_sort(order.begin(), order.end(), [](const Charge::State* left, const Charge::State* right) {
    return left->account->bytes < right->account->bytes;
  });
  for (Charge::State* state : order) {
    if (state != first_ && !fits(*state)) {
      if (!fits_first(*state)) continue;
      first_ = state;
    }
    take(*state);
    state->waits = false;
    waiting_.remove(state);
    if (state != caller) callbacks.push_back(std::move(state->granted));
  }
  return callbacks;
}

FairBudget::Callbacks FairBudget::end(Charge::State& state) {
  if (state.waits) waiting_.remove(&state);
  state.waits = false;
  if (state.is_stepwise() && state.bytes > 0) announced_.erase(announced_.find(state.announced));
  used_ -= state.bytes;
  state.account->bytes -= state.bytes;
  state.bytes = 0;
  if (first_ == &state) first_ = nullptr;
  return grant_waiting(nullptr);
}

}  // namespace sparserow::rpc
