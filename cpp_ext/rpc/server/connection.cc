#include "rpc/server/connection.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cstring>

#include "rpc/server/reply_frames.h"
#include "util/caught.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;
using Phase = FrameIo::Phase;

// Holds a whole frame of a few hundred keys, so that a small request costs one read.
constexpr std::size_t kStagingBytes = 64u << 10;
// The bytes that a connection may cost before its HELLO is accepted.
constexpr std::size_t kGreetingBytes = 4u << 10;
// A request that holds room must move at this rate while others wait for room.
constexpr std::uint64_t kContendedBytesPerS = 512u << 10;
constexpr std::chrono::milliseconds kContendedBody{1000};
constexpr std::chrono::milliseconds kContendedReply{5000};
// The bytes that are read and thrown away, so that a refused peer can still read its ERROR.
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
      strand_(asio::make_strand(core.io)),
      peer_(std::move(peer)),
      io_(core.counters, strand_, std::move(stream), kGreetingBytes),
      accounts_(core, strand_, io_),
      bodies_(core, *peer_, io_, accounts_),
      lane_(core.counters.lane_bytes),
      pulls_(core, strand_, *peer_, io_, accounts_,
             core.counters.connections_total ^ (std::uint64_t{core.incarnation} << 32)),
      opened_at_(Clock::now()) {
  if (peer_->is_local()) {
    io_.expect_descriptor();
    ++core_.counters.connections_local;
  }
  ++core_.counters.connections_greeting;
  ++peer_->connections;
  ++core_.counters.connections_open;
  ++core_.counters.connections_total;
}

Connection::~Connection() {
  if (io_.phase() == Phase::kHello) --core_.counters.connections_greeting;
  --core_.counters.connections_open;
  if (peer_->is_local()) --core_.counters.connections_local;
  --peer_->connections;
}

void Connection::start() {
  asio::co_spawn(strand_, [self = shared_from_this()] { return self->run(); }, asio::detached);
}

void Connection::close() {
  io_.close();
  asio::post(strand_, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->accounts_.cancel_waits();
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
  const Phase phase = io_.phase();
  if (phase == Phase::kHello) {
    if (now - opened_at_ > std::chrono::milliseconds(options.hello_timeout_ms)) close();
    return;
  }
  if (phase == Phase::kEnding) {
    const auto now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
    if (now_ms - io_.moved_at_ms() > 1000) close();
    return;
  }
  const std::uint64_t least = options.least_bytes_per_s;
  const bool body_waits = core_.inflight.has_waiting();
  const auto slow_body = incoming_.slow_for(now, phase == Phase::kReceiving, io_.received(), frames_,
                                            body_waits ? std::max(least, kContendedBytesPerS) : least);
  const bool reply_waits = core_.replies.has_waiting();
  const auto slow_reply = outgoing_.slow_for(now, io_.is_sending(), io_.sent(), 0,
                                             reply_waits ? std::max(least, kContendedBytesPerS) : least);
  const std::chrono::milliseconds stall(options.stall_timeout_ms);
  const auto body_limit = std::min(stall, std::chrono::milliseconds(options.slow_timeout_ms));
  if (slow_body <= (body_waits ? std::min(body_limit, kContendedBody) : body_limit) &&
      slow_reply <= (reply_waits ? std::min(stall, kContendedReply) : stall)) {
    return;
  }
  ++core_.counters.connections_too_slow;
  close();
}

Task<void> Connection::run() {
  const auto self = shared_from_this();
  try {
    const bool is_secure = !io_.needs_handshake() || co_await io_.secure(*core_.handshakes);
    if (is_secure && co_await greet()) {
      while (co_await serve_one()) {
      }
    }
  } catch (const std::exception&) {  // between two frames it is not known what the peer has read
    io_.mark_closed();
  }
  pulls_.forget_parked();
  co_await io_.drain(kLingerBytes);
  close();
}

// The first frame must be HELLO; it is answered, or refused and the connection closed.
Task<bool> Connection::greet() {
  if (!co_await io_.fill(sizeof(FrameHeader))) co_return false;
  FrameHeader header;
  std::memcpy(&header, io_.staged().data(), sizeof header);
  ++core_.counters.frames_received;
  Status status = check_header(header, kStagingBytes - sizeof header);
  std::vector<std::byte> reply;
  if (status.is_ok() && header.type != static_cast<std::uint16_t>(FrameType::kHello)) {
    status = Status(Code::kInvalidArgument, "the first frame must be HELLO");
  }
  if (status.is_ok()) {
    if (sizeof header + header.body_bytes > io_.capacity()) io_.set_capacity(kStagingBytes);
    if (!co_await io_.fill(sizeof header + header.body_bytes)) co_return false;
    const auto body = io_.staged().subspan(sizeof header, header.body_bytes);
    status = check_crc(header, body);
    if (status.is_ok()) status = check_hello(header, body, reply);
    io_.consume(sizeof header + header.body_bytes);
  }
  io_.set_phase(Phase::kIdle);
  --core_.counters.connections_greeting;
  if (status.is_ok()) {
    io_.set_capacity(kStagingBytes);
    co_return co_await io_.write_reply(reply);
  }
  co_await refuse(header, status);
  co_return false;
}

Task<bool> Connection::refuse(const FrameHeader& header, const Status& status, std::int64_t open_step) {
  ++core_.counters.frames_refused;
  FrameHeader reply = reply_to(header, FrameType::kError);
  reply.step = open_step;
  const auto refusal = error_frame(reply, status);
  co_return co_await io_.write_reply(refusal);
}

Status Connection::check_hello(const FrameHeader& header, std::span<const std::byte> body,
                               std::vector<std::byte>& reply) {
  SectionReader sections(body, header.section_count);
  std::optional<HelloPayload> hello;
  LanePayload lane;
  std::string_view token;
  while (true) {
    auto section = sections.next();
    if (!section.is_ok()) return section.status();
    if (!section.value()) break;
    if (section.value()->kind == SectionKind::kWorker && section.value()->payload.size() == sizeof worker_) {
      std::memcpy(&worker_, section.value()->payload.data(), sizeof worker_);
      proof_ = digest_of({reinterpret_cast<const char*>(worker_.proof.data()), worker_.proof.size()});
      continue;
    }
    if (section.value()->kind == SectionKind::kLane) {
      const auto passed = parse_lane(section.value()->payload);
      if (!passed.is_ok()) return passed.status();
      lane = passed.value();
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
  // This check comes first: a client without a right learns nothing of this shard.
  grant_.digest = digest_of(token);
  SR_RETURN_IF_ERROR(check_access(header));
  SR_RETURN_IF_ERROR(check_protocol(*hello, "the client", "this shard"));
  if (hello->hash_version != kHashVersion) {
    return Status(Code::kFailedPrecondition, "hash version: the client has " + std::to_string(hello->hash_version) +
                                                 ", this shard " + std::to_string(kHashVersion));
  }
  if (hello->cluster_id != 0 && hello->cluster_id != core_.options.cluster_id) {
    return Status(Code::kFailedPrecondition, "cluster id: the client belongs to " + std::to_string(hello->cluster_id) +
                                                 ", this shard to " + std::to_string(core_.options.cluster_id));
  }
  SR_RETURN_IF_ERROR(take_seat());
  auto region = take_lane(*hello, lane);
  if (!region.is_ok()) return region.status();
  const std::shared_ptr<LaneRegion> mapped = std::move(region).value();
  const bool has_lane = mapped != nullptr;
  bodies_.open(mapped);
  pulls_.open(weak_from_this(), [this] { close(); }, (hello->features & kFeatureChecksumLast) != 0, mapped);
  HelloPayload mine;
  mine.shard_index = core_.options.shard_index;
  mine.cluster_id = core_.options.cluster_id;
  mine.features = kFeatures;
  if (has_lane) mine.features |= kFeatureLane;
  mine.hash_version = kHashVersion;
  mine.slot_count = core_.store->options().slot_count;
  mine.route_epoch = core_.route()->epoch;
  mine.max_frame_bytes = core_.options.max_frame_bytes;
  mine.incarnation = (hello->features & kFeatureIncarnation) != 0 ? core_.incarnation : 0;
  reply = small_frame(reply_to(header, FrameType::kHelloAck), SectionKind::kHello, bytes_of(mine), {});
  return Status::ok();
}

Result<std::unique_ptr<LaneRegion>> Connection::take_lane(const HelloPayload& hello, const LanePayload& lane) {
  FileDescriptor descriptor = io_.take_descriptor();
  if ((hello.features & kFeatureLane) == 0 || !descriptor.is_open() || lane.version != kLaneVersion) {
    return std::unique_ptr<LaneRegion>();
  }
  if (!lane_.take(lane.bytes, core_.options.lane_budget_bytes)) return std::unique_ptr<LaneRegion>();
  auto region = LaneRegion::map(std::move(descriptor), lane.bytes);
  if (region.status().code() == Code::kUnavailable) return std::unique_ptr<LaneRegion>();  // the system gives no more
  return region;
}

Status Connection::take_seat() {
  std::string name(reinterpret_cast<const char*>(grant_.digest.data()), grant_.digest.size());
  name += peer_->address;
  auto seat = core_.seats.take(name, {.idle_since_ms = [this]() -> std::optional<std::int64_t> {
                                        if (io_.phase() != Phase::kIdle || pulls_.parked_pulls() != 0) {
                                          return std::nullopt;
                                        }
                                        return io_.moved_at_ms();
                                      },
                                      .close = [this] { close(); }});
  if (!seat.is_ok()) return seat.status();
  seat_ = std::move(seat).value();
  accounts_.open(std::move(name), weak_from_this());
  return Status::ok();
}

Status Connection::check_before_body(const FrameHeader& header, const TableDescriptor* first) {
  if (first == nullptr) {
    SR_RETURN_IF_ERROR(check_access(header));
    return check_route(core_, header);
  }
  const auto schema = core_.store->schema(first->table_id);
  return schema ? grant_.allows_table(schema->name) : Status::ok();
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
  const bool needs_none = *proof == ProofDigest{};
  if (!needs_none && (!is_of(worker_) || CRYPTO_memcmp(proof->data(), proof_.data(), proof->size()) != 0)) {
    return {Code::kFailedPrecondition, "worker " + std::to_string(header.worker_id) + " epoch " +
                                           std::to_string(header.worker_epoch) + " of job " +
                                           std::to_string(header.job_id) +
                                           ": this connection has not proved that it is that worker's"};
  }
  proven_ = WorkerPayload{.job_id = header.job_id, .worker_id = header.worker_id, .epoch = header.worker_epoch};
  return Status::ok();
}

// Reads one request, serves and answers it. False ends the connection.
Task<bool> Connection::serve_one() {
  if (io_.staged().size() < sizeof(FrameHeader) && !co_await io_.fill(sizeof(FrameHeader))) co_return false;
  FrameHeader header;
  std::memcpy(&header, io_.staged().data(), sizeof header);
  ++core_.counters.frames_received;
  ++frames_;
  const CountedRequest active(core_.counters.requests_active);
  if (Status status = check_frame(header, core_.options.max_frame_bytes); !status.is_ok()) {
    co_await refuse(header, status);
    co_return false;
  }
  const auto now = Clock::now();
  const std::uint32_t asked_ms = header.deadline_ms != 0 ? header.deadline_ms : core_.options.default_deadline_ms;
  Request request{.core = core_,
                  .grant = grant_,
                  .header = header,
                  .body = {},
                  .deadline = now + std::chrono::milliseconds(std::min(asked_ms, core_.options.max_deadline_ms)),
                  .arrival = {.at = now, .trace = {}}};
  const BodyReader::Check check = [this](const FrameHeader& frame, const TableDescriptor* first) {
    return check_before_body(frame, first);
  };
  Outcome outcome = Outcome::of(co_await bodies_.read(header, request.body, request.deadline, check));
  if (io_.is_closed()) co_return false;
  if (outcome.is_ok()) {
    io_.set_phase(Phase::kWorking);
    Status intact = check_crc(header, request.body.bytes);
    if (!intact.is_ok()) outcome = Outcome::broken_grammar(std::move(intact));  // a corrupt header may have led astray
  }
  if (outcome.is_ok()) {
    request.arrival.trace = trace_of(header, request.body.bytes);
    try {
      outcome = co_await bodies_.fetch_placed(request, check);
      if (io_.is_closed()) co_return false;
      if (outcome.is_ok()) outcome = co_await dispatch(request);
    } catch (...) {  // nothing was sent: FrameIo ends a connection whose reply it leaves unfinished
      outcome = Outcome::refused(caught_status("the request"));
    }
  }
  io_.consume(request.body.staged);
  request.body = Body{};
  bool is_alive = true;
  if (!outcome.is_ok()) {
    is_alive = co_await refuse(header, outcome.status, outcome.open_step);
  } else if (!outcome.frame.empty()) {
    is_alive = co_await io_.write_reply(outcome.frame);
  }
  if (!outcome.is_parked) {
    const auto kind = RequestTimes::kind_of(request.type());
    note_request(core_, *peer_, kind, header, outcome.status, request.arrival);
  }
  io_.set_phase(Phase::kIdle);
  co_return is_alive && !outcome.is_grammar_broken && !io_.is_closed();
}

}  // namespace sparserow::rpc
