// The arguments of an op for several lookups: tensors of each, the tables' names, and six numbers a lookup.
#pragma once

#include <ATen/ATen.h>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "ops/arguments.h"
#include "ops/bags.h"
#include "session/read_together.h"

namespace sparserow::ops {

// The numbers that each lookup has in `options`.
enum MergedOption : int64_t {
  kMergedDim,
  kMergedMode,     // of its bags (BagMode), or kRowsOfIds
  kMergedPadding,  // as gather_bag's padding_idx
  kMergedIncludesLast,
  kMergedHasOffsets,  // 0: what stands in its place in `offsets` is not looked at
  kMergedHasWeights,  // likewise
  kMergedOptions
};
constexpr int64_t kRowsOfIds = -1;

// Several lookups with their ids on the host. Tensors that the lists hold must outlive the object.
class MergedLookups {
 public:
  // ids, offsets, weights: (n) tensors as gather and gather_bag take them; no offsets or weights at all where no lookup
  // has any. tables: n names, a line each.
  // options: (n * kMergedOptions). Raises as gather and gather_bag do; `op` stands in its texts.
  MergedLookups(const char* op, at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                c10::string_view tables, at::IntArrayRef options);

  [[nodiscard]] std::size_t size() const { return wanted_.size(); }
  [[nodiscard]] const std::vector<BoundIds>& wanted() const { return wanted_; }
  [[nodiscard]] int64_t option(std::size_t i, MergedOption which) const {
    return options_[i * static_cast<std::size_t>(kMergedOptions) + static_cast<std::size_t>(which)];
  }
  [[nodiscard]] bool is_bag(std::size_t i) const { return option(i, kMergedMode) != kRowsOfIds; }
  [[nodiscard]] const at::Tensor& ids(std::size_t i) const { return ids_[i]; }
  [[nodiscard]] const HostIds& host(std::size_t i) const { return is_bag(i) ? bags_[i]->ids() : *rows_[i]; }
  [[nodiscard]] const Bags& bags(std::size_t i) const { return *bags_[i]; }  // of a bag
  [[nodiscard]] std::optional<at::Tensor> weights(std::size_t i) const {
    return option(i, kMergedHasWeights) != 0 ? std::optional(weights_[i]) : std::nullopt;
  }

 private:
  at::TensorList ids_;
  at::TensorList weights_;
  at::IntArrayRef options_;
  std::vector<std::optional<HostIds>> rows_;  // (n), where the lookup has no bags
  std::vector<std::optional<Bags>> bags_;     // (n), where it has
  std::vector<BoundIds> wanted_;
};

}  // namespace sparserow::ops
