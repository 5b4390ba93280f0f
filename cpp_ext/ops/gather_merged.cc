#include "ops/gather_merged.h"

#include "ops/gather.h"
#include "ops/gather_bag.h"
#include "session/pull_together.h"

namespace sparserow::ops {
namespace {

// The rows of each lookup, and behind them the places of those of mode max.
std::vector<at::Tensor> rows_of_all(const MergedLookups& merged, const std::vector<Lookup>& lookups,
                                    const at::Tensor& anchor) {
  std::vector<at::Tensor> out;
  std::vector<at::Tensor> places;
  for (std::size_t i = 0; i < merged.size(); ++i) {
    const int64_t dim = merged.option(i, kMergedDim);
    const at::Device device = device_of_rows(anchor, merged.ids(i));
    if (!merged.is_bag(i)) {
      out.push_back(rows_of(lookups[i], merged.ids(i), dim, device));
      continue;
    }
    const int64_t mode = merged.option(i, kMergedMode);
    auto [rows, argmax] = pool_bags(merged.bags(i), lookups[i], merged.weights(i), dim, mode, device);
    out.push_back(std::move(rows));
    if (mode == kBagMax) places.push_back(std::move(argmax));
  }
  out.insert(out.end(), places.begin(), places.end());
  return out;
}

// Whether no gradient reached a lookup. The gradient of a lookup without ids has more dimensions.
bool is_absent(const at::Tensor& grad) { return grad.dim() == 1 && grad.numel() == 0; }

}  // namespace

std::vector<at::Tensor> gather_merged(at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                                      c10::string_view tables, at::IntArrayRef options) {
  const MergedLookups merged("gather_merged", ids, offsets, weights, tables, options);
  std::vector<at::Tensor> out =
      rows_of_all(merged, value_or_raise(read_together(merged.wanted())), at::Tensor(at::empty({0})));
  out.resize(merged.size());
  return out;
}

std::vector<at::Tensor> gather_all(at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                                   const at::Tensor& anchor, c10::string_view tables, at::IntArrayRef options,
                                   bool train) {
  const NoGradScope scope(is_without_gradient(anchor));
  const MergedLookups merged("gather_all", ids, offsets, weights, tables, options);
  return rows_of_all(merged, value_or_raise(look_up_together(merged.wanted(), train)), anchor);
}

std::vector<at::Tensor> stage_all(at::TensorList grads, at::TensorList ids, at::TensorList offsets,
                                  at::TensorList weights, at::TensorList places, c10::string_view tables,
                                  at::IntArrayRef options, at::IntArrayRef wants) {
  const MergedLookups merged("stage_all", ids, offsets, weights, tables, options);
  if (grads.size() != merged.size() || wants.size() != merged.size()) {
    raise(not_allowed("stage_all: number of grads", grads.size(), std::to_string(merged.size())));
  }
  std::vector<at::Tensor> weights_grads(merged.size());
  std::size_t place = places.size();
  // The last lookup comes first, as autograd reaches the nodes of single lookups: sums of one table have equal bits.
  for (std::size_t i = merged.size(); i-- > 0;) {
    const int64_t dim = merged.option(i, kMergedDim);
    const bool is_max = merged.option(i, kMergedMode) == kBagMax;
    const at::Tensor argmax = is_max ? places[--place] : at::Tensor();
    if (is_absent(grads[i])) {
      if (wants[i] != 0) weights_grads[i] = at::zeros_like(*merged.weights(i));
      continue;
    }
    if (!merged.is_bag(i)) {
      stage_rows(*merged.wanted()[i].binding, merged.host(i), grads[i], dim, merged.option(i, kMergedPadding));
      continue;
    }
    weights_grads[i] = stage_bags(*merged.wanted()[i].binding, merged.bags(i), {grads[i], merged.weights(i), argmax},
                                  dim, merged.option(i, kMergedMode), wants[i] != 0);
  }
  std::vector<at::Tensor> out{anchor_grad(grads[0])};
  for (std::size_t i = 0; i < merged.size(); ++i) {
    if (wants[i] != 0) out.push_back(std::move(weights_grads[i]));
  }
  return out;
}

}  // namespace sparserow::ops
