#include "rpc/commit_log.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "rpc/reduce.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

std::uint64_t rows_of(const Commit& commit) {
  std::uint64_t rows = 0;
  for (const GradBlock& block : commit.blocks) rows += block.keys.size();
  return rows;
}

std::uint64_t bytes_of(const Commit& commit) {
  std::uint64_t bytes = 0;
  for (const GradBlock& block : commit.blocks) bytes += block.keys.size() * (8 + std::uint64_t{4} * block.dim);
  return bytes;
}

// A commit that is accepted but not applied: prepared, or waiting for its step's other workers.
struct Kept {
  Commit commit;
  std::vector<Store::Reservation> reservations;
  std::uint64_t bytes = 0;
};

struct Answer {
  bool done = false;  // false: being applied by another thread
  std::uint64_t rows = 0;
};

// Guarded by the log's mutex, like everything below it.
struct Worker {
  std::uint32_t epoch = 0;
  std::uint32_t rank = 0;
  bool live = false;
  bool named_a_step = false;
  std::int64_t last_step = -1;  // its steps up to here are accepted (staleness 0) or applied
  std::map<std::uint64_t, Answer> window;
  std::uint64_t forgotten_below = 0;  // sequences below are no longer known
  std::map<std::uint64_t, Kept> prepared;
};

struct Parked {
  std::uint32_t worker_id;
  std::uint32_t epoch;
  std::int64_t step;
  Clock::time_point since;
  Clock::time_point deadline;
  std::function<void(Status)> ready;
  const void* owner;
};

struct Job {
  std::string name;
  std::optional<std::uint32_t> staleness;
  std::map<std::uint32_t, Worker> workers;                      // also those who left: their windows stay
  std::map<std::int64_t, std::map<std::uint32_t, Kept>> steps;  // staleness 0: step -> worker -> commit
  std::int64_t completed = -1;                                  // staleness 0: reduced and applied up to here
  bool advancing = false;                                       // one thread reduces at a time
  Status failure;  // of a step that was acknowledged and could not be applied: sticky, every later call gets it
  std::vector<Parked> parked;
};

// A parked pull with its answer, to be called once the mutex is free.
struct Outcome {
  std::function<void(Status)> ready;
  Status status;
};

void deliver(std::vector<Outcome>& outcomes) {
  for (Outcome& outcome : outcomes) outcome.ready(std::move(outcome.status));
  outcomes.clear();
}

}  // namespace

class CommitLog::Impl {
 public:
  Impl(Store& store, Options options) : store_(store), options_(std::move(options)) {}

  Status set_job(const JobSpec& spec);
  Status drop_job(std::uint32_t job_id);
  Status prepare(Commit commit);
  Result<CommitResult> commit(Commit commit, bool prepared);
  Status abort(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t epoch, std::uint64_t sequence);
  void when_readable(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t epoch, std::int64_t step,
                     Clock::time_point deadline, std::function<void(Status)> ready, const void* owner);
  void forget(const void* owner);
  void expire(Clock::time_point now);
  void fail_parked(const Status& status);
  CommitLogStats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using JobPtr = std::shared_ptr<Job>;

  Result<JobPtr> find(std::uint32_t job_id) const;
  Status admit(Job& job, std::uint32_t worker_id, std::uint32_t epoch) const;
  Result<Kept> reserve(Commit commit);
  Status charge(std::uint64_t bytes);
  std::optional<Result<CommitResult>> seen(Lock& lock, Worker& worker, const Commit& commit);
  Result<CommitResult> accept_for_step(Lock& lock, const JobPtr& job, Kept kept);
  Result<CommitResult> apply_now(Lock& lock, const JobPtr& job, Kept kept);
  Status apply_blocks(Kept& kept, float scale);
  void apply_block(const GradBlock& block, float scale, Store::Reservation& reservation, Status& status);
  Status apply_reduced(std::vector<Kept>& commits, std::uint32_t live);
  void advance(Lock& lock, const JobPtr& job);
  void remember(Worker& worker, std::uint64_t sequence, std::uint64_t rows);
  static void name_step(Worker& worker, std::int64_t step);
  void drop_kept(Job& job, std::uint32_t worker_id, Worker& worker);
  std::uint32_t live_count(const Job& job) const;
  std::vector<std::uint32_t> missing_for(const Job& job, std::int64_t step) const;
  void note_staleness(const Job& job, std::int64_t step);
  void collect_readable(Job& job, std::vector<Outcome>& outcomes);
  std::string waited_for(const Job& job, const Parked& parked, Clock::time_point now) const;

  Store& store_;
  const Options options_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable answered_;
  std::unordered_map<std::uint32_t, JobPtr> jobs_;
  CommitLogStats stats_;
};

Result<CommitLog::Impl::JobPtr> CommitLog::Impl::find(std::uint32_t job_id) const {
  const auto found = jobs_.find(job_id);
  if (found != jobs_.end()) return found->second;
  return Status(Code::kNotFound, "job " + std::to_string(job_id) + " is not known to this shard; register the worker");
}

Status CommitLog::Impl::admit(Job& job, std::uint32_t worker_id, std::uint32_t epoch) const {
  const auto found = job.workers.find(worker_id);
  const std::string who = "worker " + std::to_string(worker_id);
  if (found == job.workers.end() || (epoch > found->second.epoch)) {
    return Status(Code::kFailedPrecondition, who + " epoch " + std::to_string(epoch) + " is not a member of job '" +
                                                 job.name + "'; register it first");
  }
  if (epoch < found->second.epoch) {
    return Status(Code::kFenced, who + " epoch " + std::to_string(epoch) + " is over; its epoch in job '" + job.name +
                                     "' is " + std::to_string(found->second.epoch));
  }
  if (!found->second.live) return Status(Code::kFenced, who + " left job '" + job.name + "'; connect anew");
  return job.failure;
}

std::uint32_t CommitLog::Impl::live_count(const Job& job) const {
  return static_cast<std::uint32_t>(
      std::count_if(job.workers.begin(), job.workers.end(), [](const auto& entry) { return entry.second.live; }));
}

void CommitLog::Impl::drop_kept(Job& job, std::uint32_t worker_id, Worker& worker) {
  for (const auto& [sequence, kept] : worker.prepared) stats_.kept_bytes -= kept.bytes;
  worker.prepared.clear();
  for (auto& [step, commits] : job.steps) {
    const auto found = commits.find(worker_id);
    if (found == commits.end()) continue;
    stats_.kept_bytes -= found->second.bytes;
    worker.window.erase(found->second.commit.sequence);
    commits.erase(found);
  }
  std::erase_if(job.steps, [](const auto& entry) { return entry.second.empty(); });
}

Status CommitLog::Impl::set_job(const JobSpec& spec) {
  if (spec.job_id == 0) return Status(Code::kInvalidArgument, "job_id: 0 is not allowed; it means no job");
  std::set<std::uint32_t> named;
  for (const Member& member : spec.members) {
    if (!named.insert(member.worker_id).second) {
      return Status(Code::kInvalidArgument, "members: worker " + std::to_string(member.worker_id) + " is named twice");
    }
  }
  std::vector<Outcome> outcomes;
  Lock lock(mutex_);
  JobPtr& slot = jobs_[spec.job_id];
  if (!slot) {
    slot = std::make_shared<Job>();
    slot->completed = spec.first_step - 1;
  }
  const JobPtr job = slot;
  job->name = spec.name;
  job->staleness = spec.staleness;
  for (auto& [worker_id, worker] : job->workers) {
    if (!named.contains(worker_id)) {
      worker.live = false;
      drop_kept(*job, worker_id, worker);
    }
  }
  for (const Member& member : spec.members) {
    Worker& worker = job->workers[member.worker_id];
    if (worker.epoch != member.epoch) {
      drop_kept(*job, member.worker_id, worker);
      worker = Worker{};
    }
    if (!worker.live) {
      worker.last_step = std::max(worker.last_step, job->completed);
      worker.named_a_step = false;
    }
    worker.live = true;
    worker.epoch = member.epoch;
    worker.rank = member.rank;
  }
  // A parked pull of a worker that was replaced or left is answered, not left to its deadline.
  std::vector<Parked> still;
  for (Parked& parked : job->parked) {
    const Worker& worker = job->workers[parked.worker_id];
    if (worker.live && worker.epoch == parked.epoch) {
      still.push_back(std::move(parked));
    } else {
      outcomes.push_back({std::move(parked.ready), Status(Code::kFenced, "worker " + std::to_string(parked.worker_id) +
                                                                             " left job '" + job->name + "'")});
    }
  }
  job->parked = std::move(still);
  answered_.notify_all();
  advance(lock, job);
  collect_readable(*job, outcomes);
  lock.unlock();
  deliver(outcomes);
  return Status::ok();
}

Status CommitLog::Impl::drop_job(std::uint32_t job_id) {
  std::vector<Outcome> outcomes;
  Lock lock(mutex_);
  const auto job = find(job_id);
  if (!job.is_ok()) return job.status();
  for (auto& [worker_id, worker] : job.value()->workers) {
    drop_kept(*job.value(), worker_id, worker);
    worker.live = false;
  }
  for (Parked& parked : job.value()->parked) {
    outcomes.push_back(
        {std::move(parked.ready), Status(Code::kNotFound, "job '" + job.value()->name + "' was dropped")});
  }
  job.value()->parked.clear();
  jobs_.erase(job_id);
  lock.unlock();
  deliver(outcomes);
  return Status::ok();
}

Result<Kept> CommitLog::Impl::reserve(Commit commit) {
  Kept kept{.commit = std::move(commit), .reservations = {}, .bytes = 0};
  kept.bytes = bytes_of(kept.commit);
  for (const GradBlock& block : kept.commit.blocks) {
    auto reservation = store_.reserve(block.table_id, block.keys);
    if (!reservation.is_ok()) return reservation.status();
    kept.reservations.push_back(std::move(reservation).value());
  }
  return kept;
}

Status CommitLog::Impl::charge(std::uint64_t bytes) {
  if (stats_.kept_bytes + bytes > options_.kept_budget_bytes) {
    return Status(Code::kResourceExhausted, "kept commits: " + std::to_string(stats_.kept_bytes) +
                                                " bytes in use and " + std::to_string(bytes) +
                                                " needed; the budget is " + std::to_string(options_.kept_budget_bytes));
  }
  stats_.kept_bytes += bytes;
  return Status::ok();
}

void CommitLog::Impl::remember(Worker& worker, std::uint64_t sequence, std::uint64_t rows) {
  worker.window[sequence] = Answer{true, rows};
  while (worker.window.size() > kWindow && worker.window.begin()->second.done) {
    worker.forgotten_below = worker.window.begin()->first + 1;
    worker.window.erase(worker.window.begin());
  }
}

// What is known about a sequence: its answer, once the thread that applies it is done; or nothing.
std::optional<Result<CommitResult>> CommitLog::Impl::seen(Lock& lock, Worker& worker, const Commit& commit) {
  if (commit.sequence < worker.forgotten_below) {
    return Result<CommitResult>(Status(
        Code::kFailedPrecondition, "sequence " + std::to_string(commit.sequence) + " of worker " +
                                       std::to_string(commit.worker_id) + " is older than what this shard remembers (" +
                                       std::to_string(worker.forgotten_below) + " and later)"));
  }
  while (true) {
    const auto found = worker.window.find(commit.sequence);
    if (found == worker.window.end()) return std::nullopt;
    if (found->second.done) {
      ++stats_.commits_duplicate;
      return Result<CommitResult>(CommitResult{found->second.rows, true});
    }
    answered_.wait(lock);  // bounded: its applier holds no lock and waits for nobody
    if (worker.epoch != commit.worker_epoch) {
      return Result<CommitResult>(
          Status(Code::kFenced, "worker " + std::to_string(commit.worker_id) + " was replaced meanwhile"));
    }
  }
}

// The worker's first step starts its clock there: what it never meant to commit holds nobody.
void CommitLog::Impl::name_step(Worker& worker, std::int64_t step) {
  if (worker.named_a_step) return;
  worker.named_a_step = true;
  worker.last_step = std::max(worker.last_step, step - 1);
}

Status CommitLog::Impl::prepare(Commit commit) {
  {
    Lock lock(mutex_);
    const auto job = find(commit.job_id);
    if (!job.is_ok()) return job.status();
    if (Status status = admit(*job.value(), commit.worker_id, commit.worker_epoch); !status.is_ok()) {
      ++(status.code() == Code::kFenced ? stats_.commits_fenced : stats_.commits_refused);
      return status;
    }
  }
  if (commit.sequence == 0) return Status(Code::kInvalidArgument, "sequence: 0 is not allowed");
  auto kept = reserve(std::move(commit));  // outside of the lock: it looks every key up
  Lock lock(mutex_);
  if (!kept.is_ok()) {
    ++stats_.commits_refused;
    return kept.status();
  }
  const Commit& held = kept.value().commit;
  const auto job = find(held.job_id);
  if (!job.is_ok()) return job.status();
  SR_RETURN_IF_ERROR(admit(*job.value(), held.worker_id, held.worker_epoch));
  Worker& worker = job.value()->workers[held.worker_id];
  if (const auto answer = seen(lock, worker, held)) return answer->status();
  if (!worker.prepared.empty() && worker.prepared.rbegin()->first > held.sequence) {
    ++stats_.commits_refused;
    return Status(Code::kFailedPrecondition, "sequence " + std::to_string(held.sequence) + " is superseded: " +
                                                 std::to_string(worker.prepared.rbegin()->first) + " is prepared");
  }
  for (const auto& [sequence, earlier] : worker.prepared) stats_.kept_bytes -= earlier.bytes;
  worker.prepared.clear();
  if (Status status = charge(kept.value().bytes); !status.is_ok()) {
    ++stats_.commits_refused;
    return status;
  }
  const std::uint64_t sequence = held.sequence;
  worker.prepared.emplace(sequence, std::move(kept).value());
  return Status::ok();
}

Result<CommitResult> CommitLog::Impl::commit(Commit commit, bool prepared) {
  Lock lock(mutex_);
  const auto refuse = [&](Status status) -> Result<CommitResult> {
    ++(status.code() == Code::kFenced ? stats_.commits_fenced : stats_.commits_refused);
    return status;
  };
  if (commit.sequence == 0) return refuse(Status(Code::kInvalidArgument, "sequence: 0 is not allowed"));
  Kept kept;
  if (!prepared) {
    // First look: a duplicate must not reserve. Second look after reserving: members may have changed.
    const auto job = find(commit.job_id);
    if (!job.is_ok()) return refuse(job.status());
    if (Status status = admit(*job.value(), commit.worker_id, commit.worker_epoch); !status.is_ok()) {
      return refuse(std::move(status));
    }
    if (auto answer = seen(lock, job.value()->workers[commit.worker_id], commit)) return *std::move(answer);
    lock.unlock();
    auto reserved = reserve(std::move(commit));
    lock.lock();
    if (!reserved.is_ok()) return refuse(reserved.status());
    kept = std::move(reserved).value();
  } else {
    kept.commit = std::move(commit);
  }
  const auto job = find(kept.commit.job_id);
  if (!job.is_ok()) return refuse(job.status());
  if (Status status = admit(*job.value(), kept.commit.worker_id, kept.commit.worker_epoch); !status.is_ok()) {
    return refuse(std::move(status));
  }
  Worker& worker = job.value()->workers[kept.commit.worker_id];
  if (auto answer = seen(lock, worker, kept.commit)) return *std::move(answer);
  if (prepared) {
    const auto found = worker.prepared.find(kept.commit.sequence);
    if (found == worker.prepared.end()) {
      return refuse(Status(Code::kFailedPrecondition, "sequence " + std::to_string(kept.commit.sequence) +
                                                          " of worker " + std::to_string(kept.commit.worker_id) +
                                                          " was not prepared on this shard"));
    }
    const Commit asked = std::move(kept.commit);
    kept = std::move(found->second);
    kept.commit.step = asked.step;
    kept.commit.grad_sum = asked.grad_sum;
    worker.prepared.erase(found);
    stats_.kept_bytes -= kept.bytes;
  }
  const bool waits_for_step = job.value()->staleness == 0u && kept.commit.step != kNoStep;
  return waits_for_step ? accept_for_step(lock, job.value(), std::move(kept))
                        : apply_now(lock, job.value(), std::move(kept));
}

Result<CommitResult> CommitLog::Impl::accept_for_step(Lock& lock, const JobPtr& job, Kept kept) {
  const std::uint32_t worker_id = kept.commit.worker_id;
  const std::uint64_t sequence = kept.commit.sequence;
  const std::int64_t step = kept.commit.step;
  Worker& worker = job->workers[worker_id];
  name_step(worker, step);
  if (step <= worker.last_step) {
    ++stats_.commits_refused;
    return Status(Code::kFailedPrecondition, "step " + std::to_string(step) + " of worker " +
                                                 std::to_string(worker_id) + " is already committed up to " +
                                                 std::to_string(worker.last_step) + " under another sequence");
  }
  if (Status status = charge(kept.bytes); !status.is_ok()) {
    ++stats_.commits_refused;
    return status;
  }
  const std::uint64_t rows = rows_of(kept.commit);
  worker.last_step = step;
  remember(worker, sequence, rows);
  ++stats_.commits_accepted;
  job->steps[step].emplace(worker_id, std::move(kept));
  advance(lock, job);
  std::vector<Outcome> outcomes;
  collect_readable(*job, outcomes);
  lock.unlock();
  deliver(outcomes);
  return CommitResult{rows, false};
}

Result<CommitResult> CommitLog::Impl::apply_now(Lock& lock, const JobPtr& job, Kept kept) {
  const std::uint32_t worker_id = kept.commit.worker_id;
  const std::uint64_t sequence = kept.commit.sequence;
  const std::int64_t step = kept.commit.step;
  const std::uint64_t rows = rows_of(kept.commit);
  if (step != kNoStep) name_step(job->workers[worker_id], step);
  const std::uint32_t epoch = kept.commit.worker_epoch;
  job->workers[worker_id].window[sequence] = Answer{};
  const float scale = kept.commit.grad_sum ? 1.0f : 1.0f / static_cast<float>(live_count(*job));
  lock.unlock();
  Status status = apply_blocks(kept, scale);
  kept = Kept{};  // gives the reservations back before others look at the budget
  lock.lock();

  std::vector<Outcome> outcomes;
  Worker& worker = job->workers[worker_id];
  if (worker.epoch == epoch) {
    if (status.is_ok()) {
      remember(worker, sequence, rows);
      if (step != kNoStep) worker.last_step = std::max(worker.last_step, step);
    } else {
      worker.window.erase(sequence);
    }
  }
  if (status.is_ok()) {
    ++stats_.commits_accepted;
    stats_.rows_applied += rows;
  } else {
    ++stats_.commits_refused;
  }
  collect_readable(*job, outcomes);
  answered_.notify_all();
  lock.unlock();
  deliver(outcomes);
  if (!status.is_ok()) return status;
  return CommitResult{rows, false};
}

void CommitLog::Impl::apply_block(const GradBlock& block, float scale, Store::Reservation& reservation,
                                  Status& status) {
  // A batch of a few rows is not worth another thread's wake-up.
  constexpr std::size_t kRowsWorthAThread = 2048;
  const std::uint32_t parts = block.keys.size() >= kRowsWorthAThread && options_.parallel_for ? options_.parts : 1;
  const auto schema = store_.schema(block.table_id);
  if (!schema || schema->dim != block.dim) return;  // dropped meanwhile: its gradients go with it
  std::vector<Status> outcome(parts);
  const auto work = [&](std::uint32_t part) {
    outcome[part] =
        store_.apply(block.table_id, block.keys, block.grads,
                     {.lr = block.lr, .grad_scale = scale, .part = part, .parts = parts, .reservation = &reservation});
  };
  if (parts > 1) {
    options_.parallel_for(parts, work);
  } else {
    work(0);
  }
  for (Status& part : outcome) {
    if (!part.is_ok() && part.code() != Code::kNotFound && status.is_ok()) status = std::move(part);
  }
}

Status CommitLog::Impl::apply_blocks(Kept& kept, float scale) {
  Status status;
  for (std::size_t i = 0; i < kept.commit.blocks.size(); ++i) {
    const GradBlock& block = kept.commit.blocks[i];
    if (!block.keys.empty()) apply_block(block, scale, kept.reservations[i], status);
  }
  return status;
}

// commits: of one step, in rank order.
Status CommitLog::Impl::apply_reduced(std::vector<Kept>& commits, std::uint32_t live) {
  if (commits.size() == 1) {
    return apply_blocks(commits[0], commits[0].commit.grad_sum ? 1.0f : 1.0f / static_cast<float>(live));
  }
  struct TableInput {
    std::uint32_t dim = 0;
    float lr = 0.0f;  // of the lowest rank that has the table
    std::vector<ReduceInput> inputs;
    std::vector<Store::Reservation*> reservations;  // of each input
  };
  std::map<std::uint32_t, TableInput> tables;
  for (Kept& kept : commits) {
    const double scale = kept.commit.grad_sum ? 1.0 : 1.0 / live;
    for (std::size_t i = 0; i < kept.commit.blocks.size(); ++i) {
      const GradBlock& block = kept.commit.blocks[i];
      if (block.keys.empty()) continue;
      TableInput& table = tables[block.table_id];
      if (table.inputs.empty()) table = {block.dim, block.lr, {}, {}};
      if (block.dim != table.dim) continue;  // the table was made anew between two commits: what is old is dropped
      table.inputs.push_back({&block, scale});
      table.reservations.push_back(&kept.reservations[i]);
    }
  }
  Status status;
  Reduced reduced;
  for (const auto& [table_id, table] : tables) {
    reduce(table_id, table.dim, table.inputs, options_.parts, options_.parallel_for, reduced);
    for (std::size_t i = 0; i < table.inputs.size(); ++i) {
      const std::size_t begin = reduced.first_in[i];
      const std::size_t count = reduced.first_in[i + 1] - begin;
      if (count == 0) continue;
      const GradBlock part{.table_id = table_id,
                           .dim = table.dim,
                           .lr = table.lr,
                           .keys = std::span(reduced.keys).subspan(begin, count),
                           .grads = reduced.grads.data() + begin * table.dim};
      apply_block(part, 1.0f, *table.reservations[i], status);
    }
  }
  return status;
}

// Reduces and applies every step that has all its commits, in order; one thread at a time per job.
void CommitLog::Impl::advance(Lock& lock, const JobPtr& job) {
  if (job->advancing) return;
  job->advancing = true;
  while (job->staleness == 0u && !job->steps.empty()) {
    const std::int64_t step = job->steps.begin()->first;
    const bool complete = std::all_of(job->workers.begin(), job->workers.end(), [&](const auto& entry) {
      return !entry.second.live || entry.second.last_step >= step;
    });
    if (!complete) break;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> order;  // (rank, worker)
    for (const auto& [worker_id, kept] : job->steps.begin()->second) {
      order.emplace_back(job->workers[worker_id].rank, worker_id);
    }
    std::sort(order.begin(), order.end());
    std::vector<Kept> commits;
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    for (const auto& [rank, worker_id] : order) {
      commits.push_back(std::move(job->steps.begin()->second[worker_id]));
      rows += rows_of(commits.back().commit);
      bytes += commits.back().bytes;
    }
    job->steps.erase(job->steps.begin());
    const std::uint32_t live = std::max(1u, live_count(*job));
    lock.unlock();
    const Status status = apply_reduced(commits, live);
    commits.clear();
    lock.lock();
    stats_.kept_bytes -= bytes;
    stats_.rows_applied += rows;
    ++stats_.steps_reduced;
    if (!status.is_ok() && job->failure.is_ok()) {
      job->failure = Status(Code::kDataLoss, "step " + std::to_string(step) + " of job '" + job->name +
                                                 "' was acknowledged and could not be applied: " + status.message());
    }
    job->completed = std::max(job->completed, step);
  }
  // Steps that every live worker has passed and nobody has commits for are complete as well: their workers
  // left, or they lie before the first step that the job named.
  std::int64_t reached = job->steps.empty() ? INT64_MAX : job->steps.begin()->first - 1;
  bool any = false;
  for (const auto& [worker_id, worker] : job->workers) {
    if (!worker.live) continue;
    any = true;
    reached = std::min(reached, worker.last_step);
  }
  if (any) job->completed = std::max(job->completed, reached);
  job->advancing = false;
}

std::vector<std::uint32_t> CommitLog::Impl::missing_for(const Job& job, std::int64_t step) const {
  std::vector<std::uint32_t> missing;
  if (!job.staleness) return missing;
  const std::int64_t needed = step - 1 - static_cast<std::int64_t>(*job.staleness);
  if (job.staleness == 0u && job.completed >= needed) return missing;
  for (const auto& [worker_id, worker] : job.workers) {
    if (worker.live && worker.last_step < needed) missing.push_back(worker_id);
  }
  return missing;
}

void CommitLog::Impl::note_staleness(const Job& job, std::int64_t step) {
  std::int64_t applied = INT64_MAX;
  for (const auto& [worker_id, worker] : job.workers) {
    if (worker.live) applied = std::min(applied, worker.last_step);
  }
  if (job.staleness == 0u) applied = std::min(applied, job.completed);
  const auto behind = static_cast<std::uint64_t>(std::max<std::int64_t>(0, step - 1 - applied));
  ++stats_.pulls_clocked;
  stats_.staleness_sum += behind;
  stats_.staleness_max = std::max(stats_.staleness_max, behind);
}

namespace {

bool readable(const Job& job, std::int64_t step, const std::vector<std::uint32_t>& missing) {
  if (!job.staleness) return true;
  if (*job.staleness == 0) return job.completed >= step - 1;
  return missing.empty();
}

}  // namespace

void CommitLog::Impl::collect_readable(Job& job, std::vector<Outcome>& outcomes) {
  std::vector<Parked> still;
  for (Parked& parked : job.parked) {
    if (readable(job, parked.step, missing_for(job, parked.step))) {
      note_staleness(job, parked.step);
      outcomes.push_back({std::move(parked.ready), Status::ok()});
    } else {
      still.push_back(std::move(parked));
    }
  }
  job.parked = std::move(still);
}

void CommitLog::Impl::when_readable(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t epoch,
                                    std::int64_t step, Clock::time_point deadline, std::function<void(Status)> ready,
                                    const void* owner) {
  std::vector<Outcome> outcomes;
  Lock lock(mutex_);
  const auto job = find(job_id);
  Status status = job.status();
  if (status.is_ok()) status = admit(*job.value(), worker_id, epoch);
  if (status.is_ok() && step < 0) {
    status = Status(Code::kInvalidArgument, "step: " + std::to_string(step) + " is not allowed; allowed: >= 0");
  }
  if (status.is_ok()) {
    Worker& worker = job.value()->workers[worker_id];
    if (!worker.named_a_step) {
      name_step(worker, step);
      advance(lock, job.value());
      collect_readable(*job.value(), outcomes);
    }
    if (readable(*job.value(), step, missing_for(*job.value(), step))) {
      note_staleness(*job.value(), step);
    } else {
      ++stats_.pulls_parked;
      job.value()->parked.push_back({worker_id, epoch, step, Clock::now(), deadline, std::move(ready), owner});
      ready = nullptr;
    }
  }
  if (ready) outcomes.push_back({std::move(ready), std::move(status)});
  lock.unlock();
  deliver(outcomes);
}

std::string CommitLog::Impl::waited_for(const Job& job, const Parked& parked, Clock::time_point now) const {
  const std::int64_t needed = parked.step - 1 - static_cast<std::int64_t>(job.staleness.value_or(0));
  std::string ids;
  for (const std::uint32_t id : missing_for(job, parked.step)) {
    ids += (ids.empty() ? "" : ", ") + std::to_string(id);
  }
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%.1f", std::chrono::duration<double>(now - parked.since).count());
  return "pull of step " + std::to_string(parked.step) + " waited " + seconds.data() + " s for commits of step " +
         std::to_string(needed) + (ids.empty() ? std::string(" to be applied") : " from worker ids " + ids);
}

void CommitLog::Impl::forget(const void* owner) {
  std::vector<Parked> dropped;  // destroyed outside of the lock: it owns whatever the callback holds
  const Lock lock(mutex_);
  for (auto& [job_id, job] : jobs_) {
    const auto theirs = std::stable_partition(job->parked.begin(), job->parked.end(),
                                              [owner](const Parked& parked) { return parked.owner != owner; });
    std::move(theirs, job->parked.end(), std::back_inserter(dropped));
    job->parked.erase(theirs, job->parked.end());
  }
}

void CommitLog::Impl::expire(Clock::time_point now) {
  std::vector<Outcome> outcomes;
  {
    const Lock lock(mutex_);
    for (auto& [job_id, job] : jobs_) {
      std::vector<Parked> still;
      for (Parked& parked : job->parked) {
        if (parked.deadline > now) {
          still.push_back(std::move(parked));
        } else {
          Status status(Code::kDeadlineExceeded, waited_for(*job, parked, now));
          outcomes.push_back({std::move(parked.ready), std::move(status)});
        }
      }
      job->parked = std::move(still);
    }
  }
  deliver(outcomes);
}

void CommitLog::Impl::fail_parked(const Status& status) {
  std::vector<Outcome> outcomes;
  {
    const Lock lock(mutex_);
    for (auto& [job_id, job] : jobs_) {
      for (Parked& parked : job->parked) outcomes.push_back({std::move(parked.ready), status});
      job->parked.clear();
    }
  }
  deliver(outcomes);
}

Status CommitLog::Impl::abort(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t epoch,
                              std::uint64_t sequence) {
  const Lock lock(mutex_);
  const auto job = find(job_id);
  if (!job.is_ok()) return job.status();
  SR_RETURN_IF_ERROR(admit(*job.value(), worker_id, epoch));
  Worker& worker = job.value()->workers[worker_id];
  const auto found = worker.prepared.find(sequence);
  if (found != worker.prepared.end()) {
    stats_.kept_bytes -= found->second.bytes;
    worker.prepared.erase(found);
  }
  return Status::ok();
}

CommitLogStats CommitLog::Impl::stats() const {
  const Lock lock(mutex_);
  CommitLogStats stats = stats_;
  for (const auto& [job_id, job] : jobs_) stats.pulls_waiting += job->parked.size();
  return stats;
}

CommitLog::CommitLog(Store& store, Options options) : impl_(std::make_unique<Impl>(store, std::move(options))) {}
CommitLog::~CommitLog() = default;
Status CommitLog::set_job(const JobSpec& spec) { return impl_->set_job(spec); }
Status CommitLog::drop_job(std::uint32_t job_id) { return impl_->drop_job(job_id); }
Status CommitLog::prepare(Commit commit) { return impl_->prepare(std::move(commit)); }
Result<CommitResult> CommitLog::commit(Commit commit, bool prepared) {
  return impl_->commit(std::move(commit), prepared);
}
Status CommitLog::abort(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t worker_epoch,
                        std::uint64_t sequence) {
  return impl_->abort(job_id, worker_id, worker_epoch, sequence);
}
void CommitLog::when_readable(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t worker_epoch,
                              std::int64_t step, Clock::time_point deadline, std::function<void(Status)> ready,
                              const void* owner) {
  impl_->when_readable(job_id, worker_id, worker_epoch, step, deadline, std::move(ready), owner);
}
void CommitLog::forget(const void* owner) { impl_->forget(owner); }
void CommitLog::expire(Clock::time_point now) { impl_->expire(now); }
void CommitLog::fail_parked(const Status& status) { impl_->fail_parked(status); }
CommitLogStats CommitLog::stats() const { return impl_->stats(); }

}  // namespace sparserow::rpc
