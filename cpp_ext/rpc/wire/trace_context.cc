#include "rpc/wire/trace_context.h"

#include <cstring>

namespace sparserow::rpc {
namespace {

thread_local TraceContext current;

}  // namespace

void set_trace_context(const TraceContext& context) noexcept { current = context; }

const TraceContext& trace_context() noexcept { return current; }

TraceContext trace_of(const FrameHeader& header, std::span<const std::byte> body) noexcept {
  TraceSection first;
  if (header.section_count == 0 || body.size() < sizeof first) return {};
  std::memcpy(&first, body.data(), sizeof first);
  if (first.section.kind != kTraceSection || first.section.payload_bytes != sizeof(TraceContext)) return {};
  return first.context;
}

}  // namespace sparserow::rpc
