// TLS on the data plane: who is let in, who is not and why, certificates that change, and rows as without it.
#include "rpc/transport/tls.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "raw_peer.h"
#include "rpc/transport/certificates.h"
#include "rpc_fixture.h"

namespace sparserow {
namespace {

using namespace testing;
using std::chrono::milliseconds;

class Authority {
 public:
  [[nodiscard]] std::string text() const { return pair_.certificate; }
  // A certificate that trusts this authority, valid from `from_sec` to `to_sec` after now.
  [[nodiscard]] rpc::TlsTexts sign(const std::string& names, long from_sec = -60, long to_sec = 3600) const {
    const auto pair = take(rpc::sign_certificate(pair_, "peer", names, std::chrono::seconds(from_sec),
                                                 std::chrono::seconds(to_sec - from_sec)));
    return {.authorities = text(), .certificate = pair.certificate, .key = pair.key};
  }

 private:
  rpc::KeyPair pair_ = take(rpc::make_authority("authority", std::chrono::hours(1)));
};

constexpr const char* kHere = "IP:127.0.0.1,DNS:localhost";

rpc::ServerOptions server_of(rpc::TlsTexts texts, bool asks_clients = false) {
  if (!asks_clients) texts.authorities.clear();
  rpc::ServerOptions options;
  options.tls = take(rpc::TlsContext::for_server(texts));
  options.hello_timeout_ms = 300;
  return options;
}

rpc::ClientOptions client_of(const Cluster& cluster, const rpc::TlsTexts& texts) {
  rpc::ClientOptions options = cluster.client_options();
  options.tls = take(rpc::TlsContext::for_client(texts));
  options.connect_timeout_ms = 400;
  return options;
}

rpc::TlsTexts trust_alone(const Authority& authority) {
  return {.authorities = authority.text(), .certificate = {}, .key = {}};
}

std::string refusal(const rpc::ClientOptions& options) {
  const auto client = rpc::Client::connect(options);
  REQUIRE(!client.is_ok());
  return client.status().message();
}

bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Rows pushed and pulled are those of a dict; `n` rows of 64 columns make frames of several records.
void push_and_pull(rpc::Client& client, const TableSchema& table, std::uint32_t n, std::uint64_t sequence) {
  std::vector<std::uint64_t> ids(n);
  std::iota(ids.begin(), ids.end(), sequence * 1'000'000);
  const Grouped grouped(client, table.id, ids);
  std::vector<float> grads(std::size_t{n} * table.dim);
  for (std::size_t i = 0; i < grads.size(); ++i) grads[i] = static_cast<float>(i % 251);
  const auto push = grouped.push(table, grads.data(), 0.5f);
  REQUIRE(client.commit(std::span(&push, 1), {.deadline = milliseconds(20'000), .sequence = sequence}).is_ok());
  std::vector<float> rows(grads.size());
  const auto pull = grouped.pull(table, rows.data());
  REQUIRE(client.pull(std::span(&pull, 1), {.deadline = milliseconds(20'000)}).is_ok());
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) wrong += rows[i] != 1.0f - 0.5f * grads[i] ? 1 : 0;
  CHECK(wrong == 0);
}

TEST_CASE("rows come and go as without TLS, in small and in large frames") {
  const Authority authority;
  const TableSchema table = sgd_table("ads/user", 64);
  Cluster cluster(2, {table}, server_of(authority.sign(kHere)));
  const auto client = take(rpc::Client::connect(client_of(cluster, trust_alone(authority))));
  push_and_pull(*client, table, 3, 1);
  push_and_pull(*client, table, 40'000, 2);  // 10 MB each way
  std::vector<std::thread> callers;
  for (std::uint64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (std::uint64_t i = 0; i < 20; ++i) push_and_pull(*client, table, 300, 10 + caller * 100 + i);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_CASE("a server that is not trusted is told apart from one that cannot be reached") {
  const Authority authority;
  const Authority stranger;
  const TableSchema table = sgd_table("ads/user", 4);
  {
    const Cluster cluster(1, {table}, server_of(authority.sign(kHere)));
    CHECK(mentions(refusal(client_of(cluster, trust_alone(stranger))), "certificate verify failed"));
    CHECK(mentions(refusal(cluster.client_options()), "does it want TLS?"));
  }
  {
    const Cluster cluster(1, {table}, server_of(authority.sign("DNS:elsewhere")));
    CHECK(mentions(refusal(client_of(cluster, trust_alone(authority))), "IP address mismatch"));
  }
  {
    const Cluster cluster(1, {table}, server_of(authority.sign(kHere, -7200, -3600)));
    CHECK(mentions(refusal(client_of(cluster, trust_alone(authority))), "expired"));
  }
  const Cluster plain(1, {table});
  CHECK(mentions(refusal(client_of(plain, trust_alone(authority))), "does not speak it"));
}

TEST_CASE("a server that asks for certificates takes only those that its authorities signed") {
  const Authority authority;
  const Authority stranger;
  const TableSchema table = sgd_table("ads/user", 4);
  Cluster cluster(1, {table}, server_of(authority.sign(kHere), /*asks_clients=*/true));
  const auto client = take(rpc::Client::connect(client_of(cluster, authority.sign("DNS:worker"))));
  push_and_pull(*client, table, 10, 1);
  CHECK(mentions(refusal(client_of(cluster, trust_alone(authority))), "certificate required"));
  rpc::TlsTexts forged = stranger.sign("DNS:worker");
  forged.authorities = authority.text();
  CHECK(mentions(refusal(client_of(cluster, forged)), "unknown ca"));
  const rpc::TlsTexts expired = authority.sign("DNS:worker", -7200, -3600);
  CHECK(mentions(refusal(client_of(cluster, expired)), "expired"));
}

TEST_CASE("another certificate counts for connections made from then on") {
  const Authority before;
  const Authority after;
  const TableSchema table = sgd_table("ads/user", 4);
  Cluster cluster(1, {table}, server_of(before.sign(kHere)));
  const auto old = take(rpc::Client::connect(client_of(cluster, trust_alone(before))));
  rpc::TlsTexts texts = after.sign(kHere);
  texts.authorities.clear();
  cluster.servers[0]->set_tls(take(rpc::TlsContext::for_server(texts)));
  push_and_pull(*old, table, 10, 1);
  CHECK(mentions(refusal(client_of(cluster, trust_alone(before))), "certificate verify failed"));
  const auto fresh = take(rpc::Client::connect(client_of(cluster, trust_alone(after))));
  push_and_pull(*fresh, table, 10, 2);
}

TEST_CASE("texts that are no certificates are refused by name") {
  const Authority authority;
  rpc::TlsTexts good = authority.sign(kHere);
  const auto why = [](const rpc::TlsTexts& texts) {
    const auto made = rpc::TlsContext::for_server(texts);
    return made.is_ok() ? std::string() : made.status().message();
  };
  CHECK(why(good).empty());
  rpc::TlsTexts bad = good;
  bad.certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
  CHECK(why(bad).starts_with("certificate: "));
  bad = good;
  bad.key.clear();
  CHECK(why(bad).starts_with("key: "));
  bad = good;
  bad.key = authority.sign(kHere).key;
  CHECK(why(bad).starts_with("key (is it the certificate's?): "));
  bad = good;
  bad.authorities = "nothing";
  CHECK(why(bad).starts_with("authorities: "));
  CHECK(!rpc::TlsContext::for_client({}).is_ok());
}

// Between a client and its shard: what the shard says is held back after `left` bytes of it.
class Relay {
 public:
  explicit Relay(std::uint16_t port) : port_(port), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), bytes) != 0 || ::listen(listener_, 1) != 0 ||
        ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
      throw std::runtime_error("listen");
    }
    own_port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { work(); });
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  ~Relay() {
    ends_ = true;
    thread_.join();
    ::close(listener_);
  }
  [[nodiscard]] std::uint16_t port() const noexcept { return own_port_; }
  std::atomic<std::size_t> left = SIZE_MAX;

 private:
  void work() {
    pollfd dialled{listener_, POLLIN, 0};
    while (::poll(&dialled, 1, 10) <= 0) {
      if (ends_) return;
    }
    const int client = ::accept(listener_, nullptr, nullptr);
    RawPeer shard(port_);
    std::vector<std::byte> room(64u << 10);
    while (!ends_) {
      pollfd both[] = {{client, POLLIN, 0}, {left > 0 ? shard.fd() : -1, POLLIN, 0}};
      if (::poll(both, 2, 10) <= 0) continue;
      if (both[0].revents != 0) {
        const ssize_t got = ::recv(client, room.data(), room.size(), 0);
        if (got <= 0 || !shard.send(std::span(room).first(static_cast<std::size_t>(got)))) break;
      }
      if (both[1].revents != 0) {
        const ssize_t got = ::recv(shard.fd(), room.data(), std::min(room.size(), left.load()), 0);
        if (got <= 0) break;
        left -= static_cast<std::size_t>(got);  // before the client may go on, and set it
        if (::send(client, room.data(), static_cast<std::size_t>(got), MSG_NOSIGNAL) != got) break;
      }
    }
    ::close(client);
  }

  std::uint16_t port_;
  int listener_;
  std::uint16_t own_port_ = 0;
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

TEST_CASE("a shard that falls silent in the middle of a record is waited for until the deadline") {
  const Authority authority;
  const TableSchema table = sgd_table("ads/user", 64);
  Cluster cluster(1, {table}, server_of(authority.sign(kHere)));
  Relay relay(cluster.servers[0]->port());
  rpc::ClientOptions options = client_of(cluster, trust_alone(authority));
  options.shards[0].port = relay.port();
  const auto client = take(rpc::Client::connect(options));
  push_and_pull(*client, table, 2'000, 1);
  std::vector<std::uint64_t> ids(2'000);
  std::iota(ids.begin(), ids.end(), std::uint64_t{1'000'000});
  const Grouped grouped(*client, table.id, ids);
  std::vector<float> rows(ids.size() * table.dim);
  const auto pull = grouped.pull(table, rows.data());
  for (const std::size_t bytes : {1u, 5'000u, 20'000u, 100'001u}) {  // of 512 KB in records of at most 16 KB
    CAPTURE(bytes);
    relay.left = bytes;
    CHECK(client->pull(std::span(&pull, 1), {.deadline = milliseconds(100)}).code() == Code::kDeadlineExceeded);
    relay.left = SIZE_MAX;
    REQUIRE(client->pull(std::span(&pull, 1), {.deadline = milliseconds(20'000)}).is_ok());
    CHECK(rows[0] == 1.0f);
    CHECK(rows.back() == 1.0f - 0.5f * static_cast<float>((rows.size() - 1) % 251));
  }
}

// One direction of a connection in memory, which takes and gives a little at a time, or nothing; or all, without
// `random`.
struct Pipe {
  std::vector<std::byte> bytes;
  std::mt19937_64* random = nullptr;
};

class PipeStream final : public rpc::Stream {
 public:
  PipeStream(Pipe& in, Pipe& out) : in_(in), out_(out) {}
  [[nodiscard]] int fd() const noexcept override { return -1; }
  rpc::Transfer try_read(std::span<const iovec> into) noexcept override {
    const std::size_t count = some(in_, std::min(into[0].iov_len, in_.bytes.size()));
    if (count == 0) return {0, rpc::Transfer::Want::kRead, 0};
    std::memcpy(into[0].iov_base, in_.bytes.data(), count);
    in_.bytes.erase(in_.bytes.begin(), in_.bytes.begin() + static_cast<std::ptrdiff_t>(count));
    return {count, rpc::Transfer::Want::kNothing, 0};
  }
  rpc::Transfer try_write(std::span<const iovec> from) noexcept override {
    const std::size_t count = some(out_, std::min(from[0].iov_len, kRoom - std::min(kRoom, out_.bytes.size())));
    if (count == 0) return {0, rpc::Transfer::Want::kWrite, 0};
    const auto* first = static_cast<const std::byte*>(from[0].iov_base);
    out_.bytes.insert(out_.bytes.end(), first, first + count);
    return {count, rpc::Transfer::Want::kNothing, 0};
  }
  void shutdown_write() noexcept override {}
  void reset() noexcept override {}

 private:
  static constexpr std::size_t kRoom = 30'000;
  static std::size_t some(Pipe& pipe, std::size_t most) {
    if (most == 0 || pipe.random == nullptr) return most;
    std::mt19937_64& random = *pipe.random;
    if (random() % 4 == 0) return 0;
    return random() % 2 == 0 ? most : 1 + random() % most;
  }
  Pipe& in_;
  Pipe& out_;
};

struct Ends {
  std::unique_ptr<rpc::Stream> client;
  std::unique_ptr<rpc::Stream> server;
};

Ends joined(Pipe& up, Pipe& down) {
  const Authority authority;
  rpc::TlsTexts texts = authority.sign(kHere);
  texts.authorities.clear();
  const auto server = take(rpc::TlsContext::for_server(texts));
  const auto client = take(rpc::TlsContext::for_client(trust_alone(authority)));
  return {client->connect(std::make_unique<PipeStream>(down, up), "localhost"),
          server->accept(std::make_unique<PipeStream>(up, down))};
}

std::size_t read_some(rpc::Stream& from, std::size_t most) {
  std::vector<std::byte> room(most);
  const iovec piece{room.data(), room.size()};
  const rpc::Transfer moved = from.try_read(std::span(&piece, 1));
  REQUIRE_MESSAGE(!moved.ended(), from.why(moved));
  return moved.bytes;
}

std::size_t write_some(rpc::Stream& into, std::size_t bytes) {
  std::vector<std::byte> text(bytes);
  const iovec piece{text.data(), text.size()};
  const rpc::Transfer moved = into.try_write(std::span(&piece, 1));
  REQUIRE_MESSAGE(!moved.ended(), into.why(moved));
  return moved.bytes;
}

TEST_CASE("what a stream has buffered can be read; part of a record cannot") {
  Pipe up;
  Pipe down;
  const auto [client, server] = joined(up, down);
  for (int turn = 0; turn < 4; ++turn) {
    read_some(*server, 1);
    read_some(*client, 1);
  }
  REQUIRE(write_some(*server, 1'000) == 1'000);
  REQUIRE(write_some(*server, 1'000) == 1'000);
  REQUIRE(read_some(*client, 400) == 400);
  CHECK(client->has_buffered());  // of the first record
  REQUIRE(read_some(*client, 600) == 600);
  CHECK(client->has_buffered());  // the second record
  REQUIRE(read_some(*client, 2'000) == 1'000);
  CHECK(!client->has_buffered());

  REQUIRE(write_some(*server, 1'000) == 1'000);
  const std::vector<std::byte> rest(down.bytes.begin() + 500, down.bytes.end());
  down.bytes.resize(500);
  REQUIRE(read_some(*client, 2'000) == 0);
  CHECK(!client->has_buffered());
  down.bytes = rest;
  REQUIRE(read_some(*client, 10) == 10);
  CHECK(client->has_buffered());
  REQUIRE(read_some(*client, 2'000) == 990);
  CHECK(!client->has_buffered());
}

TEST_CASE("bytes arrive whole and in order, however little the stream below takes at a time") {
  const auto seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  Pipe up{{}, &random};
  Pipe down{{}, &random};
  const auto [client, server] = joined(up, down);
  std::vector<std::byte> sent(1'000'000);
  for (std::byte& byte : sent) byte = static_cast<std::byte>(random());
  std::vector<std::byte> received;
  std::size_t counted = 0;
  // Both ways at once: the server sends back what it has got.
  std::vector<std::byte> echoed;
  std::size_t returned = 0;
  const auto read = [&](rpc::Stream& from, std::vector<std::byte>& to) {
    std::vector<std::byte> room(1 + random() % 40'000);
    const iovec piece{room.data(), room.size()};
    const rpc::Transfer moved = from.try_read(std::span(&piece, 1));
    REQUIRE_MESSAGE(!moved.ended(), from.why(moved));
    to.insert(to.end(), room.begin(), room.begin() + static_cast<std::ptrdiff_t>(moved.bytes));
    if (moved.bytes < room.size()) CHECK(!from.has_buffered());
  };
  for (int turn = 0; turn < 1'000'000 && echoed.size() < sent.size(); ++turn) {
    if (counted < sent.size()) {  // the same bytes again, in other pieces, until they count
      std::vector<iovec> pieces;
      for (std::size_t at = counted; at < sent.size() && pieces.size() < 5;) {
        const std::size_t count = std::min(1 + random() % 50'000, sent.size() - at);
        pieces.push_back({sent.data() + at, count});
        at += count;
      }
      // What was offered before and did not count is offered again as well.
      pieces.push_back({sent.data() + sent.size(), 0});
      std::size_t offered = 0;
      for (const iovec& piece : pieces) offered += piece.iov_len;
      const std::size_t left = sent.size() - counted - offered;
      if (left > 0) pieces.back() = {sent.data() + counted + offered, left};
      const rpc::Transfer moved = client->try_write(pieces);
      REQUIRE_MESSAGE(!moved.ended(), client->why(moved));
      counted += moved.bytes;
    }
    read(*server, received);
    if (returned < received.size()) {
      const iovec piece{received.data() + returned, received.size() - returned};
      const rpc::Transfer moved = server->try_write(std::span(&piece, 1));
      REQUIRE_MESSAGE(!moved.ended(), server->why(moved));
      returned += moved.bytes;
    }
    read(*client, echoed);
  }
  CHECK(counted == sent.size());
  CHECK(received == sent);
  CHECK(echoed == sent);
}

// What a client sends first, taken from one.
std::vector<std::byte> client_hello(const Authority& authority) {
  std::array<int, 2> fds{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds.data()) == 0);
  const auto context = take(rpc::TlsContext::for_client(trust_alone(authority)));
  const auto client = context->connect(rpc::make_socket_stream(fds[0]), "127.0.0.1");
  std::vector<std::byte> hello(4096);
  const iovec any{hello.data(), hello.size()};
  static_cast<void>(client->try_read(std::span(&any, 1)));
  const ssize_t bytes = ::read(fds[1], hello.data(), hello.size());
  ::close(fds[1]);
  REQUIRE(bytes > 100);
  hello.resize(static_cast<std::size_t>(bytes));
  return hello;
}

TEST_CASE("in a storm of handshakes those that came first are answered") {
  constexpr std::size_t kRoom = 64;  // for connections before their HELLO
  const Authority authority;
  auto options = server_of(authority.sign(kHere));
  options.max_connections = 8 * kRoom;
  options.hello_timeout_ms = 30'000;
  Cluster cluster(1, {sgd_table("ads/user", 8)}, options);
  const auto hello = client_hello(authority);
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (std::size_t i = 0; i < 4 * kRoom; ++i) {
    peers.push_back(std::make_unique<RawPeer>(cluster.servers[0]->port()));
    static_cast<void>(peers.back()->send(hello));
  }
  std::size_t answered = 0;
  for (std::size_t i = 0; i < kRoom; ++i) {
    std::byte first{};
    answered += peers[i]->read_exact(&first, 1, 10'000) ? 1 : 0;
  }
  MESSAGE(answered << " of the first " << kRoom << " were answered");
  CHECK(answered > kRoom - kRoom / 8);
}

TEST_CASE("garbage, silence and handshakes that are left at a TLS port harm nobody else") {
  const auto seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const Authority authority;
  const TableSchema table = sgd_table("ads/user", 8);
  Cluster cluster(1, {table}, server_of(authority.sign(kHere)));
  const auto client = take(rpc::Client::connect(client_of(cluster, trust_alone(authority))));
  RawPeer silent(cluster.servers[0]->port());
  RawPeer slow(cluster.servers[0]->port());
  const std::byte one{0x16};
  REQUIRE(slow.send(std::span(&one, 1)));
  const char* const asked = std::getenv("SPARSEROW_FUZZ_STREAMS");
  const int streams = asked == nullptr ? 500 : std::atoi(asked);
  const auto hello = client_hello(authority);
  std::vector<std::byte> noise;
  for (int i = 0; i < streams; ++i) {
    noise.resize(1 + random() % 600);
    for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
    if (i % 3 == 0) noise[0] = std::byte{0x16};  // a handshake record, or what looks like one
    if (i % 3 == 0 && noise.size() > 2) noise[1] = std::byte{0x03};
    if (i % 3 == 1) noise = hello;
    if (i % 6 == 1) noise.resize(1 + random() % noise.size());
    RawPeer peer(cluster.servers[0]->port());
    static_cast<void>(peer.send(noise));
    if (i % 2 == 0) peer.end_writing();
    if (i % 50 == 0) push_and_pull(*client, table, 20, 1 + static_cast<std::uint64_t>(i));
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (cluster.servers[0]->stats().connections_open > 1 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  CHECK(cluster.servers[0]->stats().connections_open == 1);
  push_and_pull(*client, table, 20, 1'000'000);
}

}  // namespace
}  // namespace sparserow
