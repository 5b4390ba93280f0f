// The optimizer interface: how one summed gradient moves one row, in place.
//
// To add an optimizer: (1) add its kind to schema/schema.h, (2) write its arithmetic in optim/NAME_kernel.h
// and name it in optim/kernels.h, (3) write optim/NAME.cc (its state and hyper-parameters) and name it in
// optim/factory.cc, (4) add its torch.optim twin to tests/contract/test_optimizers.py.
//
// Semantics are *lazy*: a row without a gradient does not move, and bias correction uses the row's own
// update count, so each row behaves as torch.optim does on that row alone. Kernels are vectorised and
// chosen once at run time from the CPU's features; every variant gives bit-equal results (no FMA
// contraction), so that shards on different machines agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "optim/row_update.h"
#include "schema/schema.h"
#include "util/cpu.h"

namespace sparserow {

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // float32 values of state per row.
  [[nodiscard]] virtual std::uint32_t state_floats() const noexcept = 0;
  virtual void init_state(float* state) const noexcept = 0;  // (state_floats)
  // Applies updates in order; `grad_scale` multiplies every gradient first (1/N of DESIGN 5).
  // The same row may stand twice: the second sees the first's effect.
  virtual void apply(std::span<const RowUpdate> updates, float lr, float grad_scale) const noexcept = 0;
};

// Thread-safe, immutable. The schema must have passed validate(); `isa` must be supported.
[[nodiscard]] std::unique_ptr<const Optimizer> make_optimizer(const TableSchema& schema, Isa isa = best_isa());

}  // namespace sparserow
