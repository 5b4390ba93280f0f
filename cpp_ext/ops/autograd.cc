// The derivative of a lookup: backward stages the gradient in the session and is differentiable once.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/arguments.h"
#include "ops/gather.h"
#include "ops/gather_bag.h"

namespace sparserow::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class Signature>
const auto& typed_op(const char* name) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return op;
}

at::Tensor call_gather(const at::Tensor& ids, const at::Tensor& anchor, c10::string_view binding, int64_t dim,
                       int64_t padding_idx, bool train) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return typed_op<decltype(gather)>("sparserow::gather").call(ids, anchor, binding, dim, padding_idx, train);
}

struct GatherFunction : torch::autograd::Function<GatherFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& ids, const at::Tensor& anchor,
                            const std::string& binding, int64_t dim, int64_t padding_idx) {
    context->save_for_backward({ids});
    context->saved_data["binding"] = binding;
    context->saved_data["dim"] = dim;
    context->saved_data["padding_idx"] = padding_idx;
    return call_gather(ids, anchor, binding, dim, padding_idx, /*train=*/true);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto& saved = context->saved_data;
    const at::Tensor anchor_grad =
        typed_op<decltype(stage)>("sparserow::stage")
            .call(grads[0], context->get_saved_variables()[0], saved["binding"].toStringView(), saved["dim"].toInt(),
                  saved["padding_idx"].toInt());
    return {at::Tensor(), anchor_grad, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor gather_autograd(const at::Tensor& ids, const at::Tensor& anchor, c10::string_view binding, int64_t dim,
                           int64_t padding_idx, bool train) {
  if (!train) return call_gather(ids, anchor, binding, dim, padding_idx, false);
  return GatherFunction::apply(ids, anchor, std::string(binding), dim, padding_idx);
}

struct BagOptions {
  std::string binding;
  int64_t dim;
  int64_t mode;
  int64_t padding_idx;
  bool include_last_offset;
};

std::tuple<at::Tensor, at::Tensor> call_gather_bag(const at::Tensor& ids, const std::optional<at::Tensor>& offsets,
                                                   const at::Tensor& anchor, const std::optional<at::Tensor>& weights,
                                                   const BagOptions& bag, bool train) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return typed_op<decltype(gather_bag)>("sparserow::gather_bag")
      .call(ids, offsets, anchor, weights, bag.binding, bag.dim, bag.mode, bag.padding_idx, bag.include_last_offset,
            train);
}

struct GatherBagFunction : torch::autograd::Function<GatherBagFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& ids,
                               const std::optional<at::Tensor>& offsets, const at::Tensor& anchor,
                               const std::optional<at::Tensor>& weights, const BagOptions& bag) {
    auto [out, argmax] = call_gather_bag(ids, offsets, anchor, weights, bag, /*train=*/true);
    context->save_for_backward({ids, offsets.value_or(at::Tensor()), weights.value_or(at::Tensor()), argmax});
    context->saved_data["binding"] = bag.binding;
    context->saved_data["dim"] = bag.dim;
    context->saved_data["mode"] = bag.mode;
    context->saved_data["padding_idx"] = bag.padding_idx;
    context->saved_data["include_last_offset"] = bag.include_last_offset;
    context->saved_data["weights_grad"] = weights && weights->requires_grad();
    context->mark_non_differentiable({argmax});
    return {out, argmax};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto optional_of = [](const at::Tensor& tensor) {
      return tensor.defined() ? std::optional(tensor) : std::nullopt;
    };
    const variable_list tensors = context->get_saved_variables();
    auto& saved = context->saved_data;
    const bool weights_grad = saved["weights_grad"].toBool();
    auto [anchor_grad, weights_out] =
        typed_op<decltype(stage_bag)>("sparserow::stage_bag")
            .call(grads[0], tensors[0], optional_of(tensors[1]), optional_of(tensors[2]), tensors[3],
                  saved["binding"].toStringView(), saved["dim"].toInt(), saved["mode"].toInt(),
                  saved["padding_idx"].toInt(), saved["include_last_offset"].toBool(), weights_grad);
    return {at::Tensor(), at::Tensor(), anchor_grad, weights_grad ? weights_out : at::Tensor(), at::Tensor()};
  }
};

std::tuple<at::Tensor, at::Tensor> gather_bag_autograd(const at::Tensor& ids, const std::optional<at::Tensor>& offsets,
                                                       const at::Tensor& anchor,
                                                       const std::optional<at::Tensor>& weights,
                                                       c10::string_view binding, int64_t dim, int64_t mode,
                                                       int64_t padding_idx, bool include_last_offset, bool train) {
  const BagOptions bag{std::string(binding), dim, mode, padding_idx, include_last_offset};
  if (!train) return call_gather_bag(ids, offsets, anchor, weights, bag, false);
  const variable_list out = GatherBagFunction::apply(ids, offsets, anchor, weights, bag);
  return {out[0], out[1]};
}

// A staged gradient is applied by a server: there is nothing to differentiate a second time.
void refuse_double_backward(const at::Tensor& grad, const char* op) {
  if (at::GradMode::is_enabled() && grad.requires_grad()) {
    raise({Code::kFailedPrecondition, std::string("double backward through sparserow::") + op +
                                          " is not possible: a distributed lookup is differentiable once"});
  }
}

at::Tensor stage_autograd(const at::Tensor& grad, const at::Tensor& ids, c10::string_view binding, int64_t dim,
                          int64_t padding_idx) {
  refuse_double_backward(grad, "gather");
  const at::AutoDispatchBelowADInplaceOrView below;
  return typed_op<decltype(stage)>("sparserow::stage").call(grad, ids, binding, dim, padding_idx);
}

std::tuple<at::Tensor, at::Tensor> stage_bag_autograd(const at::Tensor& grad, const at::Tensor& ids,
                                                      const std::optional<at::Tensor>& offsets,
                                                      const std::optional<at::Tensor>& weights,
                                                      const at::Tensor& argmax, c10::string_view binding, int64_t dim,
                                                      int64_t mode, int64_t padding_idx, bool include_last_offset,
                                                      bool weights_grad) {
  refuse_double_backward(grad, "gather_bag");
  const at::AutoDispatchBelowADInplaceOrView below;
  return typed_op<decltype(stage_bag)>("sparserow::stage_bag")
      .call(grad, ids, offsets, weights, argmax, binding, dim, mode, padding_idx, include_last_offset, weights_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(sparserow, Autograd, library) {
  library.impl("gather", &gather_autograd);
  library.impl("stage", &stage_autograd);
  library.impl("gather_bag", &gather_bag_autograd);
  library.impl("stage_bag", &stage_bag_autograd);
}

}  // namespace sparserow::ops
