#include "optim/zero_state.h"

namespace sparserow {

std::unique_ptr<const Optimizer> make_rmsprop(const TableSchema& schema, const KernelTable& table) {
  const bool has_momentum = schema.optimizer.momentum > 0;
  if (schema.optimizer.centered) {
    if (has_momentum) return std::make_unique<ZeroStateOptimizer>(schema, table.rmsprop_centered_momentum, 3);
    return std::make_unique<ZeroStateOptimizer>(schema, table.rmsprop_centered, 2);
  }
  if (has_momentum) return std::make_unique<ZeroStateOptimizer>(schema, table.rmsprop_momentum, 2);
  return std::make_unique<ZeroStateOptimizer>(schema, table.rmsprop, 1);
}

}  // namespace sparserow
