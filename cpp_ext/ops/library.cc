// torch.ops.sparserow: schemas, kernels for every device, and what compilers see of single lookups (meta kernels with
// SymInt); what they see of several at once is in cpp_ext/op_shapes.py.
//
// The anchor is a (1) float32 tensor that requires grad. int64 ids carry no gradient, so it is what makes
// autograd record a lookup; backward calls `stage`, whose output is the anchor's gradient, so that no compiler
// finds it useless. One of shape (0) says that no backward follows: the lookup's rows are kept within bounds.
#include <torch/library.h>

#include "ops/arguments.h"
#include "ops/gather.h"
#include "ops/gather_bag.h"
#include "ops/gather_merged.h"

namespace sparserow::ops {
namespace {

at::TensorOptions rows_like(const at::Tensor& anchor, const at::Tensor& ids) {
  return at::TensorOptions().device(device_of_rows(anchor, ids));
}

at::Tensor gather_meta(const at::Tensor& ids, const at::Tensor& anchor, c10::string_view /*binding*/, int64_t dim,
                       int64_t /*padding_idx*/, bool /*train*/) {
  auto sizes = ids.sym_sizes().vec();
  sizes.emplace_back(dim);
  return at::empty_symint(sizes, rows_like(anchor, ids).dtype(at::kFloat));
}

at::Tensor stage_meta(const at::Tensor& grad, const at::Tensor& /*ids*/, c10::string_view /*binding*/, int64_t /*dim*/,
                      int64_t /*padding_idx*/) {
  return at::empty({1}, grad.options().dtype(at::kFloat));
}

std::tuple<at::Tensor, at::Tensor> gather_bag_meta(const at::Tensor& ids, const std::optional<at::Tensor>& offsets,
                                                   const at::Tensor& anchor,
                                                   const std::optional<at::Tensor>& /*weights*/,
                                                   c10::string_view /*binding*/, int64_t dim, int64_t mode,
                                                   int64_t /*padding_idx*/, bool include_last_offset, bool /*train*/) {
  const c10::SymInt bags = offsets ? offsets->sym_size(0) - (include_last_offset ? 1 : 0) : ids.sym_size(0);
  at::Tensor out = at::empty_symint({bags, dim}, rows_like(anchor, ids).dtype(at::kFloat));
  const auto options = rows_like(anchor, ids).dtype(at::kLong);
  return {out, mode == kBagMax ? at::empty_symint({bags, dim}, options) : at::empty({0}, options)};
}

std::tuple<at::Tensor, at::Tensor> stage_bag_meta(const at::Tensor& grad, const at::Tensor& /*ids*/,
                                                  const std::optional<at::Tensor>& /*offsets*/,
                                                  const std::optional<at::Tensor>& weights,
                                                  const at::Tensor& /*argmax*/, c10::string_view /*binding*/,
                                                  int64_t /*dim*/, int64_t /*mode*/, int64_t /*padding_idx*/,
                                                  bool /*include_last_offset*/, bool weights_grad) {
  const auto options = grad.options().dtype(at::kFloat);
  at::Tensor weights_out =
      weights && weights_grad ? at::empty_symint(weights->sym_sizes(), weights->options()) : at::empty({0}, options);
  return {at::empty({1}, options), weights_out};
}

}  // namespace

TORCH_LIBRARY(sparserow, library) {
  const auto tags = std::vector<at::Tag>{at::Tag::pt2_compliant_tag};
  library.def("gather(Tensor ids, Tensor anchor, str binding, int dim, int padding_idx, bool train) -> Tensor", tags);
  library.def("stage(Tensor grad, Tensor ids, str binding, int dim, int padding_idx) -> Tensor", tags);
  library.def(
      "gather_bag(Tensor ids, Tensor? offsets, Tensor anchor, Tensor? per_sample_weights, str binding, int dim, "
      "int mode, int padding_idx, bool include_last_offset, bool train) -> (Tensor, Tensor)",
      tags);
  library.def(
      "stage_bag(Tensor grad, Tensor ids, Tensor? offsets, Tensor? per_sample_weights, Tensor argmax, str binding, "
      "int dim, int mode, int padding_idx, bool include_last_offset, bool weights_grad) -> (Tensor, Tensor)",
      tags);
  library.def("gather_merged(Tensor[] ids, Tensor[] offsets, Tensor[] weights, str tables, int[] options) -> Tensor[]",
              tags);
  library.def(
      "gather_all(Tensor[] ids, Tensor[] offsets, Tensor[] weights, Tensor anchor, str tables, int[] options, "
      "bool train) -> Tensor[]",
      tags);
  library.def(
      "stage_all(Tensor[] grads, Tensor[] ids, Tensor[] offsets, Tensor[] weights, Tensor[] places, str tables, "
      "int[] options, int[] wants) -> Tensor[]",
      tags);
}

TORCH_LIBRARY_IMPL(sparserow, CompositeExplicitAutograd, library) {
  library.impl("gather", &gather);
  library.impl("stage", &stage);
  library.impl("gather_bag", &gather_bag);
  library.impl("stage_bag", &stage_bag);
  library.impl("gather_merged", &gather_merged);
  library.impl("gather_all", &gather_all);
  library.impl("stage_all", &stage_all);
}

TORCH_LIBRARY_IMPL(sparserow, Meta, library) {
  library.impl("gather", &gather_meta);
  library.impl("stage", &stage_meta);
  library.impl("gather_bag", &gather_bag_meta);
  library.impl("stage_bag", &stage_bag_meta);
}

}  // namespace sparserow::ops
