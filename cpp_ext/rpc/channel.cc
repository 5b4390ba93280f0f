#include "rpc/channel.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "util/hash.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kStagingBytes = 64u << 10;
constexpr std::size_t kMaxSmallReply = 64u << 10;  // of an ACK or ERROR
constexpr std::size_t kPiecesPerWrite = 128;
constexpr int kReadsPerTurn = 16;  // so that one shard's flood does not starve the others
constexpr std::chrono::milliseconds kFirstBackoff{10};
constexpr std::chrono::milliseconds kLastBackoff{1000};

Status malformed(const std::string& what) { return Status(Code::kDataLoss, "malformed reply: " + what); }

std::uint32_t ms_until(Channel::Clock::time_point deadline, Channel::Clock::time_point now) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - now).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 1, UINT32_MAX));
}

}  // namespace

Channel::Channel(std::uint32_t index, const ClientOptions& options, ClientStats& stats)
    : index_(index),
      options_(options),
      stats_(stats),
      name_("shard " + std::to_string(index) + " (" + options.shards[index].host + ":" +
            std::to_string(options.shards[index].port) + ")"),
      jitter_(std::random_device{}()),
      staging_(kStagingBytes) {}

Status Channel::named(const Status& status) const { return Status(status.code(), name_ + ": " + status.message()); }

bool Channel::submit(Request& request) {
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

Status Channel::refusal_of(const Request& request) const {
  if (max_body_bytes_ == 0) return Status::ok();
  if (request.header.body_bytes > max_body_bytes_) {
    return Status(Code::kInvalidArgument, "the request has " + std::to_string(request.header.body_bytes) +
                                              " bytes, a frame has at most " + std::to_string(max_body_bytes_) +
                                              "; send fewer rows at a time");
  }
  if ((request.needs & ~features_) != 0) {
    return Status(Code::kFailedPrecondition, "it is of an earlier build and knows no conditional pulls");
  }
  return Status::ok();
}

Status ScatteredRows::deliver() const {
  const std::uint32_t asked = sink.expected.n;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] >= asked || (i > 0 && positions[i] <= positions[i - 1])) return malformed("positions of rows");
  }
  const std::size_t row_bytes = std::size_t{descriptor.dim} * size_of(descriptor.dtype);
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const std::size_t at = positions[i];
    convert_to_float(descriptor.dtype, rows.data() + i * row_bytes, sink.rows + at * descriptor.dim, descriptor.dim);
    sink.versions[at] = versions[i];
    if (sink.found != nullptr) sink.found[at] = found[i];
    if (sink.changed != nullptr) sink.changed[at] = 1;
  }
  return Status::ok();
}

void Channel::cancel(Request& request) {
  if (request.done) return;
  outstanding_.erase(request.header.request_id);
  if (receiving_ == &request) {
    receiving_ = nullptr;
    collecting_ = false;
    scattered_.reset();
    for (Piece& piece : pieces_) {
      piece.to = nullptr;
      piece.packed = nullptr;
    }
  }
  const auto queued = std::find(queue_.begin(), queue_.end(), &request);
  if (queued == queue_.end()) return;
  if (request.sending && stream_) {  // half a frame is out: the rest of the stream is lost with it
    failed_ = true;
    last_error_ = "a request was given up while it was being sent";
    stream_->reset();
  }
  queue_.erase(queued);
}

Status Channel::overdue(const Request& request, Clock::duration waited) const {
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

void Channel::finish(Request& request, Status status) {
  outstanding_.erase(request.header.request_id);
  request.status = status.is_ok() ? std::move(status) : named(status);
  request.done = true;
  if (request.open_requests != nullptr) --*request.open_requests;
}

void Channel::fail_all(const Status& status) {
  while (!outstanding_.empty()) finish(*outstanding_.begin()->second, status);
  queue_.clear();
}

// The connection is gone. What was asked and not answered will be asked again.
void Channel::break_off(const std::string& reason) {
  if (state_ == State::kReady) ++stats_.reconnects;
  stream_.reset();
  state_ = State::kDown;
  failed_ = false;
  last_error_ = reason;
  reset_inbox();
  queue_.clear();
  for (auto& [id, request] : outstanding_) {
    if (request->sending || request->sent) ++stats_.retries;
    request->sending = request->sent = request->header_sent = false;
    request->piece = request->offset = 0;
    queue_.push_back(request);
  }
  const auto now = Clock::now();
  auto backoff = std::min(kLastBackoff, kFirstBackoff * (1u << std::min(attempts_, 8u)));
  if (attempts_ == 0) backoff = std::chrono::milliseconds(0);
  const double spread = std::uniform_real_distribution<double>(0.5, 1.5)(jitter_);
  retry_at_ = now + std::chrono::duration_cast<Clock::duration>(backoff * spread);
  ++attempts_;
}

void Channel::dial(Clock::time_point now) {
  attempt_until_ = now + std::chrono::milliseconds(options_.connect_timeout_ms);
  const Endpoint& endpoint = options_.shards[index_];
  auto stream = start_tcp_connect(endpoint.host, endpoint.port);
  if (!stream.is_ok()) {
    break_off(stream.status().message());
    return;
  }
  stream_ = std::move(stream).value();
  state_ = State::kConnecting;
}

void Channel::greet() {
  if (const int error = connect_error(*stream_); error != 0) {
    break_off(std::strerror(error));
    return;
  }
  HelloPayload hello;
  hello.cluster_id = options_.cluster_id;
  hello.hash_version = kHashVersion;
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kHello);
  header.namespace_id = options_.namespace_id;
  header.flags = options_.frame_crc ? kFrameHasCrc : 0;
  hello_ = small_frame(header, SectionKind::kHello, bytes_of(hello), {});
  hello_sent_ = 0;
  state_ = State::kGreeting;
  flush();
}

void Channel::tick(Clock::time_point now) {
  if (failed_) break_off(last_error_);
  if (state_ == State::kDown && !queue_.empty() && now >= retry_at_) dial(now);
  if ((state_ == State::kConnecting || state_ == State::kGreeting) && now >= attempt_until_) {
    break_off(state_ == State::kConnecting ? "connecting timed out" : "no answer to HELLO");
  }
  if (state_ == State::kReady && refused_for_now_ && now >= paused_until_) flush();
}

bool Channel::wants_write() const noexcept {
  if (state_ == State::kConnecting) return true;
  if (state_ == State::kGreeting) return hello_sent_ < hello_.size();
  return state_ == State::kReady && !queue_.empty() && Clock::now() >= paused_until_;
}

pollfd Channel::interest() const noexcept {
  if (!stream_) return {-1, 0, 0};
  short events = state_ == State::kConnecting ? short{0} : short{POLLIN};
  if (wants_write()) events |= POLLOUT;
  return {stream_->fd(), events, 0};
}

Channel::Clock::time_point Channel::wake_at() const noexcept {
  if (state_ == State::kDown) return queue_.empty() ? Clock::time_point::max() : retry_at_;
  if (state_ != State::kReady) return attempt_until_;
  return refused_for_now_ && !queue_.empty() ? paused_until_ : Clock::time_point::max();
}

void Channel::on_events(short events) {
  if (events == 0 || !stream_) return;
  if (failed_) {
    break_off(last_error_);
    return;
  }
  if (state_ == State::kConnecting) {
    greet();
    return;
  }
  if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) receive();
  if (stream_ && (events & POLLOUT) != 0) flush();
}

// ---- Sending.

void Channel::begin_send(Request& request) {
  // A clocked pull gives the shard a little less, so that its answer ("waited for worker 3") arrives before
  // the caller gives up.
  std::uint32_t left = ms_until(request.deadline, Clock::now());
  if (request.header.step != kNoStep) left -= std::min(100u, left / 10);
  request.header.deadline_ms = std::max(1u, left);
  request.header.flags &= static_cast<std::uint8_t>(~kFrameHasCrc);
  request.header.crc32c = 0;
  if (options_.frame_crc) seal_crc(request.header, request.body);
  request.sending = true;
  ++stats_.frames_sent;
}

// Sends what the socket takes of one request; true when all of it is out.
bool Channel::send_front(Request& request) {
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
    if (moved.ended()) {
      failed_ = true;
      last_error_ = std::strerror(moved.error);
    }
    if (moved.bytes == 0) return false;
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
    const Transfer moved = stream_->try_write(std::span(&piece, 1));
    hello_sent_ += moved.bytes;
    if (moved.ended()) {
      failed_ = true;
      last_error_ = std::strerror(moved.error);
    }
  }
  if (state_ != State::kReady || (refused_for_now_ && Clock::now() < paused_until_)) return;
  while (!queue_.empty() && !failed_) {
    Request& request = *queue_.front();
    if (!send_front(request)) return;
    request.sending = false;
    request.sent = true;
    queue_.pop_front();
  }
}

// ---- Receiving.

void Channel::reset_inbox() {
  staged_begin_ = staged_end_ = 0;
  stage_ = Stage::kHeader;
  receiving_ = nullptr;
  collecting_ = false;
  pieces_.clear();
  scattered_.reset();
}

void Channel::receive() {
  for (int round = 0; round < kReadsPerTurn; ++round) {
    const bool direct = stage_ == Stage::kPieces && !pieces_.empty() && pieces_.front().to != nullptr;
    std::array<iovec, 2> into;
    std::size_t count = 0;
    if (direct) into[count++] = {pieces_.front().to, pieces_.front().left};
    into[count++] = {staging_.data() + staged_end_, staging_.size() - staged_end_};
    const Transfer moved = stream_->try_read(std::span(into.data(), count));
    if (moved.ended()) {
      break_off(moved.error == 0 ? "connection closed by the shard" : std::strerror(moved.error));
      return;
    }
    if (moved.bytes == 0) return;
    stats_.bytes_received += moved.bytes;
    std::size_t staged = moved.bytes;
    if (direct) {
      Piece& piece = pieces_.front();
      const std::size_t part = std::min(moved.bytes, piece.left);
      consumed(piece.to, part);
      piece.to += part;
      piece.left -= part;
      staged -= part;
    }
    staged_end_ += staged;
    if (Status status = digest(); !status.is_ok()) {
      // Nothing that this peer says can be trusted: whoever waits for it learns why.
      fail_all(status);
      if (stream_) break_off(status.message());
      return;
    }
    if (!stream_ || moved.bytes < into[0].iov_len) return;  // drained: poll says when there is more
  }
}

bool Channel::take(void* into, std::size_t bytes) {
  if (staged_end_ - staged_begin_ < bytes) {
    std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_end_ - staged_begin_);
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
    return false;
  }
  std::memcpy(into, staging_.data() + staged_begin_, bytes);
  staged_begin_ += bytes;
  if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
  return true;
}

void Channel::consumed(const void* bytes, std::size_t count) {
  body_left_ -= count;
  if ((reply_header_.flags & kFrameHasCrc) != 0) crc_ = crc32c(crc_, bytes, count);
}

// Moves staged bytes through the reply's stages until they are used up.
Status Channel::digest() {
  while (true) {
    switch (stage_) {
      case Stage::kHeader:
        if (!take(&reply_header_, sizeof reply_header_)) return Status::ok();
        SR_RETURN_IF_ERROR(on_header());
        break;
      case Stage::kSection: {
        if (sections_left_ == 0) {
          if (body_left_ != 0) return malformed("bytes after the last section");
          SR_RETURN_IF_ERROR(on_frame_end());
          if (!stream_) return Status::ok();
          break;
        }
        SectionHeader section;
        if (body_left_ < sizeof section) return malformed("truncated section");
        if (!take(&section, sizeof section)) return Status::ok();
        consumed(&section, sizeof section);
        if (section.reserved != 0 || padded8(section.payload_bytes) > body_left_ ||
            section.payload_bytes > body_left_) {
          return malformed("section length");
        }
        --sections_left_;
        section_bytes_ = section.payload_bytes;
        if (section.kind == static_cast<std::uint16_t>(SectionKind::kTableRows)) {
          if (section.payload_bytes < sizeof(TableDescriptor)) return malformed("table section length");
          stage_ = Stage::kDescriptor;
        } else if ((section.flags & kSectionRequired) != 0) {
          return malformed("section kind " + std::to_string(section.kind) + " in ROWS");
        } else {
          pieces_.push_back({.left = padded8(section.payload_bytes)});
          stage_ = Stage::kPieces;
        }
        break;
      }
      case Stage::kDescriptor:
        if (staged_end_ - staged_begin_ < sizeof(TableDescriptor)) {
          TableDescriptor unused;
          if (!take(&unused, sizeof unused)) return Status::ok();
        }
        SR_RETURN_IF_ERROR(on_descriptor());
        break;
      case Stage::kPieces:
        while (!pieces_.empty()) {
          Piece& piece = pieces_.front();
          const std::size_t part = std::min(piece.left, staged_end_ - staged_begin_);
          if (part > 0) {
            const std::byte* from = staging_.data() + staged_begin_;
            if (piece.to != nullptr) {
              std::memcpy(piece.to, from, part);
              piece.to += part;
            }
            consumed(from, part);
            piece.left -= part;
            staged_begin_ += part;
            if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
          }
          if (piece.left > 0) return Status::ok();
          finish_piece(piece);
          pieces_.pop_front();
        }
        if (receiving_ == nullptr && body_left_ > 0) {  // given up in the middle of its reply
          drop_body();
        } else if (receiving_ == nullptr || collecting_) {
          SR_RETURN_IF_ERROR(on_frame_end());
          if (!stream_) return Status::ok();
        } else {
          if (const auto scattered = std::move(scattered_)) SR_RETURN_IF_ERROR(scattered->deliver());
          stage_ = Stage::kSection;
        }
        break;
    }
  }
}

void Channel::finish_piece(const Piece& piece) {
  if (piece.packed != nullptr && piece.floats > 0) {
    convert_to_float(piece.dtype, piece.packed, piece.widened, piece.floats);
  }
}

void Channel::collect_body() {
  collected_.resize(body_left_);
  collecting_ = true;
  pieces_.clear();
  pieces_.push_back({.to = collected_.data(), .left = body_left_});
  stage_ = Stage::kPieces;
}

void Channel::drop_body() {
  receiving_ = nullptr;
  collecting_ = false;
  pieces_.clear();
  pieces_.push_back({.left = body_left_});
  stage_ = Stage::kPieces;
}

Status Channel::on_header() {
  if (Status status = check_header(reply_header_, UINT32_MAX); !status.is_ok()) return malformed(status.message());
  FrameHeader plain = reply_header_;
  plain.crc32c = 0;
  if ((plain.flags & kFrameHasCrc) != 0) crc_ = crc32c(0, &plain, sizeof plain);
  body_left_ = reply_header_.body_bytes;
  sections_left_ = reply_header_.section_count;
  const auto type = static_cast<FrameType>(reply_header_.type);
  if (state_ == State::kGreeting || (type == FrameType::kError && reply_header_.request_id == 0)) {
    if (body_left_ > kMaxSmallReply) return malformed("HELLO_ACK of " + std::to_string(body_left_) + " bytes");
    receiving_ = nullptr;
    collect_body();
    return Status::ok();
  }
  const auto found = outstanding_.find(reply_header_.request_id);
  const bool refused_early = type == FrameType::kError && found != outstanding_.end() && found->second->sending;
  if (found == outstanding_.end() || !(found->second->sent || refused_early)) {  // given up meanwhile
    drop_body();
    return Status::ok();
  }
  receiving_ = found->second;
  if (type != receiving_->expected && type != FrameType::kError) {
    return malformed(std::string(type_name(type)) + " in reply to " +
                     std::string(type_name(static_cast<FrameType>(receiving_->header.type))));
  }
  if (type == FrameType::kRows) {
    sink_ = 0;
    collecting_ = false;
    stage_ = Stage::kSection;
    return Status::ok();
  }
  if (type != FrameType::kScanPage && body_left_ > kMaxSmallReply) {
    return malformed(std::string(type_name(type)) + " of " + std::to_string(body_left_) + " bytes");
  }
  collect_body();
  return Status::ok();
}

Status Channel::on_descriptor() {
  TableDescriptor descriptor;
  take(&descriptor, sizeof descriptor);
  consumed(&descriptor, sizeof descriptor);
  if (receiving_ == nullptr) {  // given up between two sections
    drop_body();
    return Status::ok();
  }
  if (sink_ == receiving_->sinks.size()) return malformed("more tables than asked for");
  const RowsSink& sink = receiving_->sinks[sink_++];
  const auto layout = layout_of(SectionKind::kTableRows, descriptor.flags);
  const bool conditional = layout.is_ok() && layout.value().positions;
  TableDescriptor expected = sink.expected;
  if (conditional && descriptor.n < expected.n) expected.n = descriptor.n;
  if (std::memcmp(&descriptor, &expected, sizeof descriptor) != 0 || !layout.is_ok() ||
      table_payload_bytes(descriptor, layout.value()) != section_bytes_) {
    return malformed("table " + std::to_string(descriptor.table_id) + " is not what was asked for");
  }
  const std::size_t n = descriptor.n;
  const std::size_t floats = n * descriptor.dim;
  const std::size_t bytes = floats * size_of(descriptor.dtype);
  stage_ = Stage::kPieces;
  if (conditional) {
    scattered_ = std::make_unique<ScatteredRows>(ScatteredRows{.sink = sink,
                                                               .descriptor = descriptor,
                                                               .positions = std::vector<std::uint32_t>(n),
                                                               .rows = std::vector<std::byte>(bytes),
                                                               .versions = std::vector<std::uint64_t>(n),
                                                               .found = {}});
    ScatteredRows& parts = *scattered_;
    pieces_.push_back({.to = reinterpret_cast<std::byte*>(parts.positions.data()), .left = n * 4});
    pieces_.push_back({.left = padded8(n * 4) - n * 4});
    pieces_.push_back({.to = parts.rows.data(), .left = bytes});
    pieces_.push_back({.left = padded8(bytes) - bytes});
    pieces_.push_back({.to = reinterpret_cast<std::byte*>(parts.versions.data()), .left = n * 8});
    if (layout.value().found) {
      parts.found.resize(n);
      pieces_.push_back({.to = reinterpret_cast<std::byte*>(parts.found.data()), .left = n});
      pieces_.push_back({.left = padded8(n) - n});
    }
    return Status::ok();
  }
  if (descriptor.dtype == Dtype::kFloat32) {
    pieces_.push_back({.to = reinterpret_cast<std::byte*>(sink.rows), .left = bytes});
  } else {
    if (narrow_.size() < bytes) narrow_.resize(bytes);
    pieces_.push_back({.to = narrow_.data(),
                       .left = bytes,
                       .packed = narrow_.data(),
                       .widened = sink.rows,
                       .floats = floats,
                       .dtype = descriptor.dtype});
  }
  pieces_.push_back({.left = padded8(bytes) - bytes});
  if (layout.value().versions) pieces_.push_back({.to = reinterpret_cast<std::byte*>(sink.versions), .left = n * 8});
  if (layout.value().found) {
    pieces_.push_back({.to = reinterpret_cast<std::byte*>(sink.found), .left = n});
    pieces_.push_back({.left = padded8(n) - n});
  }
  return Status::ok();
}

Status Channel::on_frame_end() {
  stage_ = Stage::kHeader;
  if ((reply_header_.flags & kFrameHasCrc) != 0 && crc_ != reply_header_.crc32c) {
    return Status(Code::kDataLoss, "reply checksum does not match");
  }
  if (state_ == State::kGreeting || (collecting_ && receiving_ == nullptr)) return on_hello_ack();
  if (receiving_ == nullptr) return Status::ok();
  Request& request = *receiving_;
  receiving_ = nullptr;
  const bool collected = std::exchange(collecting_, false);
  if (static_cast<FrameType>(reply_header_.type) == FrameType::kRows) {
    if (sink_ != request.sinks.size()) return malformed("fewer tables than asked for");
  } else if (collected && static_cast<FrameType>(reply_header_.type) == FrameType::kError) {
    SectionReader sections(collected_, reply_header_.section_count);
    auto section = sections.next();
    if (!section.is_ok() || !section.value() || section.value()->kind != SectionKind::kError) {
      return malformed("ERROR section");
    }
    Status status = parse_error(section.value()->payload);
    if (!request.sent) {  // refused by its header: the shard will not read the rest
      std::erase(queue_, &request);
      finish(request, std::move(status));
      break_off("a request was refused while it was being sent");
      return Status::ok();
    }
    if (status.code() == Code::kUnavailable) {  // draining, or not told yet: asked again after a pause
      refused_for_now_ = true;
      last_error_ = status.message();
      const auto backoff = std::min(kLastBackoff, kFirstBackoff * (1u << std::min(attempts_++, 8u)));
      paused_until_ = Clock::now() + backoff;
      request.sent = request.header_sent = false;
      request.piece = request.offset = 0;
      queue_.push_back(&request);
      ++stats_.retries;
      return Status::ok();
    }
    finish(request, std::move(status));
    return Status::ok();
  } else {
    request.reply = collected_;
  }
  attempts_ = 0;
  refused_for_now_ = false;
  finish(request, Status::ok());
  return Status::ok();
}

// HELLO_ACK, or an ERROR that answers no request: what the shard thinks of this connection.
Status Channel::on_hello_ack() {
  collecting_ = false;
  SectionReader sections(collected_, reply_header_.section_count);
  auto section = sections.next();
  if (!section.is_ok() || !section.value()) return malformed("HELLO_ACK");
  if (section.value()->kind == SectionKind::kError) {
    const Status status = parse_error(section.value()->payload);
    if (!is_retryable(status.code())) return status;  // fails whoever waits: it would be refused again
    break_off(status.message());
    return Status::ok();
  }
  if (section.value()->kind != SectionKind::kHello) return malformed("HELLO_ACK");
  auto hello = parse_hello(section.value()->payload);
  if (!hello.is_ok()) return malformed(hello.status().message());
  const HelloPayload& shard = hello.value();
  if (options_.cluster_id != 0 && shard.cluster_id != options_.cluster_id) {
    return Status(Code::kFailedPrecondition, "cluster id: the shard belongs to " + std::to_string(shard.cluster_id) +
                                                 ", this client to " + std::to_string(options_.cluster_id));
  }
  if (shard.hash_version != kHashVersion || shard.slot_count != options_.slot_owner.size()) {
    return Status(Code::kFailedPrecondition, "the shard has hash version " + std::to_string(shard.hash_version) +
                                                 " and " + std::to_string(shard.slot_count) + " slots, this client " +
                                                 std::to_string(kHashVersion) + " and " +
                                                 std::to_string(options_.slot_owner.size()));
  }
  if (shard.shard_index != index_) {
    return Status(Code::kFailedPrecondition, "the server there is shard " + std::to_string(shard.shard_index));
  }
  max_body_bytes_ = shard.max_frame_bytes;
  features_ = shard.features;
  state_ = State::kReady;
  was_ready_ = true;
  refused_for_now_ = false;
  paused_until_ = {};
  for (auto at = queue_.begin(); at != queue_.end();) {
    Request& request = **at;
    const bool only_connects = request.expected == FrameType::kHelloAck;
    Status refusal = refusal_of(request);
    if (!only_connects && refusal.is_ok()) {
      ++at;
      continue;
    }
    at = queue_.erase(at);
    finish(request, std::move(refusal));
  }
  flush();
  return Status::ok();
}

}  // namespace sparserow::rpc
