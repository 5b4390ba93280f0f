#include "ops/gather.h"

#include "ops/arguments.h"

namespace sparserow::ops {

at::Tensor rows_of(const Lookup& lookup, const at::Tensor& ids, int64_t dim, const at::Device& device) {
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(dim);
  at::Tensor out = host_tensor(sizes, at::kFloat);
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, ids.numel(), grain_of(dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(to + i * dim, lookup.row(static_cast<std::size_t>(i)), static_cast<std::size_t>(dim) * sizeof(float));
    }
  });
  return device.is_cpu() ? out : out.to(device);
}

at::Tensor gather(const at::Tensor& ids, const at::Tensor& anchor, c10::string_view name, int64_t dim,
                  int64_t /*padding_idx*/, bool train) {
  const auto binding = binding_of(name, dim);
  const HostIds host(ids);
  const NoGradScope scope(is_without_gradient(anchor));
  return rows_of(value_or_raise(binding->lookup(host.ref(), train)), ids, dim, device_of_rows(anchor, ids));
}

void stage_rows(Binding& binding, const HostIds& host, const at::Tensor& grad, int64_t dim, int64_t padding_idx) {
  const at::Tensor grads = host_floats(grad);
  const float* from = grads.const_data_ptr<float>();
  StagedSums sums = value_or_raise(binding.stage(host.ref()));
  const uint32_t* indexes = sums.lookup().indexes();
  for_parts(host.size() * dim, [&](uint32_t mask, uint32_t part) {
    for (int64_t i = 0; i < host.size(); ++i) {
      if ((indexes[i] & mask) != part || host.data()[i] == padding_idx) continue;
      sums.add(indexes[i], from + i * dim, 1.0f);
    }
  });
}

at::Tensor stage(const at::Tensor& grad, const at::Tensor& ids, c10::string_view name, int64_t dim,
                 int64_t padding_idx) {
  stage_rows(*binding_of(name, dim), HostIds(ids), grad, dim, padding_idx);
  return anchor_grad(grad);
}

}  // namespace sparserow::ops
