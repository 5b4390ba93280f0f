#include "rpc/apply_commits.h"

#include <map>

namespace sparserow::rpc {

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
                                Store::Reservation& reservation, Status& status) const {
  // A batch of a few rows is not worth another thread's wake-up.
  constexpr std::size_t kRowsWorthAThread = 2048;
  const std::uint32_t parts = block.keys.size() >= kRowsWorthAThread && parallel_for_ ? parts_ : 1;
  const auto sighting = commit.step == kNoStep ? commit.sequence : static_cast<std::uint64_t>(commit.step);
  std::vector<Status> outcome(parts);
  const auto work = [&](std::uint32_t part) {
    outcome[part] = store_.apply(block.table_id, block.keys, block.grads,
                                 {.lr = block.lr,
                                  .grad_scale = scale,
                                  .part = part,
                                  .parts = parts,
                                  .dim = block.dim,
                                  .reservation = &reservation,
                                  .job = commit.clock,
                                  .step = commit.step,
                                  .sighting = sighting});
  };
  if (parts > 1) {
    parallel_for_(parts, work);
  } else {
    work(0);
  }
  for (Status& part : outcome) {  // NotFound: the table was dropped meanwhile, and its gradients go with it
    if (!part.is_ok() && part.code() != Code::kNotFound && status.is_ok()) status = std::move(part);
  }
}

Status CommitApplier::apply(Kept& kept, std::uint32_t workers) const {
  if (kept.commit.step != kNoStep) store_.note_step(kept.commit.clock, kept.commit.step);
  const float scale = kept.commit.grad_sum ? 1.0f : 1.0f / static_cast<float>(workers);
  Status status;
  for (std::size_t i = 0; i < kept.commit.blocks.size(); ++i) {
    const GradBlock& block = kept.commit.blocks[i];
    if (!block.keys.empty()) apply_block(block, kept.commit, scale, kept.reservations[i], status);
  }
  return status;
}

Status CommitApplier::apply_step(std::span<Kept> commits, std::uint32_t workers) const {
  if (commits.size() == 1) return apply(commits[0], workers);
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
      if (block.dim != table.dim) continue;  // the table was made anew between two commits: what is old is dropped
      table.inputs.push_back({&block, scale});
      table.reservations.push_back(&kept.reservations[i]);
    }
  }
  Status status;
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
      apply_block(part, commits[0].commit, 1.0f, *table.reservations[i], status);
    }
  }
  return status;
}

}  // namespace sparserow::rpc
