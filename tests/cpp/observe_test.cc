// What the server notes of its requests: how long they took, and which keys they ask for most.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "rpc/observe/hot_keys.h"
#include "rpc/observe/request_log.h"
#include "rpc/observe/request_times.h"
#include "rpc/observe/staleness_histogram.h"
#include "rpc/wire/trace_context.h"
#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using sparserow::testing::Cluster;
using sparserow::testing::Grouped;
using sparserow::testing::sgd_table;
using sparserow::testing::take;

namespace {

std::uint64_t requests_of(const RequestTimes::All& all, RequestTimes::Kind kind) {
  const auto& counts = all[static_cast<std::size_t>(kind)].requests;
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

// A request is counted after its reply has left.
bool comes_true(const std::function<bool()>& holds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

TEST_CASE("the staleness of tables that were dropped is forgotten") {
  StalenessHistogram histogram;
  std::set<std::uint32_t> tables{1, 2};
  const auto exists = [&tables](std::uint32_t table) { return tables.contains(table); };
  for (std::uint32_t table = 3; table < 50'000; ++table) {
    tables.insert(table);
    histogram.add(1, 0, exists);
    histogram.add(table, 3, exists);
    tables.erase(table);
  }
  const auto counted = histogram.by_table();
  CHECK(counted.size() <= 1024);
  CHECK(counted.at(1).pulls[0] == 50'000 - 3);
}

TEST_CASE("a job that a shard drops leaves no clock in its store") {
  TableSchema table = sgd_table("n/t", 4);
  table.policy.evict_after_steps = 1000;
  Cluster cluster(1, {table});
  const std::vector<float> grads(4, 1.0f);
  for (std::uint32_t job = 2; job < 100; ++job) {
    REQUIRE(cluster.servers[0]->set_job({.job_id = job, .name = "j", .members = {{0, 1, 0}}, .first_step = 0}).is_ok());
    auto options = cluster.client_options();
    options.job_id = job;
    const auto client = take(Client::connect(options));
    const Grouped keys(*client, table.id, {1});
    const auto push = keys.push(table, grads.data(), 1.0f);
    REQUIRE(client->commit(std::span(&push, 1), {.sequence = 1, .step = 0}).is_ok());
    CHECK(cluster.stores[0]->job_clocks() == 2);  // the store's and the table's
    REQUIRE(cluster.servers[0]->drop_job(job).is_ok());
    CHECK(cluster.stores[0]->job_clocks() == 0);
  }
}

TEST_CASE("a time falls into the bucket whose bound it does not pass") {
  RequestTimes times;
  using std::chrono::nanoseconds;
  for (const std::int64_t ns : {0, 5'000, 5'001, 10'000, 1'000'000'000}) {
    times.add(RequestTimes::Kind::kPull, nanoseconds(ns));
  }
  times.add(RequestTimes::Kind::kScan, std::chrono::hours(1));
  const auto all = times.all();
  const auto& pulls = all[static_cast<std::size_t>(RequestTimes::Kind::kPull)];
  CHECK(pulls.requests[0] == 2);  // up to 5 us
  CHECK(pulls.requests[1] == 2);  // up to 10 us
  CHECK(pulls.requests[16] == 1);
  CHECK(RequestTimes::kBoundsUs[16] == 1'000'000);
  CHECK(pulls.sum_ns == 1'000'020'001);
  CHECK(all[static_cast<std::size_t>(RequestTimes::Kind::kScan)].requests.back() == 1);
}

TEST_CASE("Space-Saving keeps its promises: heavy keys are there, counts are too high by at most their error") {
  HotKeys hot;
  const std::uint32_t seed = std::random_device{}();
  MESSAGE("seed ", seed);
  std::mt19937_64 random(seed);
  std::map<std::uint64_t, std::uint64_t> exact;
  const std::uint64_t samples = HotKeys::kWindow;  // not halved yet
  for (std::uint64_t i = 0; i < samples; ++i) {
    const double u = std::uniform_real_distribution<>(0, 1)(random);
    const auto key = static_cast<std::uint64_t>(std::pow(1e6, u));  // density about 1/key
    ++exact[key];
    hot.add(7, key);
  }
  const auto report = hot.report(HotKeys::kCounters);
  CHECK(report.samples == samples);
  CHECK(report.keys.size() == HotKeys::kCounters);
  std::set<std::uint64_t> found;
  std::uint64_t total = 0;
  for (const HotKey& key : report.keys) {
    CHECK(key.table_id == 7);
    CHECK(key.count >= exact[key.key]);
    CHECK(key.count - key.error <= exact[key.key]);
    CHECK(key.error <= samples / HotKeys::kCounters);
    total += key.count;
    found.insert(key.key);
  }
  CHECK(total == samples);
  for (const auto& [key, count] : exact) {
    if (count > samples / HotKeys::kCounters) CHECK(found.contains(key));
  }
  CHECK(report.keys[0].key == 1);  // by far the most
}

TEST_CASE("what was hot fades") {
  HotKeys hot;
  for (std::uint64_t i = 0; i < HotKeys::kWindow; ++i) hot.add(1, 42);
  for (std::uint64_t i = 0; i < 4 * HotKeys::kWindow; ++i) hot.add(1, 1'000 + i % 3);
  const auto report = hot.report(4);
  CHECK(report.samples <= HotKeys::kWindow);
  CHECK(report.keys[0].key >= 1'000);
  CHECK(report.keys.back().key == 42);
  CHECK(report.keys.back().count < report.samples / 10);
}

TEST_CASE("one key in kStride on average is looked at, wherever it stands in its request") {
  HotKeys hot;
  HotKeys::Sampler sampler(3);
  constexpr std::uint64_t kRequests = 40'000;
  const std::vector<std::uint64_t> keys{10, 11, 12, 13};
  for (std::uint64_t i = 0; i < kRequests; ++i) hot.look_at(sampler, 1, keys);
  const auto report = hot.report(10);
  const double expected = static_cast<double>(kRequests * keys.size()) / HotKeys::kStride;
  CHECK(static_cast<double>(report.samples) == doctest::Approx(expected).epsilon(0.2));
  REQUIRE(report.keys.size() == keys.size());
  for (const HotKey& key : report.keys) {
    CHECK(static_cast<double>(key.count) == doctest::Approx(expected / 4).epsilon(0.4));
  }
}

TEST_CASE("a server times each request once, a pull that waited for the clock as such") {
  const TableSchema table = sgd_table("n/t", 4);
  Cluster cluster(1, {table});
  auto& server = *cluster.servers[0];
  cluster.set_job(0u, 2);
  const auto first = take(Client::connect(cluster.client_options(0)));
  const auto second = take(Client::connect(cluster.client_options(1)));
  std::vector<std::uint64_t> ids(2'000);
  std::iota(ids.begin(), ids.end(), 0);
  const Grouped grouped(*first, table.id, ids);
  std::vector<float> rows(ids.size() * 4);
  const auto pull = grouped.pull(table, rows.data());
  REQUIRE(first->pull(std::span(&pull, 1), {.step = 0}).is_ok());
  const std::vector<float> grads(rows.size(), 0.5f);
  const auto push = grouped.push(table, grads.data(), 0.1f);
  const auto commit = [&](Client& client) { return client.commit(std::span(&push, 1), {.sequence = 1, .step = 0}); };
  REQUIRE(commit(*first).is_ok());
  std::thread late([&] {
    while (server.stats().commits.pulls_waiting == 0) std::this_thread::yield();
    REQUIRE(commit(*second).is_ok());
  });
  REQUIRE(first->pull(std::span(&pull, 1), {.step = 1}).is_ok());
  late.join();
  using Kind = RequestTimes::Kind;
  for (const auto& [kind, count] : {std::pair(Kind::kPull, 1u), {Kind::kWaitedPull, 1u}, {Kind::kCommit, 2u}}) {
    CHECK(comes_true([&] { return requests_of(server.stats().request_times, kind) == count; }));
  }
  CHECK(server.hot_keys(5).samples > 0);  // of 4,000 keys
}

TEST_CASE("a server that shall not observe notes nothing") {
  const TableSchema table = sgd_table("n/t", 4);
  ServerOptions options;
  options.observe = false;
  Cluster cluster(1, {table}, options);
  const auto client = take(Client::connect(cluster.client_options()));
  std::vector<std::uint64_t> ids(5'000);
  std::iota(ids.begin(), ids.end(), 0);
  const Grouped grouped(*client, table.id, ids);
  std::vector<float> rows(ids.size() * 4);
  const auto pull = grouped.pull(table, rows.data());
  REQUIRE(client->pull(std::span(&pull, 1), {}).is_ok());
  REQUIRE(client->pull(std::span(&pull, 1), {}).is_ok());  // the first one's end is behind it
  CHECK(requests_of(cluster.servers[0]->stats().request_times, RequestTimes::Kind::kPull) == 0);
  CHECK(cluster.servers[0]->hot_keys(5).samples == 0);
}

TEST_CASE("requests of a trace are kept with its ids when spans are wanted, refused ones always") {
  const TableSchema table = sgd_table("n/t", 4);
  Cluster cluster(1, {table});
  RequestLog& log = cluster.servers[0]->request_log();
  const auto client = take(Client::connect(cluster.client_options(3)));
  const Grouped grouped(*client, table.id, {1, 2, 3});
  std::vector<float> rows(12);
  const auto pull = grouped.pull(table, rows.data());
  auto wrong = pull;
  wrong.dim = 2;
  wrong.rows = wrong.rows.first(grouped.size() * wrong.dim);
  const auto ask = [&](const TablePull& what) { return client->pull(std::span(&what, 1), {}).is_ok(); };
  TraceContext trace;
  trace.trace_id.fill(7);
  trace.span_id.fill(9);
  std::vector<RequestEvent> events;
  const auto collect = [&](std::size_t count) {
    return comes_true([&] {
      for (RequestEvent& event : log.take().events) events.push_back(std::move(event));
      return events.size() >= count;
    });
  };

  CHECK(ask(pull));
  set_trace_context(trace);
  CHECK(ask(pull));  // nobody wants spans yet
  CHECK_FALSE(ask(wrong));
  REQUIRE(collect(1));
  CHECK(events[0].status.code() == Code::kInvalidArgument);
  CHECK(events[0].header.worker_id == 3);
  CHECK(events[0].header.request_id > 0);
  CHECK_FALSE(events[0].trace.is_set());

  log.keep_spans(true);
  events.clear();
  CHECK(ask(pull));
  set_trace_context({});
  CHECK(ask(pull));  // of no trace
  REQUIRE(collect(1));
  CHECK(events.size() == 1);
  CHECK(events[0].status.is_ok());
  CHECK(events[0].trace.trace_id == trace.trace_id);
  CHECK(events[0].trace.span_id == trace.span_id);
  CHECK(events[0].begin_unix_ns <= events[0].end_unix_ns);
}

TEST_CASE("a request log that nobody empties keeps the first, and counts the rest") {
  RequestLog log;
  const Status refused(Code::kNotFound, "no");
  for (std::size_t i = 0; i < RequestLog::kMost + 5; ++i)
    log.note({}, "", refused, {}, std::chrono::steady_clock::now());
  const auto taken = log.take();
  CHECK(taken.events.size() == RequestLog::kMost);
  CHECK(taken.dropped == 5);
  CHECK(log.take().events.empty());
}

TEST_CASE("only a whole trace section that comes first is one") {
  TraceSection section;
  section.context.trace_id.fill(1);
  const auto bytes = bytes_of(section);
  FrameHeader header;
  header.section_count = 1;
  CHECK(trace_of(header, bytes).is_set());
  CHECK_FALSE(trace_of(header, bytes.first(32)).is_set());
  header.section_count = 0;
  CHECK_FALSE(trace_of(header, bytes).is_set());
  header.section_count = 1;
  section.section.kind = static_cast<std::uint16_t>(SectionKind::kTableKeys);
  CHECK_FALSE(trace_of(header, bytes).is_set());
  section.section.kind = kTraceSection;
  section.section.payload_bytes = 23;
  CHECK_FALSE(trace_of(header, bytes).is_set());
}
