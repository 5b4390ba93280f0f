#include "session/binding.h"

#include <algorithm>

#include "session/session_state.h"

namespace sparserow {

Binding::Binding(BindingSpec spec, std::shared_ptr<SessionState> state)
    : spec_(std::move(spec)),
      state_(std::move(state)),
      step_(spec_.table_id, spec_.schema_version, spec_.dim, state_->shards().shard_count()),
      ahead_(spec_.table_id, spec_.schema_version, spec_.dim, state_->shards().shard_count()) {}

Result<Lookup> Binding::lookup(const IdsRef& ids, bool train) {
  SR_RETURN_IF_ERROR(state_->check_usable());
  state_->trace(spec_.name, ids.source);
  if (!train) return read(ids);
  if (state_->phase.load(std::memory_order_relaxed) != Phase::kOpen) {
    return Status(Code::kFailedPrecondition, "table '" + spec_.name + "': looked up while the step is being committed");
  }
  const std::lock_guard lock(mutex_);
  if (auto known = step_.recall(ids)) return *std::move(known);
  SR_RETURN_IF_ERROR(check_ids(ids.ids));
  {
    const auto locked = state_->partitioner();
    step_.add({&ids, 1}, locked.partitioner);
  }
  if (step_.pending_keys() > 0) {
    if (state_->merged_this_step.load(std::memory_order_relaxed)) ++state_->counters.lookups_missed;
    SR_RETURN_IF_ERROR(pull_pending(step_, /*train=*/true));
  }
  return *step_.recall(ids);
}

Result<Lookup> Binding::read(const IdsRef& ids) {
  {
    const std::lock_guard lock(mutex_);
    if (auto known = ahead_.recall(ids)) return *std::move(known);
  }
  SR_RETURN_IF_ERROR(check_ids(ids.ids));
  TableStep once(spec_.table_id, spec_.schema_version, spec_.dim, state_->shards().shard_count());
  {
    const auto locked = state_->partitioner();
    once.add({&ids, 1}, locked.partitioner);
  }
  if (once.pending_keys() > 0) SR_RETURN_IF_ERROR(pull_pending(once, /*train=*/false));
  return *once.recall(ids);
}

Status Binding::pull_pending(TableStep& step, bool train) {
  std::vector<rpc::TablePull> pulls;
  step.pending(pulls);
  const Status status = state_->pull_step(pulls, state_->pull_options(train), /*before_asking=*/true);
  if (!status.is_ok()) {
    step.rollback();
    return status;
  }
  step.confirm();
  if (train) note_source(kOutside);
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
  if (state_->phase.load(std::memory_order_relaxed) != Phase::kOpen) {
    return Status(Code::kFailedPrecondition, "table '" + spec_.name + "': backward while the step is being committed");
  }
  std::unique_lock lock(mutex_);
  std::optional<Lookup> lookup = step_.recall(ids);
  if (!lookup) {
    std::int64_t missing = 0;
    lookup = step_.find(ids, &missing);
    if (!lookup) {
      return Status(Code::kFailedPrecondition, "table '" + spec_.name + "': gradient for id " +
                                                   std::to_string(missing) +
                                                   ", which was not looked up in this step: call backward before "
                                                   "session.step");
    }
  }
  ++state_->staged_calls;
  float* sums = step_.sums();
  std::uint8_t* staged = step_.staged();
  return StagedSums(std::move(lock), *std::move(lookup), sums, staged, spec_.dim);
}

Status Binding::check_ids(std::span<const std::int64_t> ids) const {
  const std::uint64_t limit = spec_.num_rows == 0 ? std::uint64_t{1} << 63 : spec_.num_rows;
  const auto bad = std::find_if(ids.begin(), ids.end(),
                                [limit](std::int64_t id) { return static_cast<std::uint64_t>(id) >= limit; });
  if (bad == ids.end()) return Status::ok();
  const std::string allowed = spec_.num_rows == 0 ? "2**63" : std::to_string(spec_.num_rows);
  return {Code::kInvalidArgument,
          "table '" + spec_.name + "': id " + std::to_string(*bad) + " is not allowed; allowed: [0, " + allowed + ")"};
}

}  // namespace sparserow
