// The common part of every optimizer: parameters of its kernel, and the call.
#pragma once

#include "optim/kernels.h"
#include "optim/optimizer.h"

namespace sparserow {

class KernelOptimizer : public Optimizer {
 public:
  void apply(std::span<const RowUpdate> updates, float lr, float grad_scale) const noexcept final;

 protected:
  // `kernels` has one entry per Dtype.
  KernelOptimizer(const TableSchema& schema, const Kernel (&kernels)[3]);

  KernelParams params_;

 private:
  Kernel kernel_;  // null for rows that are never trained (Store::apply refuses them)
};

// One factory per optimizer, each in its own file; called by make_optimizer alone.
[[nodiscard]] std::unique_ptr<const Optimizer> make_sgd(const TableSchema& schema, const KernelTable& table);
[[nodiscard]] std::unique_ptr<const Optimizer> make_adagrad(const TableSchema& schema, const KernelTable& table);
[[nodiscard]] std::unique_ptr<const Optimizer> make_rowwise_adagrad(const TableSchema& schema,
                                                                    const KernelTable& table);
[[nodiscard]] std::unique_ptr<const Optimizer> make_adam(const TableSchema& schema, const KernelTable& table);
[[nodiscard]] std::unique_ptr<const Optimizer> make_rmsprop(const TableSchema& schema, const KernelTable& table);
[[nodiscard]] std::unique_ptr<const Optimizer> make_adadelta(const TableSchema& schema, const KernelTable& table);
[[nodiscard]] std::unique_ptr<const Optimizer> make_lion(const TableSchema& schema, const KernelTable& table);
[[nodiscard]] std::unique_ptr<const Optimizer> make_lamb(const TableSchema& schema, const KernelTable& table);
[[nodiscard]] std::unique_ptr<const Optimizer> make_ftrl(const TableSchema& schema, const KernelTable& table);

}  // namespace sparserow
