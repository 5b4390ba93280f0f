// One table as the ops of a process see it, and the registry that finds it by name.
//
// An exported program knows nothing but the name, so the registry is the one process-wide state of
// Sparserow. It lives in libsparserow_core: the Python client, the torch ops and a C++ program that links
// no Python all share it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "session/lookup.h"
#include "session/table_step.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

class SessionState;
struct AheadIds;
struct BoundIds;

struct BindingSpec {
  std::string name;  // what the op's `binding` argument says: unique in the process
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 1;
  std::uint32_t dim = 0;
  std::uint64_t num_rows = 0;  // ids must be below; 0 = below 2^63
  float lr = 0.0f;             // goes with every commit; Session::set_lr changes it
  bool cached = true;          // by the session's row cache, where it has one
  bool frozen = false;         // as is_frozen(), until Session::set_frozen changes it
  std::uint32_t order = 0;     // of Session::bind: mutexes of several bindings are locked in this order
};

// Thread-safe. Lock order: Binding mutexes in order of Session::bind, then the partitioner's.
class Binding {
 public:
  Binding(BindingSpec spec, std::shared_ptr<SessionState> state);
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

  [[nodiscard]] const BindingSpec& spec() const noexcept { return spec_; }
  // Whether no layer trains the rows, so that what is pulled ahead of a forward is read without clock in train mode
  // too.
  [[nodiscard]] bool is_frozen() const noexcept { return is_frozen_.load(std::memory_order_relaxed); }

  // Rows of ids. train: by the step's clock, remembered until the step ends; within a
  // NoGradScope they are kept in a bounded part instead, from which a later lookup of the step takes them. Otherwise a
  // read without clock that changes nothing. InvalidArgument names the table and the id; FailedPrecondition after
  // close, fork or between seal and the step's end; else what the shards say.
  Result<Lookup> lookup(const IdsRef& ids, bool train);
  // Opens the sums for ids that were looked up in this step. FailedPrecondition when one was not.
  Result<StagedSums> stage(const IdsRef& ids);
  // Adds sums of gradients by key to the step's sums: of the keys whose mark is not 0. Where these are the first and
  // all of the step they are not copied, and belong to the step until it ends. keys: (n) unique. marks: (n). sums: (n,
  // dim). FailedPrecondition when a marked key was not looked up in this step.
  Status stage_sums(std::span<const std::uint64_t> keys, std::span<const std::uint8_t> marks, std::span<float> sums);
  // The lookup of these ids when this step remembers it; nullopt when it does not. Pulls nothing.
  [[nodiscard]] std::optional<Lookup> recall(const IdsRef& ids);
  // Likewise, of the rows that were read ahead of an evaluation's forward.
  [[nodiscard]] std::optional<Lookup> recall_ahead(const IdsRef& ids);
  // Notes a lookup of these ids, for plans that are being learnt.
  void trace(const IdsRef& ids) const;
  [[nodiscard]] SessionState& state() noexcept { return *state_; }

  // Forgets the rows that lookups without gradient have read; their Lookups stay valid.
  void drop_no_grad_rows();

  // Where keys of a step come from: a prefetcher's number, or else.
  static constexpr std::uint64_t kNowhere = 0;
  static constexpr std::uint64_t kOutside = 1;  // pulled by the op, or from several prefetchers

 private:
  friend class Session;
  friend class Prefetcher;
  friend Result<std::vector<Lookup>> read_together(std::span<const BoundIds> wanted);
  friend Result<bool> pull_together(SessionState& state, std::span<const AheadIds> lookups, bool train);
  void note_source(std::uint64_t source) noexcept SR_REQUIRES(mutex_);
  void note_commit(std::uint64_t commits) noexcept SR_REQUIRES(mutex_);
  // Number of the last commit (from 1) of a step with keys that did not come from `source`; 0 when there is none.
  [[nodiscard]] std::uint64_t last_commit_but_of(std::uint64_t source) const noexcept SR_REQUIRES(mutex_);
  Status check_ids(std::span<const std::int64_t> ids) const;
  Status check_stages() const;
  Result<Lookup> read(const IdsRef& ids);
  Status pull_pending(TableStep& step);  // without clock
  Result<Lookup> look_up_in_step(const IdsRef& ids) SR_REQUIRES(mutex_);
  Result<Lookup> look_up_without_gradient(const IdsRef& ids) SR_REQUIRES(mutex_);
  void drop_old_no_grad_rows() SR_REQUIRES(mutex_);
  void forget_no_grad_rows() SR_REQUIRES(mutex_);
  void count_no_grad_bytes() SR_REQUIRES(mutex_);
  // Pulls what `part` lacks and `other` has not; rows that both have are those of `other`.
  Status complete(TableStep& part, TableStep& other) SR_REQUIRES(mutex_);
  // The part that lookups without gradient fill, ready for more keys.
  TableStep& no_grad_ahead() SR_REQUIRES(mutex_);
  // After a pull of pending keys: rows of this step that were read before stay as they were.
  void keep_rows_of_step(bool is_without_gradient) SR_REQUIRES(mutex_);
  // Moves rows that were prefetched in. Those of batches that no lookup with gradient came for are bounded, too.
  void take_ahead(TableStep& ahead, Partitioner& partitioner) SR_REQUIRES(mutex_);
  void end_step() SR_REQUIRES(mutex_);
  [[nodiscard]] Status not_looked_up(std::int64_t id) const;

  BindingSpec spec_;  // lr is guarded by mutex_
  std::atomic<bool> is_frozen_;
  std::shared_ptr<SessionState> state_;

  Mutex mutex_;
  TableStep step_ SR_GUARDED_BY(mutex_);
  TableStep ahead_ SR_GUARDED_BY(mutex_);    // rows read ahead of an evaluation's forward
  TableStep no_grad_ SR_GUARDED_BY(mutex_);  // rows of this step that were read without gradient
  std::chrono::steady_clock::time_point no_grad_since_ SR_GUARDED_BY(mutex_);  // when its first rows were read
  std::uint64_t no_grad_counted_ SR_GUARDED_BY(mutex_) = 0;                    // its bytes in the state's sum
  bool is_no_grad_aged_ SR_GUARDED_BY(mutex_) = false;  // rows of this step were dropped for their age
  bool has_gradients_ SR_GUARDED_BY(mutex_) = false;    // a lookup of this step was made with gradient

  struct SourcedCommit {
    std::uint64_t source = kNowhere;
    std::uint64_t number = 0;
  };
  std::uint64_t source_ SR_GUARDED_BY(mutex_) = kNowhere;  // of this step's keys
  SourcedCommit last_commit_ SR_GUARDED_BY(mutex_);
  SourcedCommit last_of_another_ SR_GUARDED_BY(mutex_);  // the last one whose source is not last_commit_'s
};

// Lookups of this thread in train mode are without gradient as long as the object lives; scopes nest.
class NoGradScope {
 public:
  explicit NoGradScope(bool is_without_gradient) noexcept;
  ~NoGradScope();
  NoGradScope(const NoGradScope&) = delete;
  NoGradScope& operator=(const NoGradScope&) = delete;
  static bool is_active() noexcept;

 private:
  bool before_;
};

// FailedPrecondition when nothing is bound under this name (says what to do).
Result<std::shared_ptr<Binding>> find_binding(std::string_view name);
// FailedPrecondition when another binding has the name.
Status register_binding(const std::shared_ptr<Binding>& binding);
// Removes it if it is still the one registered.
void unregister_binding(const Binding& binding) noexcept;

}  // namespace sparserow
