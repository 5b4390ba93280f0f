// Kernel of gather_merged: independent lookups of an inference in one round trip.
#pragma once

#include <ATen/ATen.h>

#include <vector>

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

// ids, offsets, weights: (n) tensors as gather and gather_bag take them. tables: n names, a line each. options:
// (n * kMergedOptions). Returns (n) what gather, or gather_bag first, would. Never trains.
std::vector<at::Tensor> gather_merged(at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                                      c10::string_view tables, at::IntArrayRef options);

}  // namespace sparserow::ops
