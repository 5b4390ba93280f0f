// Channel: what it reads, from bytes to finished requests.
#include <algorithm>
#include <utility>

#include "rpc/client/channel.h"
#include "util/hash.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kMaxSmallReply = 64u << 10;  // of an ACK or ERROR
constexpr int kReadsPerTurn = 16;                  // so that one shard's flood does not starve the others

}  // namespace

void Channel::receive() {
  for (int round = 0; round < kReadsPerTurn; ++round) {
    const auto into = reader_.space();
    const std::size_t first_bytes = into[0].iov_len;
    const Transfer moved = stream_->try_read(into);
    if (moved.ended()) {
      has_peer_ended_ = true;
      break_off(moved.error == 0 ? closed_reason() : stream_->why(moved));
      return;
    }
    if (moved.bytes == 0) {
      read_waits_for_write_ = moved.want == Transfer::Want::kWrite;
      return;
    }
    stats_.bytes_received += moved.bytes;
    reader_.filled(moved.bytes);
    if (Status status = read_replies(); !status.is_ok()) {
      // Nothing that this peer sends can be trusted: each of its requests fails with the reason.
      fail_all(status);
      if (stream_) break_off(status.message());
      return;
    }
    if (!stream_ || moved.bytes < first_bytes) return;  // drained: poll says when there is more
  }
}

Status Channel::read_replies() {
  while (stream_) {
    const auto event = reader_.next();
    if (!event.is_ok()) return event.status();
    if (event.value() == ReplyReader::Event::kStarved) return Status::ok();
    if (event.value() == ReplyReader::Event::kHeader) {
      SR_RETURN_IF_ERROR(on_header());
    } else {
      SR_RETURN_IF_ERROR(on_reply());
    }
  }
  return Status::ok();
}

// Says where the body of a reply goes.
Status Channel::on_header() {
  const FrameHeader& header = reader_.header();
  const auto type = static_cast<FrameType>(header.type);
  receiving_ = nullptr;
  if (state_ == State::kGreeting || state_ == State::kReplaying ||
      (type == FrameType::kError && header.request_id == 0)) {
    if (header.body_bytes > kMaxSmallReply) {
      return malformed_reply("reply of " + std::to_string(header.body_bytes) + " bytes");
    }
    reader_.collect();
    return Status::ok();
  }
  const auto found = outstanding_.find(header.request_id);
  const bool is_refused_early = type == FrameType::kError && found != outstanding_.end() && found->second->sending;
  if (found == outstanding_.end() || !(found->second->sent || is_refused_early)) {  // given up meanwhile
    reader_.drop();
    return Status::ok();
  }
  receiving_ = found->second;
  if (type != receiving_->expected && type != FrameType::kError) {
    return malformed_reply(std::string(type_name(type)) + " in reply to " +
                           std::string(type_name(static_cast<FrameType>(receiving_->header.type))));
  }
  if ((header.flags & kFrameInLane) != 0) {
    if (type != FrameType::kRows || !lane_) return malformed_reply(std::string(type_name(type)) + " in a lane");
    reader_.drop();
    return Status::ok();
  }
  if (type == FrameType::kRows) {
    reader_.read_rows(receiving_->sinks);
    return Status::ok();
  }
  if (type != FrameType::kScanPage && header.body_bytes > kMaxSmallReply) {
    return malformed_reply(std::string(type_name(type)) + " of " + std::to_string(header.body_bytes) + " bytes");
  }
  reader_.collect();
  return Status::ok();
}

// A reply is there as a whole.
Status Channel::on_reply() {
  if (state_ == State::kReplaying) return on_replay_reply();
  if (state_ == State::kGreeting || (reader_.is_collected() && receiving_ == nullptr)) return on_hello_ack();
  if (receiving_ == nullptr) {
    if (lane_) lane_->note_answer(reader_.header().request_id);
    return Status::ok();
  }
  ShardRequest& request = *std::exchange(receiving_, nullptr);
  const auto type = static_cast<FrameType>(reader_.header().type);
  if (type == FrameType::kError) return on_error(request);
  if ((reader_.header().flags & kFrameInLane) != 0) SR_RETURN_IF_ERROR(lane_->read(reader_.header(), request));
  if (request.names.count > 0) ++stats_.lane_replies;
  if (type == FrameType::kRows) {
    if (request.reply_sequence != nullptr) *request.reply_sequence = reader_.header().sequence;
  } else {
    request.reply = reader_.body();
  }
  attempts_ = 0;
  resume();
  finish(request, Status::ok());
  return Status::ok();
}

Status Channel::on_error(ShardRequest& request) {
  SectionReader sections(reader_.body(), reader_.header().section_count);
  auto section = sections.next();
  if (!section.is_ok() || !section.value() || section.value()->kind != SectionKind::kError) {
    return malformed_reply("ERROR section");
  }
  Status status = parse_error(section.value()->payload);
  if (status.code() == Code::kOutsideQuorum) request.open_step = reader_.header().step;
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
}

// HELLO_ACK, or an ERROR that answers no request: what the shard thinks of this connection.
Status Channel::on_hello_ack() {
  SectionReader sections(reader_.body(), reader_.header().section_count);
  auto section = sections.next();
  if (!section.is_ok() || !section.value()) return malformed_reply("HELLO_ACK");
  if (section.value()->kind == SectionKind::kError) {
    const Status status = parse_error(section.value()->payload);
    if (!is_retryable(status.code())) return status;  // fails the waiting requests, which would be refused again
    break_off(status.message());
    return Status::ok();
  }
  if (section.value()->kind != SectionKind::kHello) return malformed_reply("HELLO_ACK");
  auto hello = parse_hello(section.value()->payload);
  if (!hello.is_ok()) return malformed_reply(hello.status().message());
  const HelloPayload& shard = hello.value();
  SR_RETURN_IF_ERROR(check_protocol(shard, "the shard", "this client"));
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
  protocol_ = std::min(shard.protocol_max, kProtocolVersion);
  if (lane_ && (features_ & kFeatureLane) == 0) {
    lane_.reset();
    if (options_.transport == Transport::kSharedMemory) {
      break_off("transport 'shm': the shard takes no memory from this client");
      return Status::ok();
    }
  }
  if (lane_) lane_->note_taken();
  state_ = State::kReady;
  was_ready_ = true;
  resume();
  for (auto at = queue_.begin(); at != queue_.end();) {
    ShardRequest& request = **at;
    const bool only_connects = request.expected == FrameType::kHelloAck;
    Status refusal = refusal_of(request);
    if (!only_connects && refusal.is_ok()) {
      ++at;
      continue;
    }
    at = queue_.erase(at);
    finish(request, std::move(refusal));
  }
  replay_.note_shard(shard.incarnation, protocol_);
  replay_.is_due() ? begin_replay() : flush();
  return Status::ok();
}

void Channel::begin_replay() {
  state_ = State::kReplaying;
  replay_.begin((features_ & kFeatureLostWrites) != 0);
  next_replay();
}

void Channel::next_replay() {
  if (!replay_.next(next_id_)) {
    state_ = State::kReady;
    flush();
    return;
  }
  ++next_id_;
  ++stats_.frames_sent;
  send_replay();
}

void Channel::send_replay() {
  if (refused_for_now_ && Clock::now() < paused_until_) return;
  while (!replay_.unsent().empty()) {
    const auto unsent = replay_.unsent();
    const iovec piece{const_cast<std::byte*>(unsent.data()), unsent.size()};
    const Transfer moved = stream_->try_write(std::span(&piece, 1));
    if (moved.bytes == 0) {
      stopped(moved);
      return;
    }
    replay_.note_sent(moved.bytes);
    stats_.bytes_sent += moved.bytes;
  }
}

Status Channel::on_replay_reply() {
  auto answer = replay_.on_reply(reader_.body(), reader_.header().section_count);
  if (!answer.is_ok()) return answer.status();
  if (!answer.value().refusal.is_ok()) {
    last_error_ = answer.value().refusal.message();
    pause();
    replay_.send_again();
    return Status::ok();
  }
  if (answer.value().is_applied) ++stats_.commits_replayed;
  attempts_ = 0;
  resume();
  next_replay();
  return Status::ok();
}

}  // namespace sparserow::rpc
