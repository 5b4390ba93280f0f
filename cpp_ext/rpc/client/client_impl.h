// What a Client is made of: calls that wait for their requests, and one caller at a time that does the I/O of all.
#pragma once

#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <list>
#include <vector>

#include "rpc/client/channel.h"
#include "rpc/client/client.h"
#include "rpc/client/hint_pace.h"
#include "rpc/wire/trace_context.h"
#include "util/file_descriptor.h"
#include "util/mutex.h"

namespace sparserow::rpc {

// A request with the memory that its body points into.
struct Outgoing {
  ShardRequest request;
  std::vector<TableHead> heads;                  // of its tables; stay in place until the request is done
  std::vector<std::vector<std::byte>> narrowed;  // 16-bit gradients
  ScanPayload scan;
  TraceSection trace;
};

class Client::Impl {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Impl(const ClientOptions& options);

  Status connect();
  Status pull(std::span<const TablePull> tables, const CallOptions& options);
  Status lookup(std::span<const TablePull> tables, const LookupOptions& options, std::vector<ShardAnswer>& answers);
  std::uint64_t hint(std::span<const TablePull> tables, std::chrono::milliseconds deadline);
  // Shards of a request: from the first to before the last.
  struct Range {
    std::uint32_t first = 0;
    std::uint32_t last = UINT32_MAX;
  };
  Status push(FrameType type, std::span<const TablePush> tables, const CommitOptions& options, std::uint8_t flags,
              bool every_shard, Range range);
  Status signal(FrameType type, const CommitOptions& options, std::uint8_t flags, Range range);
  Status commit_prepared(const CommitOptions& options);
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint32_t> shard_begin, const CallOptions& options);
  Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                        bool with_state, const CallOptions& options);
  ClientStats stats() const;
  std::vector<std::string> transports() const;
  std::shared_ptr<RowMemory> make_rows(std::size_t floats) const;
  Status touch(std::chrono::milliseconds deadline);
  Status move(std::uint32_t shard, Endpoint endpoint);
  void show(std::shared_ptr<const TlsContext> tls, std::string token);
  void end(std::string reason);
  void extend(std::chrono::milliseconds grace) { grace_.store((Clock::now() + grace).time_since_epoch().count()); }
  [[nodiscard]] Clock::time_point grace() const { return Clock::time_point(Clock::duration(grace_.load())); }
  [[nodiscard]] std::vector<std::uint64_t> acknowledged_commits() const;
  void forget_acknowledged() {
    const MutexLock lock(mutex_);
    std::ranges::fill(acknowledged_, 0);
  }
  template <class Change>
  void change_replay_buffers(Change change) {
    const MutexLock lock(mutex_);
    for (Channel& channel : channels_) change(channel.replay_buffer());
  }
  [[nodiscard]] const ClientOptions& options() const noexcept { return options_; }

 private:
  // One caller waiting for its requests.
  struct Call {
    explicit Call(std::chrono::milliseconds allowed) : begun(Clock::now()), deadline(begun + allowed) {}
    const Clock::time_point begun;
    Clock::time_point deadline;
    bool is_patient = true;  // waits longer while a shard is being restored
    std::list<Outgoing> requests;
    std::uint32_t open = 0;  // requests not done; guarded by mutex_
    CondVar wake;
  };

  void add_keys(Outgoing& out, const TablePull& table, std::uint32_t shard) const;
  Status add_rows(Outgoing& out, std::span<const TablePush> tables) const;
  // Begins a section of n of a table's rows in `out`, whose heads have their room.
  template <class Table>
  TableHead& add_head(Outgoing& out, const Table& table, std::uint32_t n, SectionKind kind) const {
    TableHead& head = out.heads.emplace_back();
    head.descriptor.table_id = table.table_id;
    head.descriptor.schema_version = table.schema_version;
    head.descriptor.dim = table.dim;
    head.descriptor.dtype = options_.wire_dtype;
    head.descriptor.n = n;
    head.section.kind = static_cast<std::uint16_t>(kind);
    head.section.flags = kSectionRequired;
    return head;
  }
  static void report_outcome(const Call& call, const Status& status, const CommitOptions& options);
  Outgoing& add(Call& call, std::uint32_t shard, FrameType type, FrameType expected, std::int64_t step) const;
  Status run(Call& call);
  bool takes_hint(std::uint32_t shard);
  void buffer_for_replay(const Call& call, bool decided);
  void drop_refused(const Call& call);
  void count_acknowledged(const Call& call);
  void drop_held(std::uint64_t sequence) {
    change_replay_buffers([sequence](ReplayBuffer& buffer) { buffer.drop(sequence); });
  }
  [[nodiscard]] bool is_in_time(Call& call) const SR_REQUIRES(mutex_);
  void lead(Call& call) SR_REQUIRES(mutex_);
  void wake_leader();
  void notify_finished() SR_REQUIRES(mutex_);
  [[nodiscard]] std::uint32_t shards() const noexcept { return static_cast<std::uint32_t>(options_.shards.size()); }

  ClientOptions options_;  // fixed, but for `tls` and `token`, which mutex_ guards
  const pid_t pid_;
  const FileDescriptor wake_;
  std::atomic<Clock::rep> grace_{0};

  mutable Mutex mutex_;
  ClientArena arena_ SR_GUARDED_BY(mutex_);
  std::vector<Channel> channels_ SR_GUARDED_BY(mutex_);
  std::vector<HintPace> hint_paces_ SR_GUARDED_BY(mutex_);         // by shard
  std::vector<std::uint64_t> acknowledged_ SR_GUARDED_BY(mutex_);  // by shard: commits and writes of this clock
  std::list<Call*> calls_ SR_GUARDED_BY(mutex_);
  bool leading_ SR_GUARDED_BY(mutex_) = false;
  Status over_ SR_GUARDED_BY(mutex_);  // why no call can succeed any more; Ok: calls may
  ClientStats stats_ SR_GUARDED_BY(mutex_);
  std::vector<pollfd> polled_;  // the leader's, also while it waits without mutex_
};

}  // namespace sparserow::rpc
