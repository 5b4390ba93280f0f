// The native half of a worker's session: the step's rows, the staged gradients, and their commit.
//
// Within a step every key of a table is pulled once and remembered (the step cache), so activation
// recomputation and later micro-batches see the same rows. Backward adds per-key sums beside them.
// The step ends by commit or abort, and both clear the cache.
//
//   begin --gather*--> rows cached --stage*--> sums staged --finish--> committed | aborted --> begin
//
// Thread-safe: autograd stages from its own threads; one mutex per table. Ops call it without the GIL.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "rpc/partition.h"
#include "rpc/shards.h"
#include "util/status.h"

namespace sparserow {

struct BindingSpec {
  std::string name;  // what the op's `binding` argument says: unique in the process
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 1;
  std::uint32_t dim = 0;
};

struct SessionOptions {
  std::int64_t first_step = 0;
  bool clocked = true;  // false: async, pulls carry no step
  bool grad_sum = false;
  std::chrono::milliseconds deadline{30'000};
};

struct SessionStats {
  std::uint64_t steps_committed = 0;
  std::uint64_t steps_aborted = 0;
  std::uint64_t rows_pulled = 0;
  std::uint64_t rows_pushed = 0;
  std::uint64_t pulls = 0;           // calls that crossed the seam
  std::uint64_t pulls_merged = 0;    // lookups served by a merged pull
  std::uint64_t lookups_missed = 0;  // lookups that found keys missing after a merged pull
  std::uint64_t nonfinite_rows = 0;
};

class Session;

// One table as a model sees it. Found by name from the ops; lives until its session ends.
class Binding {
 public:
  virtual ~Binding() = default;
  [[nodiscard]] virtual const BindingSpec& spec() const noexcept = 0;

  // Training read. ids: (n) int64, non-negative except padding_idx (which may be any id; -1 = none).
  // `inverse` gets (n) indexes into rows() (uint32), valid until the step ends.
  virtual Status lookup(std::span<const std::int64_t> ids, std::vector<std::uint32_t>& inverse) = 0;
  // (rows so far, dim) float32 of the step cache: row i at rows() + i * dim. Stable until the next lookup.
  [[nodiscard]] virtual const float* row(std::uint32_t index) const noexcept = 0;
  // Reads without clock, cache or trace (eval, serving): out (n, dim).
  virtual Status read(std::span<const std::int64_t> ids, float* out) = 0;
  // Adds grads[i] (n, dim) to the sum of ids[i]; ids must have been looked up in this step.
  virtual Status stage(std::span<const std::int64_t> ids, const float* grads) = 0;
};

}  // namespace sparserow
