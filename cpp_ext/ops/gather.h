// Kernels of gather and stage: one row per id.
#pragma once

#include <ATen/ATen.h>

namespace sparserow::ops {

// ids: any shape, int64 or int32. Returns ids.shape + [dim] float32 on the ids' device.
at::Tensor gather(const at::Tensor& ids, const at::Tensor& anchor, c10::string_view binding, int64_t dim,
                  int64_t padding_idx, bool train);
// grad: ids.shape + [dim]. Adds it to the sums of the ids, but for padding_idx. Returns the anchor's gradient.
at::Tensor stage(const at::Tensor& grad, const at::Tensor& ids, c10::string_view binding, int64_t dim,
                 int64_t padding_idx);

}  // namespace sparserow::ops
