#include "rpc/server/peer_accounts.h"

namespace sparserow::rpc {

void PeerAccounts::open(std::string name, std::weak_ptr<void> connection) {
  name_ = std::move(name);
  connection_ = std::move(connection);
  inflight_ = core_.inflight.account(name_);
  parked_ = core_.parked.account(name_);
  replies_ = core_.replies.account(name_);
}

FairBudget::Charge PeerAccounts::charge_body(std::uint64_t bytes) { return core_.inflight.charge(inflight_, bytes); }

Status PeerAccounts::charge_parked(FairBudget::Charge& charge, std::uint64_t bytes) {
  charge = core_.parked.charge(parked_, bytes);
  const bool fits = bytes <= core_.parked.limit();
  if (fits && (charge.take(bytes, [] {}) || charge.give_up())) return Status::ok();
  return {Code::kResourceExhausted,
          "pulls that wait for the clock fill their budget of " + std::to_string(core_.parked.limit()) + " bytes"};
}

Task<Status> PeerAccounts::charge_reply(FairBudget::Charge& charge, std::uint64_t bytes,
                                        std::chrono::steady_clock::time_point deadline) {
  if (bytes > core_.replies.limit()) {
    co_return Status(Code::kInvalidArgument,
                     "the reply would take " + std::to_string(bytes) + " bytes of the shard's reply budget of " +
                         std::to_string(core_.replies.limit()) + "; ask for fewer rows at a time");
  }
  charge = core_.replies.charge(replies_, bytes);
  co_return co_await take(charge, bytes, deadline, "the shard's reply");
}

Task<Status> PeerAccounts::take(FairBudget::Charge& charge, std::uint64_t bytes,
                                std::chrono::steady_clock::time_point deadline, std::string_view whose) {
  const auto timer = std::make_shared<asio::steady_timer>(strand_, deadline);
  const auto granted = [connection = connection_, timer] {
    try {
      if (const auto alive = connection.lock()) asio::post(timer->get_executor(), [alive, timer] { timer->cancel(); });
    } catch (const std::exception&) {  // the request that waits finds its bytes at its deadline
    }
  };
  if (charge.take(bytes, granted)) co_return Status::ok();
  asio::error_code error;
  waits_.insert(timer.get());
  co_await timer->async_wait(asio::redirect_error(asio::use_awaitable, error));
  waits_.erase(timer.get());
  const bool is_taken = charge.give_up();
  if (io_.is_closed()) co_return Status(Code::kUnavailable, "connection closed");
  if (is_taken) co_return Status::ok();
  co_return Status(Code::kResourceExhausted, std::string(whose) + " budget stayed full until the deadline; " +
                                                 std::to_string(bytes) + " bytes needed");
}

void PeerAccounts::cancel_waits() {
  for (asio::steady_timer* wait : waits_) wait->cancel();
}

}  // namespace sparserow::rpc
