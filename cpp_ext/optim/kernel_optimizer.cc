#include "optim/kernel_optimizer.h"

#include "util/random.h"

namespace sparserow {

KernelOptimizer::KernelOptimizer(const TableSchema& schema, const Kernel (&kernels)[3])
    : kernel_(is_valid(schema.dtype) ? kernels[static_cast<std::size_t>(schema.dtype)] : nullptr) {
  const OptimizerSpec& spec = schema.optimizer;
  params_.dim = schema.dim;
  params_.rounding_seed = random_bits(schema.seed, schema.id);
  params_.weight_decay = spec.weight_decay;
  params_.decoupled = spec.decoupled;
  params_.momentum = spec.momentum;
  params_.dampening = spec.dampening;
  params_.nesterov = spec.nesterov;
  params_.eps = spec.eps;
  params_.accumulator_decay = spec.accumulator_decay;
  params_.beta1 = spec.beta1;
  params_.beta2 = spec.beta2;
  params_.alpha = spec.alpha;
  params_.rho = spec.rho;
  params_.beta = spec.beta;
  params_.l1 = spec.l1;
  params_.l2 = spec.l2;
  params_.group_lasso = spec.group_lasso;
}

void Optimizer::follow_weights(const std::byte* /*weights*/, float* /*state*/) const noexcept {}

void KernelOptimizer::apply(std::span<const RowUpdate> updates, float lr, float grad_scale) const noexcept {
  KernelParams params = params_;
  params.lr = lr;
  params.grad_scale = grad_scale;
  kernel_(updates.data(), updates.size(), params);
}

}  // namespace sparserow
