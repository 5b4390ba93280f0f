// The sum of several workers' gradients of one table: per key, in rank order, in float64.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "commit/commit.h"

namespace sparserow {

// Runs `work(part)` for part in [0, parts) and returns when all are done.
using ParallelFor = std::function<void(std::uint32_t parts, const std::function<void(std::uint32_t)>& work)>;

// One worker's block with the factor its gradients are multiplied by (1/N, or 1 for sums).
struct ReduceInput {
  const GradBlock* block = nullptr;
  double scale = 1.0;
};

struct Reduced {
  std::vector<std::uint64_t> keys;  // (u) unique
  std::vector<float> grads;         // (u, dim)
  // (inputs + 1): keys[first_in[i] .. first_in[i + 1]) occur in input i and in none before it, so what input
  // i reserved covers them.
  std::vector<std::size_t> first_in;
};

// inputs: blocks of one table in rank order; the result depends on their order only. Keys may repeat
// within a block. Runs `parts` pieces or more through parallel_for (null: in turn).
void reduce(std::uint32_t table_id, std::uint32_t dim, std::span<const ReduceInput> inputs, std::uint32_t parts,
            const ParallelFor& parallel_for, Reduced& out);

}  // namespace sparserow
