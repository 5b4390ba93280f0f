// Where each bag begins and ends in the flat ids of a pooled lookup, and which ids count.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>

#include "ops/arguments.h"
#include "util/not_allowed.h"

namespace sparserow::ops {

class Bags {
 public:
  Bags(const at::Tensor& ids, const std::optional<at::Tensor>& offsets, bool include_last_offset, int64_t padding_idx)
      : host_(ids), padding_idx_(padding_idx) {
    if (ids.dim() == 2 && !offsets) {
      count_ = ids.size(0);
      length_ = ids.size(1);
      return;
    }
    if (ids.dim() != 1 || !offsets || offsets->dim() != 1) {
      raise({Code::kInvalidArgument, "gather_bag: ids must be 2-D without offsets or 1-D with 1-D offsets; ids are " +
                                         std::to_string(ids.dim()) + "-D " + (offsets ? "with" : "without") +
                                         " offsets"});
    }
    if (offsets->scalar_type() != at::kLong && offsets->scalar_type() != at::kInt) {
      raise(not_allowed("gather_bag.offsets.dtype", c10::toString(offsets->scalar_type()), "int64, int32"));
    }
    offsets_ = on_host(*offsets, at::kLong);
    begins_ = offsets_.const_data_ptr<int64_t>();
    begin_count_ = offsets_.numel();
    count_ = begin_count_ - (include_last_offset ? 1 : 0);
    check_offsets();
    if (include_last_offset && begins_[begin_count_ - 1] != host_.size()) {
      raise(
          not_allowed("gather_bag.offsets[" + std::to_string(begin_count_ - 1) + "]", begins_[begin_count_ - 1],
                      std::to_string(host_.size()) + ", the number of ids, as the last one with include_last_offset"));
    }
  }

  [[nodiscard]] const HostIds& ids() const { return host_; }
  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] int64_t begin(int64_t bag) const { return begins_ != nullptr ? begins_[bag] : bag * length_; }
  [[nodiscard]] int64_t end(int64_t bag) const {
    if (begins_ == nullptr) return (bag + 1) * length_;
    return bag + 1 < begin_count_ ? begins_[bag + 1] : host_.size();
  }
  [[nodiscard]] bool counts(int64_t i) const { return host_.data()[i] != padding_idx_; }
  // 1 / (ids that count), 0 for an empty bag.
  [[nodiscard]] float mean_scale(int64_t bag) const {
    int64_t size = 0;
    for (int64_t i = begin(bag); i < end(bag); ++i) size += counts(i) ? 1 : 0;
    return size == 0 ? 0.0f : 1.0f / static_cast<float>(size);
  }

 private:
  void check_offsets() const {
    if (count_ < 0) raise({Code::kInvalidArgument, "gather_bag: include_last_offset needs at least one offset"});
    int64_t previous = 0;
    for (int64_t i = 0; i < begin_count_; ++i) {
      const int64_t begin = begins_[i];
      const bool ok = i == 0 ? begin == 0 : begin >= previous && begin <= host_.size();
      if (!ok) {
        raise(not_allowed("gather_bag.offsets[" + std::to_string(i) + "]", begin,
                          "0 first, then not falling, at most " + std::to_string(host_.size())));
      }
      previous = begin;
    }
  }

  HostIds host_;
  at::Tensor offsets_;
  const int64_t* begins_ = nullptr;  // of offsets_; null where the bags have one length
  int64_t begin_count_ = 0;
  int64_t padding_idx_;
  int64_t count_ = 0;
  int64_t length_ = 0;
};

}  // namespace sparserow::ops
