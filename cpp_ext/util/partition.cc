#include "util/partition.h"

#include <algorithm>
#include <array>
#include <bit>

#include "util/hash.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

// Ids hashed and prefetched ahead of their probe; 16 misses in flight is what a core sustains.
constexpr std::size_t kBlock = 16;

}  // namespace

Status check_slot_owner(std::span<const std::uint16_t> slot_owner, std::uint32_t shard_count) {
  const std::size_t slots = slot_owner.size();
  if (!std::has_single_bit(slots) || slots < 2 || slots > 65536) {
    return not_allowed("slot_owner's length", slots, kSlotCounts);
  }
  for (std::size_t slot = 0; slot < slots; ++slot) {
    if (slot_owner[slot] >= shard_count) {
      return not_allowed("slot_owner[" + std::to_string(slot) + "]", slot_owner[slot], below_text(shard_count));
    }
  }
  return Status::ok();
}

Partitioner::Partitioner(std::span<const std::uint16_t> slot_owner, std::uint32_t shard_count)
    : slot_owner_(slot_owner), shard_count_(shard_count) {}

void Partitioner::partition(std::uint32_t table_id, std::span<const std::uint64_t> ids, Partition& out) {
  prepare_places(ids.size());
  dedup(table_id, ids, out);
  group(out);
}

void Partitioner::prepare_places(std::size_t ids) {
  const std::size_t wanted = std::bit_ceil(std::max<std::size_t>(64, 2 * ids));
  if (places_.size() < wanted) places_.assign(wanted, Place{});
  mask_ = wanted - 1;  // a small batch probes a small part of the table, which stays in cache
  if (++generation_ == 0) {
    std::fill(places_.begin(), places_.end(), Place{});
    generation_ = 1;
  }
}

void Partitioner::dedup(std::uint32_t table_id, std::span<const std::uint64_t> ids, Partition& out) {
  const auto slot_count = static_cast<std::uint32_t>(slot_owner_.size());
  const bool has_shards = shard_count_ > 1;
  out.keys.resize(ids.size());
  out.inverse.resize(ids.size());
  if (has_shards) shard_of_.resize(ids.size());
  // Copies of what the loop reads, for its stores might change the members.
  const std::uint16_t* const owner = slot_owner_.data();
  const std::uint64_t mask = mask_;
  const std::uint16_t generation = generation_;
  Place* const places = places_.data();
  std::uint64_t* const keys = out.keys.data();
  std::uint32_t* const inverse = out.inverse.data();
  std::uint16_t* const shard_of = shard_of_.data();
  std::uint32_t uniques = 0;
  // Two blocks in flight: one is hashed and prefetched while the one before it is probed.
  std::array<std::array<std::uint64_t, kBlock>, 2> hashes;
  const auto hash_block = [&](std::size_t begin) {
    auto& block = hashes[(begin / kBlock) % 2];
    const std::size_t count = std::min(kBlock, ids.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      block[i] = row_hash(table_id, ids[begin + i]);
      __builtin_prefetch(&places[block[i] & mask], 1);
    }
  };
  if (!ids.empty()) hash_block(0);
  for (std::size_t begin = 0; begin < ids.size(); begin += kBlock) {
    if (begin + kBlock < ids.size()) hash_block(begin + kBlock);
    const auto& block = hashes[(begin / kBlock) % 2];
    const std::size_t count = std::min(kBlock, ids.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t key = ids[begin + i];
      const auto tag = static_cast<std::uint16_t>(block[i] >> 32);  // a table is indexed by the bits below
      std::uint64_t at = block[i] & mask;
      while (places[at].generation == generation && (places[at].tag != tag || keys[places[at].unique] != key)) {
        at = (at + 1) & mask;
      }
      Place& place = places[at];
      if (place.generation != generation) {
        place = {.unique = uniques, .generation = generation, .tag = tag};
        keys[uniques] = key;
        if (has_shards) shard_of[uniques] = owner[slot_of(block[i], slot_count)];
        ++uniques;
      }
      inverse[begin + i] = place.unique;
    }
  }
  out.keys.resize(uniques);
  shard_of_.resize(has_shards ? uniques : 0);
}

void Partitioner::group(Partition& out) {
  if (shard_count_ == 1) {  // first-seen order is the grouped order
    out.shard_begin = {0, static_cast<std::uint32_t>(out.keys.size())};
    return;
  }
  out.shard_begin.assign(shard_count_ + 1, 0);
  for (const std::uint16_t shard : shard_of_) ++out.shard_begin[shard + 1];
  for (std::uint32_t shard = 0; shard < shard_count_; ++shard) out.shard_begin[shard + 1] += out.shard_begin[shard];

  target_of_.resize(out.keys.size());
  grouped_.resize(out.keys.size());
  std::vector<std::uint32_t> next(out.shard_begin.begin(), out.shard_begin.end() - 1);
  for (std::size_t i = 0; i < out.keys.size(); ++i) {
    const std::uint32_t target = next[shard_of_[i]]++;
    target_of_[i] = target;
    grouped_[target] = out.keys[i];
  }
  out.keys.swap(grouped_);
  for (std::uint32_t& index : out.inverse) index = target_of_[index];
}

}  // namespace sparserow
