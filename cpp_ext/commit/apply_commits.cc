#include "commit/apply_commits.h"

#include <algorithm>
#include <exception>
#include <map>
#include <new>

namespace sparserow {
namespace {

// A store that throws has failed; the changes that it reported before stay known.
template <class Apply>
ApplyOutcome caught(Apply&& apply) noexcept {
  ApplyOutcome outcome;
  try {
    apply(outcome);
  } catch (const std::bad_alloc&) {
    outcome.status = Status(Code::kResourceExhausted, "the system refuses memory to apply a commit");
  } catch (const std::exception& error) {
    outcome.status = Status(Code::kInternal, std::string("applying a commit failed: ") + error.what());
  }
  return outcome;
}

}  // namespace

Result<Kept> CommitApplier::reserve(Commit commit) const {
  Kept kept{.commit = std::move(commit), .reservations = {}, .bytes = 0};
  kept.bytes = bytes_of(kept.commit);
  for (const GradBlock& block : kept.commit.blocks) {
    auto reservation = store_.reserve(block.table_id, block.keys);
    if (!reservation.is_ok()) return reservation.status();
    kept.reservations.push_back(std::move(reservation).value());
  }
  return kept;
}

void CommitApplier::apply_block(const GradBlock& block, const Commit& commit, float scale,
                                Store::Reservation& reservation, ApplyOutcome& outcome) const {
  // A batch of a few rows is not worth another thread's wake-up. A large one goes slice by slice, because an I/O thread
  // that helps with a slice has other connections to serve.
  constexpr std::size_t kRowsWorthAThread = 2048;
  constexpr std::size_t kSlice = std::size_t{1} << 15;
  for (std::size_t begin = 0; begin < block.keys.size() && outcome.status.is_ok(); begin += kSlice) {
    const std::size_t rows = std::min(kSlice, block.keys.size() - begin);
    const std::uint32_t parts = rows >= kRowsWorthAThread && parallel_for_ ? parts_ : 1;
    apply_slice(block, begin, rows, parts, commit, scale, reservation, outcome);
  }
}

void CommitApplier::apply_slice(const GradBlock& block, std::size_t begin, std::size_t rows, std::uint32_t parts,
                                const Commit& commit, float scale, Store::Reservation& reservation,
                                ApplyOutcome& outcome) const {
  const auto observation = commit.step == kNoStep ? commit.sequence : static_cast<std::uint64_t>(commit.step);
  struct Part {
    Status status;
    bool has_changed = false;
  };
  std::vector<Part> ended(parts);
  const auto keys = block.keys.subspan(begin, rows);
  const auto grouped = parts > 1 ? store_.grouped(block.table_id, keys) : nullptr;
  const auto work = [&](std::uint32_t part) {
    ended[part].status = store_.apply(block.table_id, keys, block.grads + begin * block.dim,
                                      {.lr = block.lr,
                                       .grad_scale = scale,
                                       .part = part,
                                       .parts = parts,
                                       .grouped = grouped.get(),
                                       .dim = block.dim,
                                       .reservation = &reservation,
                                       .job = commit.clock,
                                       .step = commit.step,
                                       .observation = observation,
                                       .has_changed = &ended[part].has_changed});
  };
  const auto note = [&] {
    for (Part& part : ended) {  // NotFound: the table was dropped meanwhile, and its gradients go with it
      outcome.has_changed |= part.has_changed;
      const bool is_first = outcome.status.is_ok() && part.status.code() != Code::kNotFound;
      if (is_first) outcome.status = std::move(part.status);
    }
  };
  try {
    parts > 1 ? parallel_for_(parts, work) : work(0);
  } catch (...) {
    note();
    throw;
  }
  note();
}

void CommitApplier::apply_commit(Kept& kept, std::uint32_t workers, ApplyOutcome& outcome) const {
  if (kept.commit.step != kNoStep) store_.note_step(kept.commit.clock, kept.commit.step);
  const float scale = kept.commit.grad_sum ? 1.0f : 1.0f / static_cast<float>(workers);
  for (std::size_t i = 0; i < kept.commit.blocks.size() && outcome.status.is_ok(); ++i) {
    const GradBlock& block = kept.commit.blocks[i];
    if (!block.keys.empty()) apply_block(block, kept.commit, scale, kept.reservations[i], outcome);
  }
}

ApplyOutcome CommitApplier::apply(Kept& kept, std::uint32_t workers) const noexcept {
  return caught([&](ApplyOutcome& outcome) { apply_commit(kept, workers, outcome); });
}

ApplyOutcome CommitApplier::apply_step(std::span<Kept> commits, std::uint32_t workers) const noexcept {
  return caught([&](ApplyOutcome& outcome) {
    if (commits.size() == 1) return apply_commit(commits[0], workers, outcome);
    reduce_and_apply(commits, workers, outcome);
  });
}

void CommitApplier::reduce_and_apply(std::span<Kept> commits, std::uint32_t workers, ApplyOutcome& outcome) const {
  if (commits[0].commit.step != kNoStep) store_.note_step(commits[0].commit.clock, commits[0].commit.step);
  struct TableInput {
    std::uint32_t dim = 0;
    float lr = 0.0f;  // of the lowest rank that has the table
    std::vector<ReduceInput> inputs;
    std::vector<Store::Reservation*> reservations;  // of each input
  };
  std::map<std::uint32_t, TableInput> tables;
  for (Kept& kept : commits) {
    const double scale = kept.commit.grad_sum ? 1.0 : 1.0 / workers;
    for (std::size_t i = 0; i < kept.commit.blocks.size(); ++i) {
      const GradBlock& block = kept.commit.blocks[i];
      if (block.keys.empty()) continue;
      TableInput& table = tables[block.table_id];
      if (table.inputs.empty()) table = {block.dim, block.lr, {}, {}};
      if (block.dim != table.dim) continue;  // a block of the table that this one has replaced between two commits
      table.inputs.push_back({&block, scale});
      table.reservations.push_back(&kept.reservations[i]);
    }
  }
  Reduced reduced;
  for (const auto& [table_id, table] : tables) {
    reduce(table_id, table.dim, table.inputs, parts_, parallel_for_, reduced);
    for (std::size_t i = 0; i < table.inputs.size(); ++i) {
      const std::size_t begin = reduced.first_in[i];
      const std::size_t count = reduced.first_in[i + 1] - begin;
      if (count == 0) continue;
      const GradBlock part{.table_id = table_id,
                           .dim = table.dim,
                           .lr = table.lr,
                           .keys = std::span(reduced.keys).subspan(begin, count),
                           .grads = reduced.grads.data() + begin * table.dim};
      apply_block(part, commits[0].commit, 1.0f, *table.reservations[i], outcome);
    }
  }
}

}  // namespace sparserow
