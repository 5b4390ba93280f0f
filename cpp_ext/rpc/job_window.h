// What one worker of one epoch has committed to this shard, and what it has in doubt.
//
// Exactly once rests on it: each of the last kSequences sequences is remembered with its answer, in any
// order of arrival; one that is older is refused, because nobody knows any more.
//
// Not thread-safe: the commit log's mutex guards it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "rpc/apply_commits.h"

namespace sparserow::rpc {

class JobWindow {
 public:
  static constexpr std::uint64_t kSequences = 1024;

  struct Answer {
    bool done = false;  // false: being applied by another thread
    std::uint64_t rows = 0;
  };

  // The answer to a sequence; null when it is new.
  [[nodiscard]] const Answer* find(std::uint64_t sequence) const;
  // Whether a sequence is so old that its answer is gone.
  [[nodiscard]] bool is_forgotten(std::uint64_t sequence) const noexcept { return sequence < forgotten_below_; }
  [[nodiscard]] std::uint64_t forgotten_below() const noexcept { return forgotten_below_; }

  void begin(std::uint64_t sequence) { answers_[sequence] = Answer{}; }
  void finish(std::uint64_t sequence, std::uint64_t rows);
  // A sequence that was begun and not applied is new again.
  void take_back(std::uint64_t sequence) { answers_.erase(sequence); }

  // What PREPARE brought and no COMMIT took. A later sequence supersedes the earlier ones.
  [[nodiscard]] std::uint64_t prepared_sequence() const noexcept;  // 0: nothing
  void hold(Kept kept);
  std::optional<Kept> take_prepared(std::uint64_t sequence);
  // Forgets what is prepared and returns its bytes.
  std::uint64_t drop_prepared();

 private:
  std::map<std::uint64_t, Answer> answers_;
  std::uint64_t forgotten_below_ = 0;
  std::optional<Kept> prepared_;
};

}  // namespace sparserow::rpc
