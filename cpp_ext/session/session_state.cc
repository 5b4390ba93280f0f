#include "session/session_state.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "session/binding.h"

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

// The writer of a session whose rows are read only.
class NoWriter final : public RowWriter {
 public:
  Status prepare(std::span<const TablePush> /*tables*/, const CommitOptions& /*options*/) override { return refusal(); }
  Status commit_prepared(const CommitOptions& /*options*/) override { return refusal(); }
  Status abort(const CommitOptions& /*options*/) override { return Status::ok(); }
  Status commit(std::span<const TablePush> /*tables*/, const CommitOptions& /*options*/) override { return refusal(); }
  Status assign(std::span<const TablePush> /*tables*/, const CallOptions& /*options*/) override { return refusal(); }
  Result<std::uint64_t> erase(std::uint32_t /*table_id*/, std::span<const std::uint64_t> /*keys*/,
                              std::span<const std::uint32_t> /*shard_begin*/, const CallOptions& /*options*/) override {
    return refusal();
  }

 private:
  static Status refusal() {
    return {Code::kFailedPrecondition, "a served model is read, not trained: put it into eval mode"};
  }
};

RowWriter* writer_of(RowReader& shards) {
  static NoWriter none;
  RowWriter* const writer = shards.writer();
  return writer != nullptr ? writer : &none;
}

}  // namespace

SessionState::SessionState(std::shared_ptr<RowReader> shards, const SessionOptions& options)
    : step(options.first_step),
      numbers(options.first_sequence),
      shards_(std::move(shards)),
      writer_(writer_of(*shards_)),
      options_(options),
      cache_(options.cache.bytes == 0 ? nullptr : std::make_unique<SessionCache>(options.cache)),
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
    const MutexLock lock(cause_mutex_);
    return {Code::kFailedPrecondition,
            "the outcome of an earlier step is unknown (" + cause_ + "): connect anew and restore the last checkpoint"};
  }
  return Status::ok();
}

void SessionState::mark_broken(const Status& cause) {
  const MutexLock lock(cause_mutex_);
  cause_ = cause.message();
  broken_.store(true);
}

void SessionState::refuse_lookups(const std::string& text) {
  const MutexLock lock(cause_mutex_);
  refusal_ = text;
  refuses_lookups_.store(true);
}

Status SessionState::check_lookup() const {
  if (!refuses_lookups_.load(std::memory_order_relaxed)) return Status::ok();
  const MutexLock lock(cause_mutex_);
  return {Code::kFailedPrecondition, refusal_};
}

void SessionState::add_binding(const std::shared_ptr<Binding>& binding) {
  const MutexLock lock(bindings_mutex_);
  bindings_.push_back(binding);
}

void SessionState::bound_no_grad_rows() {
  if (no_grad_bytes.load() <= options_.no_grad_bytes) return;
  std::vector<std::weak_ptr<Binding>> bindings;
  {
    const MutexLock lock(bindings_mutex_);
    bindings = bindings_;
  }
  for (const auto& one : bindings) {
    if (const auto binding = one.lock()) binding->drop_no_grad_rows();
  }
}

CallOptions SessionState::pull_options(bool train) const noexcept {
  CallOptions call;
  call.deadline = options_.deadline;
  call.step = train ? step.load(std::memory_order_relaxed) : kNoStep;  // async too: its staleness is measured
  return call;
}

void SessionState::trace(const std::string& binding, const TensorView& view) {
  if (!tracing_.load(std::memory_order_relaxed)) return;
  const MutexLock lock(trace_mutex_);
  std::erase_if(traces_, [](const auto& trace) { return trace.expired(); });
  for (const auto& weak : traces_) {
    if (const auto trace = weak.lock()) {
      trace->add({binding,
                  view.data,
                  {view.sizes.begin(), view.sizes.end()},
                  {view.strides.begin(), view.strides.end()},
                  view.item_bytes});
    }
  }
  tracing_.store(!traces_.empty());
}

std::shared_ptr<LookupTrace> SessionState::start_trace() {
  auto trace = std::make_shared<LookupTrace>();
  const MutexLock lock(trace_mutex_);
  traces_.push_back(trace);
  tracing_.store(true);
  return trace;
}

Status SessionState::pull_step(std::span<const TablePull> tables, const CallOptions& options, bool before_asking) {
  if (cache_ && options.step != kNoStep) return cache_->pull(*this, tables, options, before_asking);
  if (before_asking) SR_RETURN_IF_ERROR(wait_for_commit());
  return pull_and_count(tables, options);
}

Status SessionState::pull_past_cache(std::span<const TablePull> tables, const CallOptions& options) {
  SR_RETURN_IF_ERROR(wait_for_commit());
  return pull_and_count(tables, options);
}

Status SessionState::pull_and_count(std::span<const TablePull> tables, const CallOptions& options) {
  SR_RETURN_IF_ERROR(pull(tables, options));
  ++counters.pulls;
  for (const TablePull& table : tables) counters.rows_pulled += table.keys.size();
  return Status::ok();
}

Status SessionState::pull(std::span<const TablePull> tables, const CallOptions& options) {
  if (!recording_pulls_.load(std::memory_order_relaxed)) return shards_->pull(tables, options);
  const auto now = [] {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  };
  PullSpan span;
  span.step = options.step == kNoStep ? step.load() : options.step;
  span.thread = static_cast<std::uint64_t>(::syscall(SYS_gettid));
  span.begin_ns = now();
  Status status = shards_->pull(tables, options);
  span.end_ns = now();
  const MutexLock lock(spans_mutex_);
  pull_spans_.push_back(span);
  return status;
}

std::vector<PullSpan> SessionState::take_pull_spans() {
  const MutexLock lock(spans_mutex_);
  return std::exchange(pull_spans_, {});
}

void SessionState::begin_commit() {
  const MutexLock lock(commit_mutex_);
  committing_.store(true);
}

void SessionState::end_commit() noexcept {
  {
    const MutexLock lock(commit_mutex_);
    committing_.store(false);
  }
  commit_ended_.notify_all();
}

Status SessionState::wait_for_commit() const {
  if (!committing_.load()) return check_usable();
  MutexLock lock(commit_mutex_);
  // Its sender has a deadline of its own; this one is for a sender that never began.
  const auto allowed = 2 * options_.deadline;
  auto until = std::chrono::steady_clock::now() + allowed;
  const auto is_over = [this] { return !committing_.load(); };
  do {
    if (commit_ended_.wait_until(commit_mutex_, until, is_over)) return check_usable();
    until = shards_->grace() + allowed;
  } while (std::chrono::steady_clock::now() < until);
  return {Code::kDeadlineExceeded,
          "session: the commit of the last step was not sent within " + std::to_string(allowed.count()) + " ms"};
}

}  // namespace sparserow
