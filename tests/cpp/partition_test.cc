#include "util/partition.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <random>
#include <unordered_map>
#include <vector>

#include "util/hash.h"

using namespace sparserow;
using namespace sparserow::rpc;

namespace {

std::vector<std::uint16_t> owners(std::uint32_t slots, std::uint32_t shards, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint16_t> owner(slots);
  for (auto& shard : owner) shard = static_cast<std::uint16_t>(random() % shards);
  return owner;
}

// The definition, checked against the plainest code that could satisfy it.
void check_partition(std::uint32_t table, const std::vector<std::uint64_t>& ids,
                     const std::vector<std::uint16_t>& slot_owner, std::uint32_t shards, const Partition& got) {
  std::vector<std::vector<std::uint64_t>> expected(shards);
  std::unordered_map<std::uint64_t, bool> seen;
  for (const std::uint64_t id : ids) {
    if (seen.contains(id)) continue;
    seen[id] = true;
    const auto slot = slot_of(row_hash(table, id), static_cast<std::uint32_t>(slot_owner.size()));
    expected[slot_owner[slot]].push_back(id);
  }
  REQUIRE(got.shard_begin.size() == shards + 1);
  REQUIRE(got.keys.size() == seen.size());
  REQUIRE(got.inverse.size() == ids.size());
  CHECK(got.shard_begin.front() == 0);
  CHECK(got.shard_begin.back() == got.keys.size());
  for (std::uint32_t shard = 0; shard < shards; ++shard) {
    const std::vector<std::uint64_t> part(got.keys.begin() + got.shard_begin[shard],
                                          got.keys.begin() + got.shard_begin[shard + 1]);
    CHECK(part == expected[shard]);
  }
  bool inverse_right = true;
  for (std::size_t i = 0; i < ids.size(); ++i) inverse_right &= got.keys[got.inverse[i]] == ids[i];
  CHECK(inverse_right);
}

}  // namespace

TEST_CASE("a partition is unique, grouped and invertible for random ids") {
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  for (const std::uint32_t shards : {1u, 2u, 5u}) {
    const auto slot_owner = owners(1024, shards, random());
    Partitioner partitioner(slot_owner, shards);
    Partition got;
    for (int round = 0; round < 40; ++round) {
      const std::size_t n = random() % (round % 4 == 0 ? 20'000 : 50);
      const std::uint64_t range = 1 + random() % 30'000;
      std::vector<std::uint64_t> ids(n);
      for (auto& id : ids) id = random() % 16 == 0 ? ~(random() % range) : random() % range;
      const auto table = static_cast<std::uint32_t>(random());
      partitioner.partition(table, ids, got);
      check_partition(table, ids, slot_owner, shards, got);
    }
  }
}

TEST_CASE("no ids give an empty partition") {
  const auto slot_owner = owners(16, 3, 1);
  Partitioner partitioner(slot_owner, 3);
  Partition got;
  partitioner.partition(7, {}, got);
  CHECK(got.keys.empty());
  CHECK(got.inverse.empty());
  CHECK(got.shard_begin == std::vector<std::uint32_t>{0, 0, 0, 0});
}

TEST_CASE("a slot map is refused by name of what is wrong") {
  CHECK(check_slot_owner(owners(16, 3, 1), 3).is_ok());
  const Status odd = check_slot_owner(std::vector<std::uint16_t>(12), 3);
  CHECK(odd.code() == Code::kInvalidArgument);
  CHECK(odd.message().find("slot_owner's length: 12 is not allowed") != std::string::npos);
  const Status shard = check_slot_owner(std::vector<std::uint16_t>{0, 3}, 3);
  CHECK(shard.code() == Code::kInvalidArgument);
  CHECK(shard.message().find("slot_owner[1]: 3 is not allowed; allowed: [0, 3)") != std::string::npos);
}

TEST_CASE("a partitioner forgets a call when its generations begin anew") {
  const auto slot_owner = owners(64, 3, 5);
  for (const std::uint32_t shards : {1u, 3u}) {
    const auto owner = shards == 1 ? std::vector<std::uint16_t>(64, 0) : slot_owner;
    Partitioner partitioner(owner, shards);
    Partition got;
    const std::vector<std::uint64_t> first = {1, 2, 3, 2};
    partitioner.partition(9, first, got);
    // Once more than a place tells generations apart: the first call's places look like those of the last one.
    for (int call = 0; call < 65535; ++call) partitioner.partition(9, {}, got);
    const std::vector<std::uint64_t> last = {3, 4, 1, 1};
    partitioner.partition(9, last, got);
    check_partition(9, last, owner, shards, got);
  }
}
