#include "session/binding.h"

#include <algorithm>

#include "session/session_state.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

constexpr std::size_t kNoGradMemos = 64;  // lookups whose ids are compared before the keys are searched

thread_local bool is_thread_without_gradient = false;

TableStep empty_step(const BindingSpec& spec, const SessionState& state) {
  return {spec.name, spec.table_id, spec.schema_version, spec.dim, state.shards()};
}

}  // namespace

NoGradScope::NoGradScope(bool is_without_gradient) noexcept : before_(is_thread_without_gradient) {
  is_thread_without_gradient = is_without_gradient;
}

NoGradScope::~NoGradScope() { is_thread_without_gradient = before_; }

bool NoGradScope::is_active() noexcept { return is_thread_without_gradient; }

Binding::Binding(BindingSpec spec, std::shared_ptr<SessionState> state)
    : spec_(std::move(spec)),
      is_frozen_(spec_.frozen),
      state_(std::move(state)),
      step_(empty_step(spec_, *state_)),
      ahead_(empty_step(spec_, *state_)),
      no_grad_(empty_step(spec_, *state_)) {}

Result<Lookup> Binding::lookup(const IdsRef& ids, bool train) {
  SR_RETURN_IF_ERROR(state_->check_usable());
  trace(ids);
  if (!train) return read(ids);
  if (state_->phase.load(std::memory_order_relaxed) != Phase::kOpen) {
    return Status(Code::kFailedPrecondition, "table '" + spec_.name + "': looked up while the step is being committed");
  }
  if (NoGradScope::is_active()) {
    state_->bound_no_grad_rows();
    const MutexLock lock(mutex_);
    return look_up_without_gradient(ids);
  }
  SR_RETURN_IF_ERROR(state_->check_lookup());
  const MutexLock lock(mutex_);
  has_gradients_ = true;
  return look_up_in_step(ids);
}

Result<Lookup> Binding::look_up_in_step(const IdsRef& ids) {
  if (auto known = step_.recall(ids)) return *std::move(known);
  SR_RETURN_IF_ERROR(check_ids(ids.ids));
  {
    const auto locked = state_->partitioner();
    step_.add({&ids, 1}, locked.partitioner);
  }
  drop_old_no_grad_rows();
  if (step_.pending_keys() > 0) {
    SR_RETURN_IF_ERROR(complete(step_, no_grad_));
    note_source(kOutside);
  }
  return *step_.recall(ids);
}

Result<Lookup> Binding::look_up_without_gradient(const IdsRef& ids) {
  if (auto known = step_.known(ids)) return *std::move(known);
  drop_old_no_grad_rows();
  no_grad_.trim_memos(kNoGradMemos);
  if (auto known = no_grad_.known(ids)) return *std::move(known);
  SR_RETURN_IF_ERROR(check_ids(ids.ids));
  if (no_grad_.empty()) no_grad_since_ = std::chrono::steady_clock::now();
  {
    const auto locked = state_->partitioner();
    no_grad_.add({&ids, 1}, locked.partitioner);
  }
  const Status status = no_grad_.pending_keys() > 0 ? complete(no_grad_, step_) : Status::ok();
  count_no_grad_bytes();
  SR_RETURN_IF_ERROR(status);
  return *no_grad_.recall(ids);
}

// Rows that were dropped for their age come from the shards, since a row cache keeps those of a step as they were.
Status Binding::complete(TableStep& part, TableStep& other) {
  if (part.fill_pending(other) == part.pending_keys()) {
    part.confirm();
    return Status::ok();
  }
  if (state_->merged_this_step.load(std::memory_order_relaxed)) ++state_->counters.lookups_missed;
  std::vector<TablePull> pulls;
  part.pending(pulls);
  const CallOptions options = state_->pull_options(/*train=*/true);
  const bool is_past_cache = &part == &no_grad_ && is_no_grad_aged_;
  const Status status = is_past_cache ? state_->pull_past_cache(pulls, options)
                                      : state_->pull_step(pulls, options, /*before_asking=*/true);
  if (!status.is_ok()) {
    part.rollback();
    return status;
  }
  part.fill_pending(other);
  part.confirm();
  return Status::ok();
}

void Binding::drop_old_no_grad_rows() {
  const auto age = state_->options().no_grad_age;
  if (age.count() == 0 || no_grad_.empty() || std::chrono::steady_clock::now() - no_grad_since_ < age) return;
  forget_no_grad_rows();
  is_no_grad_aged_ = true;
}

void Binding::drop_no_grad_rows() {
  const MutexLock lock(mutex_);
  forget_no_grad_rows();
}

void Binding::forget_no_grad_rows() {
  if (no_grad_counted_ == 0) return;
  no_grad_ = empty_step(spec_, *state_);
  count_no_grad_bytes();
}

void Binding::count_no_grad_bytes() {
  const std::uint64_t bytes = no_grad_.bytes();
  state_->no_grad_bytes += bytes - no_grad_counted_;  // modulo 2^64
  no_grad_counted_ = bytes;
}

TableStep& Binding::no_grad_ahead() {
  drop_old_no_grad_rows();
  no_grad_.trim_memos(kNoGradMemos);
  if (no_grad_.empty()) no_grad_since_ = std::chrono::steady_clock::now();
  return no_grad_;
}

void Binding::keep_rows_of_step(bool is_without_gradient) {
  TableStep& part = is_without_gradient ? no_grad_ : step_;
  part.fill_pending(is_without_gradient ? step_ : no_grad_);
}

void Binding::take_ahead(TableStep& ahead, Partitioner& partitioner) {
  if (NoGradScope::is_active()) {
    no_grad_ahead().take(ahead, partitioner);
    return count_no_grad_bytes();
  }
  const bool has_room = step_.keys() * spec_.dim * sizeof(float) <= state_->options().no_grad_bytes;
  if (!has_gradients_ && !has_room) step_.clear();
  step_.take(ahead, partitioner);
}

void Binding::end_step() {
  step_.clear();
  no_grad_.clear();
  if (is_frozen()) ahead_.clear();
  is_no_grad_aged_ = false;
  has_gradients_ = false;
  source_ = kNowhere;
}

Result<Lookup> Binding::read(const IdsRef& ids) {
  {
    const MutexLock lock(mutex_);
    if (auto known = ahead_.recall(ids)) return *std::move(known);
  }
  SR_RETURN_IF_ERROR(check_ids(ids.ids));
  TableStep once(spec_.name, spec_.table_id, spec_.schema_version, spec_.dim, state_->shards());
  {
    const auto locked = state_->partitioner();
    once.add({&ids, 1}, locked.partitioner);
  }
  if (once.pending_keys() > 0) SR_RETURN_IF_ERROR(pull_pending(once));
  return *once.recall(ids);
}

Status Binding::pull_pending(TableStep& step) {
  std::vector<TablePull> pulls;
  step.pending(pulls);
  const Status status = state_->pull_step(pulls, state_->pull_options(/*train=*/false), /*before_asking=*/true);
  if (!status.is_ok()) {
    step.rollback();
    return status;
  }
  step.confirm();
  return Status::ok();
}

void Binding::note_source(std::uint64_t source) noexcept {
  source_ = source_ == kNowhere || source_ == source ? source : kOutside;
}

void Binding::note_commit(std::uint64_t commits) noexcept {
  if (source_ == kNowhere) return;
  if (last_commit_.source != source_) last_of_another_ = last_commit_;
  last_commit_ = {source_, commits};
}

std::uint64_t Binding::last_commit_but_of(std::uint64_t source) const noexcept {
  return last_commit_.source == source ? last_of_another_.number : last_commit_.number;
}

Result<StagedSums> Binding::stage(const IdsRef& ids) {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(check_stages());
  std::unique_lock lock(mutex_);  // goes with the sums, which clang cannot follow
  mutex_.assume_locked();
  std::optional<Lookup> lookup = step_.recall(ids);
  if (!lookup) {
    std::int64_t missing = 0;
    lookup = step_.find(ids, &missing);
    if (!lookup) {
      return not_looked_up(missing);
    }
  }
  ++state_->staged_calls;
  float* sums = step_.sums();
  std::uint8_t* staged = step_.staged();
  return StagedSums(std::move(lock), *std::move(lookup), sums, staged, spec_.dim);
}

Status Binding::not_looked_up(std::int64_t id) const {
  return {Code::kFailedPrecondition, "table '" + spec_.name + "': gradient for id " + std::to_string(id) +
                                         ", which was not looked up in this step: call backward before session.step"};
}

Status Binding::stage_sums(std::span<const std::uint64_t> keys, std::span<const std::uint8_t> marks,
                           std::span<float> sums) {
  SR_RETURN_IF_ERROR(state_->check_usable());
  SR_RETURN_IF_ERROR(check_stages());
  const MutexLock lock(mutex_);
  const bool has_all = std::find(marks.begin(), marks.end(), 0) == marks.end();
  if (has_all && step_.take_sums(keys, sums)) {
    ++state_->staged_calls;
    return Status::ok();
  }
  std::vector<std::uint32_t> indexes;
  if (const auto missing = step_.indexes_of(keys, marks, indexes)) return not_looked_up(*missing);
  ++state_->staged_calls;
  StagedSums staged({}, {}, step_.sums(), step_.staged(), spec_.dim);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (marks[i] != 0) staged.add(indexes[i], sums.data() + i * spec_.dim, 1.0f);
  }
  return Status::ok();
}

Status Binding::check_stages() const {
  if (state_->phase.load(std::memory_order_relaxed) == Phase::kOpen) return Status::ok();
  return {Code::kFailedPrecondition, "table '" + spec_.name + "': backward while the step is being committed"};
}

std::optional<Lookup> Binding::recall(const IdsRef& ids) {
  if (is_frozen()) return recall_ahead(ids);
  const MutexLock lock(mutex_);
  return step_.recall(ids);
}

void Binding::trace(const IdsRef& ids) const { state_->trace(spec_.name, ids.source); }

std::optional<Lookup> Binding::recall_ahead(const IdsRef& ids) {
  const MutexLock lock(mutex_);
  return ahead_.recall(ids);
}

Status Binding::check_ids(std::span<const std::int64_t> ids) const {
  const std::uint64_t limit = spec_.num_rows == 0 ? std::uint64_t{1} << 63 : spec_.num_rows;
  const auto bad = std::find_if(ids.begin(), ids.end(),
                                [limit](std::int64_t id) { return static_cast<std::uint64_t>(id) >= limit; });
  if (bad == ids.end()) return Status::ok();
  const std::string allowed = spec_.num_rows == 0 ? "2**63" : std::to_string(spec_.num_rows);
  return not_allowed("id of table '" + spec_.name + "'", *bad, "[0, " + allowed + ")");
}

}  // namespace sparserow
