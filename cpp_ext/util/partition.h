// Dedup and partition: ids as a model gives them -> unique keys grouped by owning shard.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "util/status.h"

namespace sparserow {

struct Partition {
  std::vector<std::uint64_t> keys;         // (u) unique, grouped by shard; first-seen order within a shard
  std::vector<std::uint32_t> shard_begin;  // (shards + 1) into keys
  std::vector<std::uint32_t> inverse;      // (n): ids[i] == keys[inverse[i]]
};

// InvalidArgument unless the map has a power of two of slots in [2, 65536] and names only shards below the
// count. Whoever receives a map checks it once; Partitioner then trusts it.
Status check_slot_owner(std::span<const std::uint16_t> slot_owner, std::uint32_t shard_count);

// Reuses its scratch between calls; not thread-safe (one per calling thread).
class Partitioner {
 public:
  // slot_owner: (slot_count) shard of each slot, passed check_slot_owner; must outlive the object.
  Partitioner(std::span<const std::uint16_t> slot_owner, std::uint32_t shard_count);

  // ids: (n), may repeat. n < 2^31. The result is deterministic in (ids, slot_owner).
  void partition(std::uint32_t table_id, std::span<const std::uint64_t> ids, Partition& out);

 private:
  // A place of the open-addressing table; it is taken when its generation is the current one, so that a
  // call clears nothing. The key stands in out.keys, and bits of its hash here, so that a table is half as large.
  struct Place {
    std::uint32_t unique = 0;
    std::uint16_t generation = 0;
    std::uint16_t tag = 0;
  };

  void prepare_places(std::size_t ids);
  void dedup(std::uint32_t table_id, std::span<const std::uint64_t> ids, Partition& out);
  void group(Partition& out);

  std::span<const std::uint16_t> slot_owner_;
  std::uint32_t shard_count_;
  std::uint16_t generation_ = 0;
  std::uint64_t mask_ = 0;
  std::vector<Place> places_;
  std::vector<std::uint16_t> shard_of_;   // (u) in first-seen order
  std::vector<std::uint32_t> target_of_;  // (u): place of a first-seen key in the grouped order
  std::vector<std::uint64_t> grouped_;    // (u)
};

}  // namespace sparserow
