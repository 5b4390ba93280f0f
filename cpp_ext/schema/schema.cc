#include "schema/schema.h"

#include <cmath>
#include <string>
#include <string_view>

#include "util/not_allowed.h"

namespace sparserow {
namespace {

template <class T>
Status refuse(std::string_view field, const T& value, std::string_view allowed) {
  return not_allowed("TableSchema." + std::string(field), value, allowed);
}

// NaN fails every comparison, so each check states what is allowed.
Status check(bool allowed, std::string_view field, float value, std::string_view range) {
  return allowed && std::isfinite(value) ? Status::ok() : refuse(field, value, range);
}

Status validate_init(const InitSpec& init) {
  if (static_cast<unsigned>(init.kind) > 4) return refuse("init.kind", static_cast<unsigned>(init.kind), "0 to 4");
  SR_RETURN_IF_ERROR(check(true, "init.a", init.a, "a finite number"));
  SR_RETURN_IF_ERROR(check(true, "init.b", init.b, "a finite number"));
  switch (init.kind) {
    case InitKind::kConstant:
      return Status::ok();
    case InitKind::kUniform:
      return check(init.b >= init.a && std::isfinite(init.b - init.a), "init.b", init.b, "a finite number >= init.a");
    case InitKind::kNormal:
      return check(init.b >= 0, "init.b", init.b, ">= 0");
    case InitKind::kXavierUniform:
    case InitKind::kXavierNormal:
      SR_RETURN_IF_ERROR(check(init.a > 0, "init.a", init.a, "> 0"));
      return check(init.b >= 1, "init.b", init.b, ">= 1");
  }
  return Status::ok();
}

Status validate_policy(const RowPolicy& policy) {
  constexpr std::uint64_t kLongest = (std::uint64_t{1} << 31) - 1;
  if (policy.admit_after < 1 || policy.admit_after > RowPolicy::kMostSightings) {
    return refuse("policy.admit_after", policy.admit_after, "[1, 255]");
  }
  SR_RETURN_IF_ERROR(check(policy.admit_probability > 0 && policy.admit_probability <= 1, "policy.admit_probability",
                           policy.admit_probability, "(0, 1]"));
  if (policy.admit_after > 1 && policy.admit_probability != 1) {
    return refuse("policy.admit_probability", policy.admit_probability, "1 with admit_after > 1: one of the two");
  }
  if (policy.admit_capacity == 0 || policy.admit_capacity >> 40 != 0) {
    return refuse("policy.admit_capacity", policy.admit_capacity, "[1, 2^40)");
  }
  if (policy.evict_after_steps > kLongest) {
    return refuse("policy.evict_after_steps", policy.evict_after_steps, "[0, 2^31)");
  }
  if (policy.evict_after_seconds > kLongest) {
    return refuse("policy.evict_after_seconds", policy.evict_after_seconds, "[0, 2^31)");
  }
  SR_RETURN_IF_ERROR(
      check(policy.evict_below_norm >= 0, "policy.evict_below_norm", policy.evict_below_norm, "a finite number >= 0"));
  if (static_cast<unsigned>(policy.evict_by) > 1) {
    return refuse("policy.evict_by", static_cast<unsigned>(policy.evict_by), "0 (lru), 1 (lfu)");
  }
  if (policy.evict_by != EvictBy::kLru && !policy.has_bound()) {
    return refuse("policy.evict_by", "lfu", "lru without max_rows and max_bytes, as nothing is removed by it");
  }
  return check(policy.ram_share >= 0 && policy.ram_share <= 0.9f, "policy.ram_share", policy.ram_share, "[0, 0.9]");
}

template <class T>
Status same(std::string_view table, std::string_view field, const T& existing, const T& requested) {
  if (existing == requested) return Status::ok();
  std::ostringstream text;
  text.precision(9);
  text << "table " << table << ": " << field << " is " << existing << ", requested " << requested
       << "; use the existing value or another table name";
  return {Code::kFailedPrecondition, text.str()};
}

Status same_init(const std::string& table, const InitSpec& existing, const InitSpec& requested) {
  SR_RETURN_IF_ERROR(
      same(table, "init.kind", static_cast<unsigned>(existing.kind), static_cast<unsigned>(requested.kind)));
  SR_RETURN_IF_ERROR(same(table, "init.a", existing.a, requested.a));
  return same(table, "init.b", existing.b, requested.b);
}

Status same_optimizer(const std::string& table, const OptimizerSpec& existing, const OptimizerSpec& requested) {
  SR_RETURN_IF_ERROR(
      same(table, "optimizer.kind", static_cast<unsigned>(existing.kind), static_cast<unsigned>(requested.kind)));
  for (const OptimizerOption& option : optimizer_options()) {
    const std::string field = "optimizer." + std::string(option.name);
    SR_RETURN_IF_ERROR(same(table, field, option.value(existing), option.value(requested)));
  }
  return Status::ok();
}

Status same_policy(const std::string& table, const RowPolicy& existing, const RowPolicy& requested) {
  SR_RETURN_IF_ERROR(same(table, "policy.admit_after", existing.admit_after, requested.admit_after));
  SR_RETURN_IF_ERROR(same(table, "policy.admit_probability", existing.admit_probability, requested.admit_probability));
  SR_RETURN_IF_ERROR(same(table, "policy.admit_capacity", existing.admit_capacity, requested.admit_capacity));
  SR_RETURN_IF_ERROR(same(table, "policy.evict_after_steps", existing.evict_after_steps, requested.evict_after_steps));
  SR_RETURN_IF_ERROR(
      same(table, "policy.evict_after_seconds", existing.evict_after_seconds, requested.evict_after_seconds));
  SR_RETURN_IF_ERROR(same(table, "policy.evict_below_norm", existing.evict_below_norm, requested.evict_below_norm));
  SR_RETURN_IF_ERROR(same(table, "policy.max_rows", existing.max_rows, requested.max_rows));
  SR_RETURN_IF_ERROR(same(table, "policy.max_bytes", existing.max_bytes, requested.max_bytes));
  SR_RETURN_IF_ERROR(same(table, "policy.evict_by", static_cast<unsigned>(existing.evict_by),
                          static_cast<unsigned>(requested.evict_by)));
  return same(table, "policy.ram_share", existing.ram_share, requested.ram_share);
}

}  // namespace

Status validate(const TableSchema& schema) {
  if (schema.id == 0) return refuse("id", schema.id, "[1, 2^32)");
  if (schema.version == 0) return refuse("version", schema.version, ">= 1");
  if (schema.name.empty() || schema.name.size() > 1024) {
    return refuse("name", schema.name.empty() ? "an empty name" : "a long name", "1 to 1024 bytes");
  }
  if (schema.dim < 1 || schema.dim > kMaxDim) return refuse("dim", schema.dim, "[1, 16384]");
  if (!is_storable(schema.dtype)) {
    return refuse("dtype", static_cast<unsigned>(schema.dtype), "0 (float32), 1 (bfloat16), 2 (float16), 3 (int8)");
  }
  SR_RETURN_IF_ERROR(validate_init(schema.init));
  SR_RETURN_IF_ERROR(validate(schema.optimizer));
  if (schema.dtype == Dtype::kInt8 && !(schema.optimizer == OptimizerSpec{})) {
    return refuse("optimizer", "any but plain sgd", "the default with dtype int8, whose rows are never trained");
  }
  return validate_policy(schema.policy);
}

Status same_schema(const TableSchema& existing, const TableSchema& requested) {
  const std::string& table = existing.name;
  SR_RETURN_IF_ERROR(same(table, "id", existing.id, requested.id));
  SR_RETURN_IF_ERROR(same(table, "name", existing.name, requested.name));
  SR_RETURN_IF_ERROR(same(table, "version", existing.version, requested.version));
  SR_RETURN_IF_ERROR(same(table, "dim", existing.dim, requested.dim));
  SR_RETURN_IF_ERROR(
      same(table, "dtype", static_cast<unsigned>(existing.dtype), static_cast<unsigned>(requested.dtype)));
  SR_RETURN_IF_ERROR(same(table, "seed", existing.seed, requested.seed));
  SR_RETURN_IF_ERROR(same_init(table, existing.init, requested.init));
  SR_RETURN_IF_ERROR(same_optimizer(table, existing.optimizer, requested.optimizer));
  return same_policy(table, existing.policy, requested.policy);
}

}  // namespace sparserow
