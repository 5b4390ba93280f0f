// Channel: what a worker holds of its commits, sent again to a process that has taken the shard's place.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "rpc/client/channel.h"

namespace sparserow::rpc {
namespace {

constexpr std::uint32_t kReplayDeadlineMs = 30'000;

}  // namespace

void Channel::note_incarnation(std::uint32_t incarnation) {
  must_replay_ |= incarnation_ != 0 && incarnation != incarnation_;
  incarnation_ = incarnation;
}

// In the order of their sequences, one at a time; whatever else is asked waits.
void Channel::begin_replay() {
  state_ = State::kReplaying;
  replay_from_ = 0;
  is_telling_lost_ = !replay_buffer_.evicted().sequences.empty() && (features_ & kFeatureLostWrites) != 0;
  if (is_telling_lost_) {
    tell_lost();
  } else {
    next_replay();
  }
}

void Channel::tell_lost() {
  const auto& [last, sequences] = replay_buffer_.evicted();
  SectionHeader section{};
  TableDescriptor descriptor{};
  descriptor.dim = 1;  // not looked at
  descriptor.n = static_cast<std::uint32_t>(sequences.size());
  section.kind = static_cast<std::uint16_t>(SectionKind::kTableKeys);
  section.flags = kSectionRequired;
  section.payload_bytes = table_payload_bytes(descriptor, {.keys = true});
  FrameHeader header = last;
  header.type = static_cast<std::uint16_t>(FrameType::kAbort);
  header.flags = kFrameLost;
  header.section_count = 1;
  header.body_bytes = static_cast<std::uint32_t>(sizeof section + section.payload_bytes);
  replay_.resize(sizeof header + header.body_bytes);
  std::byte* at = replay_.data() + sizeof header;
  std::memcpy(at, &section, sizeof section);
  std::memcpy(at + sizeof section, &descriptor, sizeof descriptor);
  const std::vector<std::uint64_t> named(sequences.begin(), sequences.end());
  std::memcpy(at + sizeof section + sizeof descriptor, named.data(), named.size() * sizeof named[0]);
  send_replay(header);
}

// The frame of this header, whose body stands in its place already.
void Channel::send_replay(FrameHeader header) {
  header.request_id = next_id_++;
  header.deadline_ms = kReplayDeadlineMs;
  header.flags &= static_cast<std::uint8_t>(~kFrameHasCrc);
  header.crc32c = 0;
  if (options_.frame_crc) {
    const iovec body{replay_.data() + sizeof header, replay_.size() - sizeof header};
    seal_crc(header, {&body, 1});
  }
  std::memcpy(replay_.data(), &header, sizeof header);
  replay_sent_ = 0;
  ++stats_.frames_sent;
  send_replay();
}

void Channel::next_replay() {
  const BufferedCommit* commit = replay_buffer_.from(replay_from_);
  if (commit == nullptr) {
    must_replay_ = false;
    state_ = State::kReady;
    flush();
    return;
  }
  FrameHeader header = commit->header;
  const auto type = static_cast<FrameType>(header.type);
  if (type != FrameType::kAssign && type != FrameType::kDelete) {
    header.type = static_cast<std::uint16_t>(commit->decided ? FrameType::kCommit : FrameType::kPrepare);
  }
  replay_from_ = header.sequence;
  is_replay_decided_ = commit->decided;
  replay_.resize(sizeof header + commit->body.size());
  if (!commit->body.empty()) std::memcpy(replay_.data() + sizeof header, commit->body.data(), commit->body.size());
  send_replay(header);
}

void Channel::send_replay() {
  if (refused_for_now_ && Clock::now() < paused_until_) return;
  while (replay_sent_ < replay_.size()) {
    const iovec piece{replay_.data() + replay_sent_, replay_.size() - replay_sent_};
    const Transfer moved = stream_->try_write(std::span(&piece, 1));
    if (moved.bytes == 0) {
      stopped(moved);
      return;
    }
    replay_sent_ += moved.bytes;
    stats_.bytes_sent += moved.bytes;
  }
}

// What was refused for good is over, by whatever the shard remembers: it is the shard's to count.
Status Channel::on_replay_reply() {
  collecting_ = false;
  SectionReader sections(collected_, reply_header_.section_count);
  auto section = sections.next();
  if (!section.is_ok() || !section.value()) return Status(Code::kDataLoss, "malformed reply to a commit sent again");
  if (section.value()->kind == SectionKind::kError) {
    const Status status = parse_error(section.value()->payload);
    if (status.code() == Code::kUnavailable) {
      last_error_ = status.message();
      pause();
      replay_sent_ = 0;
      return Status::ok();
    }
  } else {
    const auto ack = parse_ack(section.value()->payload);
    const bool is_write = is_replay_decided_ && !is_telling_lost_;
    if (ack.is_ok() && ack.value().duplicate == 0 && is_write) ++stats_.commits_replayed;
  }
  attempts_ = 0;
  refused_for_now_ = false;
  if (!std::exchange(is_telling_lost_, false)) ++replay_from_;
  next_replay();
  return Status::ok();
}

}  // namespace sparserow::rpc
