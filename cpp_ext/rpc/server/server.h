// The data-plane server of one shard: C++ threads that speak rpc/wire/frame.h over a Stream.
//
// Requests that touch few rows run inline on the I/O thread; a large pull is gathered and sent chunk by
// chunk. A connection works on one request at a time (parked pulls aside), and is not read while the
// server's in-flight budget is full or its last reply is not taken, so a slow or greedy peer holds a
// bounded amount of memory. Bodies are charged as they arrive, replies before they are made, and seats of
// connections when HELLO is accepted. An account, which is a token at an address, has a fair share of each
// (rpc/server/fair_budget.h, rpc/server/seats.h). A frame that breaks the grammar gets ERROR and the connection is
// closed; the process lives. With an SSD, requests that may wait for it run on threads of their own. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "commit/commit_log.h"
#include "rpc/observe/hot_keys.h"
#include "rpc/observe/request_log.h"
#include "rpc/observe/request_times.h"
#include "rpc/observe/staleness_histogram.h"
#include "rpc/server/access.h"
#include "rpc/server/served_models.h"
#include "rpc/transport/tls.h"
#include "store/store.h"
#include "util/status.h"

namespace sparserow::rpc {

struct ServerOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;                            // 0: chosen by the OS
  bool is_local = false;                             // listens at its local socket as well (transport/local_socket.h)
  std::uint32_t io_threads = 2;                      // [1, 256]
  std::uint32_t disk_threads = 4;                    // that wait for the SSD of a store that has one, [1, 256]
  std::uint32_t max_frame_bytes = 1u << 30;          // of one frame's body, [64 KiB, 2^32 - 8]
  std::uint64_t inflight_budget_bytes = 4ull << 30;  // of request bodies being received or worked on
  std::uint64_t reply_budget_bytes = 2ull << 30;     // of replies being made or sent
  std::uint64_t kept_budget_bytes = 4ull << 30;      // of commits, and as much again of pulls, kept for the clock
  std::uint64_t lane_budget_bytes = 64ull << 30;     // of clients' memory in which they are answered; 0: none is
  std::uint32_t max_connections = 4096;
  std::uint32_t max_client_connections = 0;  // from one address; 0: as many as there may be
  std::uint64_t client_inflight_bytes = 0;   // of request bodies from one address, at least a frame's; 0: no bound
  std::shared_ptr<const TlsContext> tls;     // null: plain TCP; then alone clients come by the local socket
  std::optional<std::vector<Grant>> grants;  // what tokens may do; nullopt: every peer may do everything
  std::uint64_t cluster_id = 0;              // 0: of no cluster; a client that names one is refused
  std::uint16_t shard_index = 0;
  std::uint32_t default_deadline_ms = 30'000;   // of requests that carry none
  std::uint32_t max_deadline_ms = 3'600'000;    // of requests that ask for more
  std::uint32_t hello_timeout_ms = 5'000;       // from the connection's start to the end of its first frame
  std::uint32_t stall_timeout_ms = 30'000;      // without a byte moved in the middle of a frame or a reply
  std::uint32_t least_bytes_per_s = 64u << 10;  // that a frame brings, and a reply loses, while it is under way
  std::uint32_t slow_timeout_ms = 5'000;        // for how long a frame may bring less; a reply: stall_timeout_ms
  bool observe = true;                          // time requests and sample their keys
};

struct ServerStats {
  std::uint64_t connections_open = 0;
  std::uint64_t connections_local = 0;  // of these, by the local socket
  std::uint64_t connections_total = 0;
  std::uint64_t frames_received = 0;
  std::uint64_t frames_refused = 0;
  std::uint64_t access_refused = 0;  // of those, for the sake of a token
  std::uint64_t bytes_received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t rows_pulled = 0;
  std::uint64_t rows_written = 0;          // committed, assigned or erased
  std::uint64_t hinted_keys = 0;           // that hints named and whose rows are brought, or were
  std::uint64_t hinted_keys_dropped = 0;   // because too many were waiting
  std::uint64_t hinted_keys_declined = 0;  // because reads do not wait for the disk
  std::uint64_t inflight_bytes = 0;
  std::uint64_t reply_bytes = 0;           // charged for replies that are being made or sent
  std::uint64_t connections_too_slow = 0;  // closed because a frame or a reply moved too slowly
  std::uint64_t lane_bytes = 0;            // of clients' memory that is mapped, so that replies are written there
  std::uint64_t lane_sent = 0;             // bytes of replies that were
  std::uint64_t lane_received = 0;         // bytes of pushed rows that were read there
  std::uint64_t requests_active = 0;
  CommitLogStats commits;
  std::map<std::uint32_t, std::int64_t> job_steps;  // by job id: the highest step that a worker has committed
  std::map<std::uint32_t, StalenessHistogram::Counts> staleness;  // by table id: of pulls that named a step
  RequestTimes::All request_times;                                // by kind
};

class Server {
 public:
  // Listens before it returns. kUnavailable when the port is taken (names host:port).
  // kInvalidArgument names an option out of range.
  static Result<std::unique_ptr<Server>> start(const ServerOptions& options, std::shared_ptr<Store> store);
  ~Server();  // stop()

  [[nodiscard]] std::uint16_t port() const noexcept;
  // slot_owner: (slot_count) shard index per slot. Requests with another route epoch, and writes of rows
  // that another shard owns, get kStaleRoute. Before the first call the epoch is 0 and ownership unchecked.
  Status set_route(std::uint32_t route_epoch, std::span<const std::uint16_t> slot_owner);
  // Requests for rows of these tables get `refusal` from now on; an empty list ends that. Returns when the requests
  // that came before have ended, so that none of them sees what happens to the tables next; parked pulls end with
  // `refusal`. kDeadlineExceeded when one goes on for longer than `deadline`; the tables are refused all the same.
  Status refuse_tables(const Status& refusal, std::vector<std::uint32_t> tables, std::chrono::milliseconds deadline);
  Status set_job(const JobSpec& spec);
  Result<std::vector<WorkerReport>> freeze_job(std::uint32_t job_id, std::uint64_t operation,
                                               const std::vector<WorkerKey>& fence,
                                               std::optional<std::chrono::milliseconds> lease = std::nullopt);
  Status drop_job(std::uint32_t job_id, std::uint64_t operation = 0);
  // CommitLog::cut, with the rows of that instant.
  struct Cut {
    std::shared_ptr<Store::Snapshot> rows;
    std::vector<JobImage> jobs;
  };
  Result<Cut> cut(const std::vector<CutTarget>& targets, std::chrono::milliseconds deadline, SnapshotOptions options);
  void install_jobs(const std::vector<JobImage>& images);
  // To be called when rows of a table were changed or dropped without a frame.
  void count_write(std::uint32_t table_id);
  // Sets the TLS of connections made from now on; null: they are plain.
  void set_tls(std::shared_ptr<const TlsContext> tls);
  // Who may do what, from the next request on.
  [[nodiscard]] AccessList& access() noexcept;
  [[nodiscard]] ServerStats stats() const;
  [[nodiscard]] std::vector<LostRange> lost_commits() const;
  // The keys that pulls and lookups ask for most, by falling count.
  [[nodiscard]] HotKeys::Report hot_keys(std::size_t most) const;
  [[nodiscard]] RequestLog& request_log() noexcept;
  // What LOOKUP is answered from; `store` answers all other requests.
  [[nodiscard]] ServedModels& models() noexcept;

  // Refuses new requests with kUnavailable, answers parked pulls so, and waits for the requests under
  // way, at most `deadline`.
  void drain(std::chrono::milliseconds deadline);
  void stop();

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparserow::rpc
