#include "commit/job_window.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sparserow {

JobWindow::Answers JobWindow::answers() const {
  Answers answers;
  for (const auto& [sequence, answer] : answers_) {
    if (answer.end != End::kAborted) answers.emplace_back(sequence, answer);
  }
  return answers;
}

void JobWindow::remember(const Answers& answers) { answers_.insert(answers.begin(), answers.end()); }

const JobWindow::Answer* JobWindow::find(std::uint64_t sequence) const {
  const auto found = answers_.find(sequence);
  return found == answers_.end() ? nullptr : &found->second;
}

void JobWindow::begin(std::uint64_t sequence, std::int64_t step) {
  answers_[sequence] = Answer{};
  begun_.emplace_back(sequence, step);
  if (step != kNoStep) taken_steps_.insert(step);
}

void JobWindow::end(std::uint64_t sequence, Answer answer) {
  answers_[sequence] = answer;
  while (answers_.size() > kSequences && answers_.begin()->second.end != End::kApplying) {
    forgotten_below_ = answers_.begin()->first + 1;
    answers_.erase(answers_.begin());
  }
}

void JobWindow::finish(std::uint64_t sequence, std::int64_t step, std::uint64_t rows) {
  if (step == kNoStep) {
    finish_write(sequence, rows);
  } else {
    end(sequence, {End::kCommitted, rows});
    ++counted_steps_;
  }
  std::erase(begun_, std::pair(sequence, step));
  finished_sequence_ = std::max(finished_sequence_, sequence);
  if (step == kNoStep) return;
  finished_step_ = std::max(finished_step_, step);
  ahead_.insert(step);
  start_at(done_step_ + 1);
}

void JobWindow::finish_write(std::uint64_t sequence, std::uint64_t rows) {
  end(sequence, {End::kCommitted, rows});
  ++counted_writes_;
}

void JobWindow::take_back(std::uint64_t sequence, std::int64_t step) {
  answers_.erase(sequence);
  taken_steps_.erase(step);
  std::erase(begun_, std::pair(sequence, step));
}

std::uint64_t JobWindow::committed_sequence() const noexcept {
  std::uint64_t highest = finished_sequence_;
  for (const auto& [sequence, step] : begun_) highest = std::max(highest, sequence);
  return highest;
}

std::int64_t JobWindow::committed_step() const noexcept {
  std::int64_t highest = finished_step_;
  for (const auto& [sequence, step] : begun_) highest = std::max(highest, step);
  return highest;
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

std::vector<JobWindow::Range> JobWindow::missing_before(std::int64_t step) const {
  std::vector<Range> missing;
  std::int64_t first = done_step_ + 1;
  for (auto done = ahead_.begin(); done != ahead_.end() && *done < step; ++done) {
    if (first < *done) missing.emplace_back(first, *done - 1);
    first = *done + 1;
  }
  if (first < step) missing.emplace_back(first, step - 1);
  return missing;
}

std::vector<JobWindow::Range> JobWindow::unknown_in(std::uint64_t first, std::uint64_t last) const {
  std::vector<Range> unknown;
  first = std::max(first, forgotten_below_);
  for (auto known = answers_.lower_bound(first); known != answers_.end() && known->first <= last; ++known) {
    if (first < known->first) unknown.emplace_back(first, known->first - 1);
    first = known->first + 1;
  }
  if (first <= last) unknown.emplace_back(first, last);
  return unknown;
}

std::uint64_t JobWindow::prepared_sequence() const noexcept { return prepared_ ? prepared_->commit.sequence : 0; }

std::int64_t JobWindow::prepared_step() const noexcept { return prepared_ ? prepared_->commit.step : kNoStep; }

void JobWindow::set_prepared(Kept kept) { prepared_ = std::move(kept); }

std::optional<Kept> JobWindow::take_prepared(std::uint64_t sequence) {
  if (prepared_sequence() != sequence) return std::nullopt;
  return std::exchange(prepared_, std::nullopt);
}

std::uint64_t JobWindow::drop_prepared() {
  const std::uint64_t bytes = prepared_ ? prepared_->bytes : 0;
  prepared_.reset();
  return bytes;
}

}  // namespace sparserow
