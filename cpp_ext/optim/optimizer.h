// The optimizer interface: how one summed gradient moves one row, in place.
//
// To add an optimizer: (1) add its kind and options to schema/optimizer_spec.h, (2) write its arithmetic in
// optim/NAME_kernel.h and name it in optim/kernels.h, (3) write optim/NAME.cc (its state and hyper-parameters) and name
// it in optim/factory.cc, (4) add its class to proto/optim.py, its message to proto/control.proto and its section
// to proto/config/optimizer_config.py, (5) add its reference to tests/contract/test_optimizers.py, (6) describe it in
// docs/optimizers.md.
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
  // Writes the state of a row before its first update. weights: (dim) in the table's dtype; state: (state_floats).
  virtual void init_state(const std::byte* weights, float* state) const noexcept = 0;
  // Brings the state in line with weights that were assigned; statistics of gradients stay.
  virtual void follow_weights(const std::byte* weights, float* state) const noexcept;
  // Applies updates in order; `grad_scale` multiplies every gradient first (1/N of DESIGN 5).
  // The same row may stand twice: the second sees the first's effect.
  virtual void apply(std::span<const RowUpdate> updates, float lr, float grad_scale) const noexcept = 0;
};

// Thread-safe, immutable. The schema must have passed validate(); `isa` must be supported.
[[nodiscard]] std::unique_ptr<const Optimizer> make_optimizer(const TableSchema& schema, Isa isa = best_isa());

}  // namespace sparserow
