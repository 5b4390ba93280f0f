#include "session/session.h"

#include <algorithm>
#include <chrono>

#include "session/pull_together.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

// After these the shards may or may not have applied the commit.
bool is_outcome_unknown(Code code) noexcept { return code == Code::kDeadlineExceeded || code == Code::kUnavailable; }

// After these a shard may still have a push prepared, so that its COMMIT has to be sent again.
bool is_in_doubt(Code code) noexcept {
  return is_outcome_unknown(code) || code == Code::kDataLoss || code == Code::kInternal || code == Code::kStaleRoute;
}

// What is left until a deadline, for a call that takes a duration.
std::chrono::milliseconds left_until(WriteTurns::Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - WriteTurns::Clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

}  // namespace

Result<std::shared_ptr<Session>> Session::create(std::shared_ptr<RowReader> shards, const SessionOptions& options) {
  SR_RETURN_IF_ERROR(check_slot_owner(shards->slot_owner(), shards->shard_count()));
  return std::shared_ptr<Session>(new Session(std::make_shared<SessionState>(std::move(shards), options)));
}

Session::~Session() { close(); }

Status Session::bind(const BindingSpec& spec) {
  SR_RETURN_IF_ERROR(state_->check_usable());
  BindingSpec ordered = spec;
  ordered.order = static_cast<std::uint32_t>(bindings_.size());
  auto binding = std::make_shared<Binding>(std::move(ordered), state_);
  if (SessionCache* cache = state_->cache(); cache != nullptr && spec.cached) {
    SR_RETURN_IF_ERROR(cache->add_table(spec.name, spec.table_id, spec.dim));
  }
  SR_RETURN_IF_ERROR(register_binding(binding));
  state_->add_binding(binding);
  bindings_.push_back(std::move(binding));
  return Status::ok();
}

namespace {

Status not_bound(std::string_view name) {
  return {Code::kNotFound, "table '" + std::string(name) + "' is not bound by this session"};
}

}  // namespace

Status Session::set_lr(std::string_view name, float lr) {
  Binding* binding = find(name);
  if (binding == nullptr) return not_bound(name);
  const MutexLock lock(binding->mutex_);
  binding->spec_.lr = lr;
  return Status::ok();
}

Status Session::set_frozen(std::string_view name, bool frozen) {
  Binding* binding = find(name);
  if (binding == nullptr) return not_bound(name);
  binding->is_frozen_.store(frozen, std::memory_order_relaxed);
  return Status::ok();
}

Status Session::pull_ahead(std::span<const AheadLookup> lookups, bool train) {
  SR_RETURN_IF_ERROR(state_->check_usable());
  if (train) SR_RETURN_IF_ERROR(expect(Phase::kOpen, "a forward that trains"));
  std::vector<AheadIds> known;
  for (const AheadLookup& lookup : lookups) {
    if (Binding* binding = find(lookup.binding); binding != nullptr) known.push_back({binding, lookup.ids});
  }
  if (const auto pulled = pull_together(*state_, known, train); !pulled.is_ok()) return pulled.status();
  if (train) state_->merged_this_step.store(true);
  return Status::ok();
}

bool Session::remembers(std::string_view name, const IdsRef& ids) const {
  Binding* binding = find(name);
  if (binding == nullptr) return false;
  const MutexLock lock(binding->mutex_);
  return binding->step_.recall(ids).has_value();
}

void Session::end_evaluation() {
  for (const auto& binding : bindings_) {
    const MutexLock lock(binding->mutex_);
    binding->ahead_.clear();
  }
}

std::pair<std::uint64_t, std::uint64_t> Session::rows_in_step() const {
  std::pair<std::uint64_t, std::uint64_t> rows{0, 0};
  for (const auto& binding : bindings_) {
    const MutexLock lock(binding->mutex_);
    rows.first += binding->step_.keys();
    rows.second += binding->no_grad_.keys();
  }
  return rows;
}

Result<SealReport> Session::seal(float scale, float clip_row_norm) {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(expect(Phase::kOpen, "seal"));
  sealed_by_.store(std::this_thread::get_id());
  state_->phase.store(Phase::kSealed);
  SealReport report;
  std::uint64_t clipped_rows = 0;
  pushes_.clear();
  for (const auto& binding : bindings_) {
    const MutexLock lock(binding->mutex_);
    const TableStep::Seal table = binding->step_.seal(scale, clip_row_norm);
    if (table.nonfinite_rows > 0 && report.nonfinite_rows == 0) {
      report.nonfinite_table = binding->spec_.name;
      report.nonfinite_key = table.first_nonfinite_key;
    }
    report.rows += table.rows;
    report.nonfinite_rows += table.nonfinite_rows;
    clipped_rows += table.clipped_rows;
    if (table.rows > 0) pushes_.push_back(binding->step_.push(binding->spec_.lr));
  }
  state_->counters.nonfinite_rows += report.nonfinite_rows;
  state_->counters.clipped_rows += clipped_rows;
  rows_sealed_ = report.rows;
  return report;
}

Status Session::prepare() {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(expect(Phase::kSealed, "prepare"));
  SR_RETURN_IF_ERROR(state_->wait_for_commit());
  const auto deadline = write_deadline();
  SR_RETURN_IF_ERROR(take_turn(deadline));
  auto numbered = number_commit(step(), deadline);
  if (!numbered.is_ok()) {
    turns_.give_back();
    return numbered.status();
  }
  prepared_ = std::move(numbered).value();
  state_->phase.store(Phase::kPrepared);  // before the work: a failed prepare has to be aborted on the shards
  return end_outside(state_->writer().prepare(pushes_, prepared_.options));
}

Status Session::commit_prepared() {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(expect(Phase::kPrepared, "commit_prepared"));
  const Status status = state_->writer().commit_prepared(prepared_.options);
  if (status.code() == Code::kOutsideQuorum) return end_outside(status);
  end_turn();
  return end_commit(status);
}

Status Session::begin_commit() {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(expect(Phase::kPrepared, "begin_commit"));
  state_->begin_commit();
  return end_commit(Status::ok());
}

Status Session::finish_commit() {
  const MutexLock lock(finishing_);
  if (!state_->is_committing()) return Status::ok();
  Status status = state_->writer().commit_prepared(prepared_.options);
  if (!status.is_ok()) state_->mark_broken(status);
  end_turn();
  state_->end_commit();
  return status;
}

// The step that has prepared gives its turn and its number back.
void Session::end_turn() noexcept {
  prepared_.number.release();
  turns_.give_back();
}

Status Session::commit() {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(expect(Phase::kSealed, "commit"));
  SR_RETURN_IF_ERROR(settle());
  auto numbered = number_commit(step(), write_deadline());
  if (!numbered.is_ok()) return numbered.status();
  bool may_be_applied = false;
  numbered.value().options.may_be_applied = &may_be_applied;
  const Status status = state_->writer().commit(pushes_, numbered.value().options);
  if (status.code() == Code::kOutsideQuorum) return end_outside(status);  // whatever copy is out gets the same answer
  if (!status.is_ok() && may_be_applied) state_->mark_broken(status);
  return end_commit(status);
}

// A refused one-phase commit changed nothing, so the step can be tried again; a commit that was prepared
// everywhere and then failed somewhere, or whose answer was lost, cannot.
Status Session::end_commit(const Status& status) {
  const bool prepared = state_->phase.load() == Phase::kPrepared;
  if (SessionCache* cache = state_->cache()) cache->committed(pushes_);
  for (const auto& binding : bindings_) {
    const MutexLock lock(binding->mutex_);
    if (status.is_ok()) binding->note_commit(state_->counters.steps_committed.load() + 1);
  }
  forget_step();
  if (!status.is_ok()) {
    ++state_->counters.steps_aborted;
    if (prepared || is_outcome_unknown(status.code())) state_->mark_broken(status);
    return status;
  }
  ++state_->step;
  ++state_->counters.steps_committed;
  state_->counters.rows_pushed += rows_sealed_;
  return status;
}

// After kOutsideQuorum: aborts the step everywhere and goes on with the one that takes members; passes the rest
// through. When ABORT fails, that failure is the result, and the clock stays: the next step supersedes what is
// prepared.
Status Session::end_outside(const Status& status) {
  if (status.code() != Code::kOutsideQuorum) return status;
  SR_RETURN_IF_ERROR(drop_step());
  const std::int64_t refused = step();
  state_->step.store(std::max(refused + 1, open_step_));
  ++state_->counters.refused_steps;
  state_->counters.missed_steps += static_cast<std::uint64_t>(step() - refused - 1);
  return status;
}

Status Session::abort() {
  ++state_->counters.steps_aborted;
  return drop_step();
}

// Forgets the step here, and on the shards where it is prepared.
Status Session::drop_step() {
  Status status = Status::ok();
  if (state_->phase.load() == Phase::kPrepared) {
    status = state_->writer().abort(prepared_.options);
    end_turn();
  }
  forget_step();
  return status;
}

Status Session::drop_gradients() {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(expect(Phase::kOpen, "drop_gradients"));
  for (const auto& binding : bindings_) {
    const MutexLock lock(binding->mutex_);
    binding->step_.drop_sums();
  }
  state_->staged_calls.store(0);
  state_->allow_lookups();
  return Status::ok();
}

void Session::reopen() noexcept {
  if (state_->phase.load() != Phase::kOpen) static_cast<void>(abort());
}

PushOutcome Session::push_now(const TablePush& push) {
  if (Status status = state_->check_usable(); !status.is_ok()) return {std::move(status)};
  const bool is_ending_step = state_->phase.load() != Phase::kOpen && sealed_by_.load() == std::this_thread::get_id();
  if (is_ending_step) return {expect(Phase::kOpen, "push")};
  const auto deadline = write_deadline();
  if (Status status = state_->wait_for_commit(); !status.is_ok()) return {std::move(status)};
  PushOutcome outcome =
      state_->shards().shard_count() == 1 ? push_in_one_phase(push, deadline) : push_in_two_phases(push, deadline);
  state_->forget_cached(push.table_id, push.keys);
  return outcome;
}

PushOutcome Session::push_in_one_phase(const TablePush& push, WriteTurns::Clock::time_point deadline) {
  auto numbered = number_commit(kNoStep, deadline);
  if (!numbered.is_ok()) return {numbered.status()};
  PushOutcome outcome;
  CommitOptions& options = numbered.value().options;
  options.deadline = left_until(deadline);
  options.may_be_applied = &outcome.may_be_applied;
  outcome.status = state_->writer().commit({&push, 1}, options);
  return outcome;
}

// Both phases end by the deadline. What ABORT cannot send a shard, the next PREPARE does.
PushOutcome Session::push_in_two_phases(const TablePush& push, WriteTurns::Clock::time_point deadline) {
  if (Status status = take_turn(deadline); !status.is_ok()) return {std::move(status)};
  auto numbered = number_commit(kNoStep, deadline);
  if (!numbered.is_ok()) {
    turns_.give_back();
    return {numbered.status()};
  }
  CommitOptions& options = numbered.value().options;
  options.deadline = left_until(deadline);
  Status status = state_->writer().prepare({&push, 1}, options);
  options.deadline = left_until(deadline);
  const bool is_decided = status.is_ok();
  if (is_decided) {
    status = state_->writer().commit_prepared(options);
    if (is_in_doubt(status.code())) {
      in_doubt_ = std::move(numbered).value();
      has_in_doubt_.store(true);
    }
  } else {
    static_cast<void>(state_->writer().abort(options));
  }
  turns_.give_back();
  return {std::move(status), is_decided};
}

// Takes the turn and ends what is in doubt, so that nothing else leaves before.
Status Session::take_turn(WriteTurns::Clock::time_point deadline) {
  SR_RETURN_IF_ERROR(turns_.take(deadline, [this] { return state_->shards().grace(); }));
  Status status = finish_in_doubt(deadline);
  if (!status.is_ok()) turns_.give_back();
  return status;
}

// A shard that refuses for good has the push applied or has lost it, and counts that; so it is in doubt no more.
Status Session::finish_in_doubt(WriteTurns::Clock::time_point deadline) {
  if (!in_doubt_) return Status::ok();
  CommitOptions options = in_doubt_->options;
  options.deadline = left_until(deadline);
  const Status status = state_->writer().commit_prepared(options);
  if (is_in_doubt(status.code())) {
    return {status.code(), "session: an earlier push by key is in doubt still, and nothing of this write was sent; " +
                               status.message()};
  }
  in_doubt_.reset();
  has_in_doubt_.store(false);
  return Status::ok();
}

Status Session::settle() {
  if (!has_in_doubt_.load()) return Status::ok();
  SR_RETURN_IF_ERROR(take_turn(write_deadline()));
  turns_.give_back();
  return Status::ok();
}

WriteTurns::Clock::time_point Session::write_deadline() const {
  return WriteTurns::Clock::now() + state_->options().deadline;
}

Status Session::skip_to(std::int64_t step) {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(expect(Phase::kOpen, "skip_to"));
  if (step < state_->step.load()) {
    return not_allowed("skip_to.step", step, ">= " + std::to_string(state_->step.load()));
  }
  state_->step.store(step);
  state_->writer().forget_buffered();
  return Status::ok();
}

SessionStats Session::stats() const noexcept { return state_->counters.load(); }

void Session::close() noexcept {
  state_->close();
  for (const auto& binding : bindings_) unregister_binding(*binding);
  bindings_.clear();
}

Binding* Session::find(std::string_view name) const noexcept {
  const auto found =
      std::find_if(bindings_.begin(), bindings_.end(), [name](const auto& one) { return one->spec_.name == name; });
  return found == bindings_.end() ? nullptr : found->get();
}

Status Session::expect(Phase phase, const char* call) const {
  if (state_->phase.load() == phase) return Status::ok();
  return {Code::kFailedPrecondition, std::string("session: ") + call + " is not allowed in this phase of the step"};
}

Result<Session::NumberedCommit> Session::number_commit(std::int64_t step, WriteTurns::Clock::time_point deadline) {
  auto number = state_->numbers.take(deadline);
  if (!number.is_ok()) return number.status();
  NumberedCommit commit;
  commit.options.deadline = state_->options().deadline;
  commit.options.sequence = number.value().value();
  commit.options.step = step;
  commit.options.grad_sum = state_->options().grad_sum;
  if (step != kNoStep) {
    open_step_ = kNoStep;
    commit.options.open_step = &open_step_;
  }
  commit.number = std::move(number).value();
  return commit;
}

void Session::forget_step() {
  for (const auto& binding : bindings_) {
    const MutexLock lock(binding->mutex_);
    binding->end_step();
  }
  state_->allow_lookups();
  state_->merged_this_step.store(false);
  state_->staged_calls.store(0);
  state_->phase.store(Phase::kOpen);
}

}  // namespace sparserow
