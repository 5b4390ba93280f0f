#include "optim/zero_state.h"

namespace sparserow {

std::unique_ptr<const Optimizer> make_lion(const TableSchema& schema, const KernelTable& table) {
  return std::make_unique<ZeroStateOptimizer>(schema, table.lion, 1);
}

}  // namespace sparserow
