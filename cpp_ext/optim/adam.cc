#include <algorithm>

#include "optim/kernel_optimizer.h"

namespace sparserow {
namespace {

class Adam final : public KernelOptimizer {
 public:
  Adam(const TableSchema& schema, const KernelTable& table) : KernelOptimizer(schema, table.adam) {}

  std::uint32_t state_floats() const noexcept override { return 2 * params_.dim; }
  void init_state(float* state) const noexcept override { std::fill_n(state, state_floats(), 0.0f); }
};

}  // namespace

std::unique_ptr<const Optimizer> make_adam(const TableSchema& schema, const KernelTable& table) {
  return std::make_unique<Adam>(schema, table);
}

}  // namespace sparserow
