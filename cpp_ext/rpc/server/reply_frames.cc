#include "rpc/server/reply_frames.h"

namespace sparserow::rpc {

FrameHeader reply_to(const FrameHeader& request, FrameType type) {
  FrameHeader reply;
  reply.type = static_cast<std::uint16_t>(type);
  if (is_spoken(request.version, type)) reply.version = request.version;
  reply.request_id = request.request_id;
  reply.flags = request.flags & kFrameHasCrc;
  return reply;
}

std::vector<std::byte> ack_frame(const FrameHeader& request, std::uint64_t count, bool duplicate) {
  AckPayload ack;
  ack.sequence = request.sequence;
  ack.count = count;
  ack.duplicate = duplicate ? 1 : 0;
  return small_frame(reply_to(request, FrameType::kAck), SectionKind::kAck, bytes_of(ack), {});
}

Status no_table(std::uint32_t table_id) {
  return Status(Code::kNotFound, "table " + std::to_string(table_id) + " is not known to this shard");
}
}  // namespace sparserow::rpc
