// What one connection takes from the budgets of its shard, on the account of its peer.
//
// Members run on the connection's strand. A wait for room ends with its deadline, or with cancel_waits().
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "rpc/server/frame_io.h"
#include "rpc/server/server_core.h"

namespace sparserow::rpc {

class PeerAccounts {
 public:
  PeerAccounts(ServerCore& core, const Strand& strand, const FrameIo& io) : core_(core), strand_(strand), io_(io) {}

  // Names the account, after HELLO: a token's digest and an address. `connection` keeps this object alive.
  void open(std::string name, std::weak_ptr<void> connection);
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  // A charge for a body of so many bytes, of which none is taken yet.
  [[nodiscard]] FairBudget::Charge charge_body(std::uint64_t bytes);
  // A charge for a parked pull, taken at once or not at all. kResourceExhausted.
  [[nodiscard]] Status charge_parked(FairBudget::Charge& charge, std::uint64_t bytes);
  // Charges a reply of so many bytes before it is made. kResourceExhausted at the deadline, kInvalidArgument when the
  // reply can never fit.
  Task<Status> charge_reply(FairBudget::Charge& charge, std::uint64_t bytes,
                            std::chrono::steady_clock::time_point deadline);
  // Takes bytes for a charge, and waits for them until the deadline. `whose` names the budget to the user.
  Task<Status> take(FairBudget::Charge& charge, std::uint64_t bytes, std::chrono::steady_clock::time_point deadline,
                    std::string_view whose);
  // Every wait ends. The connection is closed.
  void cancel_waits();

 private:
  ServerCore& core_;
  const Strand strand_;
  const FrameIo& io_;
  std::string name_;
  std::weak_ptr<void> connection_;
  std::shared_ptr<FairBudget::Account> inflight_;
  std::shared_ptr<FairBudget::Account> parked_;
  std::shared_ptr<FairBudget::Account> replies_;
  std::set<asio::steady_timer*> waits_;
};

}  // namespace sparserow::rpc
