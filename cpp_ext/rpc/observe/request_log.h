// Keeps requests that are worth a line or a span: those that were refused, and those that belong to a trace.
//
// The log is bounded: when it is full, the newest requests are dropped and counted. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "rpc/wire/frame.h"
#include "rpc/wire/trace_context.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow::rpc {

struct RequestEvent {
  FrameHeader header;
  std::string peer;  // address; "local": of the local socket
  Status status;
  TraceContext trace;
  std::uint64_t begin_unix_ns = 0;
  std::uint64_t end_unix_ns = 0;
};

class RequestLog {
 public:
  static constexpr std::size_t kMost = 4096;

  struct Taken {
    std::vector<RequestEvent> events;
    std::uint64_t dropped = 0;  // since the last call
  };

  // Keeps the request if it was refused, or if spans are kept and it belongs to a trace.
  void note(const FrameHeader& header, const std::string& peer, const Status& status, const TraceContext& trace,
            std::chrono::steady_clock::time_point arrived);
  void keep_spans(bool wanted) noexcept { keeps_spans_.store(wanted, std::memory_order_relaxed); }
  [[nodiscard]] Taken take();

 private:
  std::atomic<bool> keeps_spans_{false};
  Mutex mutex_;
  Taken kept_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow::rpc
