#include "store/ssd/pages/page_index.h"

#include <utility>

namespace sparserow {
namespace {

template <class Part>
std::size_t bytes_of(const std::vector<Part>& parts) noexcept {
  std::size_t bytes = parts.capacity() * sizeof(Part);
  for (const Part& part : parts) bytes += part.bytes();
  return bytes;
}

}  // namespace

PageIndex::PageIndex(std::uint32_t slot_bits) : slot_bits_(slot_bits) {
  is_by_slot() ? of_slot_.resize(1) : shared_.resize(1);
  bytes_ = bytes_of(shared_) + bytes_of(of_slot_);
}

void PageIndex::insert(IndexKey key, Place place) {
  if (!is_by_slot() && size_ >= kMostEntries << part_bits_) halve();
  const auto into = [&](auto& target) {
    const std::size_t before = target.bytes();
    target.insert(key, place);
    bytes_ += target.bytes() - before;
  };
  is_by_slot() ? into(of_slot_[key.slot]) : into(shared_[part(key.slot)]);
  ++size_;
}

bool PageIndex::erase(IndexKey key, Place place) {
  const auto from = [&](auto& part) {
    const std::size_t before = part.bytes();
    const bool is_erased = part.erase(key, place);
    bytes_ -= before - part.bytes();
    return is_erased;
  };
  if (!(is_by_slot() ? from(of_slot_[key.slot]) : from(shared_[part(key.slot)]))) return false;
  --size_;
  return true;
}

// Each part into two, by one more bit of the slot; after the last bit each slot has its own.
void PageIndex::halve() {
  ++part_bits_;
  const std::vector<IndexPart<SharedLine>> before = std::exchange(shared_, {});
  is_by_slot() ? of_slot_.resize(std::size_t{1} << part_bits_) : shared_.resize(std::size_t{1} << part_bits_);
  for (const IndexPart<SharedLine>& whole : before) {
    whole.each(0, [&](IndexKey key, Place place) {
      is_by_slot() ? of_slot_[key.slot].insert(key, place) : shared_[part(key.slot)].insert(key, place);
    });
  }
  bytes_ = bytes_of(shared_) + bytes_of(of_slot_);
}

}  // namespace sparserow
