// Optimizer kernels, compiled once per instruction set and chosen at run time.
//
// The bodies are in *_kernel.h and are included by kernels_baseline.cc, kernels_avx2.cc and
// kernels_avx512.cc inside a namespace of that file's own, so that no function compiled for a wide
// instruction set can be linked into code that runs without it. All variants give bit-equal results:
// products are never contracted into FMA and sums have a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/row_update.h"
#include "util/cpu.h"

namespace sparserow {

// Everything a kernel needs besides the rows; a kernel ignores what its optimizer does not have.
struct KernelParams {
  std::uint32_t dim = 0;
  std::uint64_t rounding_seed = 0;  // of (table seed, table id)
  float lr = 0.0f;
  float grad_scale = 1.0f;
  float weight_decay = 0.0f;
  bool decoupled = false;
  float momentum = 0.0f;
  float dampening = 0.0f;
  bool nesterov = false;
  float eps = 0.0f;
  float accumulator_decay = 1.0f;
  double beta1 = 0.0;
  double beta2 = 0.0;
  double alpha = 0.0;
  double rho = 0.0;
  float beta = 0.0f;
  float l1 = 0.0f;
  float l2 = 0.0f;
  float group_lasso = 0.0f;
};

using Kernel = void (*)(const RowUpdate* updates, std::size_t count, const KernelParams& params) noexcept;

// One kernel per stored dtype, indexed by Dtype.
struct KernelTable {
  Kernel sgd[3];
  Kernel sgd_momentum[3];
  Kernel adagrad[3];
  Kernel rowwise_adagrad[3];
  Kernel adam[3];
  Kernel adam_amsgrad[3];
  Kernel rmsprop[3];
  Kernel rmsprop_momentum[3];
  Kernel rmsprop_centered[3];
  Kernel rmsprop_centered_momentum[3];
  Kernel adadelta[3];
  Kernel lion[3];
  Kernel lamb[3];
  Kernel ftrl[3];
  Kernel ftrl_group[3];
};

// `isa` must be supported by this machine.
[[nodiscard]] const KernelTable& kernels_of(Isa isa) noexcept;

}  // namespace sparserow
