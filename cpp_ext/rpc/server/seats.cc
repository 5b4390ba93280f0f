#include "rpc/server/seats.h"

#include <algorithm>

namespace sparserow::rpc {

void Seats::Seat::leave() noexcept {
  if (seats_ == nullptr) return;
  const MutexLock lock(seats_->mutex_);
  const auto account = seats_->accounts_.find(account_);
  if (!at_->is_closed) {
    --account->second.open;
    --seats_->open_;
  }
  account->second.seats.erase(at_);
  if (account->second.seats.empty()) seats_->accounts_.erase(account);
  seats_ = nullptr;
}

Result<Seats::Seat> Seats::take(const std::string& account, Sitter sitter) {
  const MutexLock lock(mutex_);
  if (open_ >= limit_ && !close_one_for(account)) {
    return Status(Code::kResourceExhausted, "the shard has its " + std::to_string(limit_) + " connections already");
  }
  Account& taker = accounts_[account];
  taker.seats.push_back({.sitter = std::move(sitter), .is_closed = false});
  ++taker.open;
  ++open_;
  return Seat(this, account, std::prev(taker.seats.end()));
}

bool Seats::close_one_for(const std::string& account) {
  const auto known = accounts_.find(account);
  const std::uint32_t mine = known == accounts_.end() ? 0 : known->second.open;
  const auto most = std::max_element(accounts_.begin(), accounts_.end(), [](const auto& left, const auto& right) {
    return left.second.open < right.second.open;
  });
  if (most == accounts_.end() || most->second.open <= mine + 1) return false;
  Seat::Taken* longest = nullptr;
  std::int64_t since_ms = INT64_MAX;
  for (Seat::Taken& taken : most->second.seats) {
    if (taken.is_closed) continue;
    const auto idle = taken.sitter.idle_since_ms();
    if (!idle || *idle >= since_ms) continue;
    longest = &taken;
    since_ms = *idle;
  }
  if (longest == nullptr) return false;
  longest->is_closed = true;
  longest->sitter.close();
  --most->second.open;
  --open_;
  return true;
}

}  // namespace sparserow::rpc
