// Kernels of gather and stage: one row per id.
#pragma once

#include <ATen/ATen.h>

#include "session/binding.h"
#include "session/lookup.h"

namespace sparserow::ops {

class HostIds;

// The rows of a lookup of `ids`: ids.shape + [dim] float32 on `device`.
at::Tensor rows_of(const Lookup& lookup, const at::Tensor& ids, int64_t dim, const at::Device& device);
// grad: (ids) + [dim]. Adds it to the sums of the ids, but for padding_idx.
void stage_rows(Binding& binding, const HostIds& host, const at::Tensor& grad, int64_t dim, int64_t padding_idx);
// ids: any shape, int64 or int32. Returns ids.shape + [dim] float32 on the device of device_of_rows().
at::Tensor gather(const at::Tensor& ids, const at::Tensor& anchor, c10::string_view binding, int64_t dim,
                  int64_t padding_idx, bool train);
// grad: ids.shape + [dim]. Adds it to the sums of the ids, but for padding_idx. Returns the anchor's gradient, on
// grad's device.
at::Tensor stage(const at::Tensor& grad, const at::Tensor& ids, c10::string_view binding, int64_t dim,
                 int64_t padding_idx);

}  // namespace sparserow::ops
