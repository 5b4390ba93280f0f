// The derivative of a lookup: backward stages the gradient in the session and is differentiable once.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "ops/arguments.h"
#include "ops/gather.h"
#include "ops/gather_bag.h"
#include "ops/gather_merged.h"

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
    context->saved_data["device"] = anchor.device();
    return call_gather(ids, anchor, binding, dim, padding_idx, /*train=*/true);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto& saved = context->saved_data;
    const at::Tensor anchor_grad =
        typed_op<decltype(stage)>("sparserow::stage")
            .call(grads[0], context->get_saved_variables()[0], saved["binding"].toStringView(), saved["dim"].toInt(),
                  saved["padding_idx"].toInt());
    return {at::Tensor(), anchor_grad.to(saved["device"].toDevice()), at::Tensor(), at::Tensor(), at::Tensor()};
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
    context->saved_data["device"] = anchor.device();
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
    anchor_grad = anchor_grad.to(saved["device"].toDevice());
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

// The lookups of a gather_all without what autograd follows; a node of autograd holds them as one value.
struct AllLookups : torch::CustomClassHolder {
  std::vector<at::Tensor> ids;
  std::vector<at::Tensor> offsets;
  std::vector<at::Tensor> weights;  // detached
  std::string tables;
  std::vector<int64_t> options;
  std::vector<int64_t> wants;      // (n), 1 where the gradient of the lookup's weights is wanted
  std::vector<at::Tensor> places;  // of mode max, as the op has returned them
  std::vector<int64_t> versions;   // of the tensors above at the forward
  std::vector<bool> staged;        // (n), whether a backward has reached the lookup
  at::Device device{at::kCPU};     // of the anchor

  [[nodiscard]] bool has(std::size_t i, MergedOption which) const {
    return options[i * static_cast<std::size_t>(kMergedOptions) + static_cast<std::size_t>(which)] != 0;
  }

  // What stands in the place of offsets or weights that a lookup does not have is not looked at.
  [[nodiscard]] std::vector<int64_t> versions_now() const {
    std::vector<int64_t> now;
    const auto add = [&now](const at::Tensor& tensor) {
      now.push_back(tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version()));
    };
    for (std::size_t i = 0; i < ids.size(); ++i) {
      add(ids[i]);
      if (has(i, kMergedHasOffsets)) add(offsets[i]);
      if (has(i, kMergedHasWeights)) add(weights[i]);
    }
    for (const at::Tensor& tensor : places) add(tensor);
    return now;
  }
};

std::vector<at::Tensor> call_gather_all(const AllLookups& all, const at::Tensor& anchor, bool train) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return typed_op<decltype(gather_all)>("sparserow::gather_all")
      .call(all.ids, all.offsets, all.weights, anchor, all.tables, all.options, train);
}

// One node for all lookups of a forward behaves as a node for each would: a backward may reach some of them, and a
// later one the others. So its tensors are not freed with the graph; what is freed is the anchor, which shows that a
// backward has run whose graph was not retained.
struct GatherAllFunction : torch::autograd::Function<GatherAllFunction> {
  // wanted: the weights whose gradients are wanted, in order of the lookups.
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<AllLookups>& all,
                               const at::Tensor& anchor, at::TensorList wanted) {
    variable_list out = call_gather_all(*all, anchor, /*train=*/true);
    all->places.assign(out.begin() + static_cast<std::ptrdiff_t>(all->ids.size()), out.end());
    all->versions = all->versions_now();
    all->staged.assign(all->ids.size(), false);
    all->device = anchor.device();
    context->save_for_backward({anchor});
    context->saved_data["lookups"] = c10::IValue::make_capsule(all);
    context->saved_data["wanted"] = static_cast<int64_t>(wanted.size());
    context->mark_non_differentiable(all->places);
    context->set_materialize_grads(false);  // a lookup that no gradient reaches creates no row
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto held = context->saved_data["lookups"].toCapsule();
    auto& all = static_cast<AllLookups&>(*held);
    const std::size_t n = all.ids.size();
    if (all.versions_now() != all.versions) {
      raise({Code::kFailedPrecondition,
             "backward: ids, offsets or weights of a lookup were changed in place since the forward"});
    }
    note_staged(context, all, grads);
    grads.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      if (!grads[i].defined()) grads[i] = at::empty({0}, all.ids[i].options().dtype(at::kFloat));  // is_absent()
    }
    variable_list made =
        typed_op<decltype(stage_all)>("sparserow::stage_all")
            .call(grads, all.ids, all.offsets, all.weights, all.places, all.tables, all.options, all.wants);
    made[0] = made[0].to(all.device);
    made.insert(made.begin(), at::Tensor());  // of the lookups
    return made;
  }

 private:
  // Marks the lookups that these gradients reach; torch's error where one was reached before by a backward that did not
  // retain the graph.
  static void note_staged(AutogradContext* context, AllLookups& all, const variable_list& grads) {
    bool is_again = false;
    for (std::size_t i = 0; i < all.staged.size(); ++i) {
      if (!grads[i].defined()) continue;
      is_again = is_again || all.staged[i];
      all.staged[i] = true;
    }
    if (is_again) (void)context->get_saved_variables();  // raises when they are freed
  }
};

std::vector<at::Tensor> gather_all_autograd(at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                                            const at::Tensor& anchor, c10::string_view tables, at::IntArrayRef options,
                                            bool train) {
  auto all = c10::make_intrusive<AllLookups>();
  all->ids = ids.vec();
  all->offsets = offsets.vec();
  all->weights = weights.vec();
  all->tables = std::string(tables);
  all->options = options.vec();
  all->wants.assign(ids.size(), 0);
  variable_list wanted;
  const bool is_whole = options.size() == ids.size() * static_cast<std::size_t>(kMergedOptions);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].requires_grad()) continue;
    if (is_whole && i < ids.size() && all->has(i, kMergedHasWeights)) {
      all->wants[i] = 1;
      wanted.push_back(weights[i]);
    }
    all->weights[i] = weights[i].detach();
  }
  if (!train) return call_gather_all(*all, anchor, false);
  return GatherAllFunction::apply(all, anchor, at::TensorList(wanted));
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

std::vector<at::Tensor> stage_all_autograd(at::TensorList grads, at::TensorList ids, at::TensorList offsets,
                                           at::TensorList weights, at::TensorList places, c10::string_view tables,
                                           at::IntArrayRef options, at::IntArrayRef wants) {
  for (const at::Tensor& grad : grads) refuse_double_backward(grad, "gather_all");
  const at::AutoDispatchBelowADInplaceOrView below;
  return typed_op<decltype(stage_all)>("sparserow::stage_all")
      .call(grads, ids, offsets, weights, places, tables, options, wants);
}

}  // namespace

TORCH_LIBRARY_IMPL(sparserow, Autograd, library) {
  library.impl("gather_all", &gather_all_autograd);
  library.impl("stage_all", &stage_all_autograd);
  library.impl("gather", &gather_autograd);
  library.impl("stage", &stage_autograd);
  library.impl("gather_bag", &gather_bag_autograd);
  library.impl("stage_bag", &stage_bag_autograd);
}

}  // namespace sparserow::ops
