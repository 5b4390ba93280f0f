// What one worker of one epoch has committed to this shard, and what it has in doubt.
//
// Exactly once rests on it: each of the last kSequences sequences is remembered with its answer, in any
// order of arrival; one that is older is refused, because its answer is forgotten. A sequence is finished by
// being applied, or by ABORT: a late PREPARE of it then finds it finished.
//
// Steps: each comes once, under whatever sequence. A later one that arrives first does not stand for those
// before it.
//
// Not thread-safe: the commit log's mutex guards it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "commit/apply_commits.h"
#include "commit/commit_cut.h"

namespace sparserow {

class JobWindow {
 public:
  static constexpr std::uint64_t kSequences = 1024;

  enum class End : std::uint8_t { kApplying, kCommitted, kAborted };  // kApplying: by another thread, just now
  struct Answer {
    End end = End::kApplying;
    std::uint64_t rows = 0;
  };

  using Answers = std::vector<std::pair<std::uint64_t, Answer>>;  // by sequence, ascending

  JobWindow() = default;
  explicit JobWindow(const WindowImage& image);
  // Without what is prepared: a cut holds only what is committed.
  [[nodiscard]] WindowImage image() const;

  // The answers to what is applied, or being applied.
  [[nodiscard]] Answers answers() const;
  // Takes answers of the same worker's former window.
  void remember(const Answers& answers);

  // The answer to a sequence; null when it is new.
  [[nodiscard]] const Answer* find(std::uint64_t sequence) const;
  // Whether a sequence is so old that its answer is gone.
  [[nodiscard]] bool is_forgotten(std::uint64_t sequence) const noexcept { return sequence < forgotten_below_; }
  [[nodiscard]] std::uint64_t forgotten_below() const noexcept { return forgotten_below_; }

  // A commit is taken: begin, then finish once it is applied (or kept for its step), or take_back, which leaves no
  // trace.
  void begin(std::uint64_t sequence, std::int64_t step);
  void finish(std::uint64_t sequence, std::int64_t step, std::uint64_t rows);
  void take_back(std::uint64_t sequence, std::int64_t step);
  // The same of what is no commit: it does not count as the highest sequence taken.
  void begin_write(std::uint64_t sequence) { answers_[sequence] = Answer{}; }
  void finish_write(std::uint64_t sequence, std::uint64_t rows);
  // ABORT; does nothing to what is committed.
  void abort(std::uint64_t sequence);

  // Steps before it count as done.
  void start_at(std::int64_t step);
  [[nodiscard]] bool has_step(std::int64_t step) const;
  using Range = std::pair<std::uint64_t, std::uint64_t>;  // first, last
  // The steps before this one that are not done, ascending.
  [[nodiscard]] std::vector<Range> missing_before(std::int64_t step) const;
  // The sequences of [first, last] that are not known, ascending.
  [[nodiscard]] std::vector<Range> unknown_in(std::uint64_t first, std::uint64_t last) const;
  // All steps up to here are done.
  [[nodiscard]] std::int64_t done_step() const noexcept { return done_step_; }

  // Highest sequence and step taken so far, those being applied among them; 0 and kNoStep before the first.
  [[nodiscard]] std::uint64_t committed_sequence() const noexcept;
  [[nodiscard]] std::int64_t committed_step() const noexcept;
  // Highest sequence that is applied, or kept for its step.
  [[nodiscard]] std::uint64_t finished_sequence() const noexcept { return finished_sequence_; }

  // How many commits of steps, and how many writes without one, were taken. They are counted from the clock's
  // beginning, over the processes of a shard that follow each other.
  [[nodiscard]] std::uint64_t steps_taken() const noexcept { return counted_steps_; }
  [[nodiscard]] std::uint64_t writes_taken() const noexcept { return counted_writes_; }

  // What PREPARE brought and no COMMIT took. A later sequence supersedes the earlier ones.
  [[nodiscard]] std::uint64_t prepared_sequence() const noexcept;  // 0: nothing
  [[nodiscard]] std::int64_t prepared_step() const noexcept;       // kNoStep: nothing, or what has no step
  [[nodiscard]] std::uint64_t prepared_bytes() const noexcept { return prepared_ ? prepared_->bytes : 0; }
  void set_prepared(Kept kept);
  std::optional<Kept> take_prepared(std::uint64_t sequence);
  // Forgets what is prepared and returns its bytes.
  std::uint64_t drop_prepared();

 private:
  void end(std::uint64_t sequence, Answer answer);

  std::map<std::uint64_t, Answer> answers_;
  std::uint64_t forgotten_below_ = 0;
  std::uint64_t finished_sequence_ = 0;
  std::int64_t finished_step_ = kNoStep;
  std::vector<std::pair<std::uint64_t, std::int64_t>> begun_;  // (sequence, step) of commits that are being applied
  std::int64_t done_step_ = -1;
  std::set<std::int64_t> taken_steps_;  // beyond done_step_, some of them being applied
  std::set<std::int64_t> ahead_;        // of those, the ones that are done
  std::uint64_t counted_steps_ = 0;
  std::uint64_t counted_writes_ = 0;
  std::optional<Kept> prepared_;
};

}  // namespace sparserow
