#include "store/table/admission.h"

#include <algorithm>

#include "util/random.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kSmallest = 8;  // cells
constexpr std::uint64_t kImageFormat = 1;

std::uint32_t capacity_for(std::size_t entries) noexcept {
  return std::max(kSmallest, static_cast<std::uint32_t>(entries + entries / 3 + 1));
}

}  // namespace

template <unsigned kIdBits>
std::uint32_t CountingFilter<kIdBits>::place_of(std::uint32_t id) const noexcept {
  if (capacity_ == 0) return kNowhere;
  for (std::uint32_t at = home(id);; at = at + 1 == capacity_ ? 0 : at + 1) {  // ends: a cell is always empty
    if (cells_[at] == 0) return kNowhere;
    if (cells_[at] >> 8 == id) return at;
  }
}

template <unsigned kIdBits>
std::uint32_t CountingFilter<kIdBits>::count(std::uint32_t id) const noexcept {
  const std::uint32_t at = place_of(id);
  return at == kNowhere ? 0 : cells_[at] & 0xff;
}

template <unsigned kIdBits>
void CountingFilter<kIdBits>::put(std::uint32_t cell) noexcept {
  std::uint32_t at = home(cell >> 8);
  while (cells_[at] != 0) at = at + 1 == capacity_ ? 0 : at + 1;
  cells_[at] = cell;
  ++entries_;
}

template <unsigned kIdBits>
void CountingFilter<kIdBits>::rebuild(const std::vector<std::uint32_t>& cells, std::uint32_t capacity) {
  cells_ = std::make_unique<std::uint32_t[]>(capacity);
  capacity_ = capacity;
  entries_ = 0;
  for (const std::uint32_t cell : cells) put(cell);
}

template <unsigned kIdBits>
std::vector<std::uint32_t> CountingFilter<kIdBits>::entries_sorted() const {
  std::vector<std::uint32_t> cells;
  cells.reserve(entries_);
  for (std::uint32_t at = 0; at < capacity_; ++at) {
    if (cells_[at] != 0) cells.push_back(cells_[at]);
  }
  std::sort(cells.begin(), cells.end());
  return cells;
}

template <unsigned kIdBits>
void CountingFilter<kIdBits>::age() {
  std::vector<std::uint32_t> kept;
  for (const std::uint32_t cell : entries_sorted()) {
    if ((cell & 0xff) > 1) kept.push_back((cell & ~0xffu) | (cell & 0xff) / 2);
  }
  rebuild(kept, capacity_for(kept.size()));
}

template <unsigned kIdBits>
std::uint32_t CountingFilter<kIdBits>::raise(std::uint32_t id, std::uint32_t most) {
  if (const std::uint32_t at = place_of(id); at != kNowhere) {
    if ((cells_[at] & 0xff) < kMostCount) ++cells_[at];
    return cells_[at] & 0xff;
  }
  while (entries_ >= most) age();
  if (entries_ + 1 > capacity_ - capacity_ / 8) rebuild(entries_sorted(), std::max(kSmallest, capacity_ * 3 / 2));
  put(id << 8 | 1);
  return 1;
}

template <unsigned kIdBits>
void CountingFilter<kIdBits>::erase(std::uint32_t id) noexcept {
  std::uint32_t hole = place_of(id);
  if (hole == kNowhere) return;
  // Moves what follows back, as far as its home allows, so that no search ends early.
  const auto distance = [this](std::uint32_t from, std::uint32_t to) {
    return to >= from ? to - from : to + capacity_ - from;
  };
  for (std::uint32_t at = hole + 1 == capacity_ ? 0 : hole + 1; cells_[at] != 0;
       at = at + 1 == capacity_ ? 0 : at + 1) {
    if (distance(home(cells_[at] >> 8), at) < distance(hole, at)) continue;
    cells_[hole] = cells_[at];
    hole = at;
  }
  cells_[hole] = 0;
  --entries_;
}

template <unsigned kIdBits>
Status CountingFilter<kIdBits>::load(std::span<const std::uint32_t> entries) {
  std::uint32_t last = 0;
  for (const std::uint32_t cell : entries) {
    if ((cell & 0xff) == 0 || cell >> 8 >= std::uint32_t{1} << kIdBits || (last != 0 && cell >> 8 <= last >> 8)) {
      return {Code::kDataLoss, "the image of an admission filter is damaged"};
    }
    last = cell;
  }
  rebuild({entries.begin(), entries.end()}, capacity_for(entries.size()));
  return Status::ok();
}

template <unsigned kIdBits>
CountingFilter<kIdBits> CountingFilter<kIdBits>::copy() const {
  CountingFilter other;
  other.capacity_ = capacity_;
  other.entries_ = entries_;
  if (capacity_ == 0) return other;
  other.cells_ = std::make_unique_for_overwrite<std::uint32_t[]>(capacity_);
  std::copy_n(cells_.get(), capacity_, other.cells_.get());
  return other;
}

template class CountingFilter<24>;
template class CountingFilter<12>;  // for tests: errs often enough to be measured

TableAdmission::TableAdmission(const TableSchema& schema, std::uint32_t slot_count, std::atomic<std::uint64_t>& memory,
                               std::atomic<std::uint64_t>& used)
    : after_(schema.policy.admit_after),
      threshold_(static_cast<std::uint64_t>(static_cast<double>(schema.policy.admit_probability) * 0x1p53)),
      seed_(random_bits(schema.seed ^ 0x61646d6974ull, schema.id)),
      slots_per_stripe_((slot_count + kStripes - 1) / kStripes),
      most_(static_cast<std::uint32_t>(
          std::clamp<std::uint64_t>((schema.policy.admit_capacity + slot_count - 1) / slot_count, 1, 1u << 23))),
      memory_(memory),
      used_(used) {}

TableAdmission::~TableAdmission() { add_bytes(bytes_, 0); }

void TableAdmission::add_bytes(std::uint64_t before, std::uint64_t after) noexcept {
  memory_ += after - before;  // wraps where it shrinks
  used_ += after - before;
  bytes_ += after - before;
}

TableAdmission::Filter& TableAdmission::filter(std::uint32_t stripe, std::uint32_t slot_in_stripe) {
  std::vector<Filter>& filters = filters_[stripe];
  if (filters.empty()) {
    filters.resize(slots_per_stripe_);
    add_bytes(0, slots_per_stripe_ * sizeof(Filter));
  }
  return filters[slot_in_stripe];
}

bool TableAdmission::admit(const SlotOrder& slots, std::uint32_t stripe, std::uint64_t suffix,
                           std::uint64_t observation) {
  const std::uint64_t hash = slots.hash(stripe, suffix);
  bool is_admitted = false;
  if (after_ > 1) {
    Filter& filter = this->filter(stripe, slots.slot_in_stripe(suffix));
    const std::uint64_t bytes = filter.bytes();
    const std::uint32_t entries = filter.entries();
    const auto id = static_cast<std::uint32_t>(mix_bits(hash) >> 40);
    is_admitted = filter.raise(id, most_) >= after_;
    if (is_admitted) filter.erase(id);
    if (bytes == 0) ++used_slots_;
    add_bytes(bytes, filter.bytes());
    entries_ += std::uint64_t{filter.entries()} - entries;
  } else {
    is_admitted = random_bits(seed_ ^ hash, observation) >> 11 < threshold_;
  }
  if (!is_admitted) ++refused_;
  return is_admitted;
}

std::uint64_t TableAdmission::bytes_for(std::uint32_t stripe, std::uint64_t pushes) const noexcept {
  if (after_ <= 1 || pushes == 0) return 0;
  const std::uint64_t fixed = filters_[stripe].empty() ? slots_per_stripe_ * sizeof(Filter) : 0;
  // A filter that must grow does so by half, and has room for a key in at most 16 / 7 of its 4 bytes.
  const std::uint64_t touched = std::min<std::uint64_t>(pushes, slots_per_stripe_);
  std::uint64_t filter_bytes = 0;
  for (const Filter& filter : filters_[stripe]) filter_bytes += filter.bytes();
  return fixed + filter_bytes / 2 + touched * kSmallest * sizeof(std::uint32_t) + pushes * 10;
}

std::vector<std::uint64_t> TableAdmission::image(std::uint32_t stripe, std::uint32_t slot_in_stripe) const {
  return filters_[stripe].empty() ? std::vector<std::uint64_t>{} : image_of(filters_[stripe][slot_in_stripe]);
}

std::vector<std::uint64_t> TableAdmission::image_of(const Filter& filter) {
  if (filter.entries() == 0) return {};
  std::vector<std::uint64_t> image{kImageFormat};
  for (const std::uint32_t cell : filter.entries_sorted()) image.push_back(cell);
  return image;
}

std::vector<TableAdmission::Filter> TableAdmission::copy(std::uint32_t stripe) const {
  std::vector<Filter> copies;
  for (const Filter& filter : filters_[stripe]) copies.push_back(filter.copy());
  return copies;
}

Status TableAdmission::load(std::uint32_t stripe, std::uint32_t slot_in_stripe, std::span<const std::uint64_t> image) {
  std::vector<std::uint32_t> cells;
  if (!image.empty()) {
    if (image[0] != kImageFormat || image.size() - 1 > most_) {
      return {Code::kDataLoss, "the image of an admission filter is damaged or of another version"};
    }
    for (const std::uint64_t cell : image.subspan(1)) {
      if (cell >> 32 != 0) return {Code::kDataLoss, "the image of an admission filter is damaged"};
      cells.push_back(static_cast<std::uint32_t>(cell));
    }
  }
  Filter loaded;
  SR_RETURN_IF_ERROR(loaded.load(cells));
  Filter& filter = this->filter(stripe, slot_in_stripe);
  if (filter.bytes() == 0) ++used_slots_;
  add_bytes(filter.bytes(), loaded.bytes());
  entries_ += std::uint64_t{loaded.entries()} - filter.entries();
  filter = std::move(loaded);
  return Status::ok();
}

AdmissionStats TableAdmission::stats() const noexcept {
  const std::uint64_t slots = std::max<std::uint64_t>(used_slots_, 1);
  return {.refused = refused_,
          .entries = entries_,
          .bytes = bytes_,
          .error_rate = static_cast<double>(entries_.load()) / static_cast<double>(slots) * 0x1p-24};
}

}  // namespace sparserow
