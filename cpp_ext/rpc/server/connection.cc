#include "rpc/server/connection.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cstring>

#include "rpc/server/reply_frames.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

// Holds a whole frame of a few hundred keys, so that a small request costs one read.
constexpr std::size_t kStagingBytes = 64u << 10;
// Until HELLO is accepted: whoever connects and says nothing of sense costs no more.
constexpr std::size_t kGreetingBytes = 4u << 10;
// While others wait for room, what is under way must move faster.
constexpr std::uint64_t kContendedBytesPerS = 512u << 10;
constexpr std::chrono::milliseconds kContendedBody{1000};
constexpr std::chrono::milliseconds kContendedReply{5000};
// What is read and thrown away so that a refused peer can still read its ERROR.
constexpr std::size_t kLingerBytes = 4u << 20;

// Frames without rows are small, and only a request may bring a large one.
Status check_frame(const FrameHeader& header, std::uint32_t max_frame_bytes) {
  const auto type = static_cast<FrameType>(header.type);
  const bool is_large = is_request(type) && type != FrameType::kPing && type != FrameType::kScan;
  return check_header(header, is_large ? max_frame_bytes : kStagingBytes - sizeof header);
}

}  // namespace

Connection::Connection(ServerCore& core, std::unique_ptr<Stream> stream, std::shared_ptr<Peer> peer)
    : core_(core),
      stream_(std::move(stream)),
      strand_(asio::make_strand(core.io)),
      readiness_(strand_, stream_->fd()),
      peer_(std::move(peer)),
      sampler_(core.counters.connections_total ^ (std::uint64_t{core.incarnation} << 32)),
      staging_(kGreetingBytes),
      opened_at_(Clock::now()) {
  mark_moved();
  ++core_.counters.connections_greeting;
  ++peer_->connections;
  ++core_.counters.connections_open;
  ++core_.counters.connections_total;
}

Connection::~Connection() {
  readiness_.release();  // the fd is the stream's
  if (phase_ == Phase::kHello) --core_.counters.connections_greeting;
  --core_.counters.connections_open;
  --peer_->connections;
}

void Connection::start() {
  asio::co_spawn(strand_, [self = shared_from_this()] { return self->run(); }, asio::detached);
}

void Connection::close() {
  closed_ = true;
  stream_->reset();  // whoever waits for the fd wakes and sees the end
  asio::post(strand_, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    for (asio::steady_timer* wait : self->waits_) wait->cancel();
  });
}

Clock::duration Connection::Pace::slow_for(Clock::time_point now, bool is_active, std::uint64_t bytes,
                                           std::uint32_t frame, std::uint64_t bytes_per_s) {
  const double seconds = std::chrono::duration<double>(now - seen_at_).count();
  const bool is_fast = static_cast<double>(bytes - bytes_) >= seconds * static_cast<double>(bytes_per_s);
  if (!is_active || frame != frame_ || is_fast) fast_at_ = now;
  seen_at_ = now;
  bytes_ = bytes;
  frame_ = frame;
  return now - fast_at_;
}

void Connection::check_stall(Clock::time_point now) {
  const ServerOptions& options = core_.options;
  const Phase phase = phase_;
  if (phase == Phase::kHello) {
    if (now - opened_at_ > std::chrono::milliseconds(options.hello_timeout_ms)) close();
    return;
  }
  if (phase == Phase::kEnding) {
    const auto now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
    if (now_ms - moved_at_ms_ > 1000) close();
    return;
  }
  const std::uint64_t least = options.least_bytes_per_s;
  const bool body_waits = core_.inflight.has_waiting();
  const auto slow_body = incoming_.slow_for(now, phase == Phase::kReceiving, received_, frames_,
                                            body_waits ? std::max(least, kContendedBytesPerS) : least);
  const bool reply_waits = core_.replies.has_waiting();
  const auto slow_reply =
      outgoing_.slow_for(now, sending_, sent_, 0, reply_waits ? std::max(least, kContendedBytesPerS) : least);
  const std::chrono::milliseconds stall(options.stall_timeout_ms);
  const auto body_limit = std::min(stall, std::chrono::milliseconds(options.slow_timeout_ms));
  if (slow_body <= (body_waits ? std::min(body_limit, kContendedBody) : body_limit) &&
      slow_reply <= (reply_waits ? std::min(stall, kContendedReply) : stall)) {
    return;
  }
  ++core_.counters.connections_too_slow;
  close();
}

Connection::Task<void> Connection::run() {
  const auto self = shared_from_this();
  if (co_await greet()) {
    while (co_await serve_one()) {
    }
  }
  if (has_parked_) core_.commits.forget(this);
  co_await end_politely();
  close();
}

// The first frame must be HELLO; it is answered, or refused and the connection closed.
Connection::Task<bool> Connection::greet() {
  if (!co_await fill(sizeof(FrameHeader))) co_return false;
  FrameHeader header;
  std::memcpy(&header, staging_.data() + staged_begin_, sizeof header);
  ++core_.counters.frames_received;
  Status status = check_header(header, kStagingBytes - sizeof header);
  std::vector<std::byte> reply;
  if (status.is_ok() && header.type != static_cast<std::uint16_t>(FrameType::kHello)) {
    status = Status(Code::kInvalidArgument, "the first frame must be HELLO");
  }
  if (status.is_ok()) {
    if (sizeof header + header.body_bytes > staging_.size()) staging_.resize(kStagingBytes);
    if (!co_await fill(sizeof header + header.body_bytes)) co_return false;
    const auto body = std::span(staging_).subspan(staged_begin_ + sizeof header, header.body_bytes);
    status = check_crc(header, body);
    if (status.is_ok()) status = check_hello(header, body, reply);
    consume(sizeof header + header.body_bytes);
  }
  phase_ = Phase::kIdle;
  --core_.counters.connections_greeting;
  if (status.is_ok()) {
    staging_.resize(kStagingBytes);
    co_return co_await write_reply(reply);
  }
  ++core_.counters.frames_refused;
  const auto refusal = error_frame(reply_to(header, FrameType::kError), status);
  co_await write_reply(refusal);
  co_return false;
}

Status Connection::check_hello(const FrameHeader& header, std::span<const std::byte> body,
                               std::vector<std::byte>& reply) {
  SectionReader sections(body, header.section_count);
  std::optional<HelloPayload> hello;
  std::string_view token;
  while (true) {
    auto section = sections.next();
    if (!section.is_ok()) return section.status();
    if (!section.value()) break;
    if (section.value()->kind == SectionKind::kWorker && section.value()->payload.size() == sizeof worker_) {
      std::memcpy(&worker_, section.value()->payload.data(), sizeof worker_);
      continue;
    }
    if (section.value()->kind != SectionKind::kHello || hello) {
      return Status(Code::kInvalidArgument, "HELLO: exactly one HELLO section is allowed");
    }
    auto parsed = parse_hello(section.value()->payload);
    if (!parsed.is_ok()) return parsed.status();
    hello = parsed.value();
    const auto after = section.value()->payload.subspan(sizeof(HelloPayload));
    token = {reinterpret_cast<const char*>(after.data()), after.size()};
  }
  if (!hello) return Status(Code::kInvalidArgument, "HELLO: the section is missing");
  // First of all: who may not come in learns nothing of this shard.
  grant_.digest = digest_of(token);
  SR_RETURN_IF_ERROR(check_access(header));
  if (hello->protocol_min > kProtocolVersion || hello->protocol_max < kProtocolMin) {
    return Status(Code::kFailedPrecondition, "protocol: the client speaks " + std::to_string(hello->protocol_min) +
                                                 " to " + std::to_string(hello->protocol_max) + ", this shard " +
                                                 std::to_string(kProtocolMin) + " to " +
                                                 std::to_string(kProtocolVersion));
  }
  if (hello->hash_version != kHashVersion) {
    return Status(Code::kFailedPrecondition, "hash version: the client has " + std::to_string(hello->hash_version) +
                                                 ", this shard " + std::to_string(kHashVersion));
  }
  if (hello->cluster_id != 0 && hello->cluster_id != core_.options.cluster_id) {
    return Status(Code::kFailedPrecondition, "cluster id: the client belongs to " + std::to_string(hello->cluster_id) +
                                                 ", this shard to " + std::to_string(core_.options.cluster_id));
  }
  SR_RETURN_IF_ERROR(take_seat());
  reads_checksum_last_ = (hello->features & kFeatureChecksumLast) != 0;
  HelloPayload mine;
  mine.shard_index = core_.options.shard_index;
  mine.cluster_id = core_.options.cluster_id;
  mine.features = kFeatures;
  mine.hash_version = kHashVersion;
  mine.slot_count = core_.store->options().slot_count;
  mine.route_epoch = core_.route()->epoch;
  mine.max_frame_bytes = core_.options.max_frame_bytes;
  mine.incarnation = (hello->features & kFeatureIncarnation) != 0 ? core_.incarnation : 0;
  reply = small_frame(reply_to(header, FrameType::kHelloAck), SectionKind::kHello, bytes_of(mine), {});
  return Status::ok();
}

Status Connection::take_seat() {
  account_.assign(reinterpret_cast<const char*>(grant_.digest.data()), grant_.digest.size());
  account_ += peer_->address;
  inflight_account_ = core_.inflight.account(account_);
  parked_account_ = core_.parked.account(account_);
  reply_account_ = core_.replies.account(account_);
  auto seat = core_.seats.take(account_, {.idle_since_ms = [this]() -> std::optional<std::int64_t> {
                                            if (phase_ != Phase::kIdle || parked_ != 0) return std::nullopt;
                                            return moved_at_ms_;
                                          },
                                          .close = [this] { close(); }});
  if (!seat.is_ok()) return seat.status();
  seat_ = std::move(seat).value();
  return Status::ok();
}

Status Connection::check_access(const FrameHeader& header) {
  const std::uint64_t generation = core_.access.generation();
  if (generation != grant_generation_ || header.type == static_cast<std::uint16_t>(FrameType::kHello)) {
    auto grant = core_.access.find(grant_.digest);
    if (!grant.is_ok()) {
      ++core_.counters.access_refused;
      return grant.status();
    }
    grant_ = std::move(grant).value();
    grant_generation_ = generation;
  }
  if (header.type == static_cast<std::uint16_t>(FrameType::kHello)) return Status::ok();
  Status status = grant_.allows(header);
  if (status.is_ok() && !grant_.namespaces.empty() && header.job_id != 0) {
    const auto job = core_.commits.job_name(header.job_id);
    if (job) status = grant_.allows_table(*job);
  }
  if (status.is_ok()) status = check_worker(header);
  if (!status.is_ok()) ++core_.counters.access_refused;
  return status;
}

Status Connection::check_worker(const FrameHeader& header) {
  const auto type = static_cast<FrameType>(header.type);
  const bool is_read = type == FrameType::kPing || type == FrameType::kLookup || type == FrameType::kHint ||
                       type == FrameType::kScan || (type == FrameType::kPull && header.step == kNoStep);
  if (header.job_id == 0 || (is_read && (header.flags & kFrameWrites) == 0)) return Status::ok();
  const auto is_of = [&header](const WorkerPayload& worker) {
    return worker.job_id == header.job_id && worker.worker_id == header.worker_id &&
           worker.epoch == header.worker_epoch;
  };
  if (proven_ && is_of(*proven_)) return Status::ok();
  const auto proof = core_.commits.proof_of(header.job_id, {header.worker_id, header.worker_epoch});
  if (!proof) return Status::ok();  // no member: the commit log says so
  const bool needs_none = *proof == WorkerProof{};
  if (!needs_none && (!is_of(worker_) || CRYPTO_memcmp(proof->data(), worker_.proof.data(), proof->size()) != 0)) {
    return {Code::kFailedPrecondition, "worker " + std::to_string(header.worker_id) + " epoch " +
                                           std::to_string(header.worker_epoch) + " of job " +
                                           std::to_string(header.job_id) +
                                           ": this connection has not proved that it is that worker's"};
  }
  proven_ = WorkerPayload{.job_id = header.job_id, .worker_id = header.worker_id, .epoch = header.worker_epoch};
  return Status::ok();
}

// One request: read, served, answered. False ends the connection.
Connection::Task<bool> Connection::serve_one() {
  if (staged_end_ - staged_begin_ < sizeof(FrameHeader) && !co_await fill(sizeof(FrameHeader))) co_return false;
  FrameHeader header;
  std::memcpy(&header, staging_.data() + staged_begin_, sizeof header);
  ++core_.counters.frames_received;
  ++frames_;
  const CountedRequest active(core_.counters.requests_active);
  if (Status status = check_frame(header, core_.options.max_frame_bytes); !status.is_ok()) {
    ++core_.counters.frames_refused;
    const auto refusal = error_frame(reply_to(header, FrameType::kError), status);
    co_await write_reply(refusal);
    co_return false;
  }
  Arrival arrival{.at = Clock::now(), .trace = {}};
  const std::uint32_t asked_ms = header.deadline_ms != 0 ? header.deadline_ms : core_.options.default_deadline_ms;
  const auto deadline = arrival.at + std::chrono::milliseconds(std::min(asked_ms, core_.options.max_deadline_ms));
  Body body;
  Outcome outcome;
  outcome.status = co_await read_body(header, body, deadline);
  if (closed_) co_return false;
  if (outcome.status.is_ok()) {
    phase_ = Phase::kWorking;
    outcome.status = check_crc(header, body.bytes);
    outcome.grammar_broken = !outcome.status.is_ok();  // a corrupt header may have led astray
  }
  if (outcome.status.is_ok()) {
    arrival.trace = trace_of(header, body.bytes);
    outcome = co_await dispatch(header, body, deadline, arrival);
  }
  consume(body.staged);
  body = Body{};
  bool alive = true;
  if (!outcome.status.is_ok()) {
    ++core_.counters.frames_refused;
    outcome.reply = error_frame(reply_to(header, FrameType::kError), outcome.status);
  }
  if (!outcome.reply.empty()) alive = co_await write_reply(outcome.reply);
  if (!outcome.is_parked) {
    note(RequestTimes::kind_of(static_cast<FrameType>(header.type)), header, outcome.status, arrival);
  }
  phase_ = Phase::kIdle;
  co_return alive && !outcome.grammar_broken && !closed_;
}

void Connection::note(RequestTimes::Kind kind, const FrameHeader& header, const Status& status,
                      const Arrival& arrival) {
  if (core_.options.observe) core_.request_times.add(kind, Clock::now() - arrival.at);
  core_.request_log.note(header, peer_->address, status, arrival.trace, arrival.at);
}

// Lets the peer read the last ERROR: a socket closed with unread bytes would reset it away.
Connection::Task<void> Connection::end_politely() {
  if (closed_) co_return;
  stream_->shutdown_write();
  mark_moved();
  phase_ = Phase::kEnding;
  std::size_t thrown_away = 0;
  while (thrown_away < kLingerBytes) {
    const iovec into{staging_.data(), staging_.size()};
    const Transfer moved = stream_->try_read(std::span(&into, 1));
    if (moved.ended()) co_return;
    thrown_away += moved.bytes;
    if (moved.bytes == 0 && !co_await wait_for(moved.want)) co_return;
  }
}

}  // namespace sparserow::rpc
