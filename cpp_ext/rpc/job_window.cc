#include "rpc/job_window.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sparserow::rpc {

const JobWindow::Answer* JobWindow::find(std::uint64_t sequence) const {
  const auto found = answers_.find(sequence);
  return found == answers_.end() ? nullptr : &found->second;
}

void JobWindow::begin(std::uint64_t sequence, std::int64_t step) {
  answers_[sequence] = Answer{};
  committed_sequence_ = std::max(committed_sequence_, sequence);
  if (step == kNoStep) return;
  committed_step_ = std::max(committed_step_, step);
  taken_steps_.insert(step);
}

void JobWindow::end(std::uint64_t sequence, Answer answer) {
  answers_[sequence] = answer;
  while (answers_.size() > kSequences && answers_.begin()->second.end != End::kApplying) {
    forgotten_below_ = answers_.begin()->first + 1;
    answers_.erase(answers_.begin());
  }
}

void JobWindow::finish(std::uint64_t sequence, std::int64_t step, std::uint64_t rows) {
  end(sequence, {End::kCommitted, rows});
  if (step == kNoStep) return;
  ahead_.insert(step);
  start_at(done_step_ + 1);
}

void JobWindow::take_back(std::uint64_t sequence, std::int64_t step) {
  answers_.erase(sequence);
  taken_steps_.erase(step);
}

void JobWindow::abort(std::uint64_t sequence) {
  if (find(sequence) == nullptr && !is_forgotten(sequence)) end(sequence, {End::kAborted, 0});
}

void JobWindow::start_at(std::int64_t step) {
  done_step_ = std::max(done_step_, step - 1);
  while (ahead_.contains(done_step_ + 1)) ++done_step_;
  ahead_.erase(ahead_.begin(), ahead_.upper_bound(done_step_));
  taken_steps_.erase(taken_steps_.begin(), taken_steps_.upper_bound(done_step_));
}

bool JobWindow::has_step(std::int64_t step) const { return step <= done_step_ || taken_steps_.contains(step); }

std::uint64_t JobWindow::missing_before(std::int64_t step) const {
  const std::int64_t behind = step - 1 - done_step_;
  const auto done = std::distance(ahead_.begin(), ahead_.lower_bound(step));
  return static_cast<std::uint64_t>(std::max<std::int64_t>(0, behind - done));
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
