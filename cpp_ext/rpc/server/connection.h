// One connection of the server: it greets a peer, and serves its requests in order until it leaves.
//
// A connection is a chain of coroutines on one strand, so its members need no lock: the reader, which serves each
// request before it reads the next, and one short-lived coroutine per parked pull that became readable
// (pull_handler.h). FrameIo reads and writes for both; PeerAccounts keeps what they take from the shard's budgets.
//
// A connection lives as long as one of its coroutines, or a parked pull, refers to it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "rpc/server/access.h"
#include "rpc/server/body_reader.h"
#include "rpc/server/frame_io.h"
#include "rpc/server/outcome.h"
#include "rpc/server/peer_accounts.h"
#include "rpc/server/pull_handler.h"
#include "rpc/server/request.h"
#include "rpc/server/server_core.h"
#include "rpc/transport/event_loop.h"
#include "rpc/transport/stream.h"
#include "rpc/wire/frame.h"

namespace sparserow::rpc {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(ServerCore& core, std::unique_ptr<Stream> stream, std::shared_ptr<Peer> peer);
  ~Connection();

  // Serves until the peer leaves, breaks the grammar or close() is called.
  void start();
  // Any thread. Ends the connection; its coroutines finish by themselves.
  void close();
  // One thread at a time, called every second or so: closes a connection that moves nothing, or too little, for too
  // long.
  void check_stall(std::chrono::steady_clock::time_point now);
  [[nodiscard]] bool is_greeting() const noexcept { return io_.phase() == FrameIo::Phase::kHello && !io_.is_closed(); }
  // Whether its peer has to wait for this shard's thread of handshakes.
  [[nodiscard]] bool is_in_handshake() const noexcept { return io_.is_in_handshake(); }
  [[nodiscard]] const Peer& peer() const noexcept { return *peer_; }

 private:
  Task<void> run();
  Task<bool> greet();
  Task<bool> serve_one();
  Task<bool> refuse(const FrameHeader& header, const Status& status, std::int64_t open_step = kNoStep);

  Status check_hello(const FrameHeader& header, std::span<const std::byte> body, std::vector<std::byte>& reply);
  // Whether the token that HELLO showed is still known, and allows this request.
  Status check_access(const FrameHeader& header);
  // What can be known before the body of a large frame takes memory: type, role, namespace, route.
  Status check_before_body(const FrameHeader& header, const TableDescriptor* first);
  Status take_seat();
  // Maps the memory that a client has passed with HELLO; null: it passed none, or the shard has no room for it.
  Result<std::unique_ptr<LaneRegion>> take_lane(const HelloPayload& hello, const LanePayload& lane);
  // Whether this connection may speak for the worker that a request names.
  Status check_worker(const FrameHeader& header);

  Task<Outcome> dispatch(Request& request);
  // The threads on which a write runs; null: the I/O thread.
  [[nodiscard]] asio::thread_pool* threads_for(const Request& request) const;
  Outcome serve_hint(const Request& request);

  ServerCore& core_;
  const Strand strand_;
  const std::shared_ptr<Peer> peer_;
  FrameIo io_;
  PeerAccounts accounts_;
  BodyReader bodies_;
  CountedLane lane_;
  PullHandler pulls_;
  Grant grant_;
  std::uint64_t grant_generation_ = 0;   // of the access list, when grant_ was taken from it
  WorkerPayload worker_;                 // shown in HELLO; job 0: none
  ProofDigest proof_{};                  // of worker_
  std::optional<WorkerPayload> proven_;  // the worker that this connection was last found to speak for

  // check_stall() reads these from another thread.
  std::atomic<std::uint32_t> frames_{0};  // begun
  const std::chrono::steady_clock::time_point opened_at_;
  // How fast one direction moves, as check_stall sees it from one call to the next.
  class Pace {
   public:
    // How long `bytes` have grown by less than the rate while the direction was active. Another frame starts anew.
    std::chrono::steady_clock::duration slow_for(std::chrono::steady_clock::time_point now, bool is_active,
                                                 std::uint64_t bytes, std::uint32_t frame, std::uint64_t bytes_per_s);

   private:
    std::chrono::steady_clock::time_point seen_at_;
    std::chrono::steady_clock::time_point fast_at_;
    std::uint64_t bytes_ = 0;
    std::uint32_t frame_ = 0;
  };
  Pace incoming_;
  Pace outgoing_;
  Seats::Seat seat_;  // the last member: nothing is asked of a connection that is being destroyed
};

}  // namespace sparserow::rpc
