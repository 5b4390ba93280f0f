// What every op does with its arguments: ids on the host, the binding by name, errors of ours as torch's.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <bit>
#include <memory>
#include <string>
#include <utility>

#include "session/binding.h"
#include "util/not_allowed.h"
#include "util/status.h"

namespace sparserow::ops {

// ValueError for an argument that can never be right, RuntimeError for the rest; the text begins with the
// error's name, from which the Python layer makes its own class.
[[noreturn]] inline void raise(const Status& status) {
  const std::string text = std::string(code_name(status.code())) + ": " + status.message();
  if (status.code() == Code::kInvalidArgument) C10_THROW_ERROR(ValueError, text);
  C10_THROW_ERROR(Error, text);
}

template <class T>
T value_or_raise(Result<T> result) {
  if (!result.is_ok()) raise(result.status());
  return std::move(result).value();
}

inline std::shared_ptr<Binding> binding_of(c10::string_view name, int64_t dim) {
  auto binding = value_or_raise(find_binding({name.data(), name.size()}));
  if (binding->spec().dim != dim) {
    raise(not_allowed("dim of table '" + binding->spec().name + "'", dim, std::to_string(binding->spec().dim)));
  }
  return binding;
}

// The tensor contiguous on the host; itself where it is that already, without a call of torch's dispatcher.
inline at::Tensor on_host(const at::Tensor& tensor, at::ScalarType type) {
  const bool is_it = tensor.is_cpu() && tensor.scalar_type() == type && tensor.is_contiguous();
  return is_it ? tensor : tensor.to(at::kCPU, type).contiguous();
}

// int64, contiguous, on the host; remembers which tensor the caller gave.
class HostIds {
 public:
  explicit HostIds(const at::Tensor& ids) : given_(ids) {
    if (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt) {
      raise(not_allowed("ids.dtype", c10::toString(ids.scalar_type()), "int64, int32"));
    }
    host_ids_ = on_host(ids, at::kLong);
    data_ = host_ids_.const_data_ptr<int64_t>();
    size_ = host_ids_.numel();
  }
  [[nodiscard]] IdsRef ref() const {
    return {{data_, static_cast<std::size_t>(size_)},
            {given_.const_data_ptr(), given_.sizes(), given_.strides(), static_cast<std::uint32_t>(given_.itemsize())}};
  }
  [[nodiscard]] const int64_t* data() const { return data_; }
  [[nodiscard]] int64_t size() const { return size_; }

 private:
  at::Tensor given_;
  at::Tensor host_ids_;
  const int64_t* data_ = nullptr;  // of host_ids_, which loops over ids do not ask for it each time
  int64_t size_ = 0;
};

inline at::Tensor host_floats(const at::Tensor& tensor) { return on_host(tensor, at::kFloat); }

// New tensors on the host, without a call of torch's dispatcher.
inline at::Tensor host_tensor(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, type, /*pin_memory=*/false, /*memory_format=*/std::nullopt);
}

// Rows handled by one task of at::parallel_for at least.
inline int64_t grain_of(int64_t dim) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, dim)); }

// Calls add(mask, part) so that part p owns the row indexes with (index & mask) == p: each sum is made by one
// thread, in the order of the ids, so the result does not depend on the number of threads.
template <class Add>
void for_parts(int64_t floats, const Add& add) {
  constexpr int64_t kFloatsWorthAThread = 65536;
  const auto threads = static_cast<uint64_t>(std::min<int64_t>(at::get_num_threads(), 16));
  const auto useful = static_cast<uint64_t>(floats / kFloatsWorthAThread + 1);
  const auto parts = static_cast<int64_t>(std::bit_floor(std::min(threads, useful)));
  const auto mask = static_cast<uint32_t>(parts - 1);
  if (parts == 1) return add(mask, 0u);
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) add(mask, static_cast<uint32_t>(part));
  });
}

// An anchor without elements says that no backward follows the lookup. What records a lookup cannot say it: the forward
// of a recorded lookup runs without gradient too.
inline bool is_without_gradient(const at::Tensor& anchor) { return NoGradScope::is_active() || anchor.numel() == 0; }

// The gradient of an anchor, on the device of the rows' gradient. It is always zero: an anchor only connects a lookup
// to autograd.
inline at::Tensor anchor_grad(const at::Tensor& grad) { return at::zeros({1}, grad.options().dtype(at::kFloat)); }

// Rows go to the anchor's device; to that of the ids where the anchor stayed on the host, as in exported programs.
inline at::Device device_of_rows(const at::Tensor& anchor, const at::Tensor& ids) {
  return anchor.device().is_cpu() ? ids.device() : anchor.device();
}

}  // namespace sparserow::ops
