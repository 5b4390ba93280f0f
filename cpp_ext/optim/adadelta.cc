#include "optim/zero_state.h"

namespace sparserow {

std::unique_ptr<const Optimizer> make_adadelta(const TableSchema& schema, const KernelTable& table) {
  return std::make_unique<ZeroStateOptimizer>(schema, table.adadelta, 2);
}

}  // namespace sparserow
