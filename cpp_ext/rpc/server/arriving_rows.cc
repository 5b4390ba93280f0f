#include "rpc/server/arriving_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "util/finite.h"

namespace sparserow::rpc {

bool ArrivingRows::are_looked_at(const FrameHeader& header) noexcept {
  const auto type = static_cast<FrameType>(header.type);
  return type == FrameType::kAssign || (type == FrameType::kCommit && header.step == kNoStep);
}

void ArrivingRows::look(std::span<const std::byte> arrived) {
  while (!is_over_ && (next_ != 0 || begin_table(arrived))) {
    const std::size_t end = std::min(arrived.size(), rows_end_);
    const std::size_t floats = end > seen_ ? (end - seen_) / sizeof(float) : 0;
    is_finite_ = is_finite_ && all_finite(reinterpret_cast<const float*>(arrived.data() + seen_), floats);
    seen_ += floats * sizeof(float);
    if (seen_ < rows_end_) return;
    end_table(arrived);
  }
}

// Reads the head of the next section; false when it has not arrived, or is none whose rows are looked at.
bool ArrivingRows::begin_table(std::span<const std::byte> arrived) {
  TableHead head;
  if (arrived.size() < section_ || arrived.size() - section_ < sizeof head) return false;
  std::memcpy(&head, arrived.data() + section_, sizeof head);
  const auto kind = static_cast<SectionKind>(head.section.kind);
  const auto layout = layout_of(kind, head.descriptor.flags);
  is_over_ = kind != SectionKind::kTableGrads || head.descriptor.dtype != Dtype::kFloat32 || !layout.is_ok() ||
             layout.value().exponents || !check_descriptor(head.descriptor).is_ok() ||
             head.section.payload_bytes != table_payload_bytes(head.descriptor, layout.value());
  if (is_over_) return false;
  const std::size_t keys = std::size_t{head.descriptor.n} * sizeof(std::uint64_t);
  rows_begin_ = seen_ = section_ + sizeof head + keys;
  rows_end_ = seen_ + std::size_t{head.descriptor.n} * head.descriptor.dim * sizeof(float);
  next_ = section_ + sizeof head.section + padded8(head.section.payload_bytes);
  is_finite_ = true;
  return true;
}

void ArrivingRows::end_table(std::span<const std::byte> arrived) {
  const std::size_t bytes = rows_end_ - rows_begin_;
  if (is_finite_ && bytes >= kLeastBytes) finite_.push_back(arrived.subspan(rows_begin_, bytes));
  section_ = std::exchange(next_, 0);
}

bool ArrivingRows::are_finite(std::span<const std::byte> rows) const noexcept {
  return std::any_of(finite_.begin(), finite_.end(), [&](const std::span<const std::byte>& seen) {
    return seen.data() == rows.data() && seen.size() == rows.size();
  });
}

}  // namespace sparserow::rpc
