// The data-plane server of one shard: C++ threads that speak rpc/frame.h over a Stream.
//
// Requests that touch few rows run inline on the I/O thread; a large pull is gathered and sent chunk by
// chunk. In-flight bytes are bounded per server and per connection: past the bound a connection is not
// read. A frame that breaks the grammar gets ERROR and the connection is closed; the process lives.
// Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rpc/commit_log.h"
#include "store/store.h"
#include "util/status.h"

namespace sparserow::rpc {

struct ServerOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  // 0: chosen by the OS
  std::uint32_t io_threads = 2;
  std::uint32_t max_frame_bytes = 1u << 30;
  std::uint64_t inflight_budget_bytes = 4ull << 30;  // of request bodies and kept commits
  std::uint32_t max_connections = 4096;
  std::uint64_t cluster_id = 0;
  std::uint16_t shard_index = 0;
  std::uint32_t default_deadline_ms = 30'000;
};

struct ServerStats {
  std::uint64_t connections_open = 0;
  std::uint64_t connections_total = 0;
  std::uint64_t frames_received = 0;
  std::uint64_t frames_refused = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t rows_pulled = 0;
  std::uint64_t inflight_bytes = 0;
  CommitLogStats commits;
};

class Server {
 public:
  // Listens before it returns. kUnavailable when the port is taken (names host:port).
  static Result<std::unique_ptr<Server>> start(const ServerOptions& options, std::shared_ptr<Store> store);
  ~Server();  // stop()

  [[nodiscard]] std::uint16_t port() const noexcept;
  // slot_owner: (slot_count) shard index per slot. Requests with another route epoch get kStaleRoute.
  Status set_route(std::uint32_t route_epoch, std::span<const std::uint16_t> slot_owner);
  Status set_job(const JobSpec& spec);
  Status drop_job(std::uint32_t job_id);
  [[nodiscard]] ServerStats stats() const;

  // Refuses new requests with kUnavailable and waits for the ones under way, at most `deadline`.
  void drain(std::chrono::milliseconds deadline);
  void stop();

 private:
  Server();
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparserow::rpc
