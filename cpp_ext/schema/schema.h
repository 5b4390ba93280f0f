// What a table is: fixed at creation, recorded by the coordinator, checked by every shard.
#pragma once

#include <cstdint>
#include <string>

#include "schema/optimizer_spec.h"
#include "util/dtype.h"
#include "util/status.h"

namespace sparserow {

inline constexpr std::int64_t kNoStep = -1;              // The step of a call that belongs to no step.
inline constexpr std::uint64_t kNoVersion = UINT64_MAX;  // The version of a row that the client does not have.

// Values are part of the wire contract.
enum class InitKind : std::uint8_t { kConstant = 0, kUniform = 1, kNormal = 2, kXavierUniform = 3, kXavierNormal = 4 };

// constant: value a. uniform: [a, b). normal: mean a, standard deviation b.
// xavier_*: gain a, with fan_in = rows (b) and fan_out = dim (Glorot & Bengio 2010, as torch.nn.init).
struct InitSpec {
  InitKind kind = InitKind::kConstant;
  float a = 0.0f;
  float b = 0.0f;
  bool operator==(const InitSpec&) const = default;
};

// Which keys get a row, and which rows go again. Rows come by applied pushes (and ASSIGN, which always gives one).
enum class EvictBy : std::uint8_t { kLru = 0, kLfu = 1 };

struct RowPolicy {
  static constexpr std::uint32_t kMostSightings = 255;

  // A key gets a row at its admit_after-th push, counted by the slot's filter (admission.h); 1 = at its first.
  std::uint32_t admit_after = 1;  // [1, kMostSightings]
  // Or at each push with this probability, a pure function of seed, table, key and the push's step; 1 = always.
  float admit_probability = 1.0f;  // (0, 1]
  // Keys that the filters of all slots remember together; past it the least seen are forgotten.
  std::uint64_t admit_capacity = 10'000'000;  // >= 1

  // A sweep removes rows that no push has changed for so long; 0 = never.
  std::uint64_t evict_after_steps = 0;    // of the jobs that push to the table, < 2^31
  std::uint64_t evict_after_seconds = 0;  // < 2^31
  float evict_below_norm = 0.0f;          // and those whose weights have a smaller L2 norm; 0 = none
  // Beyond so many rows, or bytes of weights and state, of the whole table, a sweep removes those that were changed
  // longest ago (lru) or least often (lfu); 0 = no bound.
  std::uint64_t max_rows = 0;
  std::uint64_t max_bytes = 0;
  EvictBy evict_by = EvictBy::kLru;

  // The share of a shard's memory budget that the table's rows may take when there is an SSD. 0: the table shares what
  // is left with the others.
  float ram_share = 0.0f;  // [0, 0.9]

  bool operator==(const RowPolicy&) const = default;
  [[nodiscard]] bool has_filter() const noexcept { return admit_after > 1; }
  [[nodiscard]] bool admits_all() const noexcept { return admit_after == 1 && admit_probability == 1.0f; }
  [[nodiscard]] bool has_bound() const noexcept { return max_rows > 0 || max_bytes > 0; }
  [[nodiscard]] bool sweeps() const noexcept {
    return evict_after_steps > 0 || evict_after_seconds > 0 || evict_below_norm > 0 || has_bound();
  }
  // What each row keeps besides weights and state (row.h): when it was last changed, in steps and in seconds.
  [[nodiscard]] bool stamps_steps() const noexcept {
    return evict_after_steps > 0 || (has_bound() && evict_by == EvictBy::kLru);
  }
  [[nodiscard]] bool stamps_seconds() const noexcept { return evict_after_seconds > 0; }
  [[nodiscard]] std::uint32_t stamps() const noexcept {
    return (stamps_steps() ? 1u : 0u) + (stamps_seconds() ? 1u : 0u);
  }
};

inline constexpr std::uint32_t kMaxDim = 16384;

struct TableSchema {
  std::uint32_t id = 0;       // id_of_name(namespace/name)
  std::uint32_t version = 1;  // raised by a schema change
  std::string name;           // "namespace/name"
  std::uint32_t dim = 0;      // columns, [1, kMaxDim]
  Dtype dtype = Dtype::kFloat32;
  std::uint64_t seed = 0;  // of initial rows and stochastic rounding
  InitSpec init;
  OptimizerSpec optimizer;
  RowPolicy policy = {};
  bool operator==(const TableSchema&) const = default;
};

// InvalidArgument naming the field and the allowed values.
Status validate(const TableSchema& schema);
// Ok when equal; else FailedPrecondition naming the first differing field and both values.
Status same_schema(const TableSchema& existing, const TableSchema& requested);

}  // namespace sparserow
