#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <numeric>
#include <thread>

#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using namespace std::chrono_literals;

namespace {

std::vector<std::uint64_t> iota_keys(std::size_t n, std::uint64_t first = 0) {
  std::vector<std::uint64_t> keys(n);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

#define REQUIRE_OK(expression)                   \
  do {                                           \
    const Status sr_test_status = (expression);  \
    INFO(sr_test_status.message());              \
    REQUIRE(sr_test_status.code() == Code::kOk); \
  } while (false)

}  // namespace

TEST_CASE("rows pushed on several shards are pulled back, small and large") {
  for (const std::uint32_t shards : {1u, 3u}) {
    for (const std::size_t n : {1ul, 100ul, 20'000ul}) {
      const auto table = sgd_table("t/a", 16);
      Cluster cluster(shards, {table});
      const auto client = take(Client::connect(cluster.client_options()));
      const Grouped grouped(*client, table.id, iota_keys(n));
      std::vector<float> grads(n * 16);
      for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t d = 0; d < 16; ++d) {
          grads[i * 16 + d] = static_cast<float>(grouped.partition.keys[i] % 1000) + static_cast<float>(d);
        }
      }
      const auto push = grouped.push(table, grads.data(), 0.5f);
      REQUIRE_OK(client->commit(std::span(&push, 1), {.sequence = 1, .step = 0}));
      std::vector<float> rows(n * 16);
      std::vector<std::uint64_t> versions(n);
      std::vector<std::uint8_t> found(n);
      auto pull = grouped.pull(table, rows.data());
      pull.versions = versions.data();
      pull.found = found.data();
      REQUIRE_OK(client->pull(std::span(&pull, 1), {.step = 1}));
      bool right = true;
      for (std::size_t i = 0; i < n * 16; ++i) right &= rows[i] == 1.0f - 0.5f * grads[i];
      CHECK(right);
      CHECK(std::count(found.begin(), found.end(), 1) == static_cast<std::ptrdiff_t>(n));
      CHECK(std::count(versions.begin(), versions.end(), 0u) == 0);
    }
  }
}
