// Rows of a table in flat arrays of the caller, with the arithmetic of a shard.
//
// Initial rows, sums in rank order and optimizer kernels are those of the store, so that a table whose rows a rank
// keeps itself has the bits of the same table on shards. Only float32 weights: kernels of other dtypes round by key.
// Immutable; calls on different arrays may overlap.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "commit/reduce.h"
#include "optim/optimizer.h"
#include "schema/schema.h"
#include "store/table/initial_rows.h"

namespace sparserow {

// Row i of each array belongs to the same key.
struct FlatArrays {
  float* weights = nullptr;                // (rows, dim)
  float* state = nullptr;                  // (rows, state_floats)
  std::uint32_t* update_counts = nullptr;  // (rows)
  std::uint64_t rows = 0;
};

class FlatRows {
 public:
  // InvalidArgument when the schema is not valid, or its dtype is not float32.
  static Result<std::unique_ptr<FlatRows>> create(const TableSchema& schema);

  [[nodiscard]] std::uint32_t dim() const noexcept { return schema_.dim; }
  [[nodiscard]] std::uint32_t state_floats() const noexcept { return optimizer_->state_floats(); }

  // Writes the rows that keys without a push have: (keys, dim).
  void fill_initial(std::span<const std::uint64_t> keys, float* weights) const noexcept;
  // Writes the state, (rows, state_floats), that rows of these weights, (rows, dim), have before their first update.
  void fill_state(std::uint64_t rows, const float* weights, float* state) const noexcept;

  // Applies one step. A block's keys are numbers of rows of the arrays, unique within the block; blocks stand in rank
  // order, one for each of the job's `workers`. InvalidArgument, with nothing changed, when a number is too large.
  Status apply(std::span<const GradBlock> blocks, std::uint32_t workers, bool grad_sum, float lr,
               const FlatArrays& arrays) const;

 private:
  explicit FlatRows(const TableSchema& schema)
      : schema_(schema), initial_(schema), optimizer_(make_optimizer(schema)) {}

  void apply_rows(std::span<const std::uint64_t> rows, const float* grads, float lr, float scale,
                  const FlatArrays& arrays) const noexcept;

  TableSchema schema_;
  InitialRows initial_;
  std::unique_ptr<const Optimizer> optimizer_;
};

}  // namespace sparserow
