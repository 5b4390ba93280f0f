#include "session/pull_together.h"

#include <algorithm>

#include "session/session_state.h"

namespace sparserow {
namespace {

// The ids that are wanted of each binding, in the order in which bindings are locked.
std::vector<std::pair<Binding*, std::vector<IdsRef>>> by_binding(std::span<const AheadIds> lookups) {
  std::vector<std::pair<Binding*, std::vector<IdsRef>>> out;
  for (const AheadIds& lookup : lookups) {
    auto found = std::find_if(out.begin(), out.end(), [&](const auto& one) { return one.first == lookup.binding; });
    if (found == out.end()) found = out.insert(out.end(), {lookup.binding, {}});
    found->second.push_back(lookup.ids);
  }
  std::sort(out.begin(), out.end(),
            [](const auto& a, const auto& b) { return a.first->spec().order < b.first->spec().order; });
  return out;
}

}  // namespace

Result<bool> pull_together(SessionState& state, std::span<const AheadIds> lookups, bool train) {
  SR_RETURN_IF_ERROR(state.check_usable());
  std::vector<AheadIds> frozen;
  std::vector<AheadIds> others;
  for (const AheadIds& lookup : lookups) (lookup.binding->is_frozen() ? frozen : others).push_back(lookup);
  if (train && !frozen.empty()) {
    if (const auto pulled = pull_together(state, frozen, /*train=*/false); !pulled.is_ok()) return pulled.status();
    lookups = others;
  }
  const bool is_without_gradient = train && NoGradScope::is_active();
  if (is_without_gradient) state.bound_no_grad_rows();
  if (train && !is_without_gradient) SR_RETURN_IF_ERROR(state.check_lookup());
  std::vector<std::unique_lock<Mutex>> locks;  // of all of them, which clang cannot follow
  std::vector<TableStep*> tables;
  std::vector<Binding*> pulled;  // for the step
  std::vector<TablePull> pulls;
  for (auto& [binding, wanted] : by_binding(lookups)) {
    const Binding& one = *binding;
    std::erase_if(wanted, [&one](const IdsRef& ids) { return !one.check_ids(ids.ids).is_ok(); });
    if (wanted.empty()) continue;
    locks.emplace_back(binding->mutex_);
    binding->mutex_.assume_locked();
    if (is_without_gradient) {
      TableStep* const step = &binding->step_;
      std::erase_if(wanted, [step](const IdsRef& ids) { return step->known(ids).has_value(); });
      if (wanted.empty()) continue;
    }
    TableStep& table = is_without_gradient ? binding->no_grad_ahead() : train ? binding->step_ : binding->ahead_;
    const auto locked = state.partitioner();
    table.add(wanted, locked.partitioner);
    table.pending(pulls);
    tables.push_back(&table);
    if (train && table.pending_keys() > 0) pulled.push_back(binding);
    if (is_without_gradient) binding->count_no_grad_bytes();
  }
  if (pulls.empty()) return false;
  const Status status = state.pull_step(pulls, state.pull_options(train), /*before_asking=*/true);
  if (train && status.is_ok()) {
    for (Binding* binding : pulled) {
      binding->mutex_.assume_locked();
      binding->keep_rows_of_step(is_without_gradient);
    }
  }
  for (TableStep* table : tables) status.is_ok() ? table->confirm() : table->rollback();
  for (Binding* binding : pulled) {
    binding->mutex_.assume_locked();
    if (!is_without_gradient) binding->note_source(Binding::kOutside);
  }
  SR_RETURN_IF_ERROR(status);
  ++state.counters.pulls_merged;
  return true;
}

namespace {

// As read_together(), but rows that were read ahead of an evaluation's forward are taken from there.
Result<std::vector<Lookup>> read_or_recall(std::span<const BoundIds> wanted) {
  std::vector<std::optional<Lookup>> known;
  std::vector<BoundIds> lacking;
  for (const BoundIds& one : wanted) {
    one.binding->trace(one.ids);
    known.push_back(one.binding->recall_ahead(one.ids));
    if (!known.back()) lacking.push_back(one);
  }
  std::vector<Lookup> read;
  if (!lacking.empty()) {
    auto together = read_together(lacking);
    if (!together.is_ok()) return together.status();
    read = std::move(together).value();
  }
  std::vector<Lookup> out;
  std::size_t next = 0;
  for (auto& one : known) out.push_back(one ? *std::move(one) : std::move(read[next++]));
  return out;
}

}  // namespace

Result<std::vector<Lookup>> look_up_together(std::span<const BoundIds> wanted, bool train) {
  if (!train) return read_or_recall(wanted);
  std::vector<SessionState*> sessions;
  for (const BoundIds& one : wanted) {
    SessionState* state = &one.binding->state();
    if (std::find(sessions.begin(), sessions.end(), state) == sessions.end()) sessions.push_back(state);
  }
  for (SessionState* state : sessions) {
    if (state->phase.load(std::memory_order_relaxed) != Phase::kOpen)
      continue;  // the lookup refuses, and names its table
    std::vector<AheadIds> lacking;
    for (const BoundIds& one : wanted) {
      if (&one.binding->state() == state && !one.binding->recall(one.ids)) {
        lacking.push_back({one.binding.get(), one.ids});
      }
    }
    const bool was_merged = state->merged_this_step.load(std::memory_order_relaxed);
    if (lacking.empty()) continue;
    const auto pulled = pull_together(*state, lacking, train);
    if (!pulled.is_ok()) return pulled.status();
    if (was_merged && pulled.value()) ++state->counters.lookups_missed;
  }
  std::vector<Lookup> out;
  for (const BoundIds& one : wanted) {
    auto lookup = one.binding->lookup(one.ids, train);
    if (!lookup.is_ok()) return lookup.status();
    out.push_back(std::move(lookup).value());
  }
  return out;
}

}  // namespace sparserow
