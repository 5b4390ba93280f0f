// Channel: what it reads, from bytes to finished requests.
#include <algorithm>
#include <array>
#include <cstring>

#include "rpc/client/channel.h"
#include "util/hash.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kMaxSmallReply = 64u << 10;  // of an ACK or ERROR
constexpr int kReadsPerTurn = 16;                  // so that one shard's flood does not starve the others

Status malformed(const std::string& what) { return Status(Code::kDataLoss, "malformed reply: " + what); }

}  // namespace

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
      break_off(moved.error == 0 ? closed_reason() : stream_->why(moved));
      return;
    }
    if (moved.bytes == 0) {
      read_waits_for_write_ = moved.want == Transfer::Want::kWrite;
      return;
    }
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
  if ((reply_header_.flags & (kFrameHasCrc | kFrameCrcLast)) != 0) crc_ = crc32c(crc_, bytes, count);
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
        if (sections_left_ == 1 && (reply_header_.flags & kFrameCrcLast) != 0) {
          stage_ = Stage::kChecksum;
          break;
        }
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
      case Stage::kChecksum: {
        struct {
          SectionHeader section;
          ChecksumPayload checksum;
        } last;
        if (body_left_ != sizeof last) return malformed("CHECKSUM section length");
        if (!take(&last, sizeof last)) return Status::ok();
        if (last.section.kind != static_cast<std::uint16_t>(SectionKind::kChecksum) ||
            last.section.payload_bytes != sizeof last.checksum) {
          return malformed("its last section is not CHECKSUM");
        }
        if (crc_ != last.checksum.crc32c) return Status(Code::kDataLoss, "reply checksum does not match");
        consumed(&last, sizeof last);
        --sections_left_;
        stage_ = Stage::kSection;
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
  if ((plain.flags & (kFrameHasCrc | kFrameCrcLast)) != 0) crc_ = crc32c(0, &plain, sizeof plain);
  body_left_ = reply_header_.body_bytes;
  sections_left_ = reply_header_.section_count;
  const auto type = static_cast<FrameType>(reply_header_.type);
  if (state_ == State::kGreeting || state_ == State::kReplaying ||
      (type == FrameType::kError && reply_header_.request_id == 0)) {
    if (body_left_ > kMaxSmallReply) return malformed("reply of " + std::to_string(body_left_) + " bytes");
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
  if (state_ == State::kReplaying) return on_replay_reply();
  if (state_ == State::kGreeting || (collecting_ && receiving_ == nullptr)) return on_hello_ack();
  if (receiving_ == nullptr) return Status::ok();
  Request& request = *receiving_;
  receiving_ = nullptr;
  const bool collected = std::exchange(collecting_, false);
  if (static_cast<FrameType>(reply_header_.type) == FrameType::kRows) {
    if (sink_ != request.sinks.size()) return malformed("fewer tables than asked for");
    if (request.reply_sequence != nullptr) *request.reply_sequence = reply_header_.sequence;
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
    if (is_refused_for_now(request, status)) {
      last_error_ = status.message();
      pause();
      ask_again(request);
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
  note_incarnation(shard.incarnation);
  must_replay_ ? begin_replay() : flush();
  return Status::ok();
}

}  // namespace sparserow::rpc
