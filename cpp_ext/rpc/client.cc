#include "rpc/client.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>

#include "rpc/channel.h"
#include "rpc/partition.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

const std::array<std::byte, 8> kZeros{};

// What one table adds to a request's body; stays in place until the request is done.
struct TableHead {
  SectionHeader section;
  TableDescriptor descriptor;
};
static_assert(sizeof(TableHead) == 56);

// A request with the memory that its body points into.
struct Outgoing {
  Request request;
  std::vector<TableHead> heads;
  std::vector<std::vector<std::byte>> narrowed;  // 16-bit gradients
  ScanPayload scan;
};

iovec piece_of(const void* bytes, std::size_t count) { return {const_cast<void*>(bytes), count}; }

void add_piece(Request& request, const void* bytes, std::size_t count) {
  if (count == 0) return;
  request.body.push_back(piece_of(bytes, count));
  request.header.body_bytes += static_cast<std::uint32_t>(count);
}

// Names rows by their keys; out.heads must have room.
void name_rows(Outgoing& out, std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  TableHead& head = out.heads.emplace_back();
  head.descriptor.table_id = table_id;
  head.descriptor.dim = 1;  // not looked at: keys alone name rows
  head.descriptor.n = static_cast<std::uint32_t>(keys.size());
  head.section.kind = static_cast<std::uint16_t>(SectionKind::kTableKeys);
  head.section.flags = kSectionRequired;
  head.section.payload_bytes = table_payload_bytes(head.descriptor, {.keys = true});
  ++out.request.header.section_count;
  add_piece(out.request, &head, sizeof head);
  add_piece(out.request, keys.data(), keys.size_bytes());
}

// The count of a reply that is an ACK.
Result<std::uint64_t> acknowledged(const Request& request) {
  SectionReader sections(request.reply, 1);
  auto section = sections.next();
  if (!section.is_ok()) return section.status();
  const auto ack = parse_ack(section.value() ? section.value()->payload : std::span<const std::byte>());
  if (!ack.is_ok()) return ack.status();
  return ack.value().count;
}

Status check_groups(const char* field, std::uint32_t dim, std::span<const std::uint64_t> keys,
                    std::span<const std::uint32_t> shard_begin, std::size_t shards) {
  const bool ordered = std::is_sorted(shard_begin.begin(), shard_begin.end());
  if (shard_begin.size() != shards + 1 || !ordered || shard_begin.front() != 0 || shard_begin.back() != keys.size()) {
    return Status(Code::kInvalidArgument,
                  std::string(field) + ".shard_begin: must rise from 0 to the number of keys (" +
                      std::to_string(keys.size()) + ") in " + std::to_string(shards + 1) + " entries");
  }
  if (dim == 0 || dim > kMaxDim) {
    return Status(Code::kInvalidArgument, std::string(field) + ".dim: " + std::to_string(dim) + "; allowed: [1, " +
                                              std::to_string(kMaxDim) + "]");
  }
  return Status::ok();
}

class FileHandle {
 public:
  explicit FileHandle(int fd) : fd_(fd) {}
  FileHandle(const FileHandle&) = delete;
  FileHandle& operator=(const FileHandle&) = delete;
  ~FileHandle() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace

class Client::Impl {
 public:
  explicit Impl(const ClientOptions& options);

  Status connect();
  Status pull(std::span<const TablePull> tables, const CallOptions& options);
  Status lookup(std::span<const TablePull> tables, const LookupOptions& options, std::vector<ShardAnswer>& answers);
  std::uint64_t hint(std::span<const TablePull> tables, std::chrono::milliseconds deadline);
  Status push(FrameType type, std::span<const TablePush> tables, const CommitOptions& options, std::uint8_t flags,
              bool every_shard);
  Status signal(FrameType type, const CommitOptions& options, std::uint8_t flags);
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint32_t> shard_begin, const CallOptions& options);
  Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                        bool with_state, const CallOptions& options);
  ClientStats stats() const;
  Status touch(std::chrono::milliseconds deadline);
  void extend(std::chrono::milliseconds grace) { grace_.store((Clock::now() + grace).time_since_epoch().count()); }
  [[nodiscard]] Clock::time_point grace() const { return Clock::time_point(Clock::duration(grace_.load())); }
  template <class Change>
  void change_held(Change change) {
    const Lock lock(mutex_);
    for (Channel& channel : channels_) change(channel.held());
  }
  [[nodiscard]] const ClientOptions& options() const noexcept { return options_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // One caller waiting for its requests.
  struct Call {
    explicit Call(std::chrono::milliseconds allowed) : begun(Clock::now()), deadline(begun + allowed) {}
    const Clock::time_point begun;
    Clock::time_point deadline;
    bool is_patient = true;  // waits longer while a shard is being restored
    std::list<Outgoing> requests;
    std::uint32_t open = 0;  // requests not done; guarded by mutex_
    std::condition_variable wake;
  };

  void add_keys(Outgoing& out, const TablePull& table, std::uint32_t shard) const;
  Outgoing& add(Call& call, std::uint32_t shard, FrameType type, FrameType expected, std::int64_t step) const;
  Status run(Call& call);
  void hold(const Call& call, bool decided);
  [[nodiscard]] bool is_in_time(Call& call) const;
  void lead(Lock& lock, Call& call);
  void wake_leader();
  void notify_finished();
  [[nodiscard]] std::uint32_t shards() const noexcept { return static_cast<std::uint32_t>(options_.shards.size()); }

  const ClientOptions options_;
  const pid_t pid_;
  const FileHandle wake_;
  std::atomic<Clock::rep> grace_{0};

  mutable std::mutex mutex_;  // guards what follows
  std::vector<Channel> channels_;
  std::list<Call*> calls_;
  bool leading_ = false;
  ClientStats stats_;
  std::vector<pollfd> polled_;  // the leader's
};

Client::Impl::Impl(const ClientOptions& options)
    : options_(options), pid_(::getpid()), wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  channels_.reserve(options_.shards.size());
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    channels_.emplace_back(shard, options_, stats_, grace_);
  }
}

Outgoing& Client::Impl::add(Call& call, std::uint32_t shard, FrameType type, FrameType expected,
                            std::int64_t step) const {
  Outgoing& out = call.requests.emplace_back();
  Request& request = out.request;
  request.shard = shard;
  request.expected = expected;
  request.deadline = call.deadline;
  request.header.type = static_cast<std::uint16_t>(type);
  request.header.namespace_id = options_.namespace_id;
  request.header.job_id = options_.job_id;
  request.header.worker_id = options_.worker_id;
  request.header.worker_epoch = options_.worker_epoch;
  request.header.route_epoch = options_.route_epoch;
  request.header.step = step;
  return out;
}

// Sends the call's requests and waits for their replies, doing the I/O of every caller while it leads.
Status Client::Impl::run(Call& call) {
  if (::getpid() != pid_) {
    return Status(Code::kFailedPrecondition, "this client was made before fork; connect anew in this process");
  }
  Lock lock(mutex_);
  bool wake = false;
  for (Outgoing& out : call.requests) {
    ++call.open;
    out.request.open_requests = &call.open;
    wake |= channels_[out.request.shard].submit(out.request);
  }
  if (wake && leading_) wake_leader();
  const auto place = calls_.insert(calls_.end(), &call);
  while (call.open > 0 && is_in_time(call)) {
    if (leading_) {
      call.wake.wait_until(lock, call.deadline);
      continue;
    }
    leading_ = true;
    lead(lock, call);
    leading_ = false;
  }
  calls_.erase(place);
  Status status;
  const auto waited = Clock::now() - call.begun;
  for (Outgoing& out : call.requests) {
    Channel& channel = channels_[out.request.shard];
    if (!out.request.done) {
      out.request.status = channel.overdue(out.request, waited);
      channel.cancel(out.request);
    }
    if (status.is_ok()) status = out.request.status;
  }
  // Whoever leaves passes the lead on; giving up a request may have left work for the next leader.
  if (leading_) {
    wake_leader();
  } else if (!calls_.empty()) {
    calls_.front()->wake.notify_one();
  }
  return status;
}

// Whether a call may go on waiting; its deadline moves while a shard is being restored.
bool Client::Impl::is_in_time(Call& call) const {
  const auto now = Clock::now();
  if (now < call.deadline) return true;
  if (!call.is_patient || now >= grace()) return false;
  call.deadline = grace();
  for (Outgoing& out : call.requests) {
    if (!out.request.done) out.request.deadline = call.deadline;
  }
  return true;
}

// Keeps a copy of what a call sends to each shard, for a process that takes the shard's place.
void Client::Impl::hold(const Call& call, bool decided) {
  std::vector<HeldCommit> copies;
  for (const Outgoing& out : call.requests) {
    HeldCommit& copy = copies.emplace_back(out.request.header, out.request.body);
    copy.decided = decided;
  }
  const Lock lock(mutex_);
  auto copy = copies.begin();
  for (const Outgoing& out : call.requests) channels_[out.request.shard].held().add(std::move(*copy++));
}

Status Client::Impl::touch(std::chrono::milliseconds deadline) {
  Call call(deadline);
  call.is_patient = false;
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    add(call, shard, FrameType::kPing, FrameType::kPong, kNoStep);
  }
  return run(call);
}

void Client::Impl::wake_leader() {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));  // full means that it is awake already
}

void Client::Impl::notify_finished() {
  for (Call* call : calls_) {
    if (call->open == 0) call->wake.notify_one();
  }
}

void Client::Impl::lead(Lock& lock, Call& call) {
  while (call.open > 0) {
    auto now = Clock::now();
    if (now >= call.deadline) return;
    auto until = call.deadline;
    polled_.assign(1, pollfd{wake_.get(), POLLIN, 0});
    for (Channel& channel : channels_) {
      channel.tick(now);
      polled_.push_back(channel.interest());
      until = std::min(until, channel.wake_at());
    }
    if (call.open == 0) return;
    const auto left = std::max<Clock::duration>(until - Clock::now(), Clock::duration::zero());
    const auto left_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    const timespec timeout{left_ns / 1'000'000'000, left_ns % 1'000'000'000};
    lock.unlock();
    const int ready = ::ppoll(polled_.data(), polled_.size(), &timeout, nullptr);
    lock.lock();
    if (ready <= 0) continue;
    if (polled_[0].revents != 0) {
      std::uint64_t count;
      static_cast<void>(!::read(wake_.get(), &count, sizeof count));
    }
    for (std::size_t i = 0; i < channels_.size(); ++i) channels_[i].on_events(polled_[i + 1].revents);
    if (calls_.size() > 1) notify_finished();
  }
}

Status Client::Impl::connect() {
  Call call(std::chrono::milliseconds(options_.connect_timeout_ms));
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    add(call, shard, FrameType::kHello, FrameType::kHelloAck, kNoStep);
  }
  return run(call);
}

Status Client::Impl::pull(std::span<const TablePull> tables, const CallOptions& options) {
  for (const TablePull& table : tables) {
    SR_RETURN_IF_ERROR(check_groups("pull", table.dim, table.keys, table.shard_begin, shards()));
    if (table.known != nullptr && table.versions == nullptr) {
      return Status(Code::kInvalidArgument, "pull.versions: must be set when pull.known is");
    }
    if (table.changed != nullptr) std::fill_n(table.changed, table.keys.size(), std::uint8_t{0});
  }
  Call call(options.deadline);
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    Outgoing* out = nullptr;
    for (const TablePull& table : tables) {
      const std::uint32_t begin = table.shard_begin[shard];
      const std::uint32_t n = table.shard_begin[shard + 1] - begin;
      if (n == 0 && options.writes_of_others == nullptr) continue;
      if (out == nullptr) {
        out = &add(call, shard, FrameType::kPull, FrameType::kRows, options.step);
        out->heads.reserve(tables.size());
        if (options.writes_of_others != nullptr) {
          out->request.header.flags |= kFrameWrites;
          out->request.needs |= kFeatureWriteCounts;
          out->request.reply_sequence = options.writes_of_others + shard;
        }
      }
      add_keys(*out, table, shard);
    }
  }
  return run(call);
}

// A shard's keys of one table, and where its rows go. The heads have their room.
void Client::Impl::add_keys(Outgoing& out, const TablePull& table, std::uint32_t shard) const {
  const std::uint32_t begin = table.shard_begin[shard];
  const std::uint32_t n = table.shard_begin[shard + 1] - begin;
  TableHead& head = out.heads.emplace_back();
  head.descriptor.table_id = table.table_id;
  head.descriptor.schema_version = table.schema_version;
  head.descriptor.dim = table.dim;
  head.descriptor.dtype = options_.wire_dtype;
  head.descriptor.n = n;
  head.descriptor.flags = static_cast<std::uint8_t>((table.versions != nullptr ? kTableVersions : 0) |
                                                    (table.found != nullptr ? kTableFound : 0) |
                                                    (table.known != nullptr ? kTableKnown : 0));
  head.section.kind = static_cast<std::uint16_t>(SectionKind::kTableKeys);
  head.section.flags = kSectionRequired;
  const bool conditional = table.known != nullptr;
  head.section.payload_bytes = table_payload_bytes(head.descriptor, {.keys = true, .known = conditional});
  add_piece(out.request, &head, sizeof head);
  add_piece(out.request, table.keys.data() + begin, std::size_t{n} * 8);
  if (conditional) {
    add_piece(out.request, table.known + begin, std::size_t{n} * 8);
    out.request.needs |= kFeatureConditionalPull;
  }
  ++out.request.header.section_count;
  out.request.sinks.push_back({.expected = head.descriptor,
                               .rows = table.rows + std::size_t{begin} * table.dim,
                               .versions = table.versions != nullptr ? table.versions + begin : nullptr,
                               .found = table.found != nullptr ? table.found + begin : nullptr,
                               .changed = table.changed != nullptr ? table.changed + begin : nullptr});
}

Status Client::Impl::lookup(std::span<const TablePull> tables, const LookupOptions& options,
                            std::vector<ShardAnswer>& answers) {
  for (const TablePull& table : tables) {
    SR_RETURN_IF_ERROR(check_groups("lookup", table.dim, table.keys, table.shard_begin, shards()));
  }
  answers.assign(shards(), {});
  Call call(options.deadline);
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    Outgoing* out = nullptr;
    for (const TablePull& table : tables) {
      if (table.shard_begin[shard + 1] == table.shard_begin[shard]) continue;
      if (out == nullptr) {
        out = &add(call, shard, FrameType::kLookup, FrameType::kRows, kNoStep);
        out->heads.reserve(tables.size());
        out->request.header.namespace_id = options.model;
        out->request.header.sequence = options.routing_key;
        out->request.needs |= kFeatureLookup;
        out->request.reply_sequence = &answers[shard].version;
      }
      add_keys(*out, table, shard);
    }
  }
  const Status status = run(call);
  bool is_theirs = false;
  for (const Outgoing& out : call.requests) {
    answers[out.request.shard].is_asked = true;
    answers[out.request.shard].status = out.request.status;
    is_theirs |= !out.request.status.is_ok();
  }
  return is_theirs ? Status::ok() : status;
}

Status Client::Impl::push(FrameType type, std::span<const TablePush> tables, const CommitOptions& options,
                          std::uint8_t flags, bool every_shard) {
  for (const TablePush& table : tables) {
    SR_RETURN_IF_ERROR(check_groups("push", table.dim, table.keys, table.shard_begin, shards()));
  }
  Call call(options.deadline);
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    const bool any = std::any_of(tables.begin(), tables.end(), [&](const TablePush& table) {
      return table.shard_begin[shard + 1] > table.shard_begin[shard];
    });
    if (!any && !every_shard) continue;
    Outgoing& out = add(call, shard, type, FrameType::kAck, options.step);
    out.request.header.sequence = options.sequence;
    out.request.header.flags = static_cast<std::uint8_t>(flags | (options.grad_sum ? kFrameGradSum : 0));
    out.heads.reserve(tables.size());
    std::uint64_t body_bytes = 0;
    for (const TablePush& table : tables) {
      const std::uint32_t begin = table.shard_begin[shard];
      const std::uint32_t n = table.shard_begin[shard + 1] - begin;
      if (n == 0) continue;
      TableHead& head = out.heads.emplace_back();
      head.descriptor.table_id = table.table_id;
      head.descriptor.schema_version = table.schema_version;
      head.descriptor.dim = table.dim;
      head.descriptor.dtype = options_.wire_dtype;
      head.descriptor.n = n;
      head.descriptor.lr = table.lr;
      head.section.kind = static_cast<std::uint16_t>(SectionKind::kTableGrads);
      head.section.flags = kSectionRequired;
      head.section.payload_bytes = table_payload_bytes(head.descriptor, {.keys = true, .rows = true});
      body_bytes += sizeof(SectionHeader) + head.section.payload_bytes;
      if (body_bytes > UINT32_MAX - 7) {
        return Status(Code::kInvalidArgument, "push: " + std::to_string(body_bytes) +
                                                  " bytes for one shard; a frame has less than 2^32, send fewer rows");
      }
      const std::size_t count = std::size_t{n} * table.dim;
      const float* grads = table.grads + std::size_t{begin} * table.dim;
      const void* sent = grads;
      const std::size_t bytes = count * size_of(options_.wire_dtype);
      if (options_.wire_dtype != Dtype::kFloat32) {
        auto& narrowed = out.narrowed.emplace_back(bytes);
        convert_from_float(options_.wire_dtype, grads, narrowed.data(), count);
        sent = narrowed.data();
      }
      add_piece(out.request, &head, sizeof head);
      add_piece(out.request, table.keys.data() + begin, std::size_t{n} * 8);
      add_piece(out.request, sent, bytes);
      add_piece(out.request, kZeros.data(), padded8(bytes) - bytes);
      ++out.request.header.section_count;
    }
  }
  const bool has_content = type == FrameType::kPrepare || (type == FrameType::kCommit && (flags & kFramePrepared) == 0);
  if (options_.replay_bytes > 0 && has_content) hold(call, type == FrameType::kCommit);
  return run(call);
}

Status Client::Impl::signal(FrameType type, const CommitOptions& options, std::uint8_t flags) {
  return push(type, {}, options, flags, true);
}

// Shards are asked together; one that does not know hints, or fails, brings nothing.
std::uint64_t Client::Impl::hint(std::span<const TablePull> tables, std::chrono::milliseconds deadline) {
  Call call(deadline);
  for (const TablePull& table : tables) {
    if (!check_groups("hint", table.dim, table.keys, table.shard_begin, shards()).is_ok()) return 0;
  }
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    Outgoing* out = nullptr;
    for (const TablePull& table : tables) {
      const std::uint32_t begin = table.shard_begin[shard];
      const std::uint32_t n = table.shard_begin[shard + 1] - begin;
      if (n == 0) continue;
      if (out == nullptr) {
        out = &add(call, shard, FrameType::kHint, FrameType::kAck, kNoStep);
        out->request.needs = kFeatureHints;
        out->heads.reserve(tables.size());
      }
      name_rows(*out, table.table_id, table.keys.subspan(begin, n));
    }
  }
  static_cast<void>(run(call).is_ok());
  std::uint64_t taken = 0;
  for (const Outgoing& out : call.requests) {
    if (!out.request.done || !out.request.status.is_ok()) continue;
    const auto one = acknowledged(out.request);
    taken += one.is_ok() ? one.value() : 0;
  }
  return taken;
}

Result<std::uint64_t> Client::Impl::erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                          std::span<const std::uint32_t> shard_begin, const CallOptions& options) {
  SR_RETURN_IF_ERROR(check_groups("erase", 1, keys, shard_begin, shards()));
  Call call(options.deadline);
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    const std::uint32_t begin = shard_begin[shard];
    const std::uint32_t n = shard_begin[shard + 1] - begin;
    if (n == 0) continue;
    Outgoing& out = add(call, shard, FrameType::kDelete, FrameType::kAck, options.step);
    out.request.header.sequence = options.sequence;
    name_rows(out, table_id, keys.subspan(begin, n));
  }
  SR_RETURN_IF_ERROR(run(call));
  std::uint64_t count = 0;
  for (const Outgoing& out : call.requests) {
    const auto one = acknowledged(out.request);
    if (!one.is_ok()) return one.status();
    count += one.value();
  }
  return count;
}

Result<ScanPage> Client::Impl::scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor,
                                    std::uint32_t max_rows, bool with_state, const CallOptions& options) {
  if (shard >= shards()) {
    return Status(Code::kInvalidArgument,
                  "shard: " + std::to_string(shard) + "; allowed: [0, " + std::to_string(shards()) + ")");
  }
  Call call(options.deadline);
  Outgoing& out = add(call, shard, FrameType::kScan, FrameType::kScanPage, options.step);
  out.scan = {.cursor = cursor, .table_id = table_id, .max_rows = max_rows, .with_state = with_state ? 1u : 0u};
  TableHead& head = out.heads.emplace_back();
  head.section.kind = static_cast<std::uint16_t>(SectionKind::kScan);
  head.section.flags = kSectionRequired;
  head.section.payload_bytes = sizeof out.scan;
  out.request.header.section_count = 1;
  add_piece(out.request, &head.section, sizeof head.section);
  add_piece(out.request, &out.scan, sizeof out.scan);
  SR_RETURN_IF_ERROR(run(call));
  SectionReader sections(out.request.reply, 1);
  auto section = sections.next();
  if (!section.is_ok()) return section.status();
  if (!section.value() || section.value()->kind != SectionKind::kScanPage) {
    return Status(Code::kDataLoss, "malformed reply: no SCAN_PAGE section");
  }
  auto view = parse_scan_page(section.value()->payload);
  if (!view.is_ok()) return view.status();
  const ScanPageView& page = view.value();
  return ScanPage{.keys = {page.keys.begin(), page.keys.end()},
                  .versions = {page.versions.begin(), page.versions.end()},
                  .update_counts = {page.update_counts.begin(), page.update_counts.end()},
                  .rows = {page.rows.begin(), page.rows.end()},
                  .state = {page.state.begin(), page.state.end()},
                  .next_cursor = page.page.next_cursor};
}

ClientStats Client::Impl::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

Result<std::shared_ptr<Client>> Client::connect(const ClientOptions& options) {
  if (options.shards.empty() || options.shards.size() > 65535) {
    return Status(Code::kInvalidArgument,
                  "shards: " + std::to_string(options.shards.size()) + " given; allowed: [1, 65535]");
  }
  SR_RETURN_IF_ERROR(check_slot_owner(options.slot_owner, static_cast<std::uint32_t>(options.shards.size())));
  if (!is_valid(options.wire_dtype)) return Status(Code::kInvalidArgument, "wire_dtype: not a known dtype");
  std::shared_ptr<Client> client(new Client(std::make_unique<Impl>(options)));
  if (!options.is_lazy) SR_RETURN_IF_ERROR(client->impl_->connect());
  return client;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

std::uint32_t Client::shard_count() const noexcept {
  return static_cast<std::uint32_t>(impl_->options().shards.size());
}
std::span<const std::uint16_t> Client::slot_owner() const noexcept { return impl_->options().slot_owner; }

Status Client::pull(std::span<const TablePull> tables, const CallOptions& options) {
  return impl_->pull(tables, options);
}
std::uint64_t Client::hint(std::span<const TablePull> tables, std::chrono::milliseconds deadline) {
  return impl_->hint(tables, deadline);
}
Status Client::prepare(std::span<const TablePush> tables, const CommitOptions& options) {
  return impl_->push(FrameType::kPrepare, tables, options, 0, true);
}
Status Client::commit_prepared(const CommitOptions& options) {
  impl_->change_held([&options](HeldCommits& held) { held.decide(options.sequence); });
  return impl_->signal(FrameType::kCommit, options, kFramePrepared);
}
Status Client::abort(const CommitOptions& options) {
  impl_->change_held([&options](HeldCommits& held) { held.drop(options.sequence); });
  return impl_->signal(FrameType::kAbort, options, 0);
}
Status Client::commit(std::span<const TablePush> tables, const CommitOptions& options) {
  return impl_->push(FrameType::kCommit, tables, options, 0, true);
}
Status Client::assign(std::span<const TablePush> tables, const CallOptions& options) {
  CommitOptions as_commit;
  as_commit.deadline = options.deadline;
  as_commit.sequence = options.sequence;
  return impl_->push(FrameType::kAssign, tables, as_commit, 0, false);
}
Result<std::uint64_t> Client::erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                    std::span<const std::uint32_t> shard_begin, const CallOptions& options) {
  return impl_->erase(table_id, keys, shard_begin, options);
}
Result<ScanPage> Client::scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                              bool with_state, const CallOptions& options) {
  return impl_->scan(shard, table_id, cursor, max_rows, with_state, options);
}
Status Client::lookup(std::span<const TablePull> tables, const LookupOptions& options,
                      std::vector<ShardAnswer>& answers) {
  return impl_->lookup(tables, options, answers);
}
ClientStats Client::stats() const { return impl_->stats(); }
void Client::extend(std::chrono::milliseconds grace) { impl_->extend(grace); }
std::chrono::steady_clock::time_point Client::grace() const { return impl_->grace(); }
Status Client::touch(std::chrono::milliseconds deadline) { return impl_->touch(deadline); }
void Client::forget_held() {
  impl_->change_held([](HeldCommits& held) { held.clear(); });
}

}  // namespace sparserow::rpc
