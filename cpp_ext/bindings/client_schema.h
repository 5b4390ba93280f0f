// The schema of a table, of the arguments that Python gives.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "bindings/shared_optimizer.h"
#include "bindings/shared_policy.h"
#include "schema/schema.h"

namespace sparserow::bindings {

// The arguments are the numbers of schema/schema.h's enums, as in the control plane's messages.
inline TableSchema schema_of(std::uint32_t id, std::uint32_t version, std::string name, std::uint32_t dim, int dtype,
                             std::uint64_t seed, const pybind11::tuple& init, const pybind11::dict& optimizer,
                             const pybind11::dict& policy) {
  TableSchema schema;
  schema.id = id;
  schema.version = version;
  schema.name = std::move(name);
  schema.dim = dim;
  schema.dtype = static_cast<Dtype>(dtype);
  schema.seed = seed;
  schema.init = {static_cast<InitKind>(init[0].cast<int>()), init[1].cast<float>(), init[2].cast<float>()};
  schema.optimizer = optimizer_of(static_cast<OptimizerKind>(optimizer["kind"].cast<int>()), optimizer);
  schema.policy = policy_of(policy);
  return schema;
}

}  // namespace sparserow::bindings
