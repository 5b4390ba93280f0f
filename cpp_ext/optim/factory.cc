#include "optim/kernel_optimizer.h"

namespace sparserow {

std::unique_ptr<const Optimizer> make_optimizer(const TableSchema& schema, Isa isa) {
  const KernelTable& table = kernels_of(isa);
  switch (schema.optimizer.kind) {
    case OptimizerKind::kSgd:
      return make_sgd(schema, table);
    case OptimizerKind::kAdagrad:
      return make_adagrad(schema, table);
    case OptimizerKind::kRowWiseAdagrad:
      return make_rowwise_adagrad(schema, table);
    case OptimizerKind::kAdam:
      return make_adam(schema, table);
    case OptimizerKind::kRmsprop:
      return make_rmsprop(schema, table);
    case OptimizerKind::kAdadelta:
      return make_adadelta(schema, table);
    case OptimizerKind::kLion:
      return make_lion(schema, table);
    case OptimizerKind::kLamb:
      return make_lamb(schema, table);
    case OptimizerKind::kFtrl:
      return make_ftrl(schema, table);
  }
  return nullptr;
}

}  // namespace sparserow
