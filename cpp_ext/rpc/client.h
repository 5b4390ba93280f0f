// The data-plane client: one object per session, shared by every thread of the process.
//
// One connection per shard, multiplexed by request id. There is no I/O thread: a caller that waits does
// the socket I/O for all (leader/follower), so a lone caller never hops threads. A call fans out to all
// shards at once. A broken connection is re-opened with back-off and the request sent again until the
// deadline: pulls are read-only and commits are deduplicated by the shard, so nothing happens twice.
// After fork the object answers kFailedPrecondition.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "rpc/shards.h"
#include "store/store.h"

namespace sparserow::rpc {

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
};

struct ClientOptions {
  std::vector<Endpoint> shards;
  std::vector<std::uint16_t> slot_owner;  // (slot_count)
  std::uint32_t route_epoch = 0;
  std::uint64_t cluster_id = 0;
  std::uint32_t namespace_id = 0;
  std::uint32_t job_id = 0;
  std::uint32_t worker_id = 0;
  std::uint32_t worker_epoch = 0;
  Dtype wire_dtype = Dtype::kFloat32;  // of rows and gradients on this connection
  bool frame_crc = false;
  std::uint32_t connect_timeout_ms = 5'000;
};

struct ClientStats {
  std::uint64_t frames_sent = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t reconnects = 0;
  std::uint64_t retries = 0;
};

class Client final : public Shards {
 public:
  // Connects to every shard and says HELLO. kUnavailable names the shard that cannot be reached.
  static Result<std::shared_ptr<Client>> connect(const ClientOptions& options);
  ~Client() override;

  [[nodiscard]] std::uint32_t shard_count() const noexcept override;
  [[nodiscard]] std::span<const std::uint16_t> slot_owner() const noexcept override;
  Status pull(std::span<const TablePull> tables, const CallOptions& options) override;
  Status prepare(std::span<const TablePush> tables, const CommitOptions& options) override;
  Status commit_prepared(const CommitOptions& options) override;
  Status abort(const CommitOptions& options) override;
  Status commit(std::span<const TablePush> tables, const CommitOptions& options) override;
  Status assign(std::span<const TablePush> tables, const CallOptions& options) override;

  // keys grouped by shard as in TablePush; returns how many rows existed.
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint32_t> shard_begin, const CallOptions& options);
  Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                        bool with_state, const CallOptions& options);
  [[nodiscard]] ClientStats stats() const;

 private:
  Client();
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparserow::rpc
