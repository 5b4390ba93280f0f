#include "session/session_state.h"

#include <pthread.h>

namespace sparserow {
namespace {

std::atomic<std::uint64_t>& fork_counter() {
  static std::atomic<std::uint64_t> counter{0};
  return counter;
}

// Forks of this process seen from the child: a session made before one is unusable after it.
std::uint64_t fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++fork_counter(); });
  static_cast<void>(registered);
  return fork_counter().load(std::memory_order_relaxed);
}

}  // namespace

SessionState::SessionState(std::shared_ptr<rpc::Shards> shards, const SessionOptions& options)
    : step(options.first_step),
      sequence(options.first_sequence),
      shards_(std::move(shards)),
      options_(options),
      fork_generation_(fork_generation()),
      partitioner_(shards_->slot_owner(), shards_->shard_count()) {}

Status SessionState::check_usable() const {
  if (fork_generation_ != fork_generation()) {
    return {Code::kFailedPrecondition,
            "this session was made before a fork: connect in the child process (DataLoader workers must not touch "
            "distributed tables)"};
  }
  if (closed_.load(std::memory_order_relaxed)) return {Code::kFailedPrecondition, "this session is closed"};
  if (broken_.load(std::memory_order_relaxed)) {
    const std::lock_guard lock(cause_mutex_);
    return {Code::kFailedPrecondition,
            "the outcome of an earlier step is unknown (" + cause_ + "): connect anew and restore the last checkpoint"};
  }
  return Status::ok();
}

void SessionState::mark_broken(const Status& cause) {
  const std::lock_guard lock(cause_mutex_);
  cause_ = cause.message();
  broken_.store(true);
}

rpc::CallOptions SessionState::pull_options(bool train) const noexcept {
  rpc::CallOptions call;
  call.deadline = options_.deadline;
  call.step = train && options_.clocked ? step.load(std::memory_order_relaxed) : rpc::kNoStep;
  return call;
}

void SessionState::trace(const std::string& binding, const TensorView& view) {
  if (!tracing_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(trace_mutex_);
  trace_.push_back({binding,
                    view.data,
                    {view.sizes.begin(), view.sizes.end()},
                    {view.strides.begin(), view.strides.end()},
                    view.item_bytes});
}

void SessionState::start_trace() {
  const std::lock_guard lock(trace_mutex_);
  trace_.clear();
  tracing_.store(true);
}

std::vector<TracedLookup> SessionState::stop_trace() {
  const std::lock_guard lock(trace_mutex_);
  tracing_.store(false);
  return std::move(trace_);
}

}  // namespace sparserow
