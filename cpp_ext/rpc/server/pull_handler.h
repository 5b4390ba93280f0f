// Serves the PULLs and LOOKUPs of one connection: plans the reply, parks the request until its job's clock allows it,
// and sends the rows whole, in part, or chunk by chunk.
//
// Members run on the connection's strand. A parked pull keeps its keys and gives the rest of its body back; it is
// answered by a coroutine of its own, in its own turn of writing.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "rpc/server/changed_rows.h"
#include "rpc/server/frame_io.h"
#include "rpc/server/outcome.h"
#include "rpc/server/peer_accounts.h"
#include "rpc/server/request.h"
#include "rpc/server/row_chunks.h"
#include "rpc/transport/lane.h"

namespace sparserow::rpc {

struct PullRequest {
  FrameHeader header;
  std::shared_ptr<Store> store;
  std::vector<PullPart> parts;
  std::uint64_t reply_bytes = 0;     // of the reply's body
  NamedPlaces places;                // where the reply may go
  std::uint64_t reply_sequence = 0;  // writes of others, when asked; for a lookup the version that answers
  Buffer body;                       // owns the keys of a pull that is parked
  FairBudget::Charge parked;
  std::vector<ChangedKeys> changed;  // by part: the keys of a conditional pull's reply
  FairBudget::Charge changed_charge;
  FairBudget::Charge charge;  // for the reply
  Arrival arrival;
  std::chrono::steady_clock::time_point deadline;
};

class PullHandler {
 public:
  PullHandler(ServerCore& core, const Strand& strand, const Peer& peer, FrameIo& io, PeerAccounts& accounts,
              std::uint64_t sampler_seed);

  // Says what HELLO agreed on. `connection` owns this object; `close` ends the connection.
  // lane: where it may have replies written to; null: nowhere.
  void open(std::weak_ptr<void> connection, std::function<void()> close, bool reads_checksum_last,
            std::shared_ptr<LaneRegion> lane);
  Task<Outcome> serve_pull(Request& request);
  Task<Outcome> serve_lookup(Request& request);
  // The commit log forgets the pulls of this connection that wait.
  void forget_parked();
  [[nodiscard]] std::uint32_t parked_pulls() const noexcept { return parked_; }  // any thread

 private:
  // Takes the tables and keys of a body over, and plans the reply.
  Outcome plan(const Request& request, PullRequest& pull) const;
  Outcome park_until_readable(const std::shared_ptr<PullRequest>& pull, Body& body);
  Status charge_parked(PullRequest& pull, std::uint64_t bytes);
  void keep_keys(PullRequest& pull, Body& body);
  void fetch_while_parked(const std::shared_ptr<PullRequest>& pull) noexcept;
  void resume_parked(const std::shared_ptr<void>& connection, const std::shared_ptr<PullRequest>& pull,
                     const Status& status);
  Task<void> finish_parked(std::shared_ptr<PullRequest> pull, Status status);

  // Each of these is false when the connection is lost; a refusal counts as sent.
  Task<bool> send_rows(PullRequest& pull);
  Task<bool> send_refusal(const PullRequest& pull, const Status& status);
  Task<Status> write_body(PullRequest& pull, std::byte* to);
  Task<bool> send_rows_whole(PullRequest& pull);
  Task<bool> send_rows_by_lane(PullRequest& pull);
  // Checks the places that a request names, and says them to its parts.
  Status place_rows(PullRequest& pull) const;
  [[nodiscard]] static bool is_placed(const PullRequest& pull);
  Task<bool> send_chunks(RowChunks& chunks, bool has_checksum);
  Task<Status> fetch_rows(const PullRequest& pull);
  // Leaves in each conditional part the keys whose rows differ.
  Task<Status> keep_changed(PullRequest& pull);
  void count_writes(PullRequest& pull);
  [[nodiscard]] static bool is_conditional(const PullRequest& pull);
  [[nodiscard]] static FrameHeader rows_header(const PullRequest& pull);

  ServerCore& core_;
  const Strand strand_;
  const Peer& peer_;
  FrameIo& io_;
  PeerAccounts& accounts_;
  HotKeys::Sampler sampler_;
  std::weak_ptr<void> connection_;
  std::function<void()> close_;
  bool reads_checksum_last_ = false;
  std::shared_ptr<LaneRegion> lane_;
  bool has_parked_ = false;  // so the commit log may know this connection
  std::atomic<std::uint32_t> parked_{0};
};

}  // namespace sparserow::rpc
