// Replies that are written into memory which client and shard share: the memory itself, its places, and what crosses.
#include "rpc/transport/lane.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "knock.h"
#include "rpc/transport/local_socket.h"
#include "rpc_fixture.h"
#include "temporary_folder.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;

namespace {

constexpr std::uint64_t kBytes = 1u << 20;

FileDescriptor memory(std::uint64_t bytes, int seals) {
  FileDescriptor made(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(made.get(), static_cast<off_t>(bytes)) == 0);
  REQUIRE(::fcntl(made.get(), F_ADD_SEALS, seals) == 0);
  return made;
}

std::size_t open_descriptors() {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++n;
  return n;
}

// One shard that listens at its local socket too.
struct LocalShard {
  TableSchema wide;
  TableSchema narrow;
  Cluster cluster;

  explicit LocalShard(ServerOptions options = {})
      : wide(random_table("test/wide", 48)),
        narrow(random_table("test/narrow", 3)),
        cluster(1, {wide, narrow}, local(options)) {}

  static TableSchema random_table(const std::string& name, std::uint32_t dim) {
    TableSchema schema = sgd_table(name, dim);
    schema.init = {InitKind::kUniform, -1.0f, 1.0f};
    return schema;
  }
  static ServerOptions local(ServerOptions options) {
    options.is_local = true;
    return options;
  }
  [[nodiscard]] std::string name() const {
    return local_socket_name(cluster.cluster_id, 0, cluster.servers[0]->port());
  }
  [[nodiscard]] std::shared_ptr<Client> connect(std::uint64_t lane_bytes = kBytes, Dtype dtype = Dtype::kFloat32,
                                                bool crc = false) const {
    ClientOptions options = cluster.client_options();
    options.lane_bytes = lane_bytes;
    options.wire_dtype = dtype;
    options.frame_crc = crc;
    return take(Client::connect(options));
  }
  [[nodiscard]] std::shared_ptr<Client> connect_by_tcp(Dtype dtype = Dtype::kFloat32) const {
    ClientOptions options = cluster.client_options();
    options.transport = Transport::kTcp;
    options.wire_dtype = dtype;
    return take(Client::connect(options));
  }
};

struct Pulled {
  std::vector<float> rows;
  std::vector<std::uint64_t> versions;
  std::vector<std::uint8_t> found;
  bool operator==(const Pulled&) const = default;
};

Pulled pull(Client& client, const TableSchema& table, const std::vector<std::uint64_t>& ids) {
  const Grouped keys(client, table.id, ids);
  Pulled out{std::vector<float>(keys.size() * table.dim), std::vector<std::uint64_t>(keys.size()),
             std::vector<std::uint8_t>(keys.size())};
  TablePull wanted = keys.pull(table, out.rows.data());
  wanted.versions = out.versions;
  wanted.found = out.found;
  const Status status = client.pull({&wanted, 1}, {.step = kNoStep});
  INFO(status.message());
  REQUIRE(status.is_ok());
  return out;
}

std::vector<std::uint64_t> ids_from(std::uint64_t first, std::size_t n) {
  std::vector<std::uint64_t> ids(n);
  for (std::size_t i = 0; i < n; ++i) ids[i] = first + i * 7;
  return ids;
}

// A peer of a local socket that passes what it likes with its HELLO.
class PassingPeer {
 public:
  explicit PassingPeer(const std::string& name) : fd_(knock(name)) { REQUIRE(fd_.is_open()); }

  // The reply to a HELLO that says that `bytes` of memory come with it.
  FrameHeader greet(std::uint64_t cluster_id, std::uint64_t bytes, std::span<const int> descriptors,
                    std::uint32_t version = kLaneVersion) {
    HelloPayload hello;
    hello.cluster_id = cluster_id;
    hello.features = kFeatureLane;
    hello.hash_version = kHashVersion;
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kHello);
    const LanePayload lane{.version = version, .bytes = bytes};
    const auto frame =
        with_section(small_frame(header, SectionKind::kHello, bytes_of(hello), {}), SectionKind::kLane, bytes_of(lane));
    send(frame, descriptors);
    return read();
  }
  void send(std::span<const std::byte> frame, std::span<const int> descriptors = {}) {
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * 8)> control{};
    iovec piece{const_cast<std::byte*>(frame.data()), frame.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    if (!descriptors.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
      cmsghdr* const passed = CMSG_FIRSTHDR(&message);
      *passed = {.cmsg_len = CMSG_LEN(descriptors.size_bytes()), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
      std::memcpy(CMSG_DATA(passed), descriptors.data(), descriptors.size_bytes());
    }
    REQUIRE(::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(frame.size()));
  }
  // The next frame's header; type 0 at the end of the stream.
  FrameHeader read() {
    FrameHeader header;
    if (::recv(fd_.get(), &header, sizeof header, MSG_WAITALL) != static_cast<ssize_t>(sizeof header)) return {};
    const bool in_lane = (header.flags & kFrameInLane) != 0;
    body.resize(in_lane ? 0 : header.body_bytes);
    if (!body.empty()) REQUIRE(::recv(fd_.get(), body.data(), body.size(), MSG_WAITALL) > 0);
    return header;
  }
  [[nodiscard]] std::uint64_t features() const {
    SectionReader sections(body, 1);
    return parse_hello(sections.next().value()->payload).value().features;
  }
  [[nodiscard]] std::string refusal() const {
    SectionReader sections(body, 1);
    return parse_error(sections.next().value()->payload).message();
  }
  // A PULL of n keys of a table that names a place.
  void ask(const TableSchema& table, std::uint32_t n, LanePlacePayload place) {
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kPull);
    header.route_epoch = 1;
    TableDescriptor descriptor{.table_id = table.id, .schema_version = table.version, .dim = table.dim, .n = n};
    std::vector<std::byte> payload(sizeof descriptor + n * 8);
    std::memcpy(payload.data(), &descriptor, sizeof descriptor);
    const auto keys = ids_from(0, n);
    std::memcpy(payload.data() + sizeof descriptor, keys.data(), n * 8);
    const auto frame = small_frame(header, SectionKind::kTableKeys, payload, {});
    send(with_section(frame, SectionKind::kLanePlace, bytes_of(place)));
  }

  std::vector<std::byte> body;

 private:
  FileDescriptor fd_;
};

// A shard of one connection that answers when the test says, and what the test says.
class ScriptedShard {
 public:
  explicit ScriptedShard(std::uint64_t cluster_id)
      : reserves_port_(take(listen_tcp("127.0.0.1", 0))),
        listener_(take(listen_local(local_socket_name(cluster_id, 0, port())))) {}
  [[nodiscard]] std::uint16_t port() const { return local_port(reserves_port_.get()); }

  // Takes a connection and its memory.
  void accept(std::uint64_t cluster_id) {
    int fd = -1;
    while (fd < 0) fd = ::accept(listener_.get(), nullptr, nullptr);  // NOLINT: the listener does not block
    stream_ = make_socket_stream(fd);
    stream_->expect_descriptor();
    const auto hello = read();
    REQUIRE(hello.type == static_cast<std::uint16_t>(FrameType::kHello));
    lane = take(LaneRegion::map(stream_->take_descriptor(), kBytes));
    HelloPayload mine;
    mine.cluster_id = cluster_id;
    mine.features = kFeatures | kFeatureLane;
    mine.hash_version = kHashVersion;
    mine.slot_count = kSlots;
    mine.max_frame_bytes = 1u << 30;
    FrameHeader header;
    header.type = kAckOfHello;
    write(small_frame(header, SectionKind::kHello, bytes_of(mine), {}));
  }
  // The next request; `place` is what it names.
  FrameHeader read() {
    FrameHeader header;
    read_exact(std::as_writable_bytes(std::span(&header, 1)));
    body.resize(header.body_bytes);
    read_exact(body);
    SectionReader sections(body, header.section_count);
    while (const auto section = take(sections.next())) {
      if (section->kind == SectionKind::kLanePlace) place = take(parse_lane_place(section->payload));
    }
    return header;
  }
  // Answers a request of `n` rows of a table with `value` in each, at a place.
  void answer(const FrameHeader& asked, const TableSchema& table, std::uint32_t n, const LanePlacePayload& at,
              float value, std::uint64_t more_bytes = 0) {
    TableHead head;
    head.descriptor = {.table_id = table.id, .schema_version = table.version, .dim = table.dim, .n = n};
    head.section.kind = static_cast<std::uint16_t>(SectionKind::kTableRows);
    head.section.payload_bytes = rows_section_bytes(head.descriptor) - sizeof head.section;
    std::byte* const to = lane->bytes().data() + at.offset;
    std::memcpy(to, &head, sizeof head);
    const std::vector<float> rows(std::size_t{n} * table.dim, value);
    std::memcpy(to + sizeof head, rows.data(), rows.size() * sizeof(float));
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kRows);
    header.flags = kFrameInLane;
    header.request_id = asked.request_id;
    header.section_count = 1;
    header.body_bytes = static_cast<std::uint32_t>(rows_section_bytes(head.descriptor) + more_bytes);
    write(std::as_bytes(std::span(&header, 1)));
  }

  std::unique_ptr<LaneRegion> lane;
  LanePlacePayload place;
  std::vector<std::byte> body;

 private:
  static constexpr auto kAckOfHello = static_cast<std::uint16_t>(FrameType::kHelloAck);

  void read_exact(std::span<std::byte> into) {
    while (!into.empty()) {
      const iovec piece{into.data(), into.size()};
      const Transfer moved = stream_->try_read(std::span(&piece, 1));
      REQUIRE(!moved.ended());
      into = into.subspan(moved.bytes);
    }
  }
  void write(std::span<const std::byte> bytes) {
    const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
    REQUIRE(stream_->try_write(std::span(&piece, 1)).bytes == bytes.size());
  }

  FileDescriptor reserves_port_;
  FileDescriptor listener_;
  std::unique_ptr<Stream> stream_;
};

bool overlap(const LanePlacePayload& one, const LanePlacePayload& other) {
  return one.offset < other.offset + other.bytes && other.offset < one.offset + one.bytes;
}

constexpr auto kAck = static_cast<std::uint16_t>(FrameType::kHelloAck);
constexpr auto kRefused = static_cast<std::uint16_t>(FrameType::kError);
constexpr auto kRows = static_cast<std::uint16_t>(FrameType::kRows);

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
  ClientOptions options;
  ScriptedShard shard(options.cluster_id);
  options.shards = {{"127.0.0.1", shard.port()}};
  options.slot_owner = round_robin(1);
  options.lane_bytes = kBytes;
  options.is_lazy = true;
  const auto client = take(Client::connect(options));
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
  shard.accept(options.cluster_id);
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
    if (more == 8) shard.accept(options.cluster_id);
    const FrameHeader asked = shard.read();
    shard.answer(asked, table, kRowCount, shard.place, 5.0f, more);
    asks.join();
    CHECK(of_third.code() == Code::kDataLoss);
  }
}
