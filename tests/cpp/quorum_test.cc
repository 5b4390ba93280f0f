// Steps with a quorum: the first q commits of a step that the naming shard takes are its members, on every shard.
#include <doctest/doctest.h>

#include <future>
#include <random>
#include <set>
#include <thread>

#include "commit/commit_log.h"
#include "rpc_fixture.h"
#include "session/session.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using Clock = std::chrono::steady_clock;

namespace {

// A log over one table of dim 2 whose rows begin at 0 and move by -gradient.
struct Log {
  TableSchema table = sgd_table("t/a", 2, 0.0f);
  std::shared_ptr<Store> store = make_store(0);
  CommitLog log{*store};

  Log(std::uint32_t quorum, std::uint32_t workers) {
    REQUIRE(store->create_table(table).is_ok());
    JobSpec spec{.job_id = 1, .name = "job", .staleness = 0, .members = {}, .quorum = quorum};
    for (std::uint32_t worker = 0; worker < workers; ++worker) spec.members.push_back({worker, 1, worker});
    REQUIRE(log.set_job(spec).is_ok());
  }

  Commit make(std::uint32_t worker, std::uint64_t sequence, std::int64_t step, float gradient) const {
    return make_commit(table, worker, sequence, step, {7}, gradient);
  }
  Status prepare(std::uint32_t worker, std::uint64_t sequence, std::int64_t step, float gradient) {
    return log.prepare(make(worker, sequence, step, gradient));
  }
  Result<CommitResult> commit_prepared(std::uint32_t worker, std::uint64_t sequence, std::int64_t step) {
    Commit commit = make(worker, sequence, step, 0.0f);
    commit.blocks.clear();
    return log.commit(std::move(commit), true);
  }
  Result<CommitResult> commit(std::uint32_t worker, std::uint64_t sequence, std::int64_t step, float gradient) {
    return log.commit(make(worker, sequence, step, gradient), false);
  }
  float row() const {
    const std::uint64_t key = 7;
    float values[2];
    REQUIRE(store->pull(table.id, std::span(&key, 1), Dtype::kFloat32, reinterpret_cast<std::byte*>(values)).is_ok());
    return values[0];
  }
  std::shared_ptr<std::optional<Status>> pull(std::uint32_t worker, std::int64_t step,
                                              std::chrono::milliseconds deadline = std::chrono::seconds(30)) {
    auto answer = std::make_shared<std::optional<Status>>();
    log.when_readable(1, worker, 1, step, Clock::now() + deadline,
                      [answer](Status status) { *answer = std::move(status); });
    return answer;
  }
  // RESOLVE after the workers in `gone` have left; `until` and `final` are their last step and sequence.
  Status resolve(std::uint64_t operation, std::uint32_t quorum, const std::vector<std::uint32_t>& live,
                 const std::vector<Member>& gone) {
    JobSpec spec{.job_id = 1, .name = "job", .staleness = 0, .members = gone, .quorum = quorum};
    for (const std::uint32_t worker : live) spec.members.push_back({worker, 1, worker});
    spec.operation = operation;
    return log.set_job(spec);
  }
};

Member gone(std::uint32_t worker, std::int64_t until, std::uint64_t final_sequence) {
  return {.worker_id = worker, .epoch = 1, .rank = worker, .until_step = until, .final_sequence = final_sequence};
}

bool is_ok(const std::shared_ptr<std::optional<Status>>& answer) { return answer->has_value() && (*answer)->is_ok(); }
Code code_of(const Result<CommitResult>& result) { return result.status().code(); }

}  // namespace

TEST_CASE("the first q commits make a step, divided by q; the others are outside and learn the open step") {
  Log f(2, 3);
  CHECK(is_ok(f.pull(0, 0)));
  const auto waits = f.pull(1, 1);
  REQUIRE(f.commit(2, 1, 0, 8.0f).is_ok());
  CHECK(!waits->has_value());
  CHECK(f.log.open_step(1) == 0);
  REQUIRE(f.commit(1, 1, 0, 4.0f).is_ok());
  CHECK(is_ok(waits));
  CHECK(f.row() == -6.0f);
  CHECK(f.log.open_step(1) == 1);
  CHECK(code_of(f.commit(0, 1, 0, 100.0f)) == Code::kOutsideQuorum);
  CHECK(f.prepare(0, 2, 0, 100.0f).code() == Code::kOutsideQuorum);
  CHECK(f.commit(0, 3, 1, 2.0f).is_ok());  // the open one
  CHECK(f.row() == -6.0f);
  CHECK(f.commit(2, 2, 1, 4.0f).is_ok());
  CHECK(f.row() == -9.0f);
  CHECK(f.log.stats().commits_outside == 2);
  CHECK(f.log.stats().commits_refused == 0);
  CHECK(f.log.stats().kept_bytes == 0);
  CHECK(f.log.stats().staleness_max == 0);
}

TEST_CASE("a member is answered again, and who is outside stays outside") {
  Log f(2, 3);
  for (const std::uint32_t worker : {0u, 1u, 2u}) REQUIRE(f.prepare(worker, 1, 0, 2.0f).is_ok());
  REQUIRE(f.commit_prepared(0, 1, 0).is_ok());
  REQUIRE(f.commit_prepared(1, 1, 0).is_ok());
  CHECK(f.commit_prepared(0, 1, 0).value().duplicate);
  for (int again = 0; again < 2; ++again) CHECK(code_of(f.commit_prepared(2, 1, 0)) == Code::kOutsideQuorum);
  CHECK(f.log.stats().kept_bytes > 0);  // it is prepared until ABORT
  REQUIRE(f.log.abort(1, 2, 1, 1).is_ok());
  CHECK(f.log.stats().kept_bytes == 0);
  CHECK(f.prepare(2, 1, 0, 2.0f).is_ok());  // late, of what is finished: it reserves nothing
  CHECK(f.log.stats().kept_bytes == 0);
  CHECK(code_of(f.commit_prepared(2, 1, 0)) == Code::kFailedPrecondition);
  CHECK(code_of(f.commit(0, 2, 0, 9.0f)) == Code::kOutsideQuorum);  // nor twice by a member
  CHECK(f.row() == -2.0f);
}

TEST_CASE("a member that commits its step under another sequence is refused while the step is open") {
  Log f(2, 3);
  REQUIRE(f.commit(0, 1, 0, 2.0f).is_ok());
  CHECK(code_of(f.commit(0, 2, 0, 2.0f)) == Code::kFailedPrecondition);
  REQUIRE(f.commit(1, 1, 0, 2.0f).is_ok());
  CHECK(f.row() == -2.0f);
}

TEST_CASE("a shard applies steps in order, though it has heard of all members of a later one first") {
  Log f(2, 3);
  REQUIRE(f.commit(0, 1, 0, 4.0f).is_ok());
  REQUIRE(f.commit(0, 2, 1, 2.0f).is_ok());
  REQUIRE(f.commit(1, 1, 1, 2.0f).is_ok());
  CHECK(f.row() == 0.0f);
  REQUIRE(f.commit(2, 1, 0, 4.0f).is_ok());
  CHECK(f.row() == -6.0f);
}

TEST_CASE("who never came holds no step, and is named by a pull that waits") {
  Log f(2, 3);
  for (std::uint64_t step = 0; step < 50; ++step) {
    for (const std::uint32_t worker : {0u, 1u}) {
      REQUIRE(is_ok(f.pull(worker, static_cast<std::int64_t>(step))));
      REQUIRE(f.commit(worker, step + 1, static_cast<std::int64_t>(step), 1.0f).is_ok());
    }
  }
  CHECK(f.row() == -50.0f);
  REQUIRE(f.commit(0, 51, 50, 1.0f).is_ok());
  const auto late = f.pull(0, 51, std::chrono::milliseconds(-1));
  REQUIRE(late->has_value());
  CHECK((*late)->code() == Code::kDeadlineExceeded);
  CHECK((*late)->message().find("worker ids 1, 2") != std::string::npos);
  REQUIRE(f.commit(2, 1, 50, 1.0f).is_ok());
  CHECK(f.row() == -51.0f);
}

TEST_CASE("a worker that dies after it was named is a member on every shard, one before it was named on none") {
  for (const bool is_named : {false, true}) {
    Log naming(2, 3);
    Log other(2, 3);
    for (Log* shard : {&naming, &other}) {
      for (const std::uint32_t worker : {0u, 1u}) REQUIRE(shard->prepare(worker, 1, 0, 4.0f).is_ok());
    }
    if (is_named) REQUIRE(naming.commit_prepared(1, 1, 0).is_ok());  // and dies
    const Member dead = gone(1, is_named ? 0 : -1, is_named ? 1 : 0);
    for (Log* shard : {&naming, &other}) REQUIRE(shard->log.freeze(1, 1, {{1, 1}}).is_ok());
    CHECK(code_of(naming.commit_prepared(0, 1, 0)) == Code::kUnavailable);
    for (Log* shard : {&other, &naming}) REQUIRE(shard->resolve(1, 2, {0, 2}, {dead}).is_ok());
    for (Log* shard : {&naming, &other}) {
      REQUIRE(shard->commit_prepared(0, 1, 0).is_ok());
      CHECK(shard->row() == (is_named ? -4.0f : 0.0f));
      if (is_named) CHECK(code_of(shard->commit(2, 1, 0, 8.0f)) == Code::kOutsideQuorum);
      if (!is_named) CHECK(shard->commit(2, 1, 0, 8.0f).is_ok());
      CHECK(shard->row() == (is_named ? -4.0f : -6.0f));
      CHECK(shard->log.stats().kept_bytes == 0);
    }
  }
}

TEST_CASE("where fewer than q are left they are the step, and a shard told later waits for that word") {
  Log naming(2, 3);
  Log other(2, 3);
  for (Log* shard : {&naming, &other}) REQUIRE(shard->commit(0, 1, 0, 4.0f).is_ok());
  const std::vector<Member> dead{gone(1, -1, 0), gone(2, -1, 0)};
  for (Log* shard : {&naming, &other}) REQUIRE(shard->log.freeze(1, 1, {{1, 1}, {2, 1}}).is_ok());
  REQUIRE(naming.resolve(1, 2, {0}, dead).is_ok());
  CHECK(naming.row() == -4.0f);  // divided by 1
  CHECK(other.row() == 0.0f);
  REQUIRE(naming.commit(0, 2, 1, 4.0f).is_ok());
  CHECK(naming.row() == -8.0f);
  REQUIRE(other.resolve(1, 2, {0}, dead).is_ok());
  REQUIRE(other.commit(0, 2, 1, 4.0f).is_ok());
  CHECK(other.row() == -8.0f);
}

TEST_CASE("members that died since do not shrink their step") {
  // The naming shard has made step 0 of workers 0 and 1; both die before the other shard has worker 0's COMMIT.
  Log other(2, 4);
  REQUIRE(other.prepare(0, 1, 0, 2.0f).is_ok());
  REQUIRE(other.commit(1, 1, 0, 6.0f).is_ok());
  CHECK(other.row() == 0.0f);
  REQUIRE(other.log.freeze(1, 1, {{0, 1}, {1, 1}, {2, 1}}).is_ok());
  REQUIRE(other.resolve(1, 2, {3}, {gone(0, 0, 1), gone(1, 0, 1), gone(2, -1, 0)}).is_ok());
  CHECK(other.row() == -4.0f);
  CHECK(code_of(other.commit(3, 1, 0, 1.0f)) == Code::kOutsideQuorum);
  REQUIRE(other.commit(3, 2, 1, 1.0f).is_ok());
  CHECK(other.row() == -5.0f);
}

TEST_CASE("a cut waits for its highest step, not for each worker's commit of it") {
  Log f(2, 3);
  for (const std::uint32_t worker : {0u, 1u}) REQUIRE(f.commit(worker, 1, 0, 2.0f).is_ok());
  REQUIRE(f.commit(2, 1, 1, 2.0f).is_ok());
  const auto reports = f.log.freeze(1, 1, {});
  REQUIRE(reports.is_ok());
  CutTarget target{.job_id = 1, .operation = 1, .step = kNoStep, .workers = {}};
  for (const WorkerReport& report : reports.value()) {
    target.step = std::max(target.step, report.committed_step);
    target.workers.push_back({report.worker_id, report.epoch, report.committed_sequence});
  }
  CHECK(target.step == 1);
  const auto none = [] { return Status::ok(); };
  const auto in_vain = f.log.cut({target}, Clock::now() + std::chrono::milliseconds(20), none);
  CHECK(in_vain.status().code() == Code::kDeadlineExceeded);
  CHECK(in_vain.status().message().find("worker ids 0, 1") != std::string::npos);
  CHECK(code_of(f.commit(0, 9, 0, 2.0f)) == Code::kOutsideQuorum);  // a late worker learns it though the job is frozen
  REQUIRE(f.commit(0, 2, 1, 2.0f).is_ok());
  CHECK(code_of(f.commit(1, 2, 2, 2.0f)) == Code::kUnavailable);  // beyond the cut
  float row = 0.0f;
  const auto images = f.log.cut({target}, Clock::now() + std::chrono::seconds(30), [&] {
    row = f.row();
    return Status::ok();
  });
  REQUIRE(images.is_ok());
  CHECK(images.value()[0].completed == 1);
  CHECK(row == -4.0f);
}

TEST_CASE("a quorum needs staleness 0") {
  Log f(2, 3);
  const JobSpec spec{.job_id = 2, .name = "other", .staleness = 1, .members = {{0, 1, 0}}, .quorum = 1};
  CHECK(f.log.set_job(spec).code() == Code::kInvalidArgument);
}

namespace {

// A job of several workers over shards with a quorum.
struct Team {
  TableSchema table = sgd_table("t/a", 1, 0.0f);
  Cluster cluster;
  std::vector<std::shared_ptr<Client>> clients;

  Team(std::uint32_t shards, std::uint32_t workers, std::uint32_t quorum) : cluster(shards, {table}) {
    JobSpec spec{.job_id = 1, .name = "job", .staleness = 0, .members = {}, .generation = 1, .quorum = quorum};
    for (std::uint32_t worker = 0; worker < workers; ++worker) spec.members.push_back({worker, 1, worker});
    for (auto& server : cluster.servers) REQUIRE(server->set_job(spec).is_ok());
    for (std::uint32_t worker = 0; worker < workers; ++worker) {
      auto options = cluster.client_options(worker);
      options.has_quorum = true;
      clients.push_back(take(Client::connect(options)));
    }
  }
};

}  // namespace

TEST_CASE("over the network: the naming shard is asked first, and who is outside leaves nothing anywhere") {
  Team team(3, 3, 2);
  const Grouped grouped(*team.clients[0], team.table.id, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  std::vector<float> grads(12, 2.0f);
  const auto push = grouped.push(team.table, grads.data(), 1.0f);
  for (const std::uint32_t worker : {0u, 1u, 2u}) {
    REQUIRE(team.clients[worker]->prepare(std::span(&push, 1), {.sequence = 1, .step = 0}).is_ok());
  }
  const auto commit = [&](std::uint32_t worker, std::int64_t& open_step) {
    return team.clients[worker]->commit_prepared({.sequence = 1, .step = 0, .open_step = &open_step}).code();
  };
  std::int64_t open_step = kNoStep;
  REQUIRE(commit(2, open_step) == Code::kOk);
  REQUIRE(commit(1, open_step) == Code::kOk);
  CHECK(open_step == kNoStep);
  CHECK(commit(0, open_step) == Code::kOutsideQuorum);
  CHECK(open_step == 1);
  CHECK(team.cluster.servers[0]->stats().commits.commits_outside == 1);
  for (const std::uint32_t shard : {1u, 2u}) {
    CHECK(team.cluster.servers[shard]->stats().commits.commits_outside == 0);  // it was not asked
    CHECK(team.cluster.servers[shard]->stats().commits.kept_bytes > 0);
  }
  REQUIRE(team.clients[0]->abort({.sequence = 1, .step = 0}).is_ok());
  for (const auto& server : team.cluster.servers) CHECK(server->stats().commits.kept_bytes == 0);
  std::vector<float> rows(12);
  const auto pull = grouped.pull(team.table, rows.data());
  REQUIRE(team.clients[0]->pull(std::span(&pull, 1), {.step = 1}).is_ok());
  CHECK(std::count(rows.begin(), rows.end(), -2.0f) == 12);
  CHECK(team.clients[0]->prepare(std::span(&push, 1), {.sequence = 2, .step = 0}).code() == Code::kOutsideQuorum);
}

TEST_CASE("a session goes on with the open step, and counts what it was refused and what it missed") {
  for (const std::uint32_t shards : {1u, 2u}) {
    Team team(shards, 2, 1);
    std::vector<std::shared_ptr<Session>> sessions;
    for (std::uint32_t worker = 0; worker < 2; ++worker) {
      sessions.push_back(take(Session::create(team.clients[worker], {})));
    }
    const auto end_step = [&](Session& session) {
      REQUIRE(session.seal(1.0f).is_ok());
      if (shards == 1) return session.commit();
      if (Status status = session.prepare(); !status.is_ok()) return status;
      return session.commit_prepared();
    };
    for (int step = 0; step < 5; ++step) REQUIRE(end_step(*sessions[0]).is_ok());
    CHECK(end_step(*sessions[1]).code() == Code::kOutsideQuorum);
    CHECK(sessions[1]->step() == 5);
    CHECK(end_step(*sessions[1]).is_ok());
    CHECK(sessions[1]->step() == 6);
    CHECK(end_step(*sessions[0]).code() == Code::kOutsideQuorum);
    CHECK(sessions[0]->step() == 6);
    const SessionStats first = sessions[0]->stats();
    const SessionStats second = sessions[1]->stats();
    CHECK(first.steps_committed == 5);
    CHECK(first.refused_steps == 1);
    CHECK(first.missed_steps == 0);
    CHECK(second.steps_committed == 1);
    CHECK(second.refused_steps == 1);
    CHECK(second.missed_steps == 4);
    CHECK(second.steps_aborted == 0);
  }
}

TEST_CASE("workers at once: each step has q members, the same on every shard, and each saw the steps before it") {
  constexpr std::uint32_t kWorkers = 4;
  constexpr std::uint32_t kQuorum = 3;
  constexpr std::int64_t kSteps = 60;
  Team team(2, kWorkers, kQuorum);
  // A key for each shard, worker and step, and one for each shard that all members change.
  const auto keys_of = [&](std::uint32_t worker, std::int64_t step) {
    std::vector<std::uint64_t> keys;
    for (std::uint64_t key = static_cast<std::uint64_t>(step * kWorkers + worker) * 1000 + 1000; keys.size() < 2;
         ++key) {
      const Grouped one(*team.clients[0], team.table.id, {key});
      if (one.partition.shard_begin[keys.size() + 1] - one.partition.shard_begin[keys.size()] == 1) keys.push_back(key);
    }
    return keys;
  };
  std::vector<std::uint64_t> shared;
  for (std::uint64_t key = 0; shared.size() < 2; ++key) {
    const Grouped one(*team.clients[0], team.table.id, {key});
    if (one.partition.shard_begin[shared.size() + 1] - one.partition.shard_begin[shared.size()] == 1) {
      shared.push_back(key);
    }
  }
  std::vector<std::set<std::int64_t>> taken(kWorkers);
  std::atomic<int> failures{0};
  const auto work = [&](std::uint32_t worker) {
    std::mt19937 random(worker + 1);
    Client& client = *team.clients[worker];
    std::uint64_t sequence = 0;
    for (std::int64_t step = 0; step < kSteps;) {
      std::vector<float> rows(2);
      const Grouped all(client, team.table.id, shared);
      const auto pull = all.pull(team.table, rows.data());
      if (!client.pull(std::span(&pull, 1), {.step = step}).is_ok()) return void(++failures);
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 3));
      std::vector<std::uint64_t> keys = keys_of(worker, step);
      keys.insert(keys.end(), shared.begin(), shared.end());
      const Grouped grouped(client, team.table.id, keys);
      std::vector<float> grads(keys.size(), -static_cast<float>(kQuorum));
      const auto push = grouped.push(team.table, grads.data(), 1.0f);
      std::int64_t open_step = kNoStep;
      const CommitOptions options{.sequence = ++sequence, .step = step, .open_step = &open_step};
      Status status = client.prepare(std::span(&push, 1), options);
      if (status.is_ok()) status = client.commit_prepared(options);
      if (status.is_ok()) {
        // Each earlier step has added q to both rows, and no later one anything.
        const auto seen = static_cast<float>(step) * kQuorum;
        if (rows[0] != seen || rows[1] != seen) ++failures;
        taken[worker].insert(step++);
        continue;
      }
      if (status.code() != Code::kOutsideQuorum || open_step <= step) return void(++failures);
      if (!client.abort(options).is_ok()) return void(++failures);
      step = open_step;
    }
  };
  std::vector<std::future<void>> running;
  for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
    running.push_back(std::async(std::launch::async, work, worker));
  }
  for (auto& each : running) each.get();
  CHECK(failures == 0);
  std::size_t members = 0;
  for (const auto& steps : taken) members += steps.size();
  CHECK(members == kSteps * kQuorum);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
      const Grouped grouped(*team.clients[0], team.table.id, keys_of(worker, step));
      std::vector<float> rows(2);
      const auto pull = grouped.pull(team.table, rows.data());
      REQUIRE(team.clients[0]->pull(std::span(&pull, 1), {}).is_ok());
      const float wanted = taken[worker].contains(step) ? 1.0f : 0.0f;
      CHECK(rows == std::vector<float>{wanted, wanted});
    }
  }
  for (const auto& server : team.cluster.servers) CHECK(server->stats().commits.kept_bytes == 0);
}
