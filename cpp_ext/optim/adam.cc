#include "optim/zero_state.h"

namespace sparserow {

std::unique_ptr<const Optimizer> make_adam(const TableSchema& schema, const KernelTable& table) {
  if (schema.optimizer.amsgrad) return std::make_unique<ZeroStateOptimizer>(schema, table.adam_amsgrad, 3);
  return std::make_unique<ZeroStateOptimizer>(schema, table.adam, 2);
}

}  // namespace sparserow
