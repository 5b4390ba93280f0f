#include "rpc/client/replay.h"

#include <cstring>
#include <utility>

namespace sparserow::rpc {
namespace {

constexpr std::uint32_t kReplayDeadlineMs = 30'000;

}  // namespace

void Replay::note_shard(std::uint32_t incarnation, std::uint8_t protocol) {
  protocol_ = protocol;
  is_due_ |= incarnation_ != 0 && incarnation != incarnation_;
  incarnation_ = incarnation;
}

void Replay::begin(bool counts_lost) {
  from_ = 0;
  names_lost_ = counts_lost && !buffer_.evicted().sequences.empty();
  has_lost_frame_ = false;
}

bool Replay::next(std::uint64_t request_id) {
  if (names_lost_ && !has_lost_frame_) {
    has_lost_frame_ = true;
    make_lost_frame(request_id);
    return true;
  }
  const BufferedCommit* commit = buffer_.from(from_);
  if (commit == nullptr) {
    is_due_ = false;
    return false;
  }
  FrameHeader header = commit->header;
  const auto type = static_cast<FrameType>(header.type);
  if (type != FrameType::kAssign && type != FrameType::kDelete) {
    header.type = static_cast<std::uint16_t>(commit->decided ? FrameType::kCommit : FrameType::kPrepare);
  }
  from_ = header.sequence;
  is_decided_ = commit->decided;
  frame_.resize(sizeof header + commit->body.size());
  if (!commit->body.empty()) std::memcpy(frame_.data() + sizeof header, commit->body.data(), commit->body.size());
  seal(header, request_id);
  return true;
}

void Replay::make_lost_frame(std::uint64_t request_id) {
  const auto& [last, sequences] = buffer_.evicted();
  SectionHeader section{};
  TableDescriptor descriptor{};
  descriptor.dim = 1;  // the shard ignores it
  descriptor.n = static_cast<std::uint32_t>(sequences.size());
  section.kind = static_cast<std::uint16_t>(SectionKind::kTableKeys);
  section.flags = kSectionRequired;
  section.payload_bytes = table_payload_bytes(descriptor, {.keys = true});
  FrameHeader header = last;
  header.type = static_cast<std::uint16_t>(FrameType::kAbort);
  header.flags = kFrameLost;
  header.section_count = 1;
  header.body_bytes = static_cast<std::uint32_t>(sizeof section + section.payload_bytes);
  frame_.resize(sizeof header + header.body_bytes);
  std::byte* at = frame_.data() + sizeof header;
  std::memcpy(at, &section, sizeof section);
  std::memcpy(at + sizeof section, &descriptor, sizeof descriptor);
  const std::vector<std::uint64_t> named(sequences.begin(), sequences.end());
  std::memcpy(at + sizeof section + sizeof descriptor, named.data(), named.size() * sizeof named[0]);
  seal(header, request_id);
}

// Completes the header of a frame whose body stands in its place already.
void Replay::seal(FrameHeader header, std::uint64_t request_id) {
  header.version = protocol_;
  header.request_id = request_id;
  header.deadline_ms = kReplayDeadlineMs;
  header.flags &= static_cast<std::uint8_t>(~kFrameHasCrc);
  header.crc32c = 0;
  if (has_crc_) {
    const iovec body{frame_.data() + sizeof header, frame_.size() - sizeof header};
    seal_crc(header, {&body, 1});
  }
  std::memcpy(frame_.data(), &header, sizeof header);
  sent_ = 0;
}

Result<Replay::Answer> Replay::on_reply(std::span<const std::byte> body, std::uint32_t section_count) {
  SectionReader sections(body, section_count);
  auto section = sections.next();
  if (!section.is_ok() || !section.value()) return Status(Code::kDataLoss, "malformed reply to a commit sent again");
  Answer answer;
  if (section.value()->kind == SectionKind::kError) {
    Status status = parse_error(section.value()->payload);
    if (status.code() == Code::kUnavailable) {
      answer.refusal = std::move(status);
      return answer;
    }
  } else {
    const auto ack = parse_ack(section.value()->payload);
    answer.is_applied = ack.is_ok() && ack.value().duplicate == 0 && is_decided_ && !names_lost_;
  }
  if (!std::exchange(names_lost_, false)) ++from_;
  return answer;
}

}  // namespace sparserow::rpc
