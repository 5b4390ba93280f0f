#include "session/prefetcher.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>

namespace sparserow {
namespace {

constexpr std::size_t kIdsOfThread = 32'768;  // of a batch, for each thread that index() uses

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{Binding::kOutside};
  return ++last;
}

// Some of the rows of a pull, packed for it and put into their places afterwards.
class RowSelection {
 public:
  // Leaves the keys whose mark is `wanted`; what the marks and the pull point to must outlive the object.
  void narrow(TablePull& pull, const std::vector<std::uint8_t>& marks, std::uint8_t wanted) {
    if (std::all_of(marks.begin(), marks.end(), [wanted](std::uint8_t mark) { return mark == wanted; })) return;
    whole_ = pull;
    shard_begin_.assign(1, 0);
    for (std::size_t shard = 0; shard + 1 < pull.shard_begin.size(); ++shard) {
      for (std::uint32_t i = pull.shard_begin[shard]; i < pull.shard_begin[shard + 1]; ++i) {
        if (marks[i] != wanted) continue;
        keys_.push_back(pull.keys[i]);
        places_.push_back(i);
      }
      shard_begin_.push_back(static_cast<std::uint32_t>(keys_.size()));
    }
    rows_.resize(keys_.size() * pull.dim);
    pull.keys = keys_;
    pull.shard_begin = shard_begin_;
    pull.rows = rows_;
    if (pull.versions.empty()) return;
    versions_.resize(keys_.size());
    pull.versions = versions_;
  }

  void deliver() const {
    const std::size_t dim = whole_.dim;
    for (std::size_t i = 0; i < places_.size(); ++i) {
      std::memcpy(whole_.rows.data() + places_[i] * dim, rows_.data() + i * dim, dim * sizeof(float));
      if (!whole_.versions.empty()) whole_.versions[places_[i]] = versions_[i];
    }
  }

 private:
  TablePull whole_;
  std::vector<std::uint64_t> keys_;
  std::vector<std::uint32_t> shard_begin_;
  std::vector<std::uint32_t> places_;
  std::vector<float> rows_;
  std::vector<std::uint64_t> versions_;
};

}  // namespace

std::size_t PrefetchedBatch::rows() const noexcept {
  std::size_t rows = 0;
  for (const Part& part : parts_) rows += part.step.keys();
  return rows;
}

Prefetcher::Prefetcher(std::shared_ptr<Session> session, bool exact, std::size_t threads)
    : session_(std::move(session)),
      bindings_(session_->bindings_),
      exact_(exact),
      id_(next_id()),
      partitioners_(std::max<std::size_t>(threads, 1),
                    Partitioner(session_->state().shards().slot_owner(), session_->state().shards().shard_count())),
      ages_(bindings_.size()) {}

Result<std::unique_ptr<PrefetchedBatch>> Prefetcher::index(std::span<const AheadLookup> lookups) {
  SR_RETURN_IF_ERROR(session_->state().check_usable());
  std::unique_ptr<PrefetchedBatch> batch;
  {
    const MutexLock lock(mutex_);
    if (!spare_.empty()) {
      batch = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (!batch) {
    batch = std::make_unique<PrefetchedBatch>();
    for (const auto& binding : bindings_) {
      const BindingSpec& spec = binding->spec_;
      RowReader& shards = session_->state().shards();
      batch->parts_.push_back(
          {TableStep(spec.name, spec.table_id, spec.schema_version, spec.dim, shards), {}, {}, {}, {}});
    }
  }
  const MutexLock indexing(index_mutex_);
  batch->number_ = ++indexed_;
  std::vector<TableIds> tables;
  for (std::size_t b = 0; b < bindings_.size(); ++b) {
    batch->parts_[b].latest.clear();
    TableIds wanted{b, {}};
    for (const AheadLookup& lookup : lookups) {
      const bool is_of = lookup.binding == bindings_[b]->spec_.name && !bindings_[b]->is_frozen();
      if (is_of && bindings_[b]->check_ids(lookup.ids.ids).is_ok()) wanted.ids.push_back(lookup.ids);
    }
    if (!wanted.ids.empty()) tables.push_back(std::move(wanted));
  }
  index_tables(tables, *batch);
  return batch;
}

void Prefetcher::index_tables(std::span<const TableIds> tables, PrefetchedBatch& batch) {
  std::size_t ids = 0;
  for (const TableIds& table : tables) {
    for (const IdsRef& each : table.ids) ids += each.ids.size();
  }
  std::atomic<std::size_t> next = 0;
  const bool exact = exact_;
  const auto work = [&tables, &batch, &next, exact, ages = ages_.data()](Partitioner& partitioner) {
    for (std::size_t t = next++; t < tables.size(); t = next++) {
      PrefetchedBatch::Part& part = batch.parts_[tables[t].binding];
      part.step.add(tables[t].ids, partitioner);
      if (exact) ages[tables[t].binding].touch(part.step.all_keys(), batch.number_, part.latest);
    }
  };
  // A thread costs some 20 us, in which it would do 2,000 ids.
  const std::size_t threads = std::min({partitioners_.size(), tables.size(), ids / kIdsOfThread + 1});
  std::vector<std::future<void>> others;
  for (std::size_t t = 1; t < threads; ++t) {
    others.push_back(std::async(std::launch::async, work, std::ref(partitioners_[t])));
  }
  work(partitioners_[0]);
  for (std::future<void>& other : others) other.get();
}

Status Prefetcher::hint(PrefetchedBatch& batch) {
  constexpr std::chrono::milliseconds kDeadline{10'000};
  SessionState& state = session_->state();
  SR_RETURN_IF_ERROR(state.check_usable());
  std::vector<TablePull> pulls;
  for (PrefetchedBatch::Part& part : batch.parts_) part.step.requests(pulls);
  if (!pulls.empty()) state.counters.rows_hinted += state.shards().hint(pulls, kDeadline);
  return Status::ok();
}

Status Prefetcher::pull(PrefetchedBatch& batch, std::int64_t step) {
  SR_RETURN_IF_ERROR(session_->state().check_usable());
  return exact_ ? pull_ahead(batch) : pull_rows(batch, step);
}

Status Prefetcher::pull_rows(PrefetchedBatch& batch, std::int64_t step) {
  SessionState& state = session_->state();
  batch.step_ = step;
  std::vector<TablePull> pulls;
  for (PrefetchedBatch::Part& part : batch.parts_) part.step.requests(pulls);
  if (pulls.empty()) return Status::ok();
  CallOptions options = state.pull_options(/*train=*/true);
  if (options.step != kNoStep) options.step = step;
  SR_RETURN_IF_ERROR(state.pull_step(pulls, options, /*before_asking=*/false));
  for (PrefetchedBatch::Part& part : batch.parts_) part.step.confirm();
  state.counters.rows_prefetched += batch.rows();
  return Status::ok();
}

// Marks the rows that a step will change that is under way or lies between: of the batches before this one.
void Prefetcher::defer(PrefetchedBatch& batch) {
  SessionState& state = session_->state();
  std::uint32_t open = 0;
  {
    const MutexLock lock(mutex_);
    const std::uint64_t commits = state.counters.steps_committed.load();
    const bool in_doubt = state.is_committing();  // after the count: the last one counted may not be acknowledged
    if (commits > open_commits_) {
      open = in_doubt ? open_ : handed_over_ + 1;
    } else {
      open = in_doubt ? open_before_ : open_;
    }
    batch.commits_ = in_doubt && commits > 0 ? commits - 1 : commits;
  }
  for (PrefetchedBatch::Part& part : batch.parts_) {
    part.deferred.resize(part.latest.size());
    for (std::size_t i = 0; i < part.latest.size(); ++i) part.deferred[i] = part.latest[i] >= open ? 1 : 0;
  }
}

Status Prefetcher::pull_ahead(PrefetchedBatch& batch) {
  SessionState& state = session_->state();
  defer(batch);
  for (PrefetchedBatch::Part& part : batch.parts_) part.versions.clear();
  batch.writes_of_others_.assign(state.shards().shard_count(), 0);
  CallOptions options = state.pull_options(/*train=*/true);
  options.step = kNoStep;
  options.writes_of_others = batch.writes_of_others_.data();
  SR_RETURN_IF_ERROR(pull_some(batch, 0, looks_again_.load(), options));
  for (PrefetchedBatch::Part& part : batch.parts_) part.step.confirm();
  return Status::ok();
}

Status Prefetcher::pull_some(PrefetchedBatch& batch, std::uint8_t deferred, bool with_versions,
                             const CallOptions& options) {
  SessionState& state = session_->state();
  std::vector<TablePull> pulls;
  std::vector<RowSelection> selections(batch.parts_.size());
  std::size_t rows = 0;
  for (std::size_t b = 0; b < batch.parts_.size(); ++b) {
    PrefetchedBatch::Part& part = batch.parts_[b];
    const std::size_t first = pulls.size();
    part.step.requests(pulls);
    if (pulls.size() == first) continue;
    TablePull& pull = pulls.back();  // one batch of ids a table: index() added them at once
    if (with_versions) {
      part.versions.resize(pull.keys.size());
      pull.versions = part.versions;
    }
    selections[b].narrow(pull, part.deferred, deferred);
    rows += pull.keys.size();
  }
  if (pulls.empty()) return Status::ok();
  SR_RETURN_IF_ERROR(state.pull(pulls, options));
  for (const RowSelection& selection : selections) selection.deliver();
  ++state.counters.pulls;
  state.counters.rows_pulled += rows;
  (deferred == 0 ? state.counters.rows_prefetched : state.counters.rows_deferred) += rows;
  return Status::ok();
}

// Makes the rows what a pull of this step gives.
Result<Prefetcher::Refreshed> Prefetcher::pull_exactly(PrefetchedBatch& batch) {
  SessionState& state = session_->state();
  SR_RETURN_IF_ERROR(state.wait_for_commit());
  std::vector<std::uint64_t> writes_of_others(state.shards().shard_count(), 0);
  CallOptions options = state.pull_options(/*train=*/true);
  options.writes_of_others = writes_of_others.data();
  const bool knows = knows_what_was_written(batch);
  if (knows && !looks_again_.load()) {
    SR_RETURN_IF_ERROR(pull_some(batch, 1, false, options));
    if (writes_of_others == batch.writes_of_others_) return Refreshed::kDeferred;
  }
  SR_RETURN_IF_ERROR(revalidate(batch, options));
  looks_again_.store(!knows || writes_of_others != batch.writes_of_others_);
  return Refreshed::kChanged;
}

Result<std::unique_ptr<LookupPack>> Prefetcher::pack(PrefetchedBatch& batch, std::span<const AheadLookup> lookups,
                                                     std::vector<std::uint32_t>& parts) {
  SR_RETURN_IF_ERROR(session_->state().check_usable());
  auto pack = std::make_unique<LookupPack>();
  for (std::uint32_t i = 0; i < lookups.size(); ++i) {
    for (std::size_t b = 0; b < bindings_.size(); ++b) {
      if (lookups[i].binding != bindings_[b]->spec_.name) continue;
      const auto lookup = batch.parts_[b].step.known(lookups[i].ids);
      if (!lookup) continue;
      pack->add(bindings_[b], lookups[i].ids.ids, *lookup);
      parts.push_back(i);
    }
  }
  return pack;
}

void Prefetcher::note_fresh(PrefetchedBatch& batch, Refreshed which, LookupPack& pack) const {
  pack.fresh().clear();
  if (which == Refreshed::kNone) return;
  for (std::size_t g = 0; g < pack.groups().size(); ++g) {
    const LookupPack::Group& group = pack.groups()[g];
    const auto binding = std::find(bindings_.begin(), bindings_.end(), group.binding);
    PrefetchedBatch::Part& part = batch.parts_[static_cast<std::size_t>(binding - bindings_.begin())];
    const auto is_fresh = [&](std::uint32_t index) {
      if (which == Refreshed::kAll || part.deferred[index] != 0) return true;
      return which == Refreshed::kChanged && part.changed[index] != 0;
    };
    std::vector<TablePull> rows;
    part.step.requests(rows);
    LookupPack::Fresh fresh{g, {}, {}};
    for (std::size_t i = 0; i < group.indexes.size(); ++i) {
      const std::uint32_t index = group.indexes[i];
      if (!is_fresh(index)) continue;
      fresh.places.push_back(static_cast<std::int32_t>(i));
      const auto row = rows.front().rows.subspan(std::size_t{index} * part.step.dim(), part.step.dim());
      fresh.rows.insert(fresh.rows.end(), row.begin(), row.end());
    }
    if (!fresh.places.empty()) pack.fresh().push_back(std::move(fresh));
  }
}

// Whether a batch that was indexed after this one has been handed over.
bool Prefetcher::is_overtaken(const PrefetchedBatch& batch) {
  const MutexLock lock(mutex_);
  return handed_over_ > batch.number_;
}

// Whether the keys of every step committed since the batch was pulled are among those that it deferred.
bool Prefetcher::knows_what_was_written(const PrefetchedBatch& batch) {
  if (is_overtaken(batch)) return false;
  for (const auto& binding : bindings_) {
    const MutexLock lock(binding->mutex_);
    if (binding->last_commit_but_of(id_) > batch.commits_) return false;
  }
  return true;
}

Result<std::uint64_t> Prefetcher::hand_over(std::unique_ptr<PrefetchedBatch> batch, LookupPack* pack) {
  SessionState& state = session_->state();
  const std::uint64_t deferred_before = state.counters.rows_deferred.load();
  SR_RETURN_IF_ERROR(state.check_usable());
  SR_RETURN_IF_ERROR(session_->expect(Phase::kOpen, "hand_over"));
  auto refreshed = Refreshed::kNone;
  if (exact_) {
    const auto brought = pull_exactly(*batch);
    if (!brought.is_ok()) return brought.status();
    refreshed = brought.value();
  } else if (state.options().clocked && batch->step_ < session_->step()) {
    SR_RETURN_IF_ERROR(pull_rows(*batch, session_->step()));
    refreshed = Refreshed::kAll;
  }
  if (pack != nullptr) note_fresh(*batch, refreshed, *pack);
  // Batches that were pulled after a later one's step did not reckon with it.
  const bool is_late = is_overtaken(*batch);
  bool any = false;
  if (NoGradScope::is_active()) state.bound_no_grad_rows();
  for (std::size_t b = 0; b < bindings_.size(); ++b) {
    PrefetchedBatch::Part& part = batch->parts_[b];
    if (part.step.empty()) {
      part.step.clear();  // it may remember lookups of no ids
      continue;
    }
    any = true;
    Binding& binding = *bindings_[b];
    const MutexLock lock(binding.mutex_);
    binding.note_source(is_late ? Binding::kOutside : id_);
    const auto locked = state.partitioner();
    binding.take_ahead(part.step, locked.partitioner);
  }
  if (any) state.merged_this_step.store(true);
  const MutexLock lock(mutex_);
  note_hand_over(batch->number_);
  spare_.push_back(std::move(batch));
  return state.counters.rows_deferred.load() - deferred_before;
}

void Prefetcher::note_hand_over(std::uint32_t number) {
  const std::uint64_t commits = session_->state().counters.steps_committed.load();
  if (commits != open_commits_) {
    open_before_ = open_;
    open_ = number;
    open_commits_ = commits;
  }
  handed_over_ = std::max(handed_over_, number);
}

// Asks for the rows that differ from those that the batch has; for all when it has no versions.
Status Prefetcher::revalidate(PrefetchedBatch& batch, const CallOptions& options) {
  SessionState& state = session_->state();
  std::vector<TablePull> pulls;
  for (PrefetchedBatch::Part& part : batch.parts_) {
    const std::size_t first = pulls.size();
    part.step.requests(pulls);
    if (pulls.size() == first) continue;
    TablePull& pull = pulls.back();
    const std::size_t keys = pull.keys.size();
    const bool has_versions = !part.versions.empty();
    part.versions.resize(keys, kNoVersion);
    for (std::size_t i = 0; has_versions && i < keys; ++i) {
      if (part.deferred[i] != 0) part.versions[i] = kNoVersion;
    }
    part.changed.resize(keys);
    pull.versions = part.versions;
    pull.known = part.versions;
    pull.changed = part.changed;
  }
  if (pulls.empty()) return Status::ok();
  SR_RETURN_IF_ERROR(state.pull(pulls, options));
  ++state.counters.pulls;
  for (const PrefetchedBatch::Part& part : batch.parts_) {
    std::uint64_t ahead = 0;
    std::uint64_t refreshed = 0;
    for (std::size_t i = 0; i < part.step.keys(); ++i) {
      ahead += part.deferred[i] == 0 ? 1 : 0;
      refreshed += part.deferred[i] == 0 && part.changed[i] != 0 ? 1 : 0;
    }
    const std::uint64_t deferred = part.step.keys() - ahead;
    state.counters.rows_revalidated += ahead;
    state.counters.rows_refreshed += refreshed;
    state.counters.rows_deferred += deferred;
    state.counters.rows_pulled += refreshed + deferred;
    state.counters.bytes_refreshed += refreshed * part.step.dim() * sizeof(float);
  }
  return Status::ok();
}

}  // namespace sparserow
