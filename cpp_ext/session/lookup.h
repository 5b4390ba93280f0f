// What passes between an op and a table's step: the ids of a lookup, its rows, and the sums of its gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "util/finite.h"
#include "util/mutex.h"

namespace sparserow {

// Where a tensor lives. Identity only: nothing here reads through `data`. Strides count elements.
struct TensorView {
  const void* data = nullptr;
  std::span<const std::int64_t> sizes;
  std::span<const std::int64_t> strides;
  std::uint32_t item_bytes = 8;
};

// The ids of one lookup. `source` names the tensor the model gave, `ids` are its values, contiguous; the
// two differ when the tensor is a strided view, an int32 or a device tensor.
struct IdsRef {
  std::span<const std::int64_t> ids;  // (n)
  TensorView source;
};

// Index of each id's row in a step's rows. Rows never change within a step, so a Lookup stays valid
// whatever is looked up after it, and from any thread.
class Lookup {
 public:
  using Indexes = std::vector<std::uint32_t>;
  Lookup() = default;
  Lookup(std::shared_ptr<const Indexes> indexes, std::size_t offset, std::size_t n, std::shared_ptr<const float[]> rows,
         std::uint32_t dim)
      : indexes_(std::move(indexes)), rows_(std::move(rows)), offset_(offset), n_(n), dim_(dim) {}

  [[nodiscard]] std::size_t size() const noexcept { return n_; }
  // Row 0; a Lookup that reads the same rows has the same address.
  [[nodiscard]] const float* rows() const noexcept { return rows_.get(); }
  [[nodiscard]] const std::uint32_t* indexes() const noexcept { return indexes_->data() + offset_; }  // (n)
  // (dim) float32: the row of the i-th id.
  [[nodiscard]] const float* row(std::size_t i) const noexcept {
    return rows_.get() + std::size_t{indexes()[i]} * dim_;
  }

 private:
  std::shared_ptr<const Indexes> indexes_;
  std::shared_ptr<const float[]> rows_;
  std::size_t offset_ = 0;
  std::size_t n_ = 0;
  std::uint32_t dim_ = 0;
};

// What a step knows of the sum of a row's gradients.
enum Staged : std::uint8_t {
  kNotStaged,     // there is none
  kStagedFinite,  // one gradient, which is finite
  kStaged,        // not judged yet
};

// Adds gradients of one lookup to a table's sums and holds that table's lock meanwhile. The caller may
// add from several threads at once as long as no two of them touch the same index.
class StagedSums {
 public:
  StagedSums(std::unique_lock<Mutex> lock, Lookup lookup, float* sums, std::uint8_t* staged, std::uint32_t dim)
      : lock_(std::move(lock)), lookup_(std::move(lookup)), sums_(sums), staged_(staged), dim_(dim) {}

  [[nodiscard]] const Lookup& lookup() const noexcept { return lookup_; }

  // sum of row `index` += scale * grad, grad: (dim) float32. The first gradient of a row in a step is
  // stored, not added, so nothing needs zeroing; it is judged while it is in registers.
  void add(std::uint32_t index, const float* __restrict grad, float scale) noexcept {
    float* __restrict sum = sums_ + std::size_t{index} * dim_;
    if (staged_[index] == kNotStaged) {
      std::uint32_t bad = 0;
      for (std::uint32_t c = 0; c < dim_; ++c) {
        const float value = scale * grad[c];
        bad |= nonfinite_mask(value);
        sum[c] = value;
      }
      staged_[index] = bad == 0 ? kStagedFinite : kStaged;
    } else {
      staged_[index] = kStaged;
      for (std::uint32_t c = 0; c < dim_; ++c) sum[c] += scale * grad[c];
    }
  }

  // One column of a row: what `max` pooling sends back.
  void add_column(std::uint32_t index, std::uint32_t column, float grad) noexcept {
    float* sum = sums_ + std::size_t{index} * dim_;
    if (std::exchange(staged_[index], kStaged) == kNotStaged) {
      std::memset(sum, 0, std::size_t{dim_} * sizeof(float));
    }
    sum[column] += grad;
  }

 private:
  std::unique_lock<Mutex> lock_;
  Lookup lookup_;
  float* sums_;
  std::uint8_t* staged_;
  std::uint32_t dim_;
};

}  // namespace sparserow
