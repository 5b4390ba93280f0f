#include "optim/kernel_optimizer.h"

#include "util/random.h"

namespace sparserow {

KernelOptimizer::KernelOptimizer(const TableSchema& schema, const Kernel (&kernels)[3])
    : kernel_(is_valid(schema.dtype) ? kernels[static_cast<std::size_t>(schema.dtype)] : nullptr) {
  const OptimizerSpec& spec = schema.optimizer;
  params_.dim = schema.dim;
  params_.rounding_seed = random_bits(schema.seed, schema.id);
  params_.weight_decay = spec.weight_decay;
  params_.momentum = spec.momentum;
  params_.dampening = spec.dampening;
  params_.nesterov = spec.nesterov;
  params_.eps = spec.eps;
  params_.beta1 = spec.beta1;
  params_.beta2 = spec.beta2;
}

void KernelOptimizer::apply(std::span<const RowUpdate> updates, float lr, float grad_scale) const noexcept {
  KernelParams params = params_;
  params.lr = lr;
  params.grad_scale = grad_scale;
  kernel_(updates.data(), updates.size(), params);
}

}  // namespace sparserow
