// Rows that a shard writes straight into the memory of its client: bits, refusals, and who may use the memory when.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <random>
#include <thread>

#include "lane_peers.h"
#include "session_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using std::chrono::milliseconds;

namespace {

// A pull of some tables into memory of make_rows(), or into other memory.
struct PlacedPull {
  std::vector<Grouped> keys;
  std::vector<std::shared_ptr<RowMemory>> memory;
  std::vector<std::vector<std::uint64_t>> versions;
  std::vector<std::vector<std::uint8_t>> found;
  std::vector<TablePull> wanted;

  void add(Client& client, const TableSchema& table, const std::vector<std::uint64_t>& ids,
           bool with_versions = false) {
    keys.emplace_back(client, table.id, ids);
    memory.push_back(client.make_rows(ids.size() * table.dim));
    versions.emplace_back(with_versions ? ids.size() : 0);
    found.emplace_back(with_versions ? ids.size() : 0);
    std::fill_n(memory.back()->data(), memory.back()->size(), -7.0f);
  }
  Status run(Client& client, const std::vector<TableSchema>& tables, milliseconds deadline = milliseconds(30'000)) {
    wanted.clear();
    for (std::size_t i = 0; i < keys.size(); ++i) {
      wanted.push_back(keys[i].pull(tables[i], memory[i]->data()));
      wanted.back().memory = memory[i];
      wanted.back().versions = versions[i];
      wanted.back().found = found[i];
    }
    return client.pull(wanted, {.deadline = deadline, .step = kNoStep});
  }
  [[nodiscard]] std::vector<float> rows(std::size_t i) const {
    return {memory[i]->data(), memory[i]->data() + memory[i]->size()};
  }
};

}  // namespace

TEST_CASE("rows that are placed are those of TCP, with versions and without, beside tables that are not") {
  LocalShard shard;
  const auto by_tcp = shard.connect_by_tcp();
  const auto client = shard.connect(16 * kBytes);
  const std::vector<TableSchema> tables{shard.wide, shard.narrow, shard.wide};
  for (const bool with_versions : {false, true}) {
    for (const std::size_t n : {1u, 300u, 5'000u}) {
      PlacedPull pull;
      pull.add(*client, tables[0], ids_from(1, n), with_versions);
      pull.add(*client, tables[1], ids_from(5, n), with_versions);
      pull.add(*client, tables[2], ids_from(900'000, n));
      pull.memory[2] = RowMemory::on_heap(pull.memory[2]->size());
      const auto bytes = client->stats().bytes_received;
      REQUIRE(pull.run(*client, tables).is_ok());
      for (std::size_t i = 0; i < 3; ++i) {
        const Pulled expected =
            testing::pull(*by_tcp, tables[i], i == 2 ? ids_from(900'000, n) : ids_from(i == 0 ? 1 : 5, n));
        CHECK(pull.rows(i) == expected.rows);
        if (with_versions && i < 2) {
          CHECK(pull.versions[i] == expected.versions);
          CHECK(pull.found[i] == expected.found);
        }
      }
      const std::uint64_t socket = client->stats().bytes_received - bytes;
      const std::uint64_t of_heap = n * tables[2].dim * sizeof(float);
      CHECK(socket < of_heap + n * 64 + 1000);  // neither those of the first table, nor much else
    }
  }
  CHECK(client->stats().lane_replies >= 4);
  CHECK(client->stats().lane_full == 0);
}

TEST_CASE("rows of 16 bits, of a checked connection, and of a changed version go past the places") {
  LocalShard shard;
  for (const auto& [dtype, crc] : {std::pair{Dtype::kFloat16, false}, std::pair{Dtype::kFloat32, true}}) {
    const auto client = shard.connect(16 * kBytes, dtype, crc);
    PlacedPull pull;
    pull.add(*client, shard.wide, ids_from(1, 3'000));
    REQUIRE(pull.run(*client, {shard.wide}).is_ok());
    CHECK(pull.rows(0) == testing::pull(*shard.connect_by_tcp(dtype), shard.wide, ids_from(1, 3'000)).rows);
  }
  const auto client = shard.connect(16 * kBytes);
  PlacedPull pull;
  pull.add(*client, shard.wide, ids_from(1, 3'000), /*with_versions=*/true);
  REQUIRE(pull.run(*client, {shard.wide}).is_ok());
  const std::vector<float> before = pull.rows(0);
  std::vector<std::uint8_t> changed(3'000);
  TablePull again = pull.wanted[0];
  again.known = again.versions;
  again.changed = changed;
  REQUIRE(client->pull({&again, 1}, {.step = kNoStep}).is_ok());
  CHECK(pull.rows(0) == before);
  CHECK(std::count(changed.begin(), changed.end(), 1) == 0);
}

TEST_CASE("memory of make_rows is the client's again when nobody has it, and heap where there is no room") {
  LocalShard shard;
  const auto client = shard.connect(kBytes);
  std::vector<std::shared_ptr<RowMemory>> all;
  for (int i = 0; i < 8; ++i) all.push_back(client->make_rows(65'536));  // 256 KiB each, so that four are placed
  PlacedPull pull;
  for (int i = 0; i < 8; ++i) {
    pull.keys.emplace_back(*client, shard.narrow.id, ids_from(static_cast<std::uint64_t>(i) * 100'000, 20'000));
    pull.memory.push_back(all[static_cast<std::size_t>(i)]);
    pull.versions.emplace_back();
    pull.found.emplace_back();
  }
  pull.wanted.clear();
  for (std::size_t i = 0; i < 8; ++i) {
    pull.wanted.push_back(pull.keys[i].pull(shard.narrow, all[i]->data()));
    pull.wanted.back().memory = all[i];
  }
  REQUIRE(client->pull(pull.wanted, {.step = kNoStep}).is_ok());
  const auto by_tcp = shard.connect_by_tcp();
  for (std::size_t i = 0; i < 8; ++i) {
    const Pulled expected = testing::pull(*by_tcp, shard.narrow, ids_from(i * 100'000, 20'000));
    CHECK(std::memcmp(all[i]->data(), expected.rows.data(), expected.rows.size() * sizeof(float)) == 0);
  }
  CHECK(shard.cluster.servers[0]->stats().lane_sent == 4 * 20'000 * 3 * sizeof(float));
  pull = {};
  all.clear();
  for (int i = 0; i < 4; ++i) all.push_back(client->make_rows(65'536));
  PlacedPull again;
  again.add(*client, shard.narrow, ids_from(7, 20'000));
  all.clear();
  again.memory[0] = client->make_rows(again.memory[0]->size());
  REQUIRE(again.run(*client, {shard.narrow}).is_ok());
  CHECK(shard.cluster.servers[0]->stats().lane_sent == 5 * 20'000 * 3 * sizeof(float));
}

TEST_CASE("places of rows that are none are refused by name, and the connection ends") {
  LocalShard shard;
  const FileDescriptor passed = memory(kBytes, F_SEAL_SHRINK | F_SEAL_GROW);
  const auto mine = take(LaneRegion::map(FileDescriptor(::dup(passed.get())), kBytes));
  struct Wrong {
    std::vector<std::uint64_t> offsets;
    Dtype dtype;
    std::uint8_t flags;
  };
  for (const Wrong& wrong : {
           Wrong{{0, 64}, Dtype::kFloat32, 0},
           Wrong{{2}, Dtype::kFloat32, 0},
           Wrong{{kBytes - 64}, Dtype::kFloat32, 0},
           Wrong{{UINT64_MAX - 3}, Dtype::kFloat32, 0},
           Wrong{{0}, Dtype::kFloat16, 0},
           Wrong{{0}, Dtype::kFloat32, kTablePlaced},
       }) {
    PassingPeer peer(shard.name());
    CHECK(peer.greet(shard.cluster.cluster_id, kBytes, std::array{passed.get()}).type == kAck);
    peer.ask_placed(shard.wide, 10, wrong.offsets, wrong.dtype, wrong.flags);
    CHECK(peer.read().type == kRefused);
    CHECK((peer.refusal().starts_with("lane_rows") || peer.refusal().starts_with("table.flags")));
    CHECK(peer.read().type == 0);
  }
  PassingPeer without(shard.name());
  CHECK(without.greet(shard.cluster.cluster_id, kBytes, {}).type == kAck);
  without.ask_placed(shard.wide, 10, {0});
  CHECK(without.read().type == kRefused);
  CHECK(std::all_of(mine->bytes().begin(), mine->bytes().end(), [](std::byte b) { return b == std::byte{0}; }));
  PassingPeer peer(shard.name());
  CHECK(peer.greet(shard.cluster.cluster_id, kBytes, std::array{passed.get()}).type == kAck);
  peer.ask_placed(shard.wide, 10, {4096});
  CHECK(peer.read().type == kRows);
  CHECK(std::any_of(mine->bytes().begin(), mine->bytes().end(), [](std::byte b) { return b != std::byte{0}; }));
}

TEST_CASE("rows of a request that was given up are nobody's until its answer comes") {
  const TableSchema table = LocalShard::random_table("test/wide", 48);
  ScriptedShard shard;
  const auto client = client_of(shard);
  constexpr std::uint32_t kCount = 1000;
  Status of_first;
  PlacedPull first;
  std::thread asks([&] { of_first = client->touch(milliseconds(20'000)); });  // so that there is an arena
  shard.accept();
  shard.pong(shard.read());
  asks.join();
  REQUIRE(of_first.is_ok());

  first.add(*client, table, ids_from(0, kCount));
  asks = std::thread([&] { of_first = first.run(*client, {table}, milliseconds(300)); });
  const FrameHeader given_up = shard.read();
  REQUIRE(shard.rows.size() == 1);
  const std::uint64_t late = shard.rows[0];
  asks.join();
  CHECK(of_first.code() == Code::kDeadlineExceeded);
  CHECK(first.memory[0]->is_abandoned());
  first.memory.clear();
  first.wanted.clear();

  Status of_second;
  PlacedPull second;
  second.add(*client, table, ids_from(0, kCount));
  asks = std::thread([&] { of_second = second.run(*client, {table}, milliseconds(30'000)); });
  const FrameHeader next = shard.read();
  REQUIRE(shard.rows[0] != late);
  shard.place_rows(given_up, table, kCount, late, 1.0f);  // now, while another request is under way
  shard.place_rows(next, table, kCount, shard.rows[0], 2.0f);
  asks.join();
  CHECK(of_second.is_ok());
  CHECK(second.rows(0) == std::vector<float>(kCount * table.dim, 2.0f));
  CHECK(!second.memory[0]->is_abandoned());

  PlacedPull third;
  third.add(*client, table, ids_from(0, kCount));  // the answer has come, so that its memory is free
  Status of_third;
  asks = std::thread([&] { of_third = third.run(*client, {table}, milliseconds(30'000)); });
  const FrameHeader last = shard.read();
  CHECK(shard.rows[0] == late);

  // The client leaves a connection on which the shard may still write. The request waits for its end.
  client->show(nullptr, "other");  // renews
  std::this_thread::sleep_for(milliseconds(100));
  CHECK(!shard.has_caller());
  shard.place_rows(last, table, kCount, shard.rows[0], 3.0f);
  shard.end();
  shard.accept();
  const FrameHeader again = shard.read();
  CHECK(shard.rows[0] == late);
  shard.place_rows(again, table, kCount, shard.rows[0], 4.0f);
  asks.join();
  CHECK(of_third.is_ok());
  CHECK(third.rows(0) == std::vector<float>(kCount * table.dim, 4.0f));

  // It waits no longer than its deadline, and its memory stays away from later calls, which do not wait.
  Status of_fourth;
  PlacedPull fourth;
  fourth.add(*client, table, ids_from(0, kCount));
  asks = std::thread([&] { of_fourth = fourth.run(*client, {table}, milliseconds(500)); });
  static_cast<void>(shard.read());
  const std::uint64_t kept = shard.rows[0];
  client->show(nullptr, "another");
  asks.join();
  CHECK(of_fourth.code() == Code::kUnavailable);
  CHECK(of_fourth.message().find("may still write") != std::string::npos);
  CHECK(fourth.memory[0]->is_abandoned());
  fourth = {};
  Status of_fifth;
  PlacedPull fifth;
  fifth.add(*client, table, ids_from(0, kCount));
  const auto left = shard.leave();  // it does not end
  asks = std::thread([&] { of_fifth = fifth.run(*client, {table}, milliseconds(30'000)); });
  shard.accept();
  const FrameHeader newest = shard.read();
  CHECK(shard.rows[0] != kept);
  shard.place_rows(newest, table, kCount, shard.rows[0], 5.0f);
  asks.join();
  CHECK(of_fifth.is_ok());
  CHECK(fifth.rows(0) == std::vector<float>(kCount * table.dim, 5.0f));
}

namespace {

// Gradients in memory of make_rows(), or in other memory.
struct PlacedPush {
  std::vector<Grouped> keys;
  std::vector<std::shared_ptr<RowMemory>> memory;
  std::vector<TablePush> pushes;

  void add(Client& client, const TableSchema& table, std::size_t n, std::uint64_t first, std::mt19937& random) {
    keys.emplace_back(client, table.id, ids_from(first, n));
    memory.push_back(client.make_rows(n * table.dim));
    for (std::size_t i = 0; i < n * table.dim; ++i)
      memory.back()->data()[i] = static_cast<float>(random() % 100) / 7.0f;
  }
  std::span<const TablePush> of(const std::vector<TableSchema>& tables) {
    pushes.clear();
    for (std::size_t i = 0; i < keys.size(); ++i) {
      pushes.push_back(keys[i].push(tables[i], memory[i]->data(), 0.5f));
      pushes.back().memory = memory[i];
    }
    return pushes;
  }
};

}  // namespace

TEST_CASE("gradients that the shard reads where they are give the rows of those by TCP") {
  LocalShard one, other;
  const auto by_memory = one.connect(16 * kBytes), by_tcp = other.connect_by_tcp();
  const std::vector<TableSchema> tables{one.wide, one.narrow, one.narrow};
  std::uint64_t sequence = 1;
  std::int64_t step = 0;
  for (const std::size_t n : {3u, 1'001u, 20'001u}) {
    for (const int way : {0, 1, 2}) {
      Status of_both[2];
      std::uint64_t socket = one.cluster.servers[0]->stats().bytes_received;
      for (const bool is_placed : {true, false}) {
        std::mt19937 random(7 + static_cast<unsigned>(n) + static_cast<unsigned>(way));
        Client& client = is_placed ? *by_memory : *by_tcp;
        PlacedPush push;
        push.add(client, tables[0], n, 1, random);
        push.add(client, tables[1], n, 1, random);
        push.add(client, tables[2], 400, 5'000'000, random);  // too few to be placed
        const auto pushes = push.of(tables);
        const CommitOptions options{.sequence = sequence, .step = step};
        Status& status = of_both[is_placed ? 0 : 1];
        if (way == 0) {
          status = client.commit(pushes, options);
        } else if (way == 1) {
          status = client.prepare(pushes, options);
          for (const auto& memory : push.memory) std::fill_n(memory->data(), memory->size(), 1e30f);  // it has them
          if (status.is_ok()) status = client.commit_prepared(options);
        } else {
          status = client.assign(pushes, {});
        }
        INFO(status.message());
        CHECK(status.is_ok());
        for (const auto& memory : push.memory) CHECK(!memory->is_abandoned());
      }
      if (way != 2) {
        ++sequence;
        ++step;
      }
      socket = one.cluster.servers[0]->stats().bytes_received - socket;
      CHECK(socket < n * 2 * sizeof(std::uint64_t) + 400 * 20 +
                         (n < 1000     ? n * 51 * 4
                          : n < 10'000 ? n * 3 * 4
                                       : 0) +
                         2000);
      for (const TableSchema& table : {one.wide, one.narrow}) {
        const Pulled expected = testing::pull(*by_tcp, table, ids_from(1, n));
        CHECK(testing::pull(*by_memory, table, ids_from(1, n)).rows == expected.rows);
      }
    }
  }
}

TEST_CASE("a refused push by memory leaves its memory to the client, and says what frames say") {
  LocalShard shard;
  const auto client = shard.connect(16 * kBytes);
  std::mt19937 random(1);
  TableSchema unknown = LocalShard::random_table("test/unknown", 48);
  PlacedPush push;
  push.add(*client, unknown, 1'000, 1, random);
  const Status refused = client->assign(push.of({unknown}), {});
  CHECK(refused.code() == Code::kNotFound);
  PlacedPush infinite;
  infinite.add(*client, shard.wide, 1'000, 1, random);
  infinite.memory[0]->data()[4'000] = std::numeric_limits<float>::infinity();
  const Status not_finite = client->assign(infinite.of({shard.wide}), {});
  CHECK(not_finite.code() == Code::kInvalidArgument);
  CHECK(not_finite.message().find("NaN or infinite") != std::string::npos);
  CHECK(!infinite.memory[0]->is_abandoned());
}

TEST_CASE("places of gradients that are none are refused by name, and the connection ends") {
  LocalShard shard;
  const FileDescriptor passed = memory(kBytes, F_SEAL_SHRINK | F_SEAL_GROW);
  struct Wrong {
    std::vector<std::uint64_t> offsets;
    Dtype dtype = Dtype::kFloat32;
    std::uint8_t flags = kTablePlaced;
    std::uint32_t said = 0;
  };
  for (const Wrong& wrong :
       {Wrong{{0, 64}}, Wrong{{2}}, Wrong{{kBytes - 64}}, Wrong{{UINT64_MAX - 3}}, Wrong{{0}, Dtype::kFloat16},
        Wrong{{0}, Dtype::kFloat32, 0}, Wrong{{kNotPlaced}}, Wrong{{0}, Dtype::kFloat32, kTablePlaced, 11},
        Wrong{{0}, Dtype::kFloat32, kTablePlaced, UINT32_MAX}}) {
    PassingPeer peer(shard.name());
    CHECK(peer.greet(shard.cluster.cluster_id, kBytes, std::array{passed.get()}).type == kAck);
    peer.push_placed(shard.wide, 10, wrong.offsets, wrong.dtype, wrong.flags, wrong.said);
    CHECK(peer.read().type == kRefused);
    CHECK((peer.refusal().starts_with("lane_rows") || peer.refusal().starts_with("table.")));
    CHECK(peer.read().type == 0);
  }
  PassingPeer without(shard.name());
  CHECK(without.greet(shard.cluster.cluster_id, kBytes, {}).type == kAck);
  without.push_placed(shard.wide, 10, {0});
  CHECK(without.read().type == kRefused);
  CHECK(shard.cluster.servers[0]->stats().rows_written == 0);
  PassingPeer peer(shard.name());
  CHECK(peer.greet(shard.cluster.cluster_id, kBytes, std::array{passed.get()}).type == kAck);
  peer.push_placed(shard.wide, 10, {4096});
  CHECK(peer.read().type == static_cast<std::uint16_t>(FrameType::kAck));
  CHECK(shard.cluster.servers[0]->stats().rows_written == 10);
}

TEST_CASE("gradients of a push that was given up are not changed by anybody, and go as a frame to who has no memory") {
  const TableSchema table = LocalShard::random_table("test/wide", 48);
  ScriptedShard shard;
  const auto client = client_of(shard);
  Status status;
  std::thread asks([&] { status = client->touch(milliseconds(20'000)); });
  shard.accept();
  shard.pong(shard.read());
  asks.join();
  std::mt19937 random(3);
  PlacedPush push;
  push.add(*client, table, 1'000, 1, random);
  const std::vector<float> sent(push.memory[0]->data(), push.memory[0]->data() + push.memory[0]->size());
  asks = std::thread([&] { status = client->assign(push.of({table}), {.deadline = milliseconds(300)}); });
  FrameHeader header = shard.read();
  CHECK(shard.rows.size() == 1);
  CHECK(header.body_bytes < 1'000 * 8 + 300);
  CHECK(std::memcmp(shard.lane->bytes().data() + shard.rows[0], sent.data(), sent.size() * sizeof(float)) == 0);
  asks.join();
  CHECK(status.code() == Code::kDeadlineExceeded);
  CHECK(push.memory[0]->is_abandoned());

  // The same push again: by the connection that the shard has left it is a frame, whole.
  PlacedPush again;
  again.add(*client, table, 1'000, 1, random);
  const std::vector<float> whole(again.memory[0]->data(), again.memory[0]->data() + again.memory[0]->size());
  asks = std::thread([&] { status = client->assign(again.of({table}), {.deadline = milliseconds(30'000)}); });
  header = shard.read();
  CHECK(shard.rows[0] != kNotPlaced);
  shard.end();
  shard.rows.clear();
  shard.accept(/*has_lane=*/false);
  header = shard.read();
  CHECK(shard.rows.empty());
  REQUIRE(header.body_bytes == sizeof(TableHead) + 1'000 * 8 + whole.size() * sizeof(float));
  CHECK(std::memcmp(shard.body.data() + sizeof(TableHead) + 1'000 * 8, whole.data(), whole.size() * sizeof(float)) ==
        0);
  shard.acknowledge(header);
  asks.join();
  INFO(status.message());
  CHECK(status.is_ok());
}

TEST_CASE("a reply in memory that was not passed is none") {
  const TableSchema table = LocalShard::random_table("test/wide", 48);
  ScriptedShard shard;
  const auto client = client_of(shard, /*lane_bytes=*/0);
  PlacedPull pull;
  pull.add(*client, table, ids_from(0, 1000));
  Status status;
  std::thread asks([&] { status = pull.run(*client, {table}); });
  shard.accept(/*has_lane=*/false);
  FrameHeader header;
  header.type = kRows;
  header.flags = kFrameInLane;
  header.request_id = shard.read().request_id;
  header.body_bytes = 64;
  header.section_count = 1;
  shard.answer_with(header);
  asks.join();
  CHECK(status.code() == Code::kDataLoss);
}

TEST_CASE("a shard shows the end of a connection after its last write") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 random(seed);
  constexpr std::uint32_t kCount = 150'000;
  constexpr std::uint64_t kLarge = 32u << 20;
  for (int round = 0; round < 12; ++round) {
    LocalShard shard;
    const FileDescriptor passed = memory(kLarge, F_SEAL_SHRINK | F_SEAL_GROW);
    const auto mine = take(LaneRegion::map(FileDescriptor(::dup(passed.get())), kLarge));
    PassingPeer peer(shard.name());
    REQUIRE(peer.greet(shard.cluster.cluster_id, kLarge, std::array{passed.get()}).type == kAck);
    peer.ask_placed(shard.wide, kCount, {0});
    std::thread stops([&, pause = std::chrono::microseconds(random() % 20'000)] {
      std::this_thread::sleep_for(pause);
      shard.cluster.servers[0]->stop();
    });
    while (peer.read().type != 0) {
    }
    const std::vector<std::byte> seen(mine->bytes().begin(), mine->bytes().end());
    stops.join();
    CHECK(std::memcmp(seen.data(), mine->bytes().data(), seen.size()) == 0);
  }
}

TEST_CASE("a step leaves memory that may be written late, with its rows") {
  class Abandoning final : public RowReader {
   public:
    std::vector<std::uint16_t> slots = std::vector<std::uint16_t>(16, 0);
    std::shared_ptr<RowMemory> newest;
    std::uint32_t shard_count() const noexcept override { return 1; }
    std::span<const std::uint16_t> slot_owner() const noexcept override { return slots; }
    std::shared_ptr<RowMemory> make_rows(std::size_t floats) override {
      newest = RowMemory::on_heap(floats);
      return newest;
    }
    Status pull(std::span<const TablePull>, const CallOptions&) override { return Status::ok(); }
  };
  Abandoning shards;
  Partitioner partitioner(shards.slots, 1);
  TableStep step("t", 1, 1, 2, shards);
  const std::vector<std::int64_t> first{1, 2, 3}, second{4, 5};
  const auto add = [&](const std::vector<std::int64_t>& ids) {
    const IdsRef wanted{ids, {ids.data(), {}, {}, 8}};
    step.add({&wanted, 1}, partitioner);
    std::vector<TablePull> pulls;
    step.pending(pulls);
    REQUIRE(pulls.size() == 1);
    return pulls[0];
  };
  TablePull pull = add(first);
  std::fill(pull.rows.begin(), pull.rows.end(), 1.0f);
  step.confirm();
  pull = {};
  std::shared_ptr<RowMemory> late = add(second).memory;
  late->abandon();
  step.rollback();
  pull = add(second);
  CHECK(pull.memory != late);
  std::fill_n(late->data(), late->size(), 99.0f);  // the late write
  std::fill(pull.rows.begin(), pull.rows.end(), 2.0f);
  step.confirm();
  const IdsRef ids{first, {first.data(), {}, {}, 8}}, more{second, {second.data(), {}, {}, 8}};
  const auto known = step.known(ids), fresh = step.known(more);
  REQUIRE(known.has_value());
  REQUIRE(fresh.has_value());
  for (std::size_t i = 0; i < 3; ++i) CHECK(known->row(i)[0] == 1.0f);
  for (std::size_t i = 0; i < 2; ++i) CHECK(fresh->row(i)[1] == 2.0f);
}
