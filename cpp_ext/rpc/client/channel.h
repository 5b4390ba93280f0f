// One connection of the client to one shard: a state machine that never blocks.
//
//   down --dial--> connecting --writable--> greeting --HELLO_ACK--> ready
//    ^                       another process than before | ^ all buffered commits are sent again
//    |                                                   '-> replaying
//    '-------------- broken: outstanding requests are queued again --------'
//
// Requests belong to their callers and are only borrowed; the caller keeps one alive until it is done or
// cancel() returned. Gradients are sent from, and rows received into, the caller's memory.
//
// Not thread-safe: the client's mutex guards every call. Only the leading thread may call tick() and
// on_events(), which are the only ones that close the socket, so its fd stays valid while the leader polls.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "rpc/client/channel_lane.h"
#include "rpc/client/client.h"
#include "rpc/client/replay.h"
#include "rpc/client/reply_reader.h"
#include "rpc/client/shard_request.h"
#include "rpc/transport/stream.h"
#include "rpc/wire/frame.h"

namespace sparserow::rpc {

class Channel {
 public:
  using Clock = std::chrono::steady_clock;
  // grace: until then (steady_clock's count) a request waits although its own deadline has passed.
  // arena: that the client has for all of its channels.
  Channel(std::uint32_t index, const ClientOptions& options, ClientStats& stats, const std::atomic<Clock::rep>& grace,
          ClientArena& arena);

  // The shard listens elsewhere now: whatever is not answered yet is asked there. The leader must be woken.
  void move(Endpoint endpoint);
  // The connection is made anew, and whatever is not answered yet is asked there. The leader must be woken.
  void renew(std::string reason);
  // The commits that a shard which comes back gets again. Without a budget it stays empty.
  [[nodiscard]] ReplayBuffer& replay_buffer() noexcept { return replay_.buffer(); }

  // Queues and sends what the socket takes at once. Returns true when the leader must be woken: bytes are
  // left, or the shard must be dialled.
  bool submit(ShardRequest& request);
  // Forgets the request. Afterwards its memory is not touched, but for rows that a shard of this host may write itself:
  // their memory is abandoned.
  void cancel(ShardRequest& request);
  // See Client::transports().
  [[nodiscard]] const char* transport() const noexcept;
  // Why a request that never ended did not: unreachable, draining, or no reply in time.
  [[nodiscard]] Status overdue(const ShardRequest& request, Clock::duration waited) const;

  // Leader only.
  void tick(Clock::time_point now);
  [[nodiscard]] pollfd interest() const noexcept;
  [[nodiscard]] Clock::time_point wake_at() const noexcept;  // when tick() is wanted at the latest
  void on_events(short events);

 private:
  enum class State : std::uint8_t { kDown, kConnecting, kGreeting, kReplaying, kReady };

  void dial(Clock::time_point now);
  Result<std::unique_ptr<Stream>> open_stream();
  void greet();
  void flush();
  bool send_front(ShardRequest& request);
  void begin_send(ShardRequest& request);
  void break_off(const std::string& reason);
  void end_failed();
  void fail_all(const Status& status);
  // Whether a request may have rows written by a connection that has not ended yet.
  [[nodiscard]] bool waits_for_end();
  void pause();  // before what was refused for now is sent again
  void resume() noexcept;
  [[nodiscard]] bool is_refused_for_now(const ShardRequest& request, const Status& status) const;
  void ask_again(ShardRequest& request);
  void finish(ShardRequest& request, Status status);
  [[nodiscard]] Status named(const Status& status) const;
  // How long to wait after `attempts_` failures in a row.
  [[nodiscard]] Clock::duration backoff() const noexcept;
  [[nodiscard]] bool wants_write() const noexcept;
  [[nodiscard]] std::string closed_reason() const;
  // Takes a transfer of 0 bytes: what the socket must be waited for, or that it ended.
  void stopped(const Transfer& transfer);

  void begin_replay();
  void next_replay();
  void send_replay();
  Status on_replay_reply();

  void receive();
  Status read_replies();
  Status on_header();
  Status on_reply();
  Status on_error(ShardRequest& request);
  Status read_from_lane(ShardRequest& request);
  Status on_hello_ack();
  [[nodiscard]] Status refusal_of(const ShardRequest& request) const;  // ok when this shard can be asked

  const std::uint32_t index_;
  const ClientOptions& options_;
  ClientStats& stats_;
  const std::atomic<Clock::rep>& grace_;
  Endpoint endpoint_;
  std::string name_;             // "shard 1 (127.0.0.1:7001)"
  std::optional<bool> is_here_;  // whether the endpoint's address is one of this host's; nullopt: not looked up yet
  std::mt19937 jitter_;

  State state_ = State::kDown;
  std::unique_ptr<Stream> stream_;
  bool is_local_ = false;        // the stream is of the shard's local socket
  bool avoids_local_ = false;    // that did not lead to the shard the last time, so TCP is tried
  bool failed_ = false;          // the stream broke; the leader will close it
  bool has_peer_ended_ = false;  // the shard has ended the stream, and writes nothing more
  bool was_ready_ = false;
  // TLS may have to read before it can write on, and the other way round.
  bool write_waits_for_read_ = false;
  bool read_waits_for_write_ = false;
  std::string last_error_ = "not connected yet";
  std::uint32_t attempts_ = 0;
  Clock::time_point retry_at_{};
  Clock::time_point attempt_until_{};
  bool refused_for_now_ = false;
  Clock::time_point paused_until_{};
  std::uint32_t max_body_bytes_ = 0;  // 0 until HELLO_ACK
  std::uint64_t features_ = 0;
  std::uint8_t protocol_ = kGreetingVersion;  // the newest that both sides speak

  std::uint64_t next_id_ = 1;
  std::map<std::uint64_t, ShardRequest*> outstanding_;
  std::deque<ShardRequest*> queue_;  // not wholly sent; the front may be half sent
  std::vector<std::byte> hello_;
  std::size_t hello_sent_ = 0;

  ClientArena& arena_;
  std::unique_ptr<ChannelLane> lane_;  // null: this connection has none
  std::vector<EndingLane> ending_;     // at most kMostEnding
  Replay replay_;
  ReplyReader reader_;
  ShardRequest* receiving_ = nullptr;  // null while a reply is dropped, or answers no request
};

}  // namespace sparserow::rpc
