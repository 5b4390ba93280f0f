// Rows of later batches, pulled before their step begins and handed over when it does.
//
//   index(lookups) -> pull() -> hand_over()          one PrefetchedBatch per batch of the loader
//
// A batch in flight holds a table step of its own for every table: unique keys, rows, and, when exact, versions.
// hand_over() swaps them into the session's step cache, so nothing is copied, and the cache's old buffers serve a
// later batch. How many batches are in flight, and so the memory, is the caller's to bound.
//
// Two ways to be right about staleness:
//   exact    rows are pulled without clock, with their versions. hand_over() asks again by the step's clock, with the
//            versions, and gets the rows that differ: what a forward sees is what it would have pulled itself.
//   inexact  rows are pulled by the clock of the latest step that can use them. A batch that is used later than that
//            is pulled again.
//
// Nothing depends on the guess which ids a lookup will have: the op compares, and pulls what is missing.
//
// Thread-safe as long as each batch is in one call at a time and index() is called by one thread at a time; hand_over()
// belongs to the thread that trains. Tables bound after the object was made are not prefetched.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "rpc/partition.h"
#include "session/session.h"
#include "session/table_step.h"

namespace sparserow {

class PrefetchedBatch {
 public:
  [[nodiscard]] std::size_t rows() const noexcept;  // unique, over all tables

 private:
  friend class Prefetcher;
  struct Part {
    TableStep step;
    std::vector<std::uint64_t> versions;  // (keys), when exact
    std::vector<std::uint8_t> changed;    // (keys): what the second look brought
  };
  std::vector<Part> parts_;  // in order of the prefetcher's bindings
  std::int64_t step_ = 0;    // the latest that may use the rows as they are
};

class Prefetcher {
 public:
  Prefetcher(std::shared_ptr<Session> session, bool exact);

  // Dedups and groups the ids of a batch. Lookups with an id out of range, or of a table that is not bound here, are
  // left to the op. FailedPrecondition after close or fork.
  Result<std::unique_ptr<PrefetchedBatch>> index(std::span<const AheadLookup> lookups);
  // step: the latest that can use the batch; not looked at when exact. On failure the batch can be pulled again.
  Status pull(PrefetchedBatch& batch, std::int64_t step);
  // Call when the step that uses it has begun, before its lookups. On failure the step is as before.
  Status hand_over(std::unique_ptr<PrefetchedBatch> batch);

 private:
  Status pull_rows(PrefetchedBatch& batch, std::int64_t step);
  Status revalidate(PrefetchedBatch& batch);
  // conditional: only for rows that differ from those that the batch has.
  [[nodiscard]] std::vector<rpc::TablePull> requests(PrefetchedBatch& batch, bool conditional) const;

  std::shared_ptr<Session> session_;
  std::vector<std::shared_ptr<Binding>> bindings_;
  const bool exact_;
  rpc::Partitioner partitioner_;  // of index()

  std::mutex mutex_;
  std::vector<std::unique_ptr<PrefetchedBatch>> spare_;  // guarded by mutex_
};

}  // namespace sparserow
