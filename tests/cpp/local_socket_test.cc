// Shards that clients of their host reach by a local socket: who finds it, who does not, and who goes on by TCP.
#include "rpc/transport/local_socket.h"

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "knock.h"
#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using std::chrono::milliseconds;

namespace {

constexpr std::size_t kKeys = 2'000;
constexpr std::uint32_t kDim = 16;

ServerOptions local(std::uint16_t port = 0) {
  ServerOptions options;
  options.is_local = true;
  options.port = port;
  return options;
}

ClientOptions options_for(const Cluster& cluster, Transport transport) {
  ClientOptions options = cluster.client_options();
  options.transport = transport;
  options.connect_timeout_ms = 300;
  return options;
}

Status pull(Client& client, const TableSchema& table, milliseconds deadline = milliseconds(30'000)) {
  std::vector<std::uint64_t> ids(kKeys);
  for (std::size_t i = 0; i < kKeys; ++i) ids[i] = i;
  const Grouped keys(client, table.id, ids);
  std::vector<float> rows(keys.size() * table.dim);
  const TablePull wanted = keys.pull(table, rows.data());
  Status status = client.pull({&wanted, 1}, {.deadline = deadline, .step = kNoStep});
  if (status.is_ok()) CHECK(rows == std::vector<float>(rows.size(), 1.0f));
  return status;
}

std::string name_of_shard(const Cluster& cluster, std::uint32_t shard) {
  return local_socket_name(cluster.cluster_id, shard, cluster.servers[shard]->port());
}

using Ways = std::vector<std::string>;

}  // namespace

TEST_CASE("rows of a shard of this host come through memory where the client may choose") {
  const TableSchema table = sgd_table("test/t", kDim);
  const Cluster cluster(2, {table}, local());
  for (const auto& [transport, way] : {std::pair{Transport::kAuto, "shm"}, std::pair{Transport::kSharedMemory, "shm"},
                                       std::pair{Transport::kTcp, "tcp"}}) {
    const auto client = take(Client::connect(options_for(cluster, transport)));
    REQUIRE(pull(*client, table).is_ok());
    CHECK(client->transports() == Ways{way, way});
    CHECK((client->stats().lane_replies > 0) == (transport != Transport::kTcp));
    std::uint64_t connections = 0;
    for (const auto& server : cluster.servers) connections += server->stats().connections_local;
    CHECK((connections >= 2) == (transport != Transport::kTcp));
  }
}

TEST_CASE("a shard that has no local socket is reached by TCP, unless memory alone will do") {
  const TableSchema table = sgd_table("test/t", kDim);
  const Cluster cluster(1, {table});
  const auto client = take(Client::connect(options_for(cluster, Transport::kAuto)));
  REQUIRE(pull(*client, table).is_ok());
  CHECK(client->transports() == Ways{"tcp"});
  CHECK(cluster.servers[0]->stats().connections_local == 0);
  const Status refused = Client::connect(options_for(cluster, Transport::kSharedMemory)).status();
  CHECK(refused.code() == Code::kUnavailable);
  CHECK(refused.message().find("transport 'shm': cannot connect to @sparserow/77/0/") != std::string::npos);
}

TEST_CASE("no way but a shard's own port, number and cluster leads to its local socket") {
  const TableSchema table = sgd_table("test/t", kDim);
  const Cluster cluster(1, {table}, local());
  const std::uint16_t port = cluster.servers[0]->port();
  CHECK(connect_local(local_socket_name(77, 0, port)).is_ok());
  CHECK(!connect_local(local_socket_name(78, 0, port)).is_ok());
  CHECK(!connect_local(local_socket_name(77, 1, port)).is_ok());
  CHECK(!connect_local(local_socket_name(77, 0, static_cast<std::uint16_t>(port + 1))).is_ok());
  CHECK(is_of_this_host("127.0.0.1"));
  CHECK(is_of_this_host("localhost"));
  CHECK(!is_of_this_host("192.0.2.7"));  // RFC 5737: of no host
  CHECK(!is_of_this_host("no-such-host.invalid"));
}

TEST_CASE("memory is refused by name where it cannot be had") {
  const TableSchema table = sgd_table("test/t", kDim);
  ServerOptions options = local();
  options.lane_budget_bytes = 0;
  const Cluster cluster(1, {table}, options);
  const auto client = take(Client::connect(options_for(cluster, Transport::kAuto)));
  REQUIRE(pull(*client, table).is_ok());
  CHECK(client->transports() == Ways{"unix"});
  Status refused = Client::connect(options_for(cluster, Transport::kSharedMemory)).status();
  CHECK(refused.code() == Code::kUnavailable);
  CHECK(refused.message().find("transport 'shm': the shard takes no memory from this client") != std::string::npos);

  ClientOptions elsewhere = options_for(cluster, Transport::kSharedMemory);
  elsewhere.shards[0].host = "192.0.2.7";
  refused = Client::connect(elsewhere).status();
  CHECK(refused.message().find("transport 'shm': it is of another host") != std::string::npos);
}

TEST_CASE("a shard that comes back, there or elsewhere, is reached through memory again") {
  const TableSchema table = sgd_table("test/t", kDim);
  auto first = std::make_unique<Cluster>(1, std::vector{table}, local());
  const std::uint16_t port = first->servers[0]->port();
  ClientOptions options = options_for(*first, Transport::kAuto);
  options.connect_timeout_ms = 5'000;
  const auto client = take(Client::connect(options));
  REQUIRE(pull(*client, table).is_ok());
  first.reset();
  CHECK(pull(*client, table, milliseconds(100)).code() == Code::kUnavailable);
  CHECK(client->transports() == Ways{"none"});
  auto second = std::make_unique<Cluster>(1, std::vector{table}, local(port));
  REQUIRE(pull(*client, table).is_ok());
  CHECK(client->transports() == Ways{"shm"});
  const Cluster third(1, {table}, local());
  second.reset();
  REQUIRE(client->move(0, {"127.0.0.1", third.servers[0]->port()}).is_ok());
  REQUIRE(pull(*client, table).is_ok());
  CHECK(client->transports() == Ways{"shm"});
}

TEST_CASE("a local socket that does not lead to the shard costs one attempt") {
  const TableSchema table = sgd_table("test/t", kDim);
  const Cluster cluster(1, {table});  // by TCP alone, so that the name is free
  const FileDescriptor squatter(take(listen_local(name_of_shard(cluster, 0))));
  bool is_silent = false;
  SUBCASE("it takes no connection") { is_silent = true; }
  SUBCASE("it closes each connection") {}
  std::atomic<bool> is_over{is_silent};
  std::thread closes([&] {
    while (!is_over) {
      FileDescriptor taken(::accept(squatter.get(), nullptr, nullptr));
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  ClientOptions options = options_for(cluster, Transport::kAuto);
  options.connect_timeout_ms = 1'000;
  options.is_lazy = true;
  const auto client = take(Client::connect(options));
  CHECK(pull(*client, table).is_ok());
  CHECK(client->transports() == Ways{"tcp"});
  is_over = true;
  closes.join();
}

TEST_CASE("a shard whose name another process has serves by TCP") {
  const TableSchema table = sgd_table("test/t", kDim);
  auto first = std::make_unique<Cluster>(1, std::vector{table}, local());
  const std::uint16_t port = first->servers[0]->port();
  const std::string name = name_of_shard(*first, 0);
  first.reset();
  FileDescriptor squatter(take(listen_local(name)));
  const Cluster cluster(1, {table}, local(port));
  squatter.reset();
  const auto client = take(Client::connect(options_for(cluster, Transport::kAuto)));
  REQUIRE(pull(*client, table).is_ok());
  CHECK(client->transports() == Ways{"tcp"});
}

TEST_CASE("connections of a host by local sockets have the bound of one address together") {
  const TableSchema table = sgd_table("test/t", kDim);
  ServerOptions bounded = local();
  bounded.max_client_connections = 3;
  const Cluster cluster(1, {table}, bounded);
  std::vector<std::shared_ptr<Client>> clients;
  for (int i = 0; i < 3; ++i) clients.push_back(take(Client::connect(options_for(cluster, Transport::kAuto))));
  const Status refused = Client::connect(options_for(cluster, Transport::kSharedMemory)).status();
  INFO(refused.message());
  CHECK(refused.message().find("local has its 3 connections to this shard already") != std::string::npos);
  CHECK(take(Client::connect(options_for(cluster, Transport::kTcp)))->transports() == Ways{"tcp"});
}

TEST_CASE("another user finds a closed door, and does not take another user's shard for its own") {
  if (::geteuid() != 0) return;  // one user cannot become another
  const TableSchema table = sgd_table("test/t", kDim);
  const Cluster cluster(1, {table}, local());
  const std::string name = name_of_shard(cluster, 0);
  const auto in_child = [&](auto does) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(does() ? 0 : 1);
    int status = 1;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  constexpr uid_t kNobody = 65534;
  CHECK(in_child([&] {
    if (::setresuid(kNobody, kNobody, kNobody) != 0) return false;
    const auto stream = connect_local(name);
    return !stream.is_ok() && stream.status().message().ends_with("another user's process listens");
  }));
  CHECK(in_child([&] {
    if (::setresuid(kNobody, kNobody, kNobody) != 0) return false;
    const FileDescriptor door = knock(name);
    char byte = 0;
    return ::recv(door.get(), &byte, 1, 0) == 0;
  }));
  CHECK(cluster.servers[0]->stats().frames_received == 0);
}
