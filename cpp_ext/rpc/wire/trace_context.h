// Which trace a request belongs to: W3C trace context (trace id, id of the span that asked), carried in a section.
//
// The section is optional and the first of its frame; a server that does not know it skips it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "rpc/wire/frame.h"

namespace sparserow::rpc {

struct TraceContext {
  std::array<std::uint8_t, 16> trace_id{};
  std::array<std::uint8_t, 8> span_id{};

  // Ids of zeros are none.
  [[nodiscard]] bool is_set() const noexcept { return trace_id != std::array<std::uint8_t, 16>{}; }
};

inline constexpr std::uint16_t kTraceSection = 9;  // its number among SectionKind

struct TraceSection {
  SectionHeader section{.kind = kTraceSection, .payload_bytes = sizeof(TraceContext)};
  TraceContext context;
};
static_assert(sizeof(TraceSection) == 40);

// Sets the trace of the requests that the calling thread makes from now on; one that is not set ends it.
void set_trace_context(const TraceContext& context) noexcept;
[[nodiscard]] const TraceContext& trace_context() noexcept;

// The trace of a request; not set when it has none.
[[nodiscard]] TraceContext trace_of(const FrameHeader& header, std::span<const std::byte> body) noexcept;

}  // namespace sparserow::rpc
