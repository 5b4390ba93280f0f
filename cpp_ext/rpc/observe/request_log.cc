#include "rpc/observe/request_log.h"

#include <utility>

namespace sparserow::rpc {

void RequestLog::note(const FrameHeader& header, const std::string& peer, const Status& status,
                      const TraceContext& trace, std::chrono::steady_clock::time_point arrived) {
  const bool is_span = trace.is_set() && keeps_spans_.load(std::memory_order_relaxed);
  if (status.is_ok() && !is_span) return;
  using std::chrono::duration_cast;
  using std::chrono::nanoseconds;
  const auto took = duration_cast<nanoseconds>(std::chrono::steady_clock::now() - arrived).count();
  const auto end = duration_cast<nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  const MutexLock lock(mutex_);
  if (kept_.events.size() >= kMost) {
    ++kept_.dropped;
    return;
  }
  kept_.events.push_back({.header = header,
                          .peer = peer,
                          .status = status,
                          .trace = is_span ? trace : TraceContext{},
                          .begin_unix_ns = static_cast<std::uint64_t>(end - took),
                          .end_unix_ns = static_cast<std::uint64_t>(end)});
}

RequestLog::Taken RequestLog::take() {
  const MutexLock lock(mutex_);
  return std::exchange(kept_, {});
}

}  // namespace sparserow::rpc
