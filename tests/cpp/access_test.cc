// Tokens on the data plane: roles, namespaces, and what is taken back while a connection lives.
#include "rpc/server/access.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "raw_peer.h"
#include "rpc_fixture.h"

namespace sparserow {
namespace {

using namespace testing;
using std::chrono::milliseconds;

rpc::Grant grant(const std::string& token, rpc::Role role, std::vector<std::string> namespaces = {}) {
  return {.digest = rpc::digest_of(token), .role = role, .namespaces = std::move(namespaces)};
}

struct Scene {
  TableSchema ads = sgd_table("ads/user", 4);
  TableSchema shop = sgd_table("shop/item", 4);
  Cluster cluster;

  explicit Scene(std::vector<rpc::Grant> grants) : cluster(1, {ads, shop}, options_of(std::move(grants))) {}

  static rpc::ServerOptions options_of(std::vector<rpc::Grant> grants) {
    rpc::ServerOptions options;
    options.grants = std::move(grants);
    return options;
  }
  [[nodiscard]] Result<std::shared_ptr<rpc::Client>> connect(const std::string& token) const {
    rpc::ClientOptions options = cluster.client_options();
    options.token = token;
    return rpc::Client::connect(options);
  }
  static Status pull(rpc::Client& client, const TableSchema& table, std::int64_t step = kNoStep) {
    const Grouped keys(client, table.id, {1, 2, 3});
    std::vector<float> rows(keys.size() * table.dim);
    const auto pull = keys.pull(table, rows.data());
    return client.pull(std::span(&pull, 1), {.deadline = milliseconds(5000), .step = step});
  }
  static Status push(rpc::Client& client, const TableSchema& table, std::uint64_t sequence) {
    const Grouped keys(client, table.id, {1, 2, 3});
    const std::vector<float> grads(keys.size() * table.dim, 1.0f);
    const auto push = keys.push(table, grads.data(), 0.5f);
    return client.commit(std::span(&push, 1), {.deadline = milliseconds(5000), .sequence = sequence});
  }
};

bool says(const Status& status, const std::string& part) {
  return status.code() == Code::kPermissionDenied && status.message().find(part) != std::string::npos;
}

TEST_CASE("only a known token comes in") {
  const Scene scene({grant("secret", rpc::Role::kTrain)});
  CHECK(scene.connect("secret").is_ok());
  for (const char* token : {"", "Secret", "secret ", "secret2"}) CHECK(says(scene.connect(token).status(), "token:"));
  CHECK(scene.cluster.servers[0]->stats().access_refused == 4);
}

TEST_CASE("a reader reads, and changes nothing") {
  Scene scene({grant("reader", rpc::Role::kServeRead)});
  const auto client = take(scene.connect("reader"));
  CHECK(Scene::pull(*client, scene.ads).is_ok());
  CHECK(take(client->scan(0, scene.ads.id, 0, 10, false, {})).keys.empty());
  CHECK(says(Scene::push(*client, scene.ads, 1), "serve-read does not allow"));
  CHECK(says(Scene::pull(*client, scene.ads, 0), "serve-read does not allow PULL"));  // with a step: it moves a clock
  const Grouped keys(*client, scene.ads.id, {1, 2, 3});
  CHECK(says(client->erase(scene.ads.id, keys.partition.keys, keys.partition.shard_begin, {}).status(), "serve-read"));
  CHECK(scene.cluster.stores[0]->stats()[0].rows == 0);
}

TEST_CASE("a token of a namespace reaches its tables and jobs only") {
  Scene scene({grant("ads only", rpc::Role::kTrain, {"ads", "news"}), grant("all", rpc::Role::kTrain)});
  const auto name_job = [&scene](const std::string& name) {
    const JobSpec spec{.job_id = 1, .name = name, .staleness = 0u, .members = {{0, 1, 0}}, .first_step = 0};
    REQUIRE(scene.cluster.servers[0]->set_job(spec).is_ok());
  };
  name_job("ads/train");
  const auto client = take(scene.connect("ads only"));
  CHECK(Scene::pull(*client, scene.ads).is_ok());
  CHECK(says(Scene::pull(*client, scene.shop), "does not reach namespace 'shop'"));
  CHECK(says(client->scan(0, scene.shop.id, 0, 10, false, {}).status(), "does not reach namespace 'shop'"));
  CHECK(Scene::push(*client, scene.ads, 1).is_ok());
  name_job("shop/train");
  CHECK(says(Scene::push(*client, scene.ads, 2), "does not reach namespace 'shop' of 'shop/train'"));
  const auto other = take(scene.connect("all"));
  CHECK(Scene::push(*other, scene.shop, 3).is_ok());
  const Grouped keys(*client, scene.shop.id, {1, 2, 3});
  CHECK(says(client->erase(scene.shop.id, keys.partition.keys, keys.partition.shard_begin, {}).status(), "namespace"));
  CHECK(scene.cluster.stores[0]->stats()[0].rows + scene.cluster.stores[0]->stats()[1].rows == 6);
}

TEST_CASE("a hint reaches the tables of the token's namespaces alone") {
  const Scene scene({grant("ads only", rpc::Role::kTrain, {"ads"})});
  RawPeer peer(scene.cluster.servers[0]->port());
  REQUIRE(peer.greet(scene.cluster.cluster_id, "ads only"));
  for (const TableSchema& table : {scene.ads, scene.shop}) {
    rpc::FrameHeader header;
    header.type = static_cast<std::uint16_t>(rpc::FrameType::kHint);
    header.route_epoch = 1;
    rpc::TableDescriptor descriptor;
    descriptor.table_id = table.id;
    descriptor.schema_version = table.version;
    descriptor.dim = table.dim;
    REQUIRE(peer.send(small_frame(header, rpc::SectionKind::kTableKeys, bytes_of(descriptor), {})));
    std::vector<std::byte> body;
    REQUIRE(peer.read_frame(header, body, 5000));
    const auto expected = table.name == scene.ads.name ? rpc::FrameType::kAck : rpc::FrameType::kError;
    CHECK(header.type == static_cast<std::uint16_t>(expected));
  }
}

TEST_CASE("values that are not finite are refused by key, and so are such learning rates") {
  const Scene scene({grant("all", rpc::Role::kTrain)});
  const auto client = take(scene.connect("all"));
  const Grouped keys(*client, scene.ads.id, {1, 2, 3});
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    std::vector<float> values(keys.size() * scene.ads.dim, 1.0f);
    const auto with_bad_rate = keys.push(scene.ads, values.data(), bad);
    CHECK(client->commit(std::span(&with_bad_rate, 1), {.sequence = 9}).message().find("table.lr") !=
          std::string::npos);
    values[5] = bad;
    const auto push = keys.push(scene.ads, values.data(), 0.5f);
    const std::string named = "key " + std::to_string(keys.partition.keys[1]) + " of table ";
    CHECK(client->commit(std::span(&push, 1), {.sequence = 9}).message().find(named) != std::string::npos);
    CHECK(client->assign(std::span(&push, 1), {.sequence = 9}).message().find(named) != std::string::npos);
  }
  CHECK(scene.cluster.stores[0]->stats()[0].rows == 0);
  CHECK(Scene::push(*client, scene.ads, 9).is_ok());  // a refused sequence may come again
}

TEST_CASE("a client that shows another token goes on where it was; its commits count once") {
  Scene scene({grant("one", rpc::Role::kTrain), grant("two", rpc::Role::kTrain)});
  const auto client = take(scene.connect("one"));
  std::atomic<bool> ended{false};
  std::thread shows([&] {
    for (int turn = 0; !ended; ++turn) {
      client->show(nullptr, turn % 2 == 0 ? "two" : "one");
      std::this_thread::sleep_for(milliseconds(1));
    }
    client->show(nullptr, "two");
  });
  constexpr std::uint64_t kCommits = 500;
  for (std::uint64_t sequence = 1; sequence <= kCommits; ++sequence) {
    CHECK(Scene::push(*client, scene.ads, sequence).is_ok());
    const Grouped keys(*client, scene.ads.id, {1, 2, 3});
    std::vector<float> rows(keys.size() * scene.ads.dim);
    const auto pull = keys.pull(scene.ads, rows.data());
    REQUIRE(client->pull(std::span(&pull, 1), {.deadline = milliseconds(5000)}).is_ok());
    REQUIRE(rows[0] == 1.0f - 0.5f * static_cast<float>(sequence));  // a new row is 1
  }
  ended = true;
  shows.join();
  scene.cluster.servers[0]->access().set(std::vector<rpc::Grant>{grant("two", rpc::Role::kTrain)});
  CHECK(Scene::push(*client, scene.ads, kCommits + 1).is_ok());
  CHECK(client->stats().reconnects > 0);
}

TEST_CASE("a token that is taken back ends at its next request; a role changes there too") {
  Scene scene({grant("one", rpc::Role::kTrain), grant("two", rpc::Role::kTrain)});
  const auto one = take(scene.connect("one"));
  const auto two = take(scene.connect("two"));
  CHECK(Scene::push(*one, scene.ads, 1).is_ok());
  scene.cluster.servers[0]->access().set(std::vector{grant("two", rpc::Role::kServeRead)});
  CHECK(says(Scene::pull(*one, scene.ads), "not one that this server knows"));
  CHECK(Scene::pull(*two, scene.ads).is_ok());
  CHECK(says(Scene::push(*two, scene.ads, 2), "serve-read does not allow"));
  scene.cluster.servers[0]->access().set(std::nullopt);
  CHECK(Scene::push(*two, scene.ads, 2).is_ok());
}

TEST_CASE("one address has so many connections and no more") {
  const TableSchema table = sgd_table("ads/user", 4);
  rpc::ServerOptions options;
  options.max_client_connections = 2;
  const Cluster cluster(1, {table}, options);
  rpc::ClientOptions asked = cluster.client_options();
  asked.connect_timeout_ms = 300;
  const auto first = take(rpc::Client::connect(asked));
  auto second = take(rpc::Client::connect(asked));
  const auto third = rpc::Client::connect(asked);
  CHECK(third.status().message().find("127.0.0.1 has its 2 connections") != std::string::npos);
  second.reset();
  asked.connect_timeout_ms = 5000;
  CHECK(rpc::Client::connect(asked).is_ok());
}

}  // namespace
}  // namespace sparserow
