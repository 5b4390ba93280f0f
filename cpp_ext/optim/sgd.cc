#include "optim/zero_state.h"

namespace sparserow {

std::unique_ptr<const Optimizer> make_sgd(const TableSchema& schema, const KernelTable& table) {
  if (schema.optimizer.momentum > 0) return std::make_unique<ZeroStateOptimizer>(schema, table.sgd_momentum, 1);
  return std::make_unique<ZeroStateOptimizer>(schema, table.sgd, 0);
}

}  // namespace sparserow
