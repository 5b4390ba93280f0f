#include "session/prefetcher.h"

#include <algorithm>

namespace sparserow {

std::size_t PrefetchedBatch::rows() const noexcept {
  std::size_t rows = 0;
  for (const Part& part : parts_) rows += part.step.keys();
  return rows;
}

Prefetcher::Prefetcher(std::shared_ptr<Session> session, bool exact)
    : session_(std::move(session)),
      bindings_(session_->bindings_),
      exact_(exact),
      partitioner_(session_->state().shards().slot_owner(), session_->state().shards().shard_count()) {}

Result<std::unique_ptr<PrefetchedBatch>> Prefetcher::index(std::span<const AheadLookup> lookups) {
  SR_RETURN_IF_ERROR(session_->state().check_usable());
  std::unique_ptr<PrefetchedBatch> batch;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      batch = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (!batch) {
    batch = std::make_unique<PrefetchedBatch>();
    for (const auto& binding : bindings_) {
      const BindingSpec& spec = binding->spec_;
      const std::uint32_t shards = session_->state().shards().shard_count();
      batch->parts_.push_back({TableStep(spec.table_id, spec.schema_version, spec.dim, shards), {}, {}});
    }
  }
  std::vector<IdsRef> wanted;
  for (std::size_t b = 0; b < bindings_.size(); ++b) {
    wanted.clear();
    for (const AheadLookup& lookup : lookups) {
      if (lookup.binding == bindings_[b]->spec_.name && bindings_[b]->check_ids(lookup.ids.ids).is_ok()) {
        wanted.push_back(lookup.ids);
      }
    }
    if (!wanted.empty()) batch->parts_[b].step.add(wanted, partitioner_);
  }
  return batch;
}

std::vector<rpc::TablePull> Prefetcher::requests(PrefetchedBatch& batch, bool conditional) const {
  std::vector<rpc::TablePull> pulls;
  for (PrefetchedBatch::Part& part : batch.parts_) {
    const std::size_t first = pulls.size();
    part.step.requests(pulls);
    if (!exact_ || pulls.size() == first) continue;
    part.versions.resize(part.step.keys());
    rpc::TablePull& pull = pulls.back();  // one batch of ids a table: index() added them at once
    pull.versions = part.versions.data();
    if (!conditional) continue;
    part.changed.resize(part.step.keys());
    pull.known = part.versions.data();
    pull.changed = part.changed.data();
  }
  return pulls;
}

Status Prefetcher::pull(PrefetchedBatch& batch, std::int64_t step) {
  SR_RETURN_IF_ERROR(session_->state().check_usable());
  return pull_rows(batch, exact_ ? rpc::kNoStep : step);
}

Status Prefetcher::pull_rows(PrefetchedBatch& batch, std::int64_t step) {
  SessionState& state = session_->state();
  batch.step_ = step;
  const std::vector<rpc::TablePull> pulls = requests(batch, /*conditional=*/false);
  if (pulls.empty()) return Status::ok();
  rpc::CallOptions options = state.pull_options(/*train=*/true);
  if (options.step != rpc::kNoStep) options.step = step;
  SR_RETURN_IF_ERROR(state.pull_step(pulls, options, /*before_asking=*/false));
  for (PrefetchedBatch::Part& part : batch.parts_) part.step.confirm();
  state.counters.rows_prefetched += batch.rows();
  return Status::ok();
}

Status Prefetcher::hand_over(std::unique_ptr<PrefetchedBatch> batch) {
  SessionState& state = session_->state();
  SR_RETURN_IF_ERROR(state.check_usable());
  SR_RETURN_IF_ERROR(session_->expect(Phase::kOpen, "hand_over"));
  if (exact_) {
    SR_RETURN_IF_ERROR(revalidate(*batch));
  } else if (state.options().clocked && batch->step_ < session_->step()) {
    SR_RETURN_IF_ERROR(pull_rows(*batch, session_->step()));
  }
  bool any = false;
  for (std::size_t b = 0; b < bindings_.size(); ++b) {
    PrefetchedBatch::Part& part = batch->parts_[b];
    if (part.step.empty()) {
      part.step.clear();  // it may remember lookups of no ids
      continue;
    }
    any = true;
    const std::lock_guard lock(bindings_[b]->mutex_);
    const auto locked = state.partitioner();
    bindings_[b]->step_.take(part.step, locked.partitioner);
  }
  if (any) state.merged_this_step.store(true);
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(batch));
  return Status::ok();
}

Status Prefetcher::revalidate(PrefetchedBatch& batch) {
  SessionState& state = session_->state();
  const std::vector<rpc::TablePull> pulls = requests(batch, /*conditional=*/true);
  if (pulls.empty()) return Status::ok();
  SR_RETURN_IF_ERROR(state.wait_for_commit());
  SR_RETURN_IF_ERROR(state.pull(pulls, state.pull_options(/*train=*/true)));
  ++state.counters.pulls;
  for (const rpc::TablePull& pull : pulls) {
    const auto refreshed = static_cast<std::uint64_t>(std::count(pull.changed, pull.changed + pull.keys.size(), 1));
    state.counters.rows_revalidated += pull.keys.size();
    state.counters.rows_refreshed += refreshed;
    state.counters.rows_pulled += refreshed;
    state.counters.bytes_refreshed += refreshed * pull.dim * sizeof(float);
  }
  return Status::ok();
}

}  // namespace sparserow
