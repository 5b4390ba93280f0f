// One connection of the server: reads frames, serves them in order, writes replies.
//
// A connection is a chain of coroutines on one strand, so its members need no lock: the reader, which
// serves each request before it reads the next, and one short-lived coroutine per parked pull that became
// readable. They share the socket's writing side through a queue of turns; a reply is written whole in one
// turn. Bodies of up to a few KiB are served from the staging buffer, larger ones from a pooled buffer.
//
// Lives as long as one of its coroutines (or a parked pull) holds it.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rpc/server/access.h"
#include "rpc/server/changed_rows.h"
#include "rpc/server/row_chunks.h"
#include "rpc/server/server_core.h"
#include "rpc/transport/event_loop.h"
#include "rpc/transport/stream.h"
#include "rpc/wire/frame.h"

namespace sparserow::rpc {

// When a request came, and of which trace.
struct Arrival {
  std::chrono::steady_clock::time_point at = {};
  TraceContext trace;
};

struct PullRequest {
  FrameHeader header;
  std::shared_ptr<Store> store;
  std::vector<PullPart> parts;
  std::uint64_t reply_bytes = 0;     // of the reply's body
  std::uint64_t reply_sequence = 0;  // writes of others, when asked; of a lookup the version that answers
  Buffer body;                       // owns the keys of a pull that is parked
  FairBudget::Charge parked;
  std::vector<ChangedKeys> changed;  // by part: the keys of a conditional pull's reply
  FairBudget::Charge changed_charge;
  FairBudget::Charge charge;  // of the reply
  Arrival arrival;
  std::chrono::steady_clock::time_point deadline;
};

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
  [[nodiscard]] bool is_greeting() const noexcept { return phase_ == Phase::kHello && !closed_; }
  [[nodiscard]] const Peer& peer() const noexcept { return *peer_; }

 private:
  // What a request came to. A grammar break closes the connection after its ERROR.
  struct Outcome {
    Status status;
    bool grammar_broken = false;
    std::vector<std::byte> reply;    // when ok; empty: replied already, or will be
    bool is_parked = false;          // will be, when the clock allows
    FairBudget::Charge charge = {};  // of the reply
  };
  // A body, in place in the staging buffer or in a buffer of its own.
  struct Body {
    std::span<const std::byte> bytes;
    Buffer buffer;
    FairBudget::Charge client_charge;
    FairBudget::Charge charge;
    std::size_t staged = 0;  // bytes to consume from staging when served
  };
  template <class T>
  using Task = asio::awaitable<T>;

  Task<void> run();
  Task<bool> greet();
  Task<bool> serve_one();
  Task<void> end_politely();

  Task<bool> wait_for(Transfer::Want want);
  Task<bool> fill(std::size_t wanted);
  Task<bool> read_into(std::span<std::byte> into);
  Task<Status> read_body(const FrameHeader& header, Body& body, std::chrono::steady_clock::time_point deadline);
  Task<Status> read_charged(const FrameHeader& header, Body& body, std::size_t& left,
                            std::chrono::steady_clock::time_point deadline);
  // Takes bytes for a charge, and waits for them until the deadline. `whose` budget, for the user.
  Task<Status> take(FairBudget::Charge& charge, std::uint64_t bytes, std::chrono::steady_clock::time_point deadline,
                    std::string_view whose);
  // Charges a reply of so many bytes, before it is made. kResourceExhausted.
  Task<Status> charge_reply(FairBudget::Charge& charge, std::uint64_t bytes,
                            std::chrono::steady_clock::time_point deadline);
  void mark_moved() noexcept;
  void consume(std::size_t bytes) noexcept;

  Task<bool> write_all(std::span<const std::byte> bytes);
  Task<bool> write_reply(std::span<const std::byte> bytes);  // in a turn of its own
  Task<void> take_turn();
  void end_turn();

  Status check_hello(const FrameHeader& header, std::span<const std::byte> body, std::vector<std::byte>& reply);
  // Whether the token that HELLO showed is still known, and allows this request.
  Status check_access(const FrameHeader& header);
  // What can be known before the body of a large frame takes memory: type, role, namespace, route.
  Task<Status> check_before_body(const FrameHeader& header);
  Status take_seat();
  // Whether this connection may speak for the worker that a request names.
  Status check_worker(const FrameHeader& header);
  Status check_request(const FrameHeader& header) const;
  Status check_table(const Store& store, const TableDescriptor& descriptor) const;
  Status check_refusal(std::uint32_t table_id) const;
  Status check_owner(std::uint32_t table_id, std::span<const std::uint64_t> keys) const;

  Task<Outcome> dispatch(const FrameHeader& header, Body& body, std::chrono::steady_clock::time_point deadline,
                         const Arrival& arrival);
  Task<Outcome> serve_pull(const FrameHeader& header, Body& body, std::chrono::steady_clock::time_point deadline,
                           const Arrival& arrival);
  // The request is over.
  void note(RequestTimes::Kind kind, const FrameHeader& header, const Status& status, const Arrival& arrival);
  Task<Outcome> serve_lookup(const FrameHeader& header, Body& body, std::chrono::steady_clock::time_point deadline);
  // Takes the tables and keys of a request's body over, and plans its reply.
  Outcome plan_pull(const Body& body, PullRequest& request) const;
  void count_writes(PullRequest& request);
  [[nodiscard]] static FrameHeader rows_header(const PullRequest& request);
  // Where a write runs; null: on the I/O thread.
  [[nodiscard]] asio::thread_pool* threads_for(const FrameHeader& header) const;
  // Runs a request that may wait for the SSD, or that is long, where it holds up no other connection.
  Task<Outcome> serve_on(asio::thread_pool& threads, const FrameHeader& header, Body& body);
  Outcome serve_hint(const FrameHeader& header, const Body& body);
  Outcome serve_write(const FrameHeader& header, Body& body);
  Task<Status> bring_rows(const PullRequest& request);
  Task<bool> send_rows(PullRequest& request);
  Task<bool> send_rows_whole(PullRequest& request);
  Task<bool> send_rows_chunked(PullRequest& request);
  [[nodiscard]] static bool is_conditional(const PullRequest& request);
  Task<Status> keep_changed(PullRequest& request);
  Status charge_parked(PullRequest& request, std::uint64_t bytes);
  Outcome park_until_readable(const std::shared_ptr<PullRequest>& request, Body& body,
                              std::chrono::steady_clock::time_point deadline, bool& parked);
  static void resume_parked(const std::shared_ptr<Connection>& self, const std::shared_ptr<PullRequest>& request,
                            const Status& status);
  Task<void> finish_parked(std::shared_ptr<PullRequest> request, Status status);
  Outcome serve_commit(const FrameHeader& header, Body& body);
  Outcome serve_abort(const FrameHeader& header, const Body& body);
  Outcome write_rows(const FrameHeader& header, const std::function<Result<std::uint64_t>()>& write);
  Outcome serve_assign(const FrameHeader& header, const Body& body);
  Outcome serve_delete(const FrameHeader& header, const Body& body);
  // A page of a table that is to be read.
  struct ScanPlan {
    ScanPayload scan;
    std::uint32_t dim = 0;
    std::uint32_t page_rows = 0;
    std::uint64_t page_bytes = 0;
  };
  Task<Outcome> serve_scan(const FrameHeader& header, const Body& body, std::chrono::steady_clock::time_point deadline);
  Outcome plan_scan(const FrameHeader& header, const Body& body, ScanPlan& plan) const;
  Outcome scan_page(const FrameHeader& header, const ScanPlan& plan) const;

  // Parses sections of one kind. grammar_broken is set in the outcome on failure.
  Outcome parse_tables(const FrameHeader& header, std::span<const std::byte> body, SectionKind kind,
                       std::vector<TableView>& out) const;
  // float32 gradients of a view: in place, or widened into memory that is added to `owners`.
  const float* floats_of(const TableView& view, std::vector<std::shared_ptr<void>>& owners);

  ServerCore& core_;
  std::unique_ptr<Stream> stream_;
  asio::strand<asio::io_context::executor_type> strand_;
  asio::posix::stream_descriptor readiness_;  // waits on the stream's fd; does not own it
  std::set<asio::steady_timer*> waits_;       // for room in a budget
  const std::shared_ptr<Peer> peer_;
  HotKeys::Sampler sampler_;
  Grant grant_;
  std::uint64_t grant_generation_ = 0;  // of the access list, when grant_ was taken from it
  std::string account_;                 // the token's digest and the address
  std::shared_ptr<FairBudget::Account> inflight_account_;
  std::shared_ptr<FairBudget::Account> parked_account_;
  std::shared_ptr<FairBudget::Account> reply_account_;
  bool reads_checksum_last_ = false;
  WorkerPayload worker_;                 // shown in HELLO; job 0: none
  std::optional<WorkerPayload> proven_;  // whom this connection was last found to speak for
  std::vector<std::byte> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  bool writing_ = false;
  bool has_parked_ = false;  // so the commit log may know this connection
  std::atomic<std::uint32_t> parked_{0};
  std::deque<std::shared_ptr<asio::steady_timer>> turns_;

  // Read by check_stall from another thread.
  enum class Phase : std::uint8_t { kHello, kIdle, kReceiving, kWorking, kEnding };
  std::atomic<Phase> phase_{Phase::kHello};
  std::atomic<std::int64_t> moved_at_ms_{0};
  std::atomic<std::uint64_t> received_{0};  // bytes
  std::atomic<std::uint64_t> sent_{0};      // bytes
  std::atomic<std::uint32_t> frames_{0};    // begun
  std::atomic<bool> sending_{false};        // a reply waits for the peer to take it
  std::atomic<bool> closed_{false};
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
