#include "rpc/job_window.h"

#include <utility>

namespace sparserow::rpc {

const JobWindow::Answer* JobWindow::find(std::uint64_t sequence) const {
  const auto found = answers_.find(sequence);
  return found == answers_.end() ? nullptr : &found->second;
}

void JobWindow::finish(std::uint64_t sequence, std::uint64_t rows) {
  answers_[sequence] = Answer{true, rows};
  while (answers_.size() > kSequences && answers_.begin()->second.done) {
    forgotten_below_ = answers_.begin()->first + 1;
    answers_.erase(answers_.begin());
  }
}

std::uint64_t JobWindow::prepared_sequence() const noexcept { return prepared_ ? prepared_->commit.sequence : 0; }

void JobWindow::hold(Kept kept) { prepared_ = std::move(kept); }

std::optional<Kept> JobWindow::take_prepared(std::uint64_t sequence) {
  if (prepared_sequence() != sequence) return std::nullopt;
  return std::exchange(prepared_, std::nullopt);
}

std::uint64_t JobWindow::drop_prepared() {
  const std::uint64_t bytes = prepared_ ? prepared_->bytes : 0;
  prepared_.reset();
  return bytes;
}

}  // namespace sparserow::rpc
