// Dedup and partition: ids as a model gives them -> unique keys grouped by owning shard.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "util/status.h"

namespace sparserow::rpc {

struct Partition {
  std::vector<std::uint64_t> keys;         // (u) unique, grouped by shard; first-seen order within a shard
  std::vector<std::uint32_t> shard_begin;  // (shards + 1) into keys
  std::vector<std::uint32_t> inverse;      // (n): ids[i] == keys[inverse[i]]
};

// Reuses its scratch between calls; not thread-safe (one per calling thread).
class Partitioner {
 public:
  // slot_owner: (slot_count) shard of each slot, power of two; must outlive the object.
  Partitioner(std::span<const std::uint16_t> slot_owner, std::uint32_t shard_count);

  // ids: (n), may repeat. n < 2^32. The result is deterministic in (ids, slot_owner).
  void partition(std::uint32_t table_id, std::span<const std::uint64_t> ids, Partition& out);

 private:
  std::span<const std::uint16_t> slot_owner_;
  std::uint32_t shard_count_;
  std::vector<std::uint64_t> table_;
  std::vector<std::uint32_t> unique_of_;
  std::vector<std::uint16_t> shard_of_;
};

}  // namespace sparserow::rpc
