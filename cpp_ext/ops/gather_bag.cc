#include "ops/gather_bag.h"

#include "ops/arguments.h"
#include "ops/bags.h"
#include "util/not_allowed.h"

namespace sparserow::ops {
namespace {

// out[bag] = sum of weight * row, or the mean; zero for an empty bag.
void pool_sum(const Bags& bags, const Lookup& lookup, const float* weights, bool mean, int64_t dim, float* out) {
  at::parallel_for(0, bags.count(), grain_of(dim), [&](int64_t first, int64_t last) {
    for (int64_t bag = first; bag < last; ++bag) {
      float* __restrict sum = out + bag * dim;
      std::memset(sum, 0, static_cast<std::size_t>(dim) * sizeof(float));
      int64_t size = 0;
      for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
        if (!bags.counts(i)) continue;
        const float* __restrict row = lookup.row(static_cast<std::size_t>(i));
        const float weight = weights == nullptr ? 1.0f : weights[i];
        for (int64_t c = 0; c < dim; ++c) sum[c] += weight * row[c];
        ++size;
      }
      if (!mean || size == 0) continue;
      for (int64_t c = 0; c < dim; ++c) sum[c] /= static_cast<float>(size);
    }
  });
}

void pool_max(const Bags& bags, const Lookup& lookup, int64_t dim, float* out, int64_t* argmax) {
  at::parallel_for(0, bags.count(), grain_of(dim), [&](int64_t first, int64_t last) {
    for (int64_t bag = first; bag < last; ++bag) {
      float* best = out + bag * dim;
      int64_t* place = argmax + bag * dim;
      std::memset(best, 0, static_cast<std::size_t>(dim) * sizeof(float));
      std::fill_n(place, dim, int64_t{-1});
      for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
        if (!bags.counts(i)) continue;
        const float* row = lookup.row(static_cast<std::size_t>(i));
        for (int64_t c = 0; c < dim; ++c) {
          if (place[c] >= 0 && !(row[c] > best[c])) continue;
          best[c] = row[c];
          place[c] = i;
        }
      }
    }
  });
}

void stage_max(const Bags& bags, const at::Tensor& argmax, const float* grad, int64_t dim, StagedSums& sums) {
  const at::Tensor places = argmax.to(at::kCPU).contiguous();
  const int64_t* place = places.const_data_ptr<int64_t>();
  const uint32_t* indexes = sums.lookup().indexes();
  for_parts(bags.count() * dim, [&](uint32_t mask, uint32_t part) {
    for (int64_t at = 0; at < bags.count() * dim; ++at) {
      if (place[at] < 0) continue;
      const uint32_t index = indexes[place[at]];
      if ((index & mask) == part) sums.add_column(index, static_cast<uint32_t>(at % dim), grad[at]);
    }
  });
}

void stage_sum(const Bags& bags, const float* weights, bool mean, const float* grad, int64_t dim, StagedSums& sums) {
  const uint32_t* indexes = sums.lookup().indexes();
  for_parts(bags.ids().size() * dim, [&](uint32_t mask, uint32_t part) {
    for (int64_t bag = 0; bag < bags.count(); ++bag) {
      const float scale = mean ? bags.mean_scale(bag) : 1.0f;
      for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
        if ((indexes[i] & mask) != part || !bags.counts(i)) continue;
        sums.add(indexes[i], grad + bag * dim, weights == nullptr ? scale : weights[i]);
      }
    }
  });
}

// d(loss)/d(weight of id i) = grad[bag] . row(i); zero for padding.
at::Tensor weights_gradient(const Bags& bags, const Lookup& lookup, const float* grad, int64_t dim,
                            const at::Tensor& weights) {
  at::Tensor out = at::zeros(weights.sizes(), at::TensorOptions().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, bags.count(), grain_of(dim), [&](int64_t first, int64_t last) {
    for (int64_t bag = first; bag < last; ++bag) {
      for (int64_t i = bags.begin(bag); i < bags.end(bag); ++i) {
        if (!bags.counts(i)) continue;
        const float* row = lookup.row(static_cast<std::size_t>(i));
        float dot = 0.0f;
        for (int64_t c = 0; c < dim; ++c) dot += grad[bag * dim + c] * row[c];
        to[i] = dot;
      }
    }
  });
  return out.to(weights.options());
}

}  // namespace

void check_bag_mode(const at::Tensor& ids, const std::optional<at::Tensor>& weights, int64_t mode) {
  if (mode != kBagSum && mode != kBagMean && mode != kBagMax) {
    raise(not_allowed("gather_bag.mode", mode, "0 (sum), 1 (mean), 2 (max)"));
  }
  if (!weights) return;
  if (mode != kBagSum) raise({Code::kInvalidArgument, "gather_bag: per_sample_weights are allowed for mode sum only"});
  if (weights->sizes() != ids.sizes()) {
    raise({Code::kInvalidArgument, "gather_bag: per_sample_weights must have the shape of ids"});
  }
}

std::tuple<at::Tensor, at::Tensor> pool_bags(const Bags& bags, const Lookup& lookup,
                                             const std::optional<at::Tensor>& per_sample_weights, int64_t dim,
                                             int64_t mode, const at::Device& device) {
  at::Tensor out = host_tensor({bags.count(), dim}, at::kFloat);
  at::Tensor argmax;
  if (mode == kBagMax) {
    argmax = host_tensor(out.sizes(), at::kLong);
    pool_max(bags, lookup, dim, out.mutable_data_ptr<float>(), argmax.mutable_data_ptr<int64_t>());
  } else {
    const at::Tensor weights = per_sample_weights ? host_floats(*per_sample_weights) : at::Tensor();
    pool_sum(bags, lookup, per_sample_weights ? weights.const_data_ptr<float>() : nullptr, mode == kBagMean, dim,
             out.mutable_data_ptr<float>());
  }
  if (device.is_cpu()) return {out, argmax};
  return {out.to(device), argmax.defined() ? argmax.to(device) : argmax};
}

std::tuple<at::Tensor, at::Tensor> gather_bag(const at::Tensor& ids, const std::optional<at::Tensor>& offsets,
                                              const at::Tensor& anchor,
                                              const std::optional<at::Tensor>& per_sample_weights,
                                              c10::string_view name, int64_t dim, int64_t mode, int64_t padding_idx,
                                              bool include_last_offset, bool train) {
  const NoGradScope scope(is_without_gradient(anchor));
  check_bag_mode(ids, per_sample_weights, mode);
  const auto binding = binding_of(name, dim);
  const Bags bags(ids, offsets, include_last_offset, padding_idx);
  const Lookup lookup = value_or_raise(binding->lookup(bags.ids().ref(), train));
  auto [rows, argmax] = pool_bags(bags, lookup, per_sample_weights, dim, mode, device_of_rows(anchor, ids));
  if (!argmax.defined()) argmax = at::empty({0}, rows.options().dtype(at::kLong));
  return {rows, argmax};
}

at::Tensor stage_bags(Binding& binding, const Bags& bags, const BagGradient& of, int64_t dim, int64_t mode,
                      bool weights_grad) {
  const at::Tensor grads = host_floats(of.grad);
  const float* from = grads.const_data_ptr<float>();
  StagedSums sums = value_or_raise(binding.stage(bags.ids().ref()));
  if (mode == kBagMax) {
    stage_max(bags, of.argmax, from, dim, sums);
  } else {
    const at::Tensor weights = of.weights ? host_floats(*of.weights) : at::Tensor();
    stage_sum(bags, of.weights ? weights.const_data_ptr<float>() : nullptr, mode == kBagMean, from, dim, sums);
  }
  return of.weights && weights_grad ? weights_gradient(bags, sums.lookup(), from, dim, *of.weights) : at::Tensor();
}

std::tuple<at::Tensor, at::Tensor> stage_bag(const at::Tensor& grad, const at::Tensor& ids,
                                             const std::optional<at::Tensor>& offsets,
                                             const std::optional<at::Tensor>& per_sample_weights,
                                             const at::Tensor& argmax, c10::string_view name, int64_t dim, int64_t mode,
                                             int64_t padding_idx, bool include_last_offset, bool weights_grad) {
  check_bag_mode(ids, per_sample_weights, mode);
  const Bags bags(ids, offsets, include_last_offset, padding_idx);
  at::Tensor of_weights =
      stage_bags(*binding_of(name, dim), bags, {grad, per_sample_weights, argmax}, dim, mode, weights_grad);
  if (!of_weights.defined()) of_weights = at::empty({0}, grad.options().dtype(at::kFloat));
  return {anchor_grad(grad), of_weights};
}

}  // namespace sparserow::ops
