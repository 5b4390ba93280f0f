#include "rpc/client/client.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>

#include "rpc/client/client_impl.h"
#include "util/not_allowed.h"
#include "util/partition.h"

namespace sparserow::rpc {

Client::Impl::Impl(const ClientOptions& options)
    : options_(options), pid_(::getpid()), wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  arena_.bytes = options_.lane_bytes;
  channels_.reserve(options_.shards.size());
  hint_paces_.resize(options_.shards.size());
  acknowledged_.resize(options_.shards.size());
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    channels_.emplace_back(shard, options_, stats_, grace_, arena_);
  }
}

Outgoing& Client::Impl::add(Call& call, std::uint32_t shard, FrameType type, FrameType expected,
                            std::int64_t step) const {
  Outgoing& out = call.requests.emplace_back();
  ShardRequest& request = out.request;
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
  if (const TraceContext& trace = trace_context(); trace.is_set()) {
    out.trace.context = trace;
    request.body.push_back({&out.trace, sizeof out.trace});
    request.header.body_bytes += sizeof out.trace;
    ++request.header.section_count;
  }
  return out;
}

// Sends the call's requests and waits for their replies, doing the I/O of every caller while it leads.
Status Client::Impl::run(Call& call) {
  if (::getpid() != pid_) {
    return Status(Code::kFailedPrecondition, "this client was made before fork; connect anew in this process");
  }
  const MutexLock lock(mutex_);
  if (!over_.is_ok()) return over_;
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
      call.wake.wait_until(mutex_, call.deadline);
      continue;
    }
    leading_ = true;
    lead(call);
    leading_ = false;
  }
  calls_.erase(place);
  Status status;
  const auto waited = Clock::now() - call.begun;
  for (Outgoing& out : call.requests) {
    Channel& channel = channels_[out.request.shard];
    if (!out.request.done) {
      out.request.status = over_.is_ok() ? channel.overdue(out.request, waited) : over_;
      channel.cancel(out.request);
    }
    if (status.is_ok()) status = out.request.status;
  }
  // A call that ends passes the lead on; a request that it gave up may have left work for the next leader.
  if (leading_) {
    wake_leader();
  } else if (!calls_.empty()) {
    calls_.front()->wake.notify_one();
  }
  return status;
}

// Whether a call may go on waiting; its deadline moves while a shard is being restored.
bool Client::Impl::is_in_time(Call& call) const {
  if (!over_.is_ok()) return false;
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
void Client::Impl::buffer_for_replay(const Call& call, bool decided) {
  std::vector<BufferedCommit> copies;
  for (const Outgoing& out : call.requests) {
    BufferedCommit& copy = copies.emplace_back(out.request.header, out.request.body);
    copy.decided = decided;
  }
  const MutexLock lock(mutex_);
  auto copy = copies.begin();
  for (const Outgoing& out : call.requests) channels_[out.request.shard].replay_buffer().add(std::move(*copy++));
}

Status Client::Impl::touch(std::chrono::milliseconds deadline) {
  Call call(deadline);
  call.is_patient = false;
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    add(call, shard, FrameType::kPing, FrameType::kPong, kNoStep);
  }
  return run(call);
}

Status Client::Impl::move(std::uint32_t shard, Endpoint endpoint) {
  if (shard >= shards()) return Status(Code::kInvalidArgument, "shard " + std::to_string(shard) + ": there is none");
  {
    const MutexLock lock(mutex_);
    channels_[shard].move(std::move(endpoint));
  }
  wake_leader();
  return Status::ok();
}

void Client::Impl::show(std::shared_ptr<const TlsContext> tls, std::string token) {
  {
    const MutexLock lock(mutex_);
    options_.tls = std::move(tls);
    options_.token = std::move(token);
    for (Channel& channel : channels_) channel.renew("its secrets have changed");
  }
  wake_leader();
}

void Client::Impl::end(std::string reason) {
  const MutexLock lock(mutex_);
  if (over_.is_ok()) over_ = Status(Code::kUnavailable, std::move(reason));
  for (Call* call : calls_) call->wake.notify_one();
  wake_leader();
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

void Client::Impl::lead(Call& call) {
  while (call.open > 0) {
    auto now = Clock::now();
    if (now >= call.deadline || !over_.is_ok()) return;
    auto until = call.deadline;
    polled_.assign(1, pollfd{wake_.get(), POLLIN, 0});
    for (Channel& channel : channels_) {
      channel.tick(now);
      polled_.push_back(channel.interest());
      until = std::min(until, channel.wake_at());
    }
    if (call.open == 0) return;
    now = Clock::now();
    const auto left = until > now ? until - now : Clock::duration::zero();  // `until` may be the least there is
    const auto left_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    const timespec timeout{left_ns / 1'000'000'000, left_ns % 1'000'000'000};
    int ready = 0;
    {
      const MutexUnlock unlocked(mutex_);
      ready = ::ppoll(polled_.data(), polled_.size(), &timeout, nullptr);
    }
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

ClientStats Client::Impl::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

std::shared_ptr<RowMemory> Client::Impl::make_rows(std::size_t floats) const {
  const std::uint64_t bytes = floats * sizeof(float);
  const bool is_placed =
      bytes >= options_.least_in_lane && options_.wire_dtype == Dtype::kFloat32 && !options_.frame_crc;
  const auto arena = [&] {
    const MutexLock lock(mutex_);
    return is_placed ? arena_.arena : nullptr;
  }();
  if (arena) {
    if (auto memory = arena->take(bytes)) {
      const std::span<float> all(reinterpret_cast<float*>(memory.get()), floats);
      return std::make_shared<RowMemory>(std::move(memory), all);
    }
  }
  return RowMemory::on_heap(floats);
}

std::vector<std::string> Client::Impl::transports() const {
  const MutexLock lock(mutex_);
  std::vector<std::string> of_shards;
  for (const Channel& channel : channels_) of_shards.emplace_back(channel.transport());
  return of_shards;
}

Result<std::shared_ptr<Client>> Client::connect(const ClientOptions& options) {
  if (options.shards.empty() || options.shards.size() > 65535) {
    return not_allowed("shards", options.shards.size(), range_text(1, 65535));
  }
  SR_RETURN_IF_ERROR(check_slot_owner(options.slot_owner, static_cast<std::uint32_t>(options.shards.size())));
  if (options.lane_bytes % LaneRegion::kUnit != 0 || options.lane_bytes > LaneRegion::kMostBytes) {
    return not_allowed("lane_bytes", options.lane_bytes, LaneRegion::allowed());
  }
  if (options.transport == Transport::kSharedMemory && options.tls) {
    return not_allowed("transport", "shm", "auto or tcp, as TLS is on");
  }
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

std::shared_ptr<RowMemory> Client::make_rows(std::size_t floats) { return impl_->make_rows(floats); }
Status Client::pull(std::span<const TablePull> tables, const CallOptions& options) {
  return impl_->pull(tables, options);
}
std::uint64_t Client::hint(std::span<const TablePull> tables, std::chrono::milliseconds deadline) {
  return impl_->hint(tables, deadline);
}
Status Client::prepare(std::span<const TablePush> tables, const CommitOptions& options) {
  return impl_->push(FrameType::kPrepare, tables, options, 0, true, {});
}
Status Client::commit_prepared(const CommitOptions& options) {
  impl_->change_replay_buffers([&options](ReplayBuffer& buffer) { buffer.decide(options.sequence); });
  return impl_->commit_prepared(options);
}
Status Client::abort(const CommitOptions& options) {
  impl_->change_replay_buffers([&options](ReplayBuffer& buffer) { buffer.drop(options.sequence); });
  return impl_->signal(FrameType::kAbort, options, 0, {});
}
Status Client::commit(std::span<const TablePush> tables, const CommitOptions& options) {
  return impl_->push(FrameType::kCommit, tables, options, 0, true, {});
}
Status Client::assign(std::span<const TablePush> tables, const CallOptions& options) {
  CommitOptions as_commit;
  as_commit.deadline = options.deadline;
  as_commit.sequence = options.sequence;
  return impl_->push(FrameType::kAssign, tables, as_commit, 0, false, {});
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
std::vector<std::string> Client::transports() const { return impl_->transports(); }
void Client::extend(std::chrono::milliseconds grace) { impl_->extend(grace); }
std::chrono::steady_clock::time_point Client::grace() const { return impl_->grace(); }
Status Client::touch(std::chrono::milliseconds deadline) { return impl_->touch(deadline); }
Status Client::move(std::uint32_t shard, Endpoint endpoint) { return impl_->move(shard, std::move(endpoint)); }
void Client::show(std::shared_ptr<const TlsContext> tls, std::string token) {
  impl_->show(std::move(tls), std::move(token));
}
void Client::end(std::string reason) { impl_->end(std::move(reason)); }
void Client::forget_buffered() {
  impl_->change_replay_buffers([](ReplayBuffer& buffer) { buffer.clear(); });
  impl_->forget_acknowledged();
}
std::vector<std::uint64_t> Client::acknowledged_commits() const { return impl_->acknowledged_commits(); }

}  // namespace sparserow::rpc
