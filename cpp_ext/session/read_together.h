// Several lookups without clock in one round trip: one frame per shard for all their tables.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "session/binding.h"
#include "session/lookup.h"
#include "util/status.h"

namespace sparserow {

struct BoundIds {
  std::shared_ptr<Binding> binding;
  IdsRef ids;
};

// The lookup of each, in order; as Binding::lookup without train. Those of one session share a pull, and nothing is
// remembered. InvalidArgument names the table and the id; FailedPrecondition after close or fork; else what the shards
// say. Thread-safe.
Result<std::vector<Lookup>> read_together(std::span<const BoundIds> wanted);

}  // namespace sparserow
