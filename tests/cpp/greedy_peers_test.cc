// What a peer may hold of a shard: bytes that come in, replies that go out, connections, and pulls that wait. Each case
// has greedy peers with a token of their own, and an honest one that must not notice them.
#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include "raw_peer.h"
#include "rpc/server/access.h"
#include "rpc/wire/crc32c.h"
#include "rpc_fixture.h"

namespace sparserow {
namespace {

using namespace testing;
using namespace rpc;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint32_t kFrameBytes = 4u << 20;

struct Scene {
  TableSchema mine = sgd_table("honest/a", 64);
  TableSchema theirs = sgd_table("greedy/a", 64);
  Cluster cluster;

  explicit Scene(ServerOptions options = {}) : cluster(1, {mine, theirs}, with_tokens(std::move(options))) {}

  static ServerOptions with_tokens(ServerOptions options) {
    options.grants = {{.digest = digest_of("honest"), .role = Role::kTrain, .namespaces = {}},
                      {.digest = digest_of("greedy"), .role = Role::kTrain, .namespaces = {"greedy", "job"}}};
    return options;
  }
  [[nodiscard]] std::shared_ptr<Client> honest() const {
    auto options = cluster.client_options();
    options.token = "honest";
    return take(Client::connect(options));
  }
  [[nodiscard]] std::unique_ptr<RawPeer> greedy(std::uint64_t features = 0) const {
    auto peer = std::make_unique<RawPeer>(cluster.servers[0]->port());
    REQUIRE(peer->greet(cluster.cluster_id, "greedy", features));
    return peer;
  }
  [[nodiscard]] ServerStats stats() const { return cluster.servers[0]->stats(); }

  // Rows of the honest table come back whole and in time.
  void check_pull(Client& client, std::size_t n, milliseconds deadline) const {
    const Grouped keys(client, mine.id, iota(n));
    std::vector<float> rows(n * mine.dim, -1.0f);
    const auto pull = keys.pull(mine, rows.data());
    const Status status = client.pull(std::span(&pull, 1), {.deadline = deadline});
    INFO(status.message());
    CHECK(status.is_ok());
    CHECK(std::count(rows.begin(), rows.end(), 1.0f) == static_cast<std::ptrdiff_t>(rows.size()));
  }
  static std::vector<std::uint64_t> iota(std::size_t n) {
    std::vector<std::uint64_t> keys(n);
    for (std::size_t i = 0; i < n; ++i) keys[i] = i;
    return keys;
  }

  // A PULL of their table; what follows the header and the descriptor is sent by the caller.
  [[nodiscard]] std::vector<std::byte> pull_frame(std::size_t n, std::uint8_t table_flags = 0, std::uint8_t flags = 0,
                                                  const TableSchema* table = nullptr) const {
    const TableSchema& schema = table == nullptr ? theirs : *table;
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kPull);
    header.flags = flags;
    header.request_id = 7;
    header.route_epoch = 1;
    TableDescriptor descriptor;
    descriptor.table_id = schema.id;
    descriptor.schema_version = schema.version;
    descriptor.dim = schema.dim;
    descriptor.flags = table_flags;
    descriptor.n = static_cast<std::uint32_t>(n);
    std::vector<std::uint64_t> values = iota(n);
    if ((table_flags & kTableKnown) != 0) values.resize(2 * n, kNoVersion);
    auto frame = small_frame(header, SectionKind::kTableKeys, bytes_of(descriptor), std::as_bytes(std::span(values)));
    if ((flags & kFrameHasCrc) != 0) {
      const iovec body{frame.data() + sizeof header, frame.size() - sizeof header};
      std::memcpy(&header, frame.data(), sizeof header);
      seal_crc(header, std::span(&body, 1));
      std::memcpy(frame.data(), &header, sizeof header);
    }
    return frame;
  }
};

template <class Holds>
bool wait_until(Holds holds, milliseconds limit = milliseconds(20'000)) {
  const auto until = Clock::now() + limit;
  while (!holds()) {
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

// Whether the shard closes the connection in time.
bool is_closed(RawPeer& peer, int timeout_ms = 20'000) {
  FrameHeader header;
  std::vector<std::byte> body;
  pollfd readable{peer.fd(), POLLIN, 0};
  return ::poll(&readable, 1, timeout_ms) == 1 && !peer.read_frame(header, body, 0);
}

}  // namespace

TEST_CASE("bodies that are announced and do not come hold next to nothing") {
  ServerOptions options;
  options.max_frame_bytes = kFrameBytes;
  options.inflight_budget_bytes = 4ull * kFrameBytes;
  options.slow_timeout_ms = 600;
  const Scene scene(options);
  const auto honest = scene.honest();
  std::vector<std::unique_ptr<RawPeer>> peers;
  const auto frame = scene.pull_frame(500'000);
  for (int i = 0; i < 8; ++i) {
    peers.push_back(scene.greedy());
    REQUIRE(peers.back()->send(std::span(frame).first(312)));
  }
  REQUIRE(wait_until([&] { return scene.stats().inflight_bytes >= 8 * (64u << 10); }));
  CHECK(scene.stats().inflight_bytes == 8 * (64u << 10));
  for (int i = 0; i < 20; ++i) scene.check_pull(*honest, 15'000, milliseconds(2000));
  for (auto& peer : peers) CHECK(is_closed(*peer));
  CHECK(scene.stats().connections_too_slow == 8);
  CHECK(wait_until([&] { return scene.stats().inflight_bytes == 0; }));
}

TEST_CASE("bodies that come almost whole leave room for others, and are given up when others wait") {
  ServerOptions options;
  options.max_frame_bytes = kFrameBytes;
  options.inflight_budget_bytes = 4ull * kFrameBytes;
  const Scene scene(options);
  const auto honest = scene.honest();
  std::vector<std::unique_ptr<RawPeer>> peers;
  const auto frame = scene.pull_frame(500'000);
  for (int i = 0; i < 6; ++i) {
    peers.push_back(scene.greedy());
    // The shard stops reading where the budget ends; what it does not take stays here.
    const auto part = std::span(frame).first(frame.size() - 8);
    static_cast<void>(::send(peers.back()->fd(), part.data(), part.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
  }
  REQUIRE(wait_until([&] { return scene.stats().inflight_bytes > 4u << 20; }));
  for (int i = 0; i < 10; ++i) scene.check_pull(*honest, 15'000, milliseconds(10'000));
  CHECK(scene.stats().inflight_bytes <= options.inflight_budget_bytes);
}

TEST_CASE("a body is refused before it takes memory where its header or first table already tells") {
  ServerOptions options;
  options.max_frame_bytes = kFrameBytes;
  options.inflight_budget_bytes = kFrameBytes;
  const Scene scene(options);
  const auto peer = scene.greedy();
  const auto frame = scene.pull_frame(500'000, 0, 0, &scene.mine);
  REQUIRE(peer->send(std::span(frame).first(frame.size() / 2)));
  std::this_thread::sleep_for(milliseconds(100));
  CHECK(scene.stats().inflight_bytes == 0);
  REQUIRE(peer->send(std::span(frame).subspan(frame.size() / 2)));
  FrameHeader header;
  std::vector<std::byte> body;
  REQUIRE(peer->read_frame(header, body, 5000));
  SectionReader sections(body, header.section_count);
  const Status status = parse_error(sections.next().value()->payload);
  CHECK(status.code() == Code::kPermissionDenied);
  CHECK(status.message().find("namespace 'honest'") != std::string::npos);
}

TEST_CASE("HELLO has an absolute time, however its bytes trickle") {
  ServerOptions options;
  options.hello_timeout_ms = 600;
  const Scene scene(options);
  RawPeer peer(scene.cluster.servers[0]->port());
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kHello);
  header.body_bytes = 64;
  header.section_count = 1;
  std::vector<std::byte> bytes(128);
  std::memcpy(bytes.data(), &header, sizeof header);
  const auto began = Clock::now();
  std::size_t sent = 0;
  while (sent < bytes.size() && peer.send(std::span(bytes).subspan(sent, 1)) && !is_closed(peer, 100)) ++sent;
  CHECK(sent < bytes.size());
  CHECK(Clock::now() - began < milliseconds(5000));
}

TEST_CASE("silent connections take no seat, and a token with many seats leaves some to others") {
  ServerOptions options;
  options.max_connections = 8;
  options.hello_timeout_ms = 60'000;
  const Scene scene(options);
  std::vector<std::unique_ptr<RawPeer>> silent;
  for (int i = 0; i < 100; ++i) {
    silent.push_back(std::make_unique<RawPeer>(scene.cluster.servers[0]->port()));
  }
  REQUIRE(wait_until([&] { return scene.stats().connections_total >= 100; }));
  CHECK(wait_until([&] { return scene.stats().connections_open <= 65; }));
  std::vector<std::unique_ptr<RawPeer>> seated;
  for (int i = 0; i < 8; ++i) seated.push_back(scene.greedy());
  RawPeer ninth(scene.cluster.servers[0]->port());
  CHECK_FALSE(ninth.greet(scene.cluster.cluster_id, "greedy"));
  std::vector<std::shared_ptr<Client>> honest;
  for (int i = 0; i < 4; ++i) {
    honest.push_back(scene.honest());
    scene.check_pull(*honest.back(), 100, milliseconds(5000));
  }
  int closed = 0;
  for (auto& peer : seated) closed += is_closed(*peer, 10) ? 1 : 0;
  CHECK(closed == 4);
}

TEST_CASE("replies that are not taken are charged, sent in chunks, and leave room for others") {
  ServerOptions options;
  options.reply_budget_bytes = 64u << 20;
  options.stall_timeout_ms = 1000;
  const Scene scene(options);
  const auto honest = scene.honest();
  const std::size_t n = 200'000;  // 51 MB a reply
  std::vector<std::byte> frame;
  std::uint64_t features = kFeatureChecksumLast;
  std::uint64_t most = 6u << 20;  // bytes that a reply may hold
  SUBCASE("with a checksum") { frame = scene.pull_frame(n, 0, kFrameHasCrc); }
  SUBCASE("with known versions") { frame = scene.pull_frame(n, kTableKnown | kTableVersions); }
  SUBCASE("with both") { frame = scene.pull_frame(n, kTableKnown | kTableVersions | kTableFound, kFrameHasCrc); }
  SUBCASE("with a checksum first, for a client of the version before") {
    frame = scene.pull_frame(n, 0, kFrameHasCrc);
    features = 0;
    most = 52u << 20;
  }
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i < 4; ++i) {
    peers.push_back(scene.greedy(features));
    REQUIRE(peers.back()->send(frame));
  }
  REQUIRE(wait_until([&] { return scene.stats().reply_bytes > 0; }));
  for (int i = 0; i < 10; ++i) scene.check_pull(*honest, 15'000, milliseconds(10'000));
  CHECK(scene.stats().reply_bytes <= std::min<std::uint64_t>(4 * most, options.reply_budget_bytes));
  CHECK(wait_until([&] { return scene.stats().connections_too_slow == 4; }));
  CHECK(wait_until([&] { return scene.stats().reply_bytes == 0; }));
}

TEST_CASE("a checksum that stands last covers the header and every byte before it") {
  const Scene scene;
  const std::size_t n = 4001;
  for (const std::uint8_t table_flags : {0, kTableVersions | kTableFound, kTableKnown | kTableVersions | kTableFound}) {
    const auto peer = scene.greedy(kFeatureChecksumLast);
    REQUIRE(peer->send(scene.pull_frame(n, table_flags, kFrameHasCrc)));
    FrameHeader header;
    std::vector<std::byte> body;
    REQUIRE(peer->read_frame(header, body, 5000));
    REQUIRE(header.type == static_cast<std::uint16_t>(FrameType::kRows));
    CHECK(header.flags == kFrameCrcLast);
    CHECK(header.section_count == 2);
    SectionReader sections(body, header.section_count);
    const auto rows = sections.next();
    REQUIRE(rows.is_ok());
    const auto view = take(parse_table(SectionKind::kTableRows, rows.value()->payload));
    CHECK(view.descriptor.n == n);
    if ((table_flags & kTableKnown) != 0) CHECK(view.positions.back() == n - 1);
    const auto last = sections.next();
    REQUIRE(last.is_ok());
    REQUIRE(last.value()->kind == SectionKind::kChecksum);
    ChecksumPayload checksum;
    std::memcpy(&checksum, last.value()->payload.data(), sizeof checksum);
    const std::size_t covered = body.size() - sizeof(SectionHeader) - sizeof checksum;
    CHECK(checksum.crc32c == crc32c(crc32c(0, &header, sizeof header), body.data(), covered));
  }
}

TEST_CASE("a frame has a bounded number of sections") {
  const Scene scene;
  const auto peer = scene.greedy();
  TableDescriptor empty;
  empty.table_id = scene.theirs.id;
  empty.schema_version = scene.theirs.version;
  empty.dim = scene.theirs.dim;
  SectionHeader section;
  section.kind = static_cast<std::uint16_t>(SectionKind::kTableKeys);
  section.flags = kSectionRequired;
  section.payload_bytes = sizeof empty;
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kPull);
  header.route_epoch = 1;
  header.section_count = kMaxSections + 1;
  header.body_bytes = (kMaxSections + 1) * (sizeof section + sizeof empty);
  std::vector<std::byte> frame(sizeof header);
  std::memcpy(frame.data(), &header, sizeof header);
  for (std::uint32_t i = 0; i <= kMaxSections; ++i) {
    const auto head = bytes_of(section);
    const auto tail = bytes_of(empty);
    frame.insert(frame.end(), head.begin(), head.end());
    frame.insert(frame.end(), tail.begin(), tail.end());
  }
  static_cast<void>(peer->send(frame));
  std::vector<std::byte> body;
  REQUIRE(peer->read_frame(header, body, 5000));
  SectionReader sections(body, header.section_count);
  CHECK(parse_error(sections.next().value()->payload).message().find("at most 16384") != std::string::npos);
}

TEST_CASE("pulls that wait for the clock are counted, charged, and end") {
  ServerOptions options;
  options.default_deadline_ms = 500;
  options.max_deadline_ms = 2000;
  options.kept_budget_bytes = 1u << 20;
  Scene scene(options);
  scene.cluster.set_job(0u, 2);  // the other worker commits nothing
  const auto peer = scene.greedy();
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kPull);
  header.route_epoch = 1;
  header.job_id = 1;
  header.worker_epoch = 1;
  header.step = 1'000'000;
  header.deadline_ms = UINT32_MAX;
  header.request_id = 1;
  REQUIRE(peer->send(empty_frame(header)));
  FrameHeader reply;
  std::vector<std::byte> body;
  const auto began = Clock::now();
  REQUIRE(peer->read_frame(reply, body, 20'000));
  CHECK(Clock::now() - began < milliseconds(15'000));  // not 49 days
  SectionReader sections(body, reply.section_count);
  const Status late = parse_error(sections.next().value()->payload);
  INFO(late.message());
  CHECK(late.code() == Code::kDeadlineExceeded);

  // A budget of 1 MiB keeps fewer than 1,024 of them, though their bodies are empty.
  for (int i = 0; i < 3000; ++i) {
    header.request_id = 100 + static_cast<std::uint64_t>(i);
    REQUIRE(peer->send(empty_frame(header)));
  }
  int refused = 0;
  for (int i = 0; i < 3000 && refused < 3000 - 1024; ++i) {
    REQUIRE(peer->read_frame(reply, body, 20'000));
    SectionReader errors(body, reply.section_count);
    refused += parse_error(errors.next().value()->payload).code() == Code::kResourceExhausted ? 1 : 0;
  }
  CHECK(refused >= 3000 - 1024);
  CHECK(scene.stats().commits.pulls_waiting <= 1024);
}

TEST_CASE("the writes of others are counted for members of the job alone") {
  const Scene scene;
  const auto peer = scene.greedy();
  const auto ask = [&](std::uint32_t worker, std::uint32_t epoch) {
    auto frame = scene.pull_frame(0, 0, kFrameWrites);
    FrameHeader header;
    std::memcpy(&header, frame.data(), sizeof header);
    header.job_id = 1;
    header.worker_id = worker;
    header.worker_epoch = epoch;
    std::memcpy(frame.data(), &header, sizeof header);
    REQUIRE(peer->send(frame));
    std::vector<std::byte> body;
    REQUIRE(peer->read_frame(header, body, 5000));
    REQUIRE(header.type == static_cast<std::uint16_t>(FrameType::kRows));
    return header.sequence;
  };
  const std::uint64_t first = ask(0, 1);
  const auto client = scene.honest();
  const Grouped keys(*client, scene.theirs.id, {1});
  const std::vector<float> grads(scene.theirs.dim, 1.0f);
  const auto push = keys.push(scene.theirs, grads.data(), 1.0f);
  REQUIRE(client->commit(std::span(&push, 1), {.sequence = 1, .step = 0}).is_ok());
  CHECK(ask(0, 1) == first);      // its own write
  CHECK(ask(9, 9) == first + 1);  // no member: it has written nothing, and nothing is remembered of it
  CHECK(ask(0, 1) == first);
}

}  // namespace sparserow
