#include "commit/flat_rows.h"

#include <array>
#include <limits>
#include <string>
#include <vector>

#include "util/not_allowed.h"

namespace sparserow {

Result<std::unique_ptr<FlatRows>> FlatRows::create(const TableSchema& schema) {
  SR_RETURN_IF_ERROR(validate(schema));
  if (schema.dtype != Dtype::kFloat32) {
    return not_allowed("flat_rows.dtype", static_cast<int>(schema.dtype), "0 (float32)");
  }
  return std::unique_ptr<FlatRows>(new FlatRows(schema));
}

void FlatRows::fill_initial(std::span<const std::uint64_t> keys, float* weights) const noexcept {
  for (std::size_t i = 0; i < keys.size(); ++i) initial_.fill(keys[i], weights + i * schema_.dim);
}

void FlatRows::fill_state(std::uint64_t rows, const float* weights, float* state) const noexcept {
  for (std::uint64_t i = 0; i < rows; ++i) {
    optimizer_->init_state(reinterpret_cast<const std::byte*>(weights + i * schema_.dim), state + i * state_floats());
  }
}

Status FlatRows::apply(std::span<const GradBlock> blocks, std::uint32_t workers, bool grad_sum, float lr,
                       const FlatArrays& arrays) const {
  for (const GradBlock& block : blocks) {
    for (const std::uint64_t row : block.keys) {
      if (row >= arrays.rows) return not_allowed("flat_rows.apply.row", row, below_text(arrays.rows));
    }
  }
  // One worker's gradients are multiplied in float32 by the kernel, several workers' are summed in float64, as in
  // apply_commits.cc.
  if (blocks.size() == 1) {
    const float scale = grad_sum ? 1.0f : 1.0f / static_cast<float>(workers);
    apply_rows(blocks[0].keys, blocks[0].grads, lr, scale, arrays);
    return Status::ok();
  }
  std::vector<ReduceInput> inputs;
  for (const GradBlock& block : blocks) {
    if (!block.keys.empty()) inputs.push_back({&block, grad_sum ? 1.0 : 1.0 / workers});
  }
  Reduced reduced;
  reduce(schema_.id, schema_.dim, inputs, 1, nullptr, reduced);
  apply_rows(reduced.keys, reduced.grads.data(), lr, 1.0f, arrays);
  return Status::ok();
}

void FlatRows::apply_rows(std::span<const std::uint64_t> rows, const float* grads, float lr, float scale,
                          const FlatArrays& arrays) const noexcept {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::uint32_t& count = arrays.update_counts[rows[i]];
    if (count < std::numeric_limits<std::uint32_t>::max()) ++count;
    const RowUpdate update{reinterpret_cast<std::byte*>(arrays.weights + rows[i] * schema_.dim),
                           arrays.state + rows[i] * state_floats(), grads + i * schema_.dim, rows[i], count};
    optimizer_->apply({&update, 1}, lr, scale);
  }
}

}  // namespace sparserow
