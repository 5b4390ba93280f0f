// A table's RowPolicy from Python: a dict of its fields, of which any may be left out; evict_by is the enum's number.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <type_traits>

#include "schema/schema.h"
#include "shared_errors.h"

namespace sparserow::bindings {

inline RowPolicy policy_of(const pybind11::dict& fields) {
  RowPolicy policy;
  std::size_t known = 0;
  const auto set = [&](const char* key, auto& field) {
    if (!fields.contains(key)) return;
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_enum_v<Field>) {
      field = static_cast<Field>(fields[key].template cast<std::uint8_t>());
    } else {
      field = fields[key].template cast<Field>();
    }
    ++known;
  };
  set("admit_after", policy.admit_after);
  set("admit_probability", policy.admit_probability);
  set("admit_capacity", policy.admit_capacity);
  set("evict_after_steps", policy.evict_after_steps);
  set("evict_after_seconds", policy.evict_after_seconds);
  set("evict_below_norm", policy.evict_below_norm);
  set("max_rows", policy.max_rows);
  set("max_bytes", policy.max_bytes);
  set("evict_by", policy.evict_by);
  set("ram_share", policy.ram_share);
  if (known != fields.size()) raise_error({Code::kInvalidArgument, "policy: has a field that RowPolicy has not"});
  return policy;
}

}  // namespace sparserow::bindings
