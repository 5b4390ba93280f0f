// Replies that are written into memory which client and shard share: the memory itself, its places, and what crosses.
#include "rpc/transport/lane.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <array>
#include <filesystem>
#include <random>
#include <thread>

#include "lane_peers.h"
#include "temporary_folder.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;

namespace {

std::size_t open_descriptors() {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++n;
  return n;
}

}  // namespace

TEST_CASE("places never overlap, and all of the memory is free again at the end") {
  for (const std::uint32_t seed : {1u, 2u, 3u}) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    std::vector<std::byte> region(64 * LanePlaces::kAlignment);
    LanePlaces places(region);
    std::vector<LanePlaces::Place> taken;
    std::vector<int> owners(region.size() / LanePlaces::kAlignment, 0);
    const auto mark = [&owners](const LanePlaces::Place& place, int from, int to) {
      for (std::uint64_t at = place.offset; at < place.offset + place.bytes; at += LanePlaces::kAlignment) {
        REQUIRE(std::exchange(owners.at(at / LanePlaces::kAlignment), to) == from);
      }
    };
    for (int i = 0; i < 3000; ++i) {
      if (random() % 2 == 0 || taken.empty()) {
        const std::uint64_t wanted = random() % (region.size() / 4);
        const auto place = places.take(wanted);
        const auto longest = [&owners] {
          std::uint64_t most = 0, run = 0;
          for (const int owner : owners) most = std::max(most, run = owner == 0 ? run + LanePlaces::kAlignment : 0);
          return most;
        };
        REQUIRE(place.has_value() == (longest() >= std::max<std::uint64_t>(wanted, 1)));
        if (!place) continue;
        REQUIRE(place->bytes >= wanted);
        mark(*place, 0, 1);
        taken.push_back(*place);
      } else {
        std::swap(taken[random() % taken.size()], taken.back());
        mark(taken.back(), 1, 0);
        places.give_back(taken.back());
        taken.pop_back();
      }
    }
    for (const auto& place : taken) places.give_back(place);
    CHECK(places.taken() == 0);
    CHECK(places.take(region.size()).has_value());
    CHECK(!places.take(UINT64_MAX).has_value());
  }
}

TEST_CASE("memory that is mapped twice is the same, and cannot be made smaller") {
  const auto mine = take(LaneRegion::make(kBytes));
  const auto theirs = take(LaneRegion::map(FileDescriptor(::dup(mine->descriptor())), kBytes));
  theirs->bytes()[12345] = std::byte{7};
  CHECK(mine->bytes()[12345] == std::byte{7});
  CHECK(::ftruncate(mine->descriptor(), 4096) != 0);
  CHECK(::ftruncate(mine->descriptor(), 2 * kBytes) != 0);
}

TEST_CASE("what is no sealed memory of the size that was said is refused by name") {
  const auto refused = [](FileDescriptor descriptor, std::uint64_t bytes) {
    const auto mapped = LaneRegion::map(std::move(descriptor), bytes);
    CHECK(mapped.status().code() == Code::kInvalidArgument);
    return mapped.status().message();
  };
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  CHECK(refused(FileDescriptor(::open("/dev/null", O_RDWR | O_CLOEXEC)), kBytes).starts_with("lane.descriptor"));
  CHECK(refused(FileDescriptor(), kBytes).starts_with("lane.descriptor"));
  const Folder folder;
  const FileDescriptor file(::open((folder.path() / "f").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  REQUIRE(::ftruncate(file.get(), kBytes) == 0);
  CHECK(refused(FileDescriptor(::dup(file.get())), kBytes).starts_with("lane.descriptor"));
  CHECK(refused(memory(kBytes, 0), kBytes).find("sealed") != std::string::npos);
  CHECK(refused(memory(kBytes, F_SEAL_GROW), kBytes).find("sealed") != std::string::npos);
  CHECK(refused(memory(kBytes / 2, seals), kBytes).starts_with("lane.bytes"));
  CHECK(refused(memory(kBytes, seals), 0).starts_with("lane.bytes"));
  CHECK(refused(memory(kBytes, seals), kBytes + 8).starts_with("lane.bytes"));
  CHECK(refused(memory(kBytes, seals), 2 * LaneRegion::kMostBytes).starts_with("lane.bytes"));
  CHECK(LaneRegion::map(memory(kBytes, seals), kBytes).is_ok());
}

TEST_CASE("rows by memory are those by the socket, of every dtype, table and size") {
  LocalShard shard;
  const auto written = ids_from(0, 900);
  {
    const auto writer = shard.connect();
    const Grouped keys(*writer, shard.wide.id, written);
    const std::vector<float> values(keys.size() * shard.wide.dim, 0.25f);
    const TablePush push = keys.push(shard.wide, values.data(), 1.0f);
    REQUIRE(writer->assign({&push, 1}, {}).is_ok());
  }
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16}) {
    const auto by_memory = shard.connect(kBytes * 8, dtype);
    const auto by_socket = shard.connect_by_tcp(dtype);
    for (const std::size_t n : {1u, 200u, 3000u, 20000u}) {
      for (const TableSchema& table : {shard.wide, shard.narrow}) {
        CHECK(pull(*by_memory, table, ids_from(3, n)) == pull(*by_socket, table, ids_from(3, n)));
        CHECK(pull(*by_memory, table, written) == pull(*by_socket, table, written));
      }
    }
    CHECK(by_memory->stats().lane_replies >= 6);
    CHECK(by_memory->stats().lane_full == 0);
    CHECK(by_memory->stats().bytes_received < by_socket->stats().bytes_received / 8);
    CHECK(by_socket->stats().lane_replies == 0);
  }
}

TEST_CASE("a pull of rows that have changed answers by memory with those alone") {
  LocalShard shard;
  const auto client = shard.connect();
  const auto ids = ids_from(0, 2000);
  Pulled before = pull(*client, shard.wide, ids);
  const std::vector<std::uint64_t> some(ids.begin(), ids.begin() + 300);
  const Grouped keys(*client, shard.wide.id, some);
  const std::vector<float> values(keys.size() * shard.wide.dim, 0.5f);
  const TablePush push = keys.push(shard.wide, values.data(), 1.0f);
  REQUIRE(client->assign({&push, 1}, {}).is_ok());

  const Grouped all(*client, shard.wide.id, ids);
  std::vector<std::uint64_t> known = before.versions;
  std::vector<std::uint8_t> changed(ids.size());
  TablePull wanted = all.pull(shard.wide, before.rows.data());
  wanted.versions = before.versions;
  wanted.known = known;
  wanted.changed = changed;
  const std::uint64_t replies = client->stats().lane_replies;
  REQUIRE(client->pull({&wanted, 1}, {.step = kNoStep}).is_ok());
  CHECK(client->stats().lane_replies == replies + 1);
  CHECK(std::count(changed.begin(), changed.end(), 1) == 300);
  Pulled now = pull(*client, shard.wide, ids);
  CHECK(now.rows == before.rows);
  CHECK(now.versions == before.versions);
}

TEST_CASE("a reply that has no place comes through the socket, and so do replies with a checksum") {
  LocalShard shard;
  const auto expected = pull(*shard.connect_by_tcp(), shard.wide, ids_from(0, 5000));
  const auto small = shard.connect(64u << 10);
  CHECK(pull(*small, shard.wide, ids_from(0, 5000)) == expected);
  CHECK(small->stats().lane_full == 1);
  CHECK(small->stats().lane_replies == 0);
  const auto checked = shard.connect(kBytes * 2, Dtype::kFloat32, /*crc=*/true);
  CHECK(pull(*checked, shard.wide, ids_from(0, 5000)) == expected);
  CHECK(checked->stats().lane_replies + checked->stats().lane_full == 0);
  const auto without = shard.connect(0);
  CHECK(pull(*without, shard.wide, ids_from(0, 5000)) == expected);
  CHECK(without->stats().lane_replies + without->stats().lane_full == 0);
}

TEST_CASE("memory that no lane may have is refused before a connection is made") {
  for (const std::uint64_t bytes : {std::uint64_t{100}, LaneRegion::kMostBytes + LaneRegion::kUnit}) {
    ClientOptions options;
    options.shards = {{"127.0.0.1", 9}};
    options.slot_owner = round_robin(1);
    options.lane_bytes = bytes;
    const auto client = Client::connect(options);
    CHECK(client.status().code() == Code::kInvalidArgument);
    CHECK(client.status().message().starts_with("lane_bytes: "));
  }
}

TEST_CASE("a shard maps no more memory than its budget, and none that a connection has left") {
  ServerOptions options;
  options.lane_budget_bytes = 2 * kBytes;
  LocalShard shard(options);
  const auto mapped = [&shard] { return shard.cluster.servers[0]->stats().lane_bytes; };
  const auto first = shard.connect();
  auto second = shard.connect();
  const auto third = shard.connect();
  CHECK(mapped() == 2 * kBytes);
  const auto expected = pull(*first, shard.wide, ids_from(0, 3000));
  CHECK(pull(*third, shard.wide, ids_from(0, 3000)) == expected);
  CHECK(first->stats().lane_replies == 1);
  CHECK(third->stats().lane_replies == 0);
  second.reset();
  for (int i = 0; i < 1000 && mapped() != kBytes; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(mapped() == kBytes);
  const auto fourth = shard.connect();
  CHECK(pull(*fourth, shard.wide, ids_from(0, 3000)) == expected);
  CHECK(fourth->stats().lane_replies == 1);
}

TEST_CASE("many callers of one connection, and many connections, get their own rows") {
  LocalShard shard;
  const auto by_socket = shard.connect_by_tcp();
  std::vector<Pulled> expected;
  for (std::uint64_t i = 0; i < 8; ++i) expected.push_back(pull(*by_socket, shard.wide, ids_from(i * 100'000, 700)));
  const auto shared = shard.connect(kBytes / 2);
  std::vector<std::shared_ptr<Client>> clients(4, shared);
  for (int i = 0; i < 96; ++i) clients.push_back(shard.connect(kBytes / 4));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = t; i < clients.size() * 2; i += 8) {
        Client& client = *clients[i % clients.size()];
        const Grouped keys(client, shard.wide.id, ids_from(t * 100'000, 700));
        std::vector<float> rows(keys.size() * shard.wide.dim);
        const TablePull wanted = keys.pull(shard.wide, rows.data());
        if (!client.pull({&wanted, 1}, {.step = kNoStep}).is_ok() || rows != expected[t].rows) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(shared->stats().lane_replies + shared->stats().lane_full == 8);
  CHECK(clients.back()->stats().lane_replies == 2);
}

TEST_CASE("what a peer passes with HELLO that is no lane is refused by name, and no descriptor stays open") {
  LocalShard shard;
  const auto id = shard.cluster.cluster_id;
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  const std::size_t before = open_descriptors();
  {
    const FileDescriptor null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    const FileDescriptor open_ended = memory(kBytes, 0);
    const FileDescriptor good = memory(kBytes, seals);
    const auto refusal = [&](int descriptor, std::uint64_t bytes) {
      PassingPeer peer(shard.name());
      CHECK(peer.greet(id, bytes, std::array{descriptor}).type == kRefused);
      return peer.refusal();
    };
    CHECK(refusal(null.get(), kBytes).starts_with("lane.descriptor"));
    CHECK(refusal(open_ended.get(), kBytes).starts_with("lane.descriptor"));
    CHECK(refusal(good.get(), kBytes * 2).starts_with("lane.bytes"));
    {  // said, and not passed; of another version; several at once, of which the first counts
      PassingPeer without(shard.name());
      CHECK(without.greet(id, kBytes, {}).type == kAck);
      CHECK((without.features() & kFeatureLane) == 0);
      without.ask(shard.wide, 10, {.offset = 0, .bytes = 4096});
      CHECK(without.read().type == kRefused);
      CHECK(without.refusal().starts_with("lane_place.bytes"));
      CHECK(without.read().type == 0);  // the grammar is broken: its connection has ended
      PassingPeer other(shard.name());
      CHECK(other.greet(id, kBytes, std::array{good.get()}, kLaneVersion + 1).type == kAck);
      CHECK((other.features() & kFeatureLane) == 0);
      PassingPeer many(shard.name());
      CHECK(many.greet(id, kBytes, std::array{good.get(), null.get(), open_ended.get()}).type == kAck);
      CHECK((many.features() & kFeatureLane) != 0);
      for (int i = 0; i < 20; ++i) {  // descriptors that come later are not kept
        FrameHeader ping;
        ping.type = static_cast<std::uint16_t>(FrameType::kPing);
        many.send(empty_frame(ping), std::array{null.get()});
        CHECK(many.read().type == static_cast<std::uint16_t>(FrameType::kPong));
      }
      CHECK(open_descriptors() <= before + 3 + 2 * 3);
    }
  }
  for (int i = 0; i < 2000 && open_descriptors() != before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("a place outside of the memory is refused, and one that is too small is not written") {
  LocalShard shard;
  const FileDescriptor passed = memory(kBytes, F_SEAL_SHRINK | F_SEAL_GROW);
  const auto mine = take(LaneRegion::map(FileDescriptor(::dup(passed.get())), kBytes));
  for (const LanePlacePayload& place :
       {LanePlacePayload{.offset = 8, .bytes = kBytes}, LanePlacePayload{.offset = UINT64_MAX - 7, .bytes = 64},
        LanePlacePayload{.offset = 64, .bytes = UINT64_MAX}, LanePlacePayload{.offset = 4, .bytes = 4096}}) {
    PassingPeer peer(shard.name());
    CHECK(peer.greet(shard.cluster.cluster_id, kBytes, std::array{passed.get()}).type == kAck);
    peer.ask(shard.wide, 10, place);
    CHECK(peer.read().type == kRefused);
    CHECK(peer.refusal().starts_with("lane_place."));
    CHECK(peer.read().type == 0);
  }
  PassingPeer peer(shard.name());
  CHECK(peer.greet(shard.cluster.cluster_id, kBytes, std::array{passed.get()}).type == kAck);
  peer.ask(shard.wide, 10, {.offset = 64, .bytes = 64});
  FrameHeader header = peer.read();
  CHECK(header.type == kRows);
  CHECK((header.flags & kFrameInLane) == 0);
  CHECK(std::all_of(mine->bytes().begin(), mine->bytes().end(), [](std::byte b) { return b == std::byte{0}; }));
  const std::uint64_t exact = sizeof(TableHead) + 10 * shard.wide.dim * sizeof(float);
  peer.ask(shard.wide, 10, {.offset = 4096, .bytes = exact});
  header = peer.read();
  CHECK((header.flags & kFrameInLane) != 0);
  CHECK(header.body_bytes == exact);
  const auto is_zero = [](std::span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
  };
  CHECK(is_zero(mine->bytes().first(4096)));
  CHECK(!is_zero(mine->bytes().subspan(4096, exact)));
  CHECK(is_zero(mine->bytes().subspan(4096 + exact)));
}

TEST_CASE("the place of a request that was given up is nobody's until its answer comes") {
  const TableSchema table = LocalShard::random_table("test/wide", 48);
  ScriptedShard shard;
  const auto client = client_of(shard);
  constexpr std::uint32_t kRowCount = 1000;
  const auto ask = [&](std::vector<float>& rows, std::chrono::milliseconds deadline, Status& status) {
    return std::thread([&rows, deadline, &status, &client, &table] {
      const Grouped keys(*client, table.id, ids_from(0, kRowCount));
      rows.assign(keys.size() * table.dim, 0.0f);
      const TablePull wanted = keys.pull(table, rows.data());
      status = client->pull({&wanted, 1}, {.deadline = deadline});
    });
  };
  std::vector<float> first, second, third;
  Status of_first, of_second, of_third;
  std::thread asks = ask(first, std::chrono::milliseconds(300), of_first);
  shard.accept();
  const FrameHeader given_up = shard.read();
  const LanePlacePayload late = shard.place;
  asks.join();
  CHECK(of_first.code() == Code::kDeadlineExceeded);

  asks = ask(second, std::chrono::milliseconds(60'000), of_second);
  const FrameHeader header = shard.read();
  const LanePlacePayload place = shard.place;
  CHECK(!overlap(late, place));
  shard.answer(header, table, kRowCount, place, 2.0f);
  asks.join();
  CHECK(of_second.is_ok());
  CHECK(second == std::vector<float>(second.size(), 2.0f));

  asks = ask(third, std::chrono::milliseconds(60'000), of_third);
  const FrameHeader next = shard.read();
  CHECK(!overlap(late, shard.place));
  shard.answer(given_up, table, kRowCount, late, 1.0f);  // now, while another request is under way
  shard.answer(next, table, kRowCount, shard.place, 3.0f);
  asks.join();
  CHECK(of_third.is_ok());
  CHECK(third == std::vector<float>(third.size(), 3.0f));
  CHECK(first == std::vector<float>(first.size(), 0.0f));

  asks = ask(third, std::chrono::milliseconds(60'000), of_third);
  const FrameHeader last = shard.read();
  CHECK(shard.place.offset == late.offset);  // its answer has come, so that it is free
  shard.answer(last, table, kRowCount, shard.place, 4.0f);
  asks.join();
  CHECK(of_third.is_ok());
  CHECK(third == std::vector<float>(third.size(), 4.0f));

  // An answer of more bytes than its place, and one that is no answer.
  for (const std::uint64_t more : {std::uint64_t{1} << 20, std::uint64_t{8}}) {
    asks = ask(third, std::chrono::milliseconds(60'000), of_third);
    if (more == 8) shard.accept();
    const FrameHeader asked = shard.read();
    shard.answer(asked, table, kRowCount, shard.place, 5.0f, more);
    asks.join();
    CHECK(of_third.code() == Code::kDataLoss);
  }
}
