// Kernels of gather_bag and stage_bag: the ids of a bag pooled to one row.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

#include "session/binding.h"
#include "session/lookup.h"

namespace sparserow::ops {

class Bags;

enum BagMode : int64_t { kBagSum = 0, kBagMean = 1, kBagMax = 2 };  // as torch's embedding_bag

// Raises unless the mode is one of them and the weights fit it and the ids.
void check_bag_mode(const at::Tensor& ids, const std::optional<at::Tensor>& weights, int64_t mode);
// The pooled rows of a lookup and, for max, where they came from, as gather_bag returns them.
std::tuple<at::Tensor, at::Tensor> pool_bags(const Bags& bags, const Lookup& lookup,
                                             const std::optional<at::Tensor>& per_sample_weights, int64_t dim,
                                             int64_t mode, const at::Device& device);

// What a backward knows of pooled rows. grad: (bags, dim). argmax: as gather_bag returned it, for mode max.
struct BagGradient {
  at::Tensor grad;
  std::optional<at::Tensor> weights;
  at::Tensor argmax;
};
// Adds the gradient to the sums of the ids. Returns the gradient of the weights when weights_grad.
at::Tensor stage_bags(Binding& binding, const Bags& bags, const BagGradient& of, int64_t dim, int64_t mode,
                      bool weights_grad);

// ids: (bags, length), or (n) with offsets: (bags) or, with include_last_offset, (bags + 1).
// per_sample_weights: ids.shape float, mode sum only. Ids equal to padding_idx are left out of their bag.
// Returns the pooled rows (bags, dim) float32 and, for max, the place in ids that each value came from
// (bags, dim) int64, -1 for an empty bag; (0) for the other modes.
std::tuple<at::Tensor, at::Tensor> gather_bag(const at::Tensor& ids, const std::optional<at::Tensor>& offsets,
                                              const at::Tensor& anchor,
                                              const std::optional<at::Tensor>& per_sample_weights,
                                              c10::string_view binding, int64_t dim, int64_t mode, int64_t padding_idx,
                                              bool include_last_offset, bool train);

// grad: (bags, dim). Returns the anchor's gradient and, when weights_grad, that of per_sample_weights; else (0).
std::tuple<at::Tensor, at::Tensor> stage_bag(const at::Tensor& grad, const at::Tensor& ids,
                                             const std::optional<at::Tensor>& offsets,
                                             const std::optional<at::Tensor>& per_sample_weights,
                                             const at::Tensor& argmax, c10::string_view binding, int64_t dim,
                                             int64_t mode, int64_t padding_idx, bool include_last_offset,
                                             bool weights_grad);

}  // namespace sparserow::ops
