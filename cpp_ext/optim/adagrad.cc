#include <algorithm>

#include "optim/kernel_optimizer.h"

namespace sparserow {
namespace {

class Adagrad final : public KernelOptimizer {
 public:
  Adagrad(const TableSchema& schema, const Kernel (&kernels)[3], std::uint32_t accumulators)
      : KernelOptimizer(schema, kernels), accumulators_(accumulators), initial_(schema.optimizer.initial_accumulator) {}

  std::uint32_t state_floats() const noexcept override { return accumulators_; }
  void init_state(const std::byte* /*weights*/, float* state) const noexcept override {
    std::fill_n(state, accumulators_, initial_);
  }

 private:
  std::uint32_t accumulators_;  // one per column, or one per row
  float initial_;
};

}  // namespace

std::unique_ptr<const Optimizer> make_adagrad(const TableSchema& schema, const KernelTable& table) {
  return std::make_unique<Adagrad>(schema, table.adagrad, schema.dim);
}

std::unique_ptr<const Optimizer> make_rowwise_adagrad(const TableSchema& schema, const KernelTable& table) {
  return std::make_unique<Adagrad>(schema, table.rowwise_adagrad, 1);
}

}  // namespace sparserow
