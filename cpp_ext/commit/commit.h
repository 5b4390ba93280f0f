// A commit: what one worker sends one shard to end a step, and what it is answered.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "schema/schema.h"

namespace sparserow {

// One table's gradients within a commit, owned (the body of a received frame) or borrowed.
struct GradBlock {
  std::uint32_t table_id = 0;
  std::uint32_t dim = 0;
  float lr = 0.0f;
  std::span<const std::uint64_t> keys;  // (n) unique
  const float* grads = nullptr;         // (n, dim) float32
};

struct Commit {
  std::uint32_t job_id = 0;
  std::uint32_t worker_id = 0;
  std::uint32_t worker_epoch = 0;
  std::uint64_t sequence = 0;  // not 0
  std::int64_t step = kNoStep;
  std::uint64_t clock = 0;  // whose steps are counted from its start: the job in this generation
  bool grad_sum = false;
  std::vector<GradBlock> blocks;
  std::shared_ptr<void> owner;  // keeps the bytes behind blocks alive
};

[[nodiscard]] inline std::uint64_t rows_of(const Commit& commit) noexcept {
  std::uint64_t rows = 0;
  for (const GradBlock& block : commit.blocks) rows += block.keys.size();
  return rows;
}

[[nodiscard]] inline std::uint64_t bytes_of(const Commit& commit) noexcept {
  std::uint64_t bytes = 0;
  for (const GradBlock& block : commit.blocks) bytes += block.keys.size() * (8 + std::uint64_t{4} * block.dim);
  return bytes;
}

struct CommitResult {
  std::uint64_t applied_rows = 0;  // rows of this commit that are applied, or kept for their step's reduction
  bool duplicate = false;
  bool aborted = false;  // ABORT has finished this sequence
};

}  // namespace sparserow
