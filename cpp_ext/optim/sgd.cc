#include <algorithm>

#include "optim/kernel_optimizer.h"

namespace sparserow {
namespace {

class Sgd final : public KernelOptimizer {
 public:
  Sgd(const TableSchema& schema, const KernelTable& table)
      : KernelOptimizer(schema, schema.optimizer.momentum > 0 ? table.sgd_momentum : table.sgd) {}

  std::uint32_t state_floats() const noexcept override { return params_.momentum > 0 ? params_.dim : 0; }
  void init_state(float* state) const noexcept override { std::fill_n(state, state_floats(), 0.0f); }
};

}  // namespace

std::unique_ptr<const Optimizer> make_sgd(const TableSchema& schema, const KernelTable& table) {
  return std::make_unique<Sgd>(schema, table);
}

}  // namespace sparserow
