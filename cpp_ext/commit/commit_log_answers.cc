// The shard's memory of commits: the answers to repeats, and which commits are lost.
#include "commit/commit_log.h"

namespace sparserow {

// Returns a sequence's answer, once the thread that applies it is done; nullopt when the sequence is new.
Result<std::optional<CommitResult>> CommitLog::seen(const JobPtr& job, const Commit& commit) {
  const WorkerKey key{commit.worker_id, commit.worker_epoch};
  const std::uint64_t sequence = commit.sequence;
  while (true) {
    const auto worker = job->workers.find(key);
    if (worker == job->workers.end()) {
      const auto known = settled(commit);
      if (!known)
        return Status(Code::kFenced, "worker " + std::to_string(commit.worker_id) + " was replaced meanwhile");
      if (!known->is_ok()) return known->status();
      return std::optional(known->value());
    }
    const JobWindow& window = worker->second.window;
    if (window.is_forgotten(sequence)) {
      return Status(Code::kFailedPrecondition, "sequence " + std::to_string(sequence) + " of worker " +
                                                   std::to_string(commit.worker_id) +
                                                   " is older than what this shard remembers (" +
                                                   std::to_string(window.forgotten_below()) + " and later)");
    }
    const JobWindow::Answer* answer = window.find(sequence);
    if (answer == nullptr) return std::optional<CommitResult>();
    if (answer->end != JobWindow::End::kApplying) {
      ++stats_.commits_duplicate;
      return std::optional(CommitResult{answer->rows, true, answer->end == JobWindow::End::kAborted});
    }
    answered_.wait(mutex_);  // bounded: its applier holds no lock and waits for no other thread
  }
}

// Returns the answer to a repeat by a worker whose epoch is over; nullopt: the refusal of admit() is the answer.
std::optional<Result<CommitResult>> CommitLog::settled(const Commit& commit) {
  const WorkerKey key{commit.worker_id, commit.worker_epoch};
  while (true) {
    const auto job = jobs_.find(commit.job_id);
    const auto* workers = job == jobs_.end() ? nullptr : &job->second->workers;
    if (workers == nullptr || !workers->contains(key)) {
      if (retired_.is_applying(commit.job_id, key, commit.sequence)) {
        answered_.wait(mutex_);  // bounded, as in seen()
        continue;
      }
      const auto rows = retired_.rows_of(commit.job_id, key, commit.sequence, RetiredWindows::Clock::now());
      if (!rows) return std::nullopt;
      ++stats_.commits_duplicate;
      return CommitResult{.applied_rows = *rows, .duplicate = true};
    }
    const JobWindow& window = workers->at(key).window;
    const bool is_fenced = job->second->admit(key.first, key.second).code() == Code::kFenced;
    if (is_fenced && window.prepared_sequence() == commit.sequence) {
      return Status(Code::kUnavailable, "worker " + std::to_string(commit.worker_id) + " left job '" +
                                            job->second->name + "'; whether this commit is applied is being decided");
    }
    const JobWindow::Answer* answer = window.find(commit.sequence);
    if (answer == nullptr || answer->end == JobWindow::End::kAborted) return std::nullopt;
    if (answer->end == JobWindow::End::kCommitted) {
      ++stats_.commits_duplicate;
      return CommitResult{.applied_rows = answer->rows, .duplicate = true};
    }
    answered_.wait(mutex_);  // bounded, as in seen()
  }
}

// The answer to a COMMIT of a sequence that is seen.
Result<CommitResult> CommitLog::answered(const Result<std::optional<CommitResult>>& seen) {
  if (!seen.is_ok()) return refused(seen.status());
  if (seen.value()->aborted) return refused(Status(Code::kFailedPrecondition, "this sequence was aborted"));
  return *seen.value();
}

Status CommitLog::note_lost(std::uint32_t job_id, const WorkerKey& key, std::span<const std::uint64_t> sequences) {
  const MutexLock lock(mutex_);
  const auto job = find(job_id);
  if (!job.is_ok()) return job.status();
  SR_RETURN_IF_ERROR(job.value()->admit(key.first, key.second));
  const JobWindow& window = job.value()->workers[key].window;
  for (const std::uint64_t sequence : sequences) count_lost(job_id, key, false, window.unknown_in(sequence, sequence));
  return Status::ok();
}

void CommitLog::count_lost(std::uint32_t job_id, const WorkerKey& worker, bool is_steps,
                           const std::vector<JobWindow::Range>& ranges) {
  for (const auto& [first, last] : ranges) {
    stats_.commits_lost += lost_.add({job_id, worker.first, worker.second, is_steps, first, last});
  }
}

std::vector<LostRange> CommitLog::lost() const {
  const MutexLock lock(mutex_);
  return lost_.ranges();
}

}  // namespace sparserow
