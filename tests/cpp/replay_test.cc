// A shard that comes back as another process gets what its worker still holds: each commit once, in order, the one in
// doubt as it was; what nobody has is counted.
#include <doctest/doctest.h>

#include <cstring>
#include <future>
#include <thread>

#include "rpc/client/replay.h"
#include "rpc/client/replay_buffer.h"
#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t kDim = 4;

struct Fixture {
  TableSchema table = sgd_table("t/a", kDim, 0.0f);
  Cluster cluster{1, {table}};
  std::shared_ptr<Client> client;
  std::vector<std::uint64_t> keys{3, 5, 8};
  float step = 1.0f;  // what a commit adds to each value of its rows

  explicit Fixture(std::uint64_t replay_bytes, std::optional<std::uint32_t> staleness = std::nullopt,
                   Dtype wire_dtype = Dtype::kFloat32) {
    cluster.set_job(staleness, 1);
    ClientOptions options = cluster.client_options();
    options.replay_bytes = replay_bytes;
    options.wire_dtype = wire_dtype;
    client = take(Client::connect(options));
  }

  [[nodiscard]] static CommitOptions options(std::uint64_t sequence) {
    CommitOptions options;
    options.sequence = sequence;
    options.step = static_cast<std::int64_t>(sequence) - 1;
    return options;
  }

  Status prepare(std::uint64_t sequence) {
    const Grouped grouped(*client, table.id, keys);
    const std::vector<float> grads(keys.size() * kDim, -step);
    const auto push = grouped.push(table, grads.data(), 1.0f);
    return client->prepare(std::span(&push, 1), options(sequence));
  }
  // The same by key, outside of steps.
  void push(std::uint64_t sequence) {
    const Grouped grouped(*client, table.id, keys);
    const std::vector<float> grads(keys.size() * kDim, -step);
    const auto push = grouped.push(table, grads.data(), 1.0f);
    REQUIRE(client->commit(std::span(&push, 1), by_key<CommitOptions>(sequence)).is_ok());
  }
  void assign(std::uint64_t sequence, float value) {
    const Grouped grouped(*client, table.id, keys);
    const std::vector<float> rows(keys.size() * kDim, value);
    const auto push = grouped.push(table, rows.data(), 1.0f);
    REQUIRE(client->assign(std::span(&push, 1), by_key<CallOptions>(sequence)).is_ok());
  }
  void erase(std::uint64_t sequence) {
    const Grouped grouped(*client, table.id, keys);
    REQUIRE(
        client->erase(table.id, grouped.partition.keys, grouped.partition.shard_begin, by_key<CallOptions>(sequence))
            .is_ok());
  }
  template <class Options>
  [[nodiscard]] static Options by_key(std::uint64_t sequence) {
    Options options;
    options.sequence = sequence;
    return options;
  }
  void commit(std::uint64_t first, std::uint64_t last) {
    for (std::uint64_t sequence = first; sequence <= last; ++sequence) {
      REQUIRE(prepare(sequence).is_ok());
      REQUIRE(client->commit_prepared(options(sequence)).is_ok());
    }
  }

  // Another process in the shard's place, with the rows and the window of after `saved` commits; it serves when its
  // route is set.
  void come_back(std::uint64_t saved, std::optional<std::uint32_t> staleness = std::nullopt) {
    ServerOptions options;
    options.port = cluster.servers[0]->port();
    options.cluster_id = cluster.cluster_id;
    cluster.servers[0].reset();
    cluster.stores[0] = make_store();
    REQUIRE(cluster.stores[0]->create_table(table).is_ok());
    cluster.servers[0] = take(Server::start(options, cluster.stores[0]));
    WindowImage window;
    window.committed_sequence = saved;
    window.committed_step = window.done_step = static_cast<std::int64_t>(saved) - 1;
    for (std::uint64_t sequence = 1; sequence <= saved; ++sequence) window.answers.emplace_back(sequence, keys.size());
    JobImage image{.job_id = 1, .generation = 0, .completed = -1, .lossy = true, .workers = {{0, 1, window}}};
    cluster.servers[0]->install_jobs({image});
    cluster.set_job(staleness, 1);
    if (saved == 0) return;
    const std::vector<float> rows(keys.size() * kDim, static_cast<float>(saved) * step);
    REQUIRE(cluster.stores[0]->assign(table.id, keys, rows.data()).is_ok());
  }
  void let_in() { REQUIRE(cluster.servers[0]->set_route(1, cluster.slot_owner).is_ok()); }

  float row() {
    const Grouped grouped(*client, table.id, keys);
    std::vector<float> rows(keys.size() * kDim, -1.0f);
    const auto pull = grouped.pull(table, rows.data());
    REQUIRE(client->pull(std::span(&pull, 1), {}).is_ok());
    for (const float value : rows) CHECK(value == rows[0]);
    return rows[0];
  }
  [[nodiscard]] std::uint64_t lost() const { return cluster.servers[0]->stats().commits.commits_lost; }
};

}  // namespace

TEST_CASE("buffered commits are sent again, and what the checkpoint had is not applied twice") {
  Fixture f(1 << 20);
  f.commit(1, 5);
  f.come_back(2);
  auto row = std::async(std::launch::async, [&f] { return f.row(); });
  CHECK(row.wait_for(200ms) == std::future_status::timeout);  // not let in yet: refused, and tried again
  f.let_in();
  CHECK(row.get() == 5.0f);
  CHECK(f.client->stats().commits_replayed == 3);
  f.commit(6, 6);
  CHECK(f.row() == 6.0f);
  CHECK(f.lost() == 0);
}

TEST_CASE("what is sent again in 16 bits has its exponents") {
  for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16}) {
    for (const float step : {0x1p-45f, 0x1p45f}) {
      Fixture f(1 << 20, std::nullopt, dtype);
      f.step = step;
      f.commit(1, 5);
      f.push(1001);
      f.assign(1002, 6.5f * step);
      f.come_back(2);
      f.let_in();
      f.commit(6, 6);
      const Grouped grouped(*f.client, f.table.id, f.keys);
      std::vector<float> rows(f.keys.size() * kDim);
      REQUIRE(f.cluster.stores[0]
                  ->pull(f.table.id, grouped.partition.keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(rows.data()))
                  .is_ok());
      for (const float value : rows) CHECK(value == 7.5f * step);
      CHECK(f.client->stats().commits_replayed == 5);
      CHECK(f.lost() == 0);
    }
  }
}

TEST_CASE("a push of one phase that was refused is not sent again") {
  Fixture f(1 << 20);
  f.push(1);
  REQUIRE(f.cluster.stores[0]->drop_table(f.table.id).is_ok());
  const Grouped grouped(*f.client, f.table.id, f.keys);
  const std::vector<float> grads(f.keys.size() * kDim, -1.0f);
  const auto push = grouped.push(f.table, grads.data(), 1.0f);
  bool may_be_applied = false;
  auto options = Fixture::by_key<CommitOptions>(2);
  options.may_be_applied = &may_be_applied;
  CHECK(f.client->commit(std::span(&push, 1), options).code() == Code::kNotFound);
  CHECK_FALSE(may_be_applied);
  f.come_back(1);
  f.let_in();
  CHECK(f.row() == 1.0f);
  CHECK(f.client->stats().commits_replayed == 0);
}

TEST_CASE("a push that never left is known not to be applied") {
  Fixture f(0);
  const auto port = f.cluster.servers[0]->port();
  bool may_be_applied = false;
  const auto push_late = [&](std::uint64_t sequence) {
    const Grouped grouped(*f.client, f.table.id, f.keys);
    const std::vector<float> grads(f.keys.size() * kDim, -1.0f);
    const auto push = grouped.push(f.table, grads.data(), 1.0f);
    auto options = Fixture::by_key<CommitOptions>(sequence);
    options.deadline = 300ms;
    options.may_be_applied = &may_be_applied;
    return f.client->commit(std::span(&push, 1), options).code();
  };
  f.cluster.servers[0].reset();
  CHECK(push_late(1) == Code::kUnavailable);  // the client may find out only by sending it
  CHECK(push_late(2) == Code::kUnavailable);
  CHECK_FALSE(may_be_applied);

  ServerOptions options;
  options.port = port;
  options.cluster_id = f.cluster.cluster_id;
  f.cluster.stores[0] = make_store();
  REQUIRE(f.cluster.stores[0]->create_table(f.table).is_ok());
  f.cluster.servers[0] = take(Server::start(options, f.cluster.stores[0]));
  f.cluster.set_job(std::nullopt, 1);
  f.let_in();
  CHECK(f.row() == 0.0f);
  CHECK(push_late(3) == Code::kOk);
  CHECK_FALSE(may_be_applied);
}

TEST_CASE("evicted commits are counted; the newest stays in any case") {
  Fixture f(1);
  f.commit(1, 6);
  f.come_back(2);
  f.let_in();
  CHECK(f.row() == 3.0f);
  CHECK(f.lost() == 3);
  f.commit(7, 7);
  CHECK(f.row() == 4.0f);
  CHECK(f.lost() == 3);
}

TEST_CASE("rows assigned and erased by key are so again, in the order of all writes") {
  for (const bool is_erased_last : {false, true}) {
    Fixture f(1 << 20);
    f.push(1);
    f.push(2);
    is_erased_last ? f.assign(3, 7.0f) : f.erase(3);
    is_erased_last ? f.erase(4) : f.assign(4, 7.0f);
    f.push(5);
    f.come_back(2);
    f.let_in();
    CHECK(f.row() == (is_erased_last ? 1.0f : 8.0f));
    CHECK(f.client->stats().commits_replayed == 3);
    CHECK(f.lost() == 0);
  }
}

TEST_CASE("writes by key that were evicted are counted, each once") {
  Fixture f(1);
  f.push(1);
  f.push(2);
  f.assign(3, 7.0f);
  f.erase(4);
  f.push(5);
  f.push(6);
  f.come_back(2);
  f.let_in();
  CHECK(f.row() == 3.0f);
  CHECK(f.lost() == 3);  // of five that were let go two are saved
  f.push(7);
  f.push(8);
  CHECK(f.row() == 5.0f);
  f.come_back(7);
  f.let_in();
  CHECK(f.row() == 8.0f);
  CHECK(f.lost() == 0);  // of this process
}

TEST_CASE("a process that ends right after it was told what is lost leaves the next one to count it") {
  Fixture f(1);
  for (std::uint64_t sequence = 1; sequence <= 6; ++sequence) f.push(sequence);
  for (int process = 0; process < 3; ++process) {
    f.come_back(2);
    f.let_in();
    CHECK(f.row() == 3.0f);
    CHECK(f.lost() == 3);
    CHECK(f.cluster.servers[0]->lost_commits() == std::vector<LostRange>{{1, 0, 1, false, 3, 5}});
  }
}

TEST_CASE("a commit in doubt is prepared again, and committed or not as is decided later") {
  Fixture f(1 << 20);
  f.commit(1, 2);
  REQUIRE(f.prepare(3).is_ok());
  f.come_back(2);
  f.let_in();
  CHECK(f.row() == 2.0f);  // which sends it again, undecided
  REQUIRE(f.client->commit_prepared(Fixture::options(3)).is_ok());
  CHECK(f.row() == 3.0f);
  REQUIRE(f.prepare(4).is_ok());
  REQUIRE(f.client->abort(Fixture::options(4)).is_ok());
  f.come_back(3);
  f.let_in();
  CHECK(f.row() == 3.0f);
  REQUIRE(f.prepare(5).is_ok());
  f.come_back(3);
  f.let_in();
  REQUIRE(f.client->commit_prepared(Fixture::options(5)).is_ok());
  CHECK(f.row() == 4.0f);
}

TEST_CASE("who waits for a shard that is being restored goes on waiting beyond its deadline") {
  Fixture f(1 << 20, 1u);
  f.commit(1, 3);
  f.come_back(1, 1u);
  f.client->extend(5s);
  auto late = std::async(std::launch::async, [&f] {
    const Grouped grouped(*f.client, f.table.id, f.keys);
    std::vector<float> rows(f.keys.size() * kDim);
    const auto pull = grouped.pull(f.table, rows.data());
    return f.client->pull(std::span(&pull, 1), {.deadline = 50ms, .step = 3}).code();
  });
  CHECK(late.wait_for(300ms) == std::future_status::timeout);
  CHECK_FALSE(f.client->touch(50ms).is_ok());  // it is in a hurry
  f.let_in();
  CHECK(late.get() == Code::kOk);
  CHECK(f.row() == 3.0f);
  CHECK(f.lost() == 0);
}

TEST_CASE("commits that are over are forgotten") {
  Fixture f(1 << 20);
  f.commit(1, 3);
  f.client->forget_buffered();
  f.come_back(1);
  f.let_in();
  CHECK(f.row() == 1.0f);
  f.commit(4, 4);
  CHECK(f.lost() == 2);
}

TEST_CASE("the budget drops the oldest, a later try of a sequence replaces the earlier") {
  const auto commit_of = [](std::uint64_t sequence, std::size_t bytes) {
    BufferedCommit commit;
    commit.header.sequence = sequence;
    commit.body.resize(bytes);
    return commit;
  };
  ReplayBuffer buffer(100);
  buffer.add(commit_of(1, 60));
  buffer.add(commit_of(1, 40));
  buffer.add(commit_of(2, 60));
  CHECK(buffer.bytes() == 100);
  buffer.add(commit_of(3, 1));
  REQUIRE(buffer.from(0) != nullptr);
  CHECK(buffer.from(0)->header.sequence == 2);
  buffer.add(commit_of(4, 1000));
  CHECK(buffer.from(0)->header.sequence == 4);
  CHECK(buffer.bytes() == 1000);
  buffer.drop(4);
  CHECK(buffer.from(0) == nullptr);
  CHECK(buffer.bytes() == 0);
}

namespace {

// A shard that answers what Replay sends, without a socket.
struct ReplayedShard {
  explicit ReplayedShard(std::uint64_t budget_bytes = 1 << 20) : replay(budget_bytes, true) {}

  Replay replay;
  std::uint64_t request_id = 0;

  void add(FrameType type, std::uint64_t sequence, bool is_decided) {
    BufferedCommit commit;
    commit.header.type = static_cast<std::uint16_t>(type);
    commit.header.sequence = sequence;
    commit.body.resize(8 * sequence, std::byte{7});
    commit.header.body_bytes = static_cast<std::uint32_t>(commit.body.size());
    commit.decided = is_decided;
    replay.buffer().add(std::move(commit));
  }
  // The header of the next frame; nullopt when there is none.
  std::optional<FrameHeader> next() {
    if (!replay.next(++request_id)) return std::nullopt;
    return unsent();
  }
  [[nodiscard]] FrameHeader unsent() const {
    FrameHeader header;
    REQUIRE(replay.unsent().size() >= sizeof header);
    std::memcpy(&header, replay.unsent().data(), sizeof header);
    REQUIRE(replay.unsent().size() == sizeof header + header.body_bytes);
    REQUIRE(check_crc(header, replay.unsent().subspan(sizeof header)).is_ok());
    return header;
  }
  Result<Replay::Answer> answer(const std::vector<std::byte>& frame) {
    FrameHeader header;
    std::memcpy(&header, frame.data(), sizeof header);
    return replay.on_reply(std::span(frame).subspan(sizeof header), header.section_count);
  }
  static std::vector<std::byte> ack(bool is_duplicate) {
    AckPayload payload;
    payload.duplicate = is_duplicate ? 1 : 0;
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kAck);
    return small_frame(header, SectionKind::kAck, bytes_of(payload), {});
  }
  static std::vector<std::byte> error(Code code) {
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kError);
    return error_frame(header, {code, "refused"});
  }
};

}  // namespace

TEST_CASE("commits are sent again in order, decided ones whole and the one in doubt as PREPARE") {
  ReplayedShard shard;
  shard.add(FrameType::kPrepare, 2, true);
  shard.add(FrameType::kAssign, 4, true);
  shard.add(FrameType::kPrepare, 5, false);
  shard.replay.note_shard(10, kProtocolVersion);
  CHECK_FALSE(shard.replay.is_due());
  shard.replay.note_shard(10, kProtocolVersion);
  CHECK_FALSE(shard.replay.is_due());  // the same process
  shard.replay.note_shard(11, kProtocolVersion);
  REQUIRE(shard.replay.is_due());
  shard.replay.begin(true);
  const auto sent = [&shard](FrameType type, std::uint64_t sequence, bool is_duplicate, bool is_applied) {
    const auto header = shard.next();
    REQUIRE(header);
    CHECK(header->type == static_cast<std::uint16_t>(type));
    CHECK(header->sequence == sequence);
    CHECK(header->body_bytes == 8 * sequence);
    CHECK(header->request_id == shard.request_id);
    const auto answer = shard.answer(ReplayedShard::ack(is_duplicate));
    REQUIRE(answer.is_ok());
    CHECK(answer.value().refusal.is_ok());
    CHECK(answer.value().is_applied == is_applied);
  };
  sent(FrameType::kCommit, 2, true, false);
  sent(FrameType::kAssign, 4, false, true);
  sent(FrameType::kPrepare, 5, false, false);  // it is held, not applied
  CHECK_FALSE(shard.next());
  CHECK_FALSE(shard.replay.is_due());
}

TEST_CASE("a frame that is refused for now is sent again; one that is refused for good ends") {
  ReplayedShard shard;
  shard.add(FrameType::kPrepare, 1, true);
  shard.add(FrameType::kPrepare, 2, true);
  shard.replay.begin(true);
  REQUIRE(shard.next()->sequence == 1);
  shard.replay.note_sent(70);
  CHECK(shard.replay.unsent().size() == sizeof(FrameHeader) + 8 - 70);
  const auto refused = shard.answer(ReplayedShard::error(Code::kUnavailable));
  REQUIRE(refused.is_ok());
  CHECK(refused.value().refusal.code() == Code::kUnavailable);
  shard.replay.send_again();
  CHECK(shard.unsent().sequence == 1);
  const auto ended = shard.answer(ReplayedShard::error(Code::kFenced));
  REQUIRE(ended.is_ok());
  CHECK(ended.value().refusal.is_ok());
  CHECK_FALSE(ended.value().is_applied);
  REQUIRE(shard.next()->sequence == 2);
}

TEST_CASE("evicted writes are named first, once in each replay, to a shard that can count them") {
  ReplayedShard shard(8);
  for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
    BufferedCommit write;
    write.header.type = static_cast<std::uint16_t>(FrameType::kAssign);
    write.header.sequence = sequence;
    write.body.resize(8);
    write.header.body_bytes = 8;
    write.decided = true;
    shard.replay.buffer().add(std::move(write));
  }
  for (int round = 0; round < 2; ++round) {  // the shard may end before it saves the count
    shard.replay.begin(true);
    const auto lost = shard.next();
    REQUIRE(lost);
    CHECK(lost->type == static_cast<std::uint16_t>(FrameType::kAbort));
    CHECK((lost->flags & kFrameLost) != 0);
    SectionReader sections(shard.replay.unsent().subspan(sizeof(FrameHeader)), lost->section_count);
    const auto section = sections.next();
    REQUIRE((section.is_ok() && section.value()));
    const auto table = parse_table(SectionKind::kTableKeys, section.value()->payload);
    REQUIRE(table.is_ok());
    const auto keys = table.value().keys;
    CHECK(std::vector<std::uint64_t>(keys.begin(), keys.end()) == std::vector<std::uint64_t>{1, 2});
    REQUIRE(shard.answer(ReplayedShard::ack(false)).is_ok());
    CHECK(shard.next()->sequence == 3);
    REQUIRE(shard.answer(ReplayedShard::ack(round == 1)).is_ok());
    CHECK_FALSE(shard.next());
  }
  shard.replay.begin(false);
  CHECK(shard.next()->sequence == 3);
}

TEST_CASE("a reply that is none is DataLoss") {
  ReplayedShard shard;
  shard.add(FrameType::kPrepare, 1, true);
  shard.replay.begin(true);
  REQUIRE(shard.next());
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kAck);
  CHECK(shard.answer(empty_frame(header)).status().code() == Code::kDataLoss);
}
