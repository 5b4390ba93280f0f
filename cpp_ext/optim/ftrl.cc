#include <algorithm>

#include "optim/kernel_optimizer.h"

namespace sparserow {
namespace {

// State is [sums of squares (dim)][residuals (dim)]; a residual follows from its weight (ftrl_kernel.h).
class Ftrl final : public KernelOptimizer {
 public:
  Ftrl(const TableSchema& schema, const Kernel (&kernels)[3])
      : KernelOptimizer(schema, kernels), dtype_(schema.dtype) {}

  std::uint32_t state_floats() const noexcept override { return 2 * params_.dim; }

  void init_state(const std::byte* weights, float* state) const noexcept override {
    std::fill_n(state, params_.dim, 0.0f);
    follow_weights(weights, state);
  }

  void follow_weights(const std::byte* weights, float* state) const noexcept override {
    float* residuals = state + params_.dim;
    convert_to_float(dtype_, weights, residuals, params_.dim);
    for (std::uint32_t i = 0; i < params_.dim; ++i) {
      const float weight = residuals[i];
      residuals[i] = weight == 0.0f ? 0.0f : (weight > 0.0f ? -params_.l1 : params_.l1);
    }
  }

 private:
  Dtype dtype_;
};

}  // namespace

std::unique_ptr<const Optimizer> make_ftrl(const TableSchema& schema, const KernelTable& table) {
  return std::make_unique<Ftrl>(schema, schema.optimizer.group_lasso > 0 ? table.ftrl_group : table.ftrl);
}

}  // namespace sparserow
