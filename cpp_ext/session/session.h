// The native half of a worker's session: the step's rows, the staged gradients, and their commit.
//
// Within a step every key of a table is pulled once and remembered, so activation recomputation and later
// micro-batches see the same rows. Backward adds per-key sums beside them. The step ends by commit or abort;
// both forget its rows, only a commit moves the clock.
//
//   kOpen --lookup* stage*-- seal --> kSealed -- commit ------------------------------> kOpen, step + 1
//                                        |------ prepare --> kPrepared -- commit_prepared --> kOpen, step + 1
//                                        |                       |------- begin_commit -----> kOpen, step + 1
//                                        |------ abort <-------|--------> kOpen, same step
//
// Where steps have a quorum, prepare, commit_prepared and commit may end with kOutsideQuorum: the step is aborted on
// all shards, and the clock goes on at the step that the shards said still takes members.
//
// begin_commit leaves the last phase to finish_commit, which any thread may call: the next prepare waits for it, so
// at most one sequence is in doubt, and so do pulls of the op, so that a worker sees its own steps.
//
// Every write takes the next sequence number just before it leaves. Writes of two phases take turns
// (session/write_turns.h): a step has the turn from prepare to its end, a push by key for its two phases. A push whose
// COMMIT has no certain answer stays in doubt; the next write sends that COMMIT again and leaves only when it is
// answered (docs/internals/consistency.md, rule 2).
//
// Thread-safe for lookups, staging and writes by key; seal ... commit belong to one thread. No call needs the GIL.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "session/binding.h"
#include "session/session_state.h"
#include "session/write_turns.h"
#include "shards/shards.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

// What a step is about to push.
struct SealReport {
  std::uint64_t rows = 0;
  std::uint64_t nonfinite_rows = 0;
  std::string nonfinite_table;  // the first one met, with its key
  std::uint64_t nonfinite_key = 0;
};

// How a push by key ended.
struct PushOutcome {
  Status status;
  bool may_be_applied = false;  // of an error: its COMMIT has left, and the shards may have applied it or will
};

// Lookups to be served by one pull.
struct AheadLookup {
  std::string_view binding;
  IdsRef ids;
};

class Session {
 public:
  // InvalidArgument when the shards' slot map is not valid.
  static Result<std::shared_ptr<Session>> create(std::shared_ptr<RowReader> shards, const SessionOptions& options);
  ~Session();  // close()

  // Makes a table known to the ops. FailedPrecondition when its name is taken in this process.
  Status bind(const BindingSpec& spec);
  Status set_lr(std::string_view binding, float lr);         // NotFound
  Status set_frozen(std::string_view binding, bool frozen);  // NotFound

  // Pulls what these lookups need in one call, one frame per shard. Wrong guesses are harmless: lookups with an
  // id out of range are left to the op. train as in Binding::lookup, within a NoGradScope too; rows of an evaluation
  // are kept until end_evaluation(). Another thread may evaluate within the end of a step: FailedPrecondition only when
  // it trains.
  Status pull_ahead(std::span<const AheadLookup> lookups, bool train);
  void end_evaluation();
  // Whether a lookup of this step that pulls from now on counts as missed, as after pull_ahead(); lookups that are made
  // together in place of pull_ahead() stand between two calls.
  void count_missed(bool counts) noexcept { state_->merged_this_step.store(counts); }
  // Rows that the open step keeps in this process, of all tables: with gradient, and without.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> rows_in_step() const;
  // Whether this step has a lookup of these ids for the table; they are compared, since memory is used again.
  [[nodiscard]] bool remembers(std::string_view binding, const IdsRef& ids) const;

  // Ends the gathering of gradients: sums times `scale`, each shortened to an L2 norm of `clip_row_norm` (infinity:
  // as they are), become pushes. Until the step's end the ops refuse
  // training calls. FailedPrecondition when already sealed.
  Result<SealReport> seal(float scale, float clip_row_norm = std::numeric_limits<float>::infinity());
  Status prepare();
  Status commit_prepared();
  // After prepare: the step counts as taken, its last phase is sent by finish_commit().
  Status begin_commit();
  // Ok also when there is nothing to finish. A failure breaks the session: the outcome is unknown.
  Status finish_commit();
  Status commit();
  Status abort();  // from any phase; notifies the shards when prepared
  // What a caller that failed between seal and the end does last: abort, if it has not ended.
  void reopen() noexcept;
  // Forgets the gradients of the open step; its rows stay, so that a forward that was made can go backward.
  // FailedPrecondition within the end of a step.
  Status drop_gradients();
  // Changes made outside of steps: one commit without clock. Keys must be unique and grouped by shard. Within the end
  // of a step the thread that ends it gets FailedPrecondition; other threads wait for the step.
  PushOutcome push_now(const TablePush& push);
  // Ends a push whose COMMIT had no certain answer; Ok when there is none. Unavailable or DeadlineExceeded while it has
  // none still.
  Status settle();

  // The clock goes on at `step`, which may not lie behind; for a worker that joins a running job, before its first
  // lookup. FailedPrecondition within the end of a step, InvalidArgument for a step that is over.
  Status skip_to(std::int64_t step);

  // When a write that begins now is to end.
  [[nodiscard]] WriteTurns::Clock::time_point write_deadline() const;

  [[nodiscard]] std::int64_t step() const noexcept { return state_->step.load(); }
  [[nodiscard]] SessionStats stats() const noexcept;
  SessionState& state() noexcept { return *state_; }

  // Forgets everything and unregisters the bindings. Idempotent.
  void close() noexcept;

 private:
  friend class Prefetcher;
  explicit Session(std::shared_ptr<SessionState> state) : state_(std::move(state)) {}
  [[nodiscard]] Binding* find(std::string_view name) const noexcept;
  Status expect(Phase phase, const char* call) const;
  // A commit and its number, which is the commit's until this object ends.
  struct NumberedCommit {
    SequenceNumbers::Number number;
    CommitOptions options;
  };
  Result<NumberedCommit> number_commit(std::int64_t step, WriteTurns::Clock::time_point deadline);
  void end_turn() noexcept;
  PushOutcome push_in_one_phase(const TablePush& push, WriteTurns::Clock::time_point deadline);
  PushOutcome push_in_two_phases(const TablePush& push, WriteTurns::Clock::time_point deadline);
  Status take_turn(WriteTurns::Clock::time_point deadline);
  Status finish_in_doubt(WriteTurns::Clock::time_point deadline);
  Status end_commit(const Status& status);
  Status end_outside(const Status& status);
  Status drop_step();
  void forget_step();

  std::shared_ptr<SessionState> state_;
  std::vector<std::shared_ptr<Binding>> bindings_;  // in order of bind: the lock order
  std::vector<TablePush> pushes_;
  std::uint64_t rows_sealed_ = 0;
  std::atomic<std::thread::id> sealed_by_;  // the thread that ends the step; set by seal()
  WriteTurns turns_;
  Mutex finishing_;                         // finish_commit() has it
  std::int64_t open_step_ = kNoStep;        // of the step that ends, where it has its quorum without this worker
  NumberedCommit prepared_;                 // of the step that has the turn
  std::optional<NumberedCommit> in_doubt_;  // of a push by key; guarded by the turn
  std::atomic<bool> has_in_doubt_{false};
};

}  // namespace sparserow
