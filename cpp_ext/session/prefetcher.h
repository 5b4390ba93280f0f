// Rows of later batches, pulled before their step begins and handed over when it does.
//
//   index(lookups) -> [hint()] -> pull() -> hand_over()      one PrefetchedBatch per batch of the loader
//
// A batch in flight holds a table step of its own for every table: unique keys, rows, and, when exact, versions.
// hand_over() swaps them into the session's step cache, so nothing is copied, and the cache's old buffers serve a
// later batch. How many batches are in flight, and so the memory, is the caller's to bound.
//
// Two ways to be right about staleness:
//   exact    what a forward sees is what it would have pulled itself. Rows are pulled without clock, but for those
//            that a batch before this one has as well and whose step is not committed: they would change. hand_over()
//            pulls these by the step's clock. When the shards say that no other worker wrote meanwhile, and the steps
//            wrote no other keys than those of batches handed over here, that is all; else it asks again for every row,
//            with the versions, and gets the rows that differ.
//   inexact  rows are pulled by the clock of the latest step that can use them. A batch that is used later than that
//            is pulled again.
//
// Nothing depends on the guess which ids a lookup will have: the op compares, and pulls what is missing.
//
// Thread-safe as long as each batch is in one call at a time; hand_over() belongs to the thread that trains. Tables
// bound after the object was made are not prefetched.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "session/key_ages.h"
#include "session/lookup_pack.h"
#include "session/session.h"
#include "session/table_step.h"
#include "util/mutex.h"
#include "util/partition.h"

namespace sparserow {

class PrefetchedBatch {
 public:
  [[nodiscard]] std::size_t rows() const noexcept;  // unique, over all tables

 private:
  friend class Prefetcher;
  struct Part {
    TableStep step;
    // The rest is filled when exact.
    std::vector<std::uint32_t> latest;    // (keys): number of the latest batch before this one that has it, or 0
    std::vector<std::uint8_t> deferred;   // (keys): 1 where the row is left for the step
    std::vector<std::uint64_t> versions;  // (keys), or empty when they were not asked for
    std::vector<std::uint8_t> changed;    // (keys): what the second look brought
  };
  std::vector<Part> parts_;                      // in order of the prefetcher's bindings
  std::int64_t step_ = 0;                        // the latest that may use the rows as they are
  std::uint32_t number_ = 0;                     // from 1, in order of index()
  std::uint64_t commits_ = 0;                    // that were acknowledged for sure when its rows were pulled
  std::vector<std::uint64_t> writes_of_others_;  // (shards) when its rows were pulled
};

class Prefetcher {
 public:
  // threads: how many index() may use, each for other tables; at least 1.
  Prefetcher(std::shared_ptr<Session> session, bool exact, std::size_t threads = 1);

  // Dedups and groups the ids of a batch. Lookups with an id out of range, or of a table that is not bound here, are
  // left to the op. FailedPrecondition after close or fork.
  Result<std::unique_ptr<PrefetchedBatch>> index(std::span<const AheadLookup> lookups);
  // Sends the shards the keys that will be pulled, so that rows on an SSD are in memory by then. Before pull().
  // Fails only as index().
  Status hint(PrefetchedBatch& batch);
  // step: the latest that can use the batch; not looked at when exact. On failure the batch can be pulled again.
  Status pull(PrefetchedBatch& batch, std::int64_t step);
  // The batch's rows for a device, after pull(): those of these lookups, in order, but for lookups that index() left to
  // the op. parts: which of the lookups each part of the pack is.
  Result<std::unique_ptr<LookupPack>> pack(PrefetchedBatch& batch, std::span<const AheadLookup> lookups,
                                           std::vector<std::uint32_t>& parts);
  // Call when the step that uses it has begun, before its lookups. On failure the step is as before.
  // pack: of this batch, or null; its fresh() becomes the rows that are not those which it was made of.
  // Returns how many rows pull() had left to this call, which has pulled them.
  Result<std::uint64_t> hand_over(std::unique_ptr<PrefetchedBatch> batch, LookupPack* pack = nullptr);

 private:
  // The ids of one table in a batch.
  struct TableIds {
    std::size_t binding = 0;
    std::vector<IdsRef> ids;
  };
  void index_tables(std::span<const TableIds> tables, PrefetchedBatch& batch) SR_REQUIRES(index_mutex_);
  // The rows that a hand-over brought: none, those whose `deferred` or `changed` is set, or all.
  enum class Refreshed : std::uint8_t { kNone, kDeferred, kChanged, kAll };
  Status pull_rows(PrefetchedBatch& batch, std::int64_t step);
  Status pull_ahead(PrefetchedBatch& batch);
  Result<Refreshed> pull_exactly(PrefetchedBatch& batch);
  void defer(PrefetchedBatch& batch);
  // The rows whose `deferred` is `deferred`, by these options.
  Status pull_some(PrefetchedBatch& batch, std::uint8_t deferred, bool with_versions, const CallOptions& options);
  Status revalidate(PrefetchedBatch& batch, const CallOptions& options);
  // Notes the rows of the batch that were pulled or refreshed after its pack was made.
  void note_fresh(PrefetchedBatch& batch, Refreshed which, LookupPack& pack) const;
  [[nodiscard]] bool is_overtaken(const PrefetchedBatch& batch);
  [[nodiscard]] bool knows_what_was_written(const PrefetchedBatch& batch);
  void note_hand_over(std::uint32_t number) SR_REQUIRES(mutex_);

  std::shared_ptr<Session> session_;
  std::vector<std::shared_ptr<Binding>> bindings_;
  const bool exact_;
  const std::uint64_t id_;  // of this object in Binding's notes
  Mutex index_mutex_;
  std::vector<Partitioner> partitioners_ SR_GUARDED_BY(index_mutex_);  // one for each thread
  std::vector<KeyAges> ages_ SR_GUARDED_BY(index_mutex_);              // by binding
  std::uint32_t indexed_ SR_GUARDED_BY(index_mutex_) = 0;              // number of the last batch

  std::atomic<bool> looks_again_ = false;  // the last batch needed it, so versions are asked for

  Mutex mutex_;
  std::vector<std::unique_ptr<PrefetchedBatch>> spare_ SR_GUARDED_BY(mutex_);
  std::uint32_t handed_over_ SR_GUARDED_BY(mutex_) = 0;  // of the last one handed over
  // Batches from open_ on are of steps that are not committed once `open_commits_` are; from open_before_ on: one
  // commit earlier.
  std::uint32_t open_ SR_GUARDED_BY(mutex_) = 1;
  std::uint32_t open_before_ SR_GUARDED_BY(mutex_) = 1;
  std::uint64_t open_commits_ SR_GUARDED_BY(mutex_) = 0;
};

}  // namespace sparserow
