// An optimizer whose state begins with zeros, some of them per column.
#pragma once

#include <algorithm>

#include "optim/kernel_optimizer.h"

namespace sparserow {

class ZeroStateOptimizer final : public KernelOptimizer {
 public:
  // `arrays`: the float32 values of state per column.
  ZeroStateOptimizer(const TableSchema& schema, const Kernel (&kernels)[3], std::uint32_t arrays)
      : KernelOptimizer(schema, kernels), state_floats_(arrays * schema.dim) {}

  std::uint32_t state_floats() const noexcept override { return state_floats_; }
  void init_state(const std::byte* /*weights*/, float* state) const noexcept override {
    std::fill_n(state, state_floats_, 0.0f);
  }

 private:
  std::uint32_t state_floats_;
};

}  // namespace sparserow
