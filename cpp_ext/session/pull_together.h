// Several lookups of a step in one pull: one frame per shard for all their tables.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "session/binding.h"
#include "session/lookup.h"
#include "session/read_together.h"
#include "util/status.h"

namespace sparserow {

// Ids that a lookup of a binding will ask for.
struct AheadIds {
  Binding* binding = nullptr;
  IdsRef ids;
};

// Pulls what these lookups need and the step lacks. Lookups with an id out of range are left to the op, which names
// the id. train as in Binding::lookup, within a NoGradScope too; rows of an evaluation are kept until
// Session::end_evaluation(). The bindings are those of `state`. Returns whether rows were missing and pulled.
Result<bool> pull_together(SessionState& state, std::span<const AheadIds> lookups, bool train);

// The lookup of each, in order. train: as Binding::lookup after one pull for all of them, and remembered by the step.
// Otherwise as read_together(). Errors are those of Binding::lookup. Thread-safe.
Result<std::vector<Lookup>> look_up_together(std::span<const BoundIds> wanted, bool train);

}  // namespace sparserow
