// Frames that answer a request.
#pragma once

#include <cstdint>
#include <vector>

#include "rpc/wire/frame.h"
#include "util/status.h"

namespace sparserow::rpc {

// The header of a reply to `request`.
[[nodiscard]] FrameHeader reply_to(const FrameHeader& request, FrameType type);
[[nodiscard]] std::vector<std::byte> ack_frame(const FrameHeader& request, std::uint64_t count, bool duplicate);
// kNotFound.
[[nodiscard]] Status no_table(std::uint32_t table_id);

}  // namespace sparserow::rpc
