// Which part of a batch reaches which lookup, as a plan of lookups says (worker/lookups/plan.py), which learns it from
// a traced forward.
//
// A part is a tensor of the batch, one index of one of its dimensions (select), or a range of one (narrow). It is a
// guess about later batches and is checked against each: a part that does not fit is left out.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "session/lookup_pack.h"
#include "session/session.h"

namespace sparserow {

struct IdPart {
  enum class Kind : std::uint8_t { kWhole, kSelect, kNarrow };
  std::string binding;
  std::uint32_t root = 0;  // index of the batch tensor
  Kind kind = Kind::kWhole;
  std::uint32_t dim = 0;
  std::int64_t start = 0;   // select: the index
  std::int64_t length = 0;  // narrow
};

struct PlannedIds {
  std::vector<IdPart> parts;
};

// A tensor of a batch: `view` as the ops will see it, `host` its memory on this side of the bus (the same
// address for a CPU tensor).
struct BatchTensor {
  const void* host = nullptr;
  TensorView view;
};

// What a plan says of one batch: a lookup for each part that fits. Ids point into the batch, or into `copies` where
// the batch's own memory is strided or int32.
struct MergedIds {
  std::vector<AheadLookup> lookups;
  std::vector<std::vector<std::int64_t>> copies;
};
MergedIds ids_of(const PlannedIds& plan, std::span<const BatchTensor> roots);

// Lookups whose ids the step remembers already (a prefetched batch's) are left out.
Status pull_merged(Session& session, const PlannedIds& plan, std::span<const BatchTensor> roots, bool train);
// The rows of the plan's lookups for a device, after pull_merged(); lookups that the step, or the evaluation, does not
// have are left out.
std::unique_ptr<LookupPack> pack_merged(const PlannedIds& plan, std::span<const BatchTensor> roots, bool train);

}  // namespace sparserow
