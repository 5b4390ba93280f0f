// Kernels of the ops that serve all lookups of a forward at once: gather_merged of an inference, and gather_all and
// stage_all of a training step.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "ops/merged_lookups.h"

namespace sparserow::ops {

// Arguments as MergedLookups takes them. Returns (n) what gather, or gather_bag first, would. Never trains.
std::vector<at::Tensor> gather_merged(at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                                      c10::string_view tables, at::IntArrayRef options);

// Likewise, of a step: one pull brings what the step lacks. anchor and train as in gather.
// Returns the rows of n lookups; behind them stands, for each lookup of mode max, the place that each value came from.
std::vector<at::Tensor> gather_all(at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                                   const at::Tensor& anchor, c10::string_view tables, at::IntArrayRef options,
                                   bool train);

// Adds the gradients of a gather_all, lookup by lookup, to the sums of the step.
// grads: (n), of shape (0) where no gradient came. places: what gather_all has returned behind the rows.
// wants: (n), 1 where the gradient of the lookup's weights is wanted.
// Returns the anchor's gradient, and behind it the gradients of the wanted weights.
std::vector<at::Tensor> stage_all(at::TensorList grads, at::TensorList ids, at::TensorList offsets,
                                  at::TensorList weights, at::TensorList places, c10::string_view tables,
                                  at::IntArrayRef options, at::IntArrayRef wants);

}  // namespace sparserow::ops
