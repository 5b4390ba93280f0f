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
#include <span>
#include <vector>

#include "rpc/access.h"
#include "rpc/event_loop.h"
#include "rpc/frame.h"
#include "rpc/row_chunks.h"
#include "rpc/server_core.h"
#include "rpc/stream.h"

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
  Charge charge;
  Arrival arrival;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(ServerCore& core, std::unique_ptr<Stream> stream, std::shared_ptr<Peer> peer);
  ~Connection();

  // Serves until the peer leaves, breaks the grammar or close() is called.
  void start();
  // Any thread. Ends the connection; its coroutines finish by themselves.
  void close();
  // Any thread, called every second or so: closes a connection that has not moved a byte in time.
  void check_stall(std::chrono::steady_clock::time_point now);

 private:
  // What a request came to. A grammar break closes the connection after its ERROR.
  struct Outcome {
    Status status;
    bool grammar_broken = false;
    std::vector<std::byte> reply;  // when ok; empty: replied already, or will be
    bool is_parked = false;        // will be, when the clock allows
  };
  // A body, in place in the staging buffer or in a buffer of its own.
  struct Body {
    std::span<const std::byte> bytes;
    Buffer buffer;
    Charge client_charge;
    Charge charge;
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
  Task<Status> acquire(InflightBudget& budget, std::uint64_t bytes, std::chrono::steady_clock::time_point deadline);
  void mark_moved() noexcept;
  void consume(std::size_t bytes) noexcept;

  Task<bool> write_all(std::span<const std::byte> bytes);
  Task<bool> write_reply(std::span<const std::byte> bytes);  // in a turn of its own
  Task<void> take_turn();
  void end_turn();

  Status check_hello(const FrameHeader& header, std::span<const std::byte> body, std::vector<std::byte>& reply);
  // Whether the token that HELLO showed is still known, and allows this request.
  Status check_access(const FrameHeader& header);
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
  Task<Outcome> serve_lookup(const FrameHeader& header, Body& body);
  // Takes the tables and keys of a request's body over, and plans its reply.
  Outcome plan_pull(const Body& body, PullRequest& request) const;
  void count_writes(PullRequest& request);
  [[nodiscard]] static FrameHeader rows_header(const PullRequest& request);
  // Runs a request that may wait for the SSD, or that is long, where it holds up no other connection.
  Task<Outcome> serve_on(asio::thread_pool& threads, const FrameHeader& header, Body& body);
  Outcome serve_hint(const FrameHeader& header, const Body& body);
  Outcome serve_write_or_scan(const FrameHeader& header, Body& body);
  Task<Status> bring_rows(const PullRequest& request);
  Task<bool> send_rows(PullRequest& request);
  Task<bool> send_rows_whole(PullRequest& request);
  Task<bool> send_rows_chunked(PullRequest& request);
  Task<bool> send_changed_rows(PullRequest& request);
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
  Outcome serve_scan(const FrameHeader& header, const Body& body);

  // Parses sections of one kind. grammar_broken is set in the outcome on failure.
  Outcome parse_tables(const FrameHeader& header, std::span<const std::byte> body, SectionKind kind,
                       std::vector<TableView>& out) const;
  // float32 gradients of a view: in place, or widened into memory that is added to `owners`.
  const float* floats_of(const TableView& view, std::vector<std::shared_ptr<void>>& owners);

  ServerCore& core_;
  std::unique_ptr<Stream> stream_;
  asio::strand<asio::io_context::executor_type> strand_;
  asio::posix::stream_descriptor readiness_;  // waits on the stream's fd; does not own it
  asio::steady_timer budget_timer_;
  const std::shared_ptr<Peer> peer_;
  HotKeys::Sampler sampler_;
  Grant grant_;
  std::uint64_t grant_generation_ = 0;  // of the access list, when grant_ was taken from it
  std::vector<std::byte> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  bool writing_ = false;
  bool has_parked_ = false;
  std::deque<std::shared_ptr<asio::steady_timer>> turns_;

  // Read by check_stall from another thread.
  enum class Phase : std::uint8_t { kHello, kIdle, kReceiving, kSending, kWorking, kEnding };
  std::atomic<Phase> phase_{Phase::kHello};
  std::atomic<std::int64_t> moved_at_ms_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace sparserow::rpc
