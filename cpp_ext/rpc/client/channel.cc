#include "rpc/client/channel.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "rpc/transport/local_socket.h"
#include "util/hash.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kPiecesPerWrite = 128;
constexpr std::size_t kMostEnding = 8;  // connections that this side has left and on which the shard may still write
constexpr std::chrono::milliseconds kEndingPause{5};
constexpr std::chrono::milliseconds kFirstBackoff{10};
constexpr std::chrono::milliseconds kFirstPause{1};  // a save holds commits for a few of them
constexpr std::chrono::milliseconds kLastBackoff{1000};

std::uint32_t ms_until(Channel::Clock::time_point deadline, Channel::Clock::time_point now) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - now).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 1, UINT32_MAX));
}

// "shard 1 (127.0.0.1:7001)"
std::string name_of(std::uint32_t index, const Endpoint& endpoint) {
  std::string name = "shard " + std::to_string(index);
  name += " (";
  name += endpoint.host;
  name += ':';
  name += std::to_string(endpoint.port);
  name += ')';
  return name;
}

}  // namespace

Channel::Channel(std::uint32_t index, const ClientOptions& options, ClientStats& stats,
                 const std::atomic<Clock::rep>& grace, ClientArena& arena)
    : index_(index),
      options_(options),
      stats_(stats),
      grace_(grace),
      endpoint_(options.shards[index]),
      name_(name_of(index, endpoint_)),
      jitter_(std::random_device{}()),
      arena_(arena),
      replay_(options.replay_bytes, options.frame_crc) {}

Channel::Clock::duration Channel::backoff() const noexcept {
  return std::min(kLastBackoff, kFirstBackoff * (1u << std::min(attempts_, 8u)));
}

Status Channel::named(const Status& status) const { return Status(status.code(), name_ + ": " + status.message()); }

void Channel::move(Endpoint endpoint) {
  if (endpoint.host == endpoint_.host && endpoint.port == endpoint_.port) return;
  endpoint_ = std::move(endpoint);
  is_here_.reset();
  name_ = name_of(index_, endpoint_);
  renew("it listens elsewhere now");
}

void Channel::renew(std::string reason) {
  last_error_ = std::move(reason);
  attempts_ = 0;
  retry_at_ = {};
  failed_ = state_ != State::kDown;  // the leader closes the connection
}

bool Channel::submit(ShardRequest& request) {
  request.header.request_id = next_id_++;
  if (request.expected == FrameType::kHelloAck && state_ == State::kReady) {
    finish(request, Status::ok());
    return false;
  }
  if (Status status = refusal_of(request); !status.is_ok()) {
    finish(request, std::move(status));
    return false;
  }
  outstanding_[request.header.request_id] = &request;
  queue_.push_back(&request);
  if (state_ == State::kReady) flush();
  return failed_ || state_ != State::kReady || !queue_.empty();
}

Status Channel::refusal_of(const ShardRequest& request) const {
  const std::uint32_t most = max_body_bytes_ == 0 ? UINT32_MAX - 1 : max_body_bytes_;
  if (request.header.body_bytes > most) {
    const char* more = request.header.body_bytes == UINT32_MAX ? " or more" : "";
    return Status(Code::kInvalidArgument, "the request has " + std::to_string(request.header.body_bytes) + more +
                                              " bytes, a frame has at most " + std::to_string(most) +
                                              "; send fewer rows at a time");
  }
  if (max_body_bytes_ == 0) return Status::ok();
  if ((request.needs & ~features_) != 0) {
    return Status(Code::kFailedPrecondition, "it is of an earlier build, which cannot answer such a request");
  }
  return Status::ok();
}

void Channel::cancel(ShardRequest& request) {
  if (request.done) return;
  request.may_be_taken |= request.sent;
  outstanding_.erase(request.header.request_id);
  if (lane_ && (request.sent || request.sending)) lane_->give_up(request);
  if (request.waits_for_end) ChannelLane::abandon_rows(request);
  if (receiving_ == &request) {
    receiving_ = nullptr;
    reader_.abandon();
  }
  const auto queued = std::find(queue_.begin(), queue_.end(), &request);
  if (queued == queue_.end()) return;
  if (request.sending && stream_) {  // half a frame is out: the rest of the stream is lost with it
    failed_ = true;
    last_error_ = "a request was given up while it was being sent";
    stream_->shutdown_write();  // the shard ends it, which the leader sees
  }
  queue_.erase(queued);
}

Status Channel::overdue(const ShardRequest& request, Clock::duration waited) const {
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%.1f s", std::chrono::duration<double>(waited).count());
  if (state_ != State::kReady || failed_) {
    return named(Status(Code::kUnavailable, "cannot be reached: " + last_error_ + "; gave up after " + seconds.data()));
  }
  if (refused_for_now_) {
    return named(Status(Code::kUnavailable, last_error_ + "; gave up after " + seconds.data()));
  }
  const auto type = static_cast<FrameType>(request.header.type);
  return named(
      Status(Code::kDeadlineExceeded, "no reply to " + std::string(type_name(type)) + " within " + seconds.data()));
}

void Channel::finish(ShardRequest& request, Status status) {
  request.names.body.reset();
  outstanding_.erase(request.header.request_id);
  request.status = status.is_ok() ? std::move(status) : named(status);
  request.done = true;
  if (request.open_requests != nullptr) --*request.open_requests;
}

void Channel::fail_all(const Status& status) {
  while (!outstanding_.empty()) {
    ShardRequest& request = *outstanding_.begin()->second;
    request.may_be_taken |= request.sent;
    if (lane_ && (request.sent || request.sending)) lane_->give_up(request);
    finish(request, status);
  }
  queue_.clear();
}

void Channel::pause() {
  refused_for_now_ = true;
  paused_until_ =
      Clock::now() + std::min<Clock::duration>(kLastBackoff, kFirstPause * (1u << std::min(attempts_, 12u)));
  ++attempts_;
}

// Ends a pause: the shard has answered, so refused requests are sent again at once. A pause that stayed would leave
// them without a timer, as wake_at() and tick() look at it for a channel that is refused alone.
void Channel::resume() noexcept {
  refused_for_now_ = false;
  paused_until_ = {};
}

// Draining, or not notified yet; or it waited in vain for workers, while a shard that they need is being restored.
bool Channel::is_refused_for_now(const ShardRequest& request, const Status& status) const {
  if (status.code() == Code::kUnavailable) return true;
  return status.code() == Code::kDeadlineExceeded && request.header.step != kNoStep &&
         Clock::now().time_since_epoch().count() < grace_.load();
}

void Channel::ask_again(ShardRequest& request) {
  request.deadline = std::max(request.deadline, Clock::time_point(Clock::duration(grace_.load())));
  request.sent = request.header_sent = false;
  request.piece = request.offset = 0;
  queue_.push_back(&request);
  ++stats_.retries;
}

// The connection is gone. What was asked and not answered will be asked again.
void Channel::break_off(const std::string& reason) {
  if (state_ == State::kReady) ++stats_.reconnects;
  avoids_local_ = is_local_ && (state_ == State::kConnecting || state_ == State::kGreeting);
  is_local_ = false;
  ChannelLane::Owners named = lane_ ? lane_->take_late() : ChannelLane::Owners();
  const bool may_be_written = lane_ && !has_peer_ended_;
  for (auto& [id, request] : outstanding_) {
    if (!lane_ || !(request->sent || request->sending)) continue;
    ChannelLane::add_owners(*request, named);
    request->waits_for_end = may_be_written && request->names.has_rows;
    // A shard only reads gradients, so they may be sent again at once; the session must not change them afterwards.
    if (may_be_written && !request->sources.empty()) ChannelLane::abandon_rows(*request);
  }
  if (may_be_written && !named.empty()) {
    stream_->shutdown_write();
    ending_.push_back({std::move(stream_), std::move(named)});
  }
  stream_.reset();
  write_waits_for_read_ = read_waits_for_write_ = false;
  state_ = State::kDown;
  failed_ = false;
  last_error_ = reason;
  receiving_ = nullptr;
  reader_.reset();
  lane_.reset();
  queue_.clear();
  for (auto& [id, request] : outstanding_) {
    if (request->sending || request->sent) ++stats_.retries;
    request->may_be_taken |= request->sent;
    request->sending = request->sent = request->header_sent = false;
    request->piece = request->offset = 0;
    queue_.push_back(request);
  }
  const auto now = Clock::now();
  const Clock::duration backoff = attempts_ == 0 ? Clock::duration(0) : this->backoff();
  const double spread = std::uniform_real_distribution<double>(0.5, 1.5)(jitter_);
  retry_at_ = now + std::chrono::duration_cast<Clock::duration>(backoff * spread);
  ++attempts_;
}

// A shard that refuses a connection says why and closes it, which a write may find first.
void Channel::end_failed() {
  if (state_ == State::kGreeting && has_peer_ended_) receive();
  if (failed_) break_off(last_error_);
}

void Channel::dial(Clock::time_point now) {
  attempt_until_ = now + std::chrono::milliseconds(options_.connect_timeout_ms);
  auto stream = open_stream();
  if (!stream.is_ok()) {
    break_off(stream.status().message());
    return;
  }
  stream_ = std::move(stream).value();
  has_peer_ended_ = false;
  state_ = State::kConnecting;
}

// A client with TLS does not use local sockets, because they prove the peer's user and not its certificate.
Result<std::unique_ptr<Stream>> Channel::open_stream() {
  const bool is_forced = options_.transport == Transport::kSharedMemory;
  if (is_forced && options_.tls) return Status(Code::kUnavailable, "transport 'shm': TLS is on now");
  if (is_forced || (options_.transport == Transport::kAuto && !options_.tls && !avoids_local_)) {
    if (!is_here_) is_here_ = is_of_this_host(endpoint_.host);
    auto local = *is_here_ ? connect_local(local_socket_name(options_.cluster_id, index_, endpoint_.port))
                           : Status(Code::kUnavailable, "it is of another host");
    is_local_ = local.is_ok();
    if (is_local_) return local;
    if (is_forced) return Status(local.status().code(), "transport 'shm': " + local.status().message());
  }
  auto stream = start_connect(endpoint_.host, endpoint_.port);
  if (!stream.is_ok() || !options_.tls) return stream;
  return options_.tls->connect(std::move(stream).value(), endpoint_.host);
}

const char* Channel::transport() const noexcept {
  if (state_ != State::kReady && state_ != State::kReplaying) return "none";
  if (lane_) return "shm";
  if (is_local_) return "unix";
  return options_.tls ? "tls" : "tcp";
}

void Channel::greet() {
  if (const int error = connect_error(*stream_); error != 0) {
    break_off(std::strerror(error));
    return;
  }
  if (options_.lane_bytes > 0 && is_local_ && ending_.size() < kMostEnding) {
    auto arena = arena_.open();
    if (arena.is_ok()) {
      lane_ = std::make_unique<ChannelLane>(std::move(arena).value(), options_.least_in_lane);
    } else if (options_.transport == Transport::kSharedMemory) {
      break_off("transport 'shm': " + arena.status().message());
      return;
    }
  }
  HelloPayload hello;
  hello.cluster_id = options_.cluster_id;
  if (options_.replay_bytes > 0) hello.features |= kFeatureIncarnation;
  if (options_.frame_crc) hello.features |= kFeatureChecksumLast;
  if (lane_) hello.features |= kFeatureLane;
  hello.hash_version = kHashVersion;
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kHello);
  header.namespace_id = options_.namespace_id;
  header.flags = options_.frame_crc ? kFrameHasCrc : 0;
  hello.token_bytes = static_cast<std::uint32_t>(options_.token.size());
  hello_ = small_frame(header, SectionKind::kHello, bytes_of(hello), std::as_bytes(std::span(options_.token)));
  if (options_.worker_proof != std::array<std::byte, 16>{}) {
    const WorkerPayload worker{.job_id = options_.job_id,
                               .worker_id = options_.worker_id,
                               .epoch = options_.worker_epoch,
                               .proof = options_.worker_proof};
    hello_ = with_section(hello_, SectionKind::kWorker, bytes_of(worker));
  }
  if (lane_) {
    const LanePayload lane{.bytes = lane_->arena().bytes()};
    hello_ = with_section(hello_, SectionKind::kLane, bytes_of(lane));
  }
  hello_sent_ = 0;
  state_ = State::kGreeting;
  flush();
}

void Channel::tick(Clock::time_point now) {
  if (failed_) end_failed();
  if (state_ == State::kDown && !queue_.empty() && now >= retry_at_) {
    if (waits_for_end()) {
      retry_at_ = now + kEndingPause;
    } else {
      dial(now);
    }
  }
  if ((state_ == State::kConnecting || state_ == State::kGreeting) && now >= attempt_until_) {
    break_off(state_ == State::kConnecting ? "connecting timed out" : "no answer to HELLO");
  }
  if ((state_ == State::kReady || state_ == State::kReplaying) && refused_for_now_ && now >= paused_until_) flush();
  if (stream_ && stream_->has_buffered()) receive();  // poll would not show it
}

bool Channel::waits_for_end() {
  std::erase_if(ending_, [](const EndingLane& one) { return one.has_ended(); });
  bool waits = false;
  for (auto& [id, request] : outstanding_) {
    request->waits_for_end &= !ending_.empty();
    waits |= request->waits_for_end;
  }
  if (waits) last_error_ = "the process at its former connection may still write to rows of this request";
  return waits;
}

bool Channel::wants_write() const noexcept {
  if (state_ == State::kConnecting || read_waits_for_write_) return true;
  if (write_waits_for_read_) return false;
  if (state_ == State::kGreeting) return hello_sent_ < hello_.size();
  if (Clock::now() < paused_until_) return false;
  return state_ == State::kReplaying ? !replay_.unsent().empty() : state_ == State::kReady && !queue_.empty();
}

pollfd Channel::interest() const noexcept {
  if (!stream_) return {-1, 0, 0};
  short events = state_ == State::kConnecting ? short{0} : short{POLLIN};
  if (wants_write()) events |= POLLOUT;
  stream_->be_readable_from(reader_.awaited());  // before each poll, as a reader may stop before all that came is taken
  return {stream_->fd(), events, 0};
}

Channel::Clock::time_point Channel::wake_at() const noexcept {
  if (state_ == State::kDown) return queue_.empty() ? Clock::time_point::max() : retry_at_;
  if (stream_ && stream_->has_buffered()) return Clock::time_point::min();
  if (state_ == State::kReplaying) return refused_for_now_ ? paused_until_ : Clock::time_point::max();
  if (state_ != State::kReady) return attempt_until_;
  return refused_for_now_ && !queue_.empty() ? paused_until_ : Clock::time_point::max();
}

void Channel::on_events(short events) {
  if (events == 0 || !stream_) return;
  if (failed_) {
    end_failed();
    return;
  }
  if (state_ == State::kConnecting) {
    greet();
    return;
  }
  const bool is_readable = (events & (POLLIN | POLLHUP | POLLERR)) != 0;
  const bool reads_again = std::exchange(read_waits_for_write_, false) && (events & POLLOUT) != 0;
  const bool writes_again = std::exchange(write_waits_for_read_, false) && is_readable;
  if (is_readable || reads_again) receive();
  if (stream_ && ((events & POLLOUT) != 0 || writes_again)) flush();
}

std::string Channel::closed_reason() const {
  if (state_ == State::kReady || options_.tls) return "connection closed by the shard";
  return "connection closed by the shard before it answered HELLO; does it want TLS?";
}

void Channel::stopped(const Transfer& transfer) {
  if (transfer.ended()) {
    failed_ = true;
    has_peer_ended_ = true;
    last_error_ = stream_->why(transfer);
  }
  write_waits_for_read_ = transfer.want == Transfer::Want::kRead;
}

// ---- Sending.

void Channel::begin_send(ShardRequest& request) {
  // A clocked pull gives the shard a little less, so that its answer ("waited for worker 3") arrives before
  // the caller gives up.
  std::uint32_t left = ms_until(request.deadline, Clock::now());
  if (request.header.step != kNoStep) left -= std::min(250u, left / 10);
  ChannelLane::forget(request);
  if (lane_ && !options_.frame_crc && !lane_->name(request, max_body_bytes_)) ++stats_.lane_full;
  request.header.version = protocol_;
  request.header.deadline_ms = std::max(1u, left);
  request.header.flags &= static_cast<std::uint8_t>(~kFrameHasCrc);
  request.header.crc32c = 0;
  if (options_.frame_crc) seal_crc(request.header, request.body);
  request.sending = true;
  ++stats_.frames_sent;
}

// Sends what the socket takes of one request; true when all of it is out.
bool Channel::send_front(ShardRequest& request) {
  if (!request.sending) begin_send(request);
  while (true) {
    std::array<iovec, kPiecesPerWrite> pieces;
    std::size_t count = 0;
    std::size_t wanted = 0;
    if (!request.header_sent) {
      pieces[count++] = {reinterpret_cast<std::byte*>(&request.header) + request.offset,
                         sizeof(FrameHeader) - request.offset};
      wanted = pieces[0].iov_len;
    }
    std::size_t offset = request.header_sent ? request.offset : 0;
    for (std::size_t i = request.piece; i < request.body.size() && count < pieces.size(); ++i) {
      pieces[count++] = {static_cast<std::byte*>(request.body[i].iov_base) + offset, request.body[i].iov_len - offset};
      wanted += pieces[count - 1].iov_len;
      offset = 0;
    }
    if (wanted == 0) return true;
    const Transfer moved = stream_->try_write(std::span(pieces.data(), count));
    if (moved.bytes == 0) {
      stopped(moved);
      return false;
    }
    stats_.bytes_sent += moved.bytes;
    std::size_t left = moved.bytes;
    if (!request.header_sent) {
      const std::size_t part = std::min(left, sizeof(FrameHeader) - request.offset);
      request.offset += part;
      left -= part;
      if (request.offset < sizeof(FrameHeader)) return false;
      request.header_sent = true;
      request.offset = 0;
    }
    while (request.piece < request.body.size() && left >= request.body[request.piece].iov_len - request.offset) {
      left -= request.body[request.piece].iov_len - request.offset;
      ++request.piece;
      request.offset = 0;
    }
    request.offset += left;
    if (request.piece == request.body.size()) return true;
    if (moved.bytes < wanted) return false;  // the socket is full
  }
}

void Channel::flush() {
  if (failed_) return;
  if (state_ == State::kGreeting && hello_sent_ < hello_.size()) {
    const iovec piece{hello_.data() + hello_sent_, hello_.size() - hello_sent_};
    const bool passes = lane_ && hello_sent_ == 0;
    const Transfer moved = passes ? stream_->try_write_with(std::span(&piece, 1), lane_->arena().descriptor())
                                  : stream_->try_write(std::span(&piece, 1));
    hello_sent_ += moved.bytes;
    if (moved.bytes == 0) stopped(moved);
  }
  if (state_ == State::kReplaying) send_replay();
  if (state_ != State::kReady || (refused_for_now_ && Clock::now() < paused_until_)) return;
  while (!queue_.empty() && !failed_) {
    ShardRequest& request = *queue_.front();
    if (!send_front(request)) return;
    request.sending = false;
    request.sent = true;
    queue_.pop_front();
  }
}

}  // namespace sparserow::rpc
