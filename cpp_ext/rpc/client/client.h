// The data-plane client: one object per session, shared by every thread of the process.
//
// One connection per shard, multiplexed by request id. There is no I/O thread: a caller that waits does
// the socket I/O for all (leader/follower), so a lone caller never hops threads. A call fans out to all
// shards at once. A broken connection is re-opened with back-off and the request sent again until the
// deadline: pulls are read-only and commits are deduplicated by the shard, so nothing happens twice.
// What a shard refuses is returned with the shard's name and not tried again, but for "draining".
// After fork the object answers kFailedPrecondition.
//
// A step that no shard has keys for still commits (every shard gets its frame); a pull only goes to the
// shards that own one of its keys. All memory in a request must stay valid until the call returns.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "rpc/transport/tls.h"
#include "shards/shards.h"
#include "store/store.h"

namespace sparserow::rpc {

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
};

// How a shard is reached at a TCP address.
enum class Transport : std::uint8_t {
  kAuto,          // by its local socket and shared memory where it is of this host and user, else by TCP
  kTcp,           // by TCP alone
  kSharedMemory,  // by the local socket and shared memory alone; not with TLS
};

struct ClientOptions {
  std::vector<Endpoint> shards;
  Transport transport = Transport::kAuto;
  std::vector<std::uint16_t> slot_owner;  // (slot_count)
  std::uint32_t route_epoch = 0;
  std::uint64_t cluster_id = 0;
  std::uint32_t namespace_id = 0;
  std::uint32_t job_id = 0;
  std::uint32_t worker_id = 0;
  std::uint32_t worker_epoch = 0;
  std::array<std::byte, 16> worker_proof{};  // that the coordinator gave this worker; zeros: none
  Dtype wire_dtype = Dtype::kFloat32;        // of rows and gradients on this connection
  bool frame_crc = false;                    // checksum every frame, both ways
  std::uint32_t connect_timeout_ms = 5'000;  // of connect(), and of each later attempt
  std::shared_ptr<const TlsContext> tls;     // null: plain, by `transport`
  std::string token;                         // shown in HELLO; empty: none
  // Bytes of commits that are kept for each shard, to be sent again when it comes back from a checkpoint. The newest
  // commit is kept in any case; 0: none is.
  std::uint64_t replay_bytes = 0;
  // Steps have a quorum: the COMMIT of a step goes to shard 0, which names the members, and to the others when that has
  // acknowledged it. All workers of the job have the same value.
  bool has_quorum = false;
  bool is_lazy = false;  // connect() does not wait: shards are dialled when they are asked
  // Memory in which shards of this host answer (rpc/transport/lane.h): a multiple of 4096, which takes memory as it is
  // used. 0: replies come through the socket.
  std::uint64_t lane_bytes = 256u << 20;
  // Rows and replies of fewer bytes go through the socket, as they cost a copy less there.
  std::uint64_t least_in_lane = 32u << 10;
};

struct ClientStats {
  std::uint64_t frames_sent = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t reconnects = 0;
  std::uint64_t retries = 0;
  std::uint64_t commits_replayed = 0;  // that a shard which came back did not have
  std::uint64_t lane_replies = 0;      // whose rows came through memory
  std::uint64_t lane_full = 0;         // requests that found no place there
};

// What one shard made of a lookup.
struct ShardAnswer {
  bool is_asked = false;      // it owns a key
  Status status;              // not ok: the rows of its keys are not there
  std::uint64_t version = 0;  // of the model, that answered
};

struct LookupOptions {
  std::uint32_t model = 0;        // handle: rpc/server/served_models.h
  std::uint64_t routing_key = 0;  // chooses between an alias's versions; 0: never the canary
  std::chrono::milliseconds deadline{30'000};
};

class Client final : public Shards {
 public:
  // Connects to every shard and says HELLO. kUnavailable names the shard that cannot be reached.
  // kInvalidArgument names an option out of range.
  static Result<std::shared_ptr<Client>> connect(const ClientOptions& options);
  ~Client() override;

  [[nodiscard]] std::uint32_t shard_count() const noexcept override;
  [[nodiscard]] std::span<const std::uint16_t> slot_owner() const noexcept override;
  // In the memory that shards of this host write to, where there is room.
  [[nodiscard]] std::shared_ptr<RowMemory> make_rows(std::size_t floats) override;
  Status pull(std::span<const TablePull> tables, const CallOptions& options) override;
  std::uint64_t hint(std::span<const TablePull> tables, std::chrono::milliseconds deadline) override;
  Status prepare(std::span<const TablePush> tables, const CommitOptions& options) override;
  Status commit_prepared(const CommitOptions& options) override;
  Status abort(const CommitOptions& options) override;
  Status commit(std::span<const TablePush> tables, const CommitOptions& options) override;
  Status assign(std::span<const TablePush> tables, const CallOptions& options) override;

  // After a lost connection, rows that the first try removed are not counted.
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint32_t> shard_begin, const CallOptions& options) override;
  // A page may hold fewer rows than asked for; next_cursor 0 says the end.
  Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                        bool with_state, const CallOptions& options) override;
  // Rows of a served model, as pull(); answers has an entry per shard. A shard that fails, or does not answer in time,
  // is said there, and its rows are unspecified. InvalidArgument: the request itself is wrong.
  Status lookup(std::span<const TablePull> tables, const LookupOptions& options, std::vector<ShardAnswer>& answers);
  [[nodiscard]] ClientStats stats() const;
  // By shard: "tcp", "tls", "unix" (a local socket without memory) or "shm"; "none" where there is no connection now.
  [[nodiscard]] std::vector<std::string> transports() const;

  // A shard is being restored: every call goes on waiting for so long from now, whatever its deadline.
  void extend(std::chrono::milliseconds grace);
  [[nodiscard]] std::chrono::steady_clock::time_point grace() const override;
  // Asks every shard for a sign of life, so that one that came back gets the commits that are buffered for it.
  Status touch(std::chrono::milliseconds deadline);
  // A shard listens elsewhere now, as one that came back may; harmless when it does not. InvalidArgument: no such
  // shard.
  Status move(std::uint32_t shard, Endpoint endpoint);
  // From now on these certificates and this token are shown: connections are made anew, and what has no answer yet is
  // asked there. Null: plain TCP.
  void show(std::shared_ptr<const TlsContext> tls, std::string token);
  // No call can succeed any more: those that wait, and all later ones, end as Unavailable with this reason.
  void end(std::string reason);
  void forget_buffered() override;
  // By shard: how many commits and writes with a sequence it has acknowledged since the clock began.
  [[nodiscard]] std::vector<std::uint64_t> acknowledged_commits() const;

 private:
  class Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparserow::rpc
