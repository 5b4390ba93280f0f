// The row cache on a session's pull route: what a step gets is never older than the knob allows.
#include "session/session_cache.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>

#include "session/prefetcher.h"
#include "session/table_access.h"
#include "session_fixture.h"

using namespace sparserow;

namespace {

using Ids = std::vector<std::int64_t>;

// A session with a cache over the fixture's shards, and a second one that stands for other workers. A row's weights
// count updates: 1 for each of this session, 1000 for each of the other.
struct Cached2 {
  Fixture f;
  std::shared_ptr<Session> session;
  std::shared_ptr<Binding> binding;
  TableAccess others;

  explicit Cached2(CacheOptions cache) : others(nullptr, {}) {
    f.session->close();
    SessionOptions options;
    options.cache = cache;
    session = Session::create(f.shards, options).value();
    REQUIRE(session->bind({"test/t", id_of_name("test/t"), 1, kDim, 1000, 1.0f}).is_ok());
    binding = find_binding("test/t").value();
    auto same_stores = LocalShards::create({f.stores[0], f.stores[1]}).value();  // with a window of its own
    others = TableAccess(Session::create(same_stores, {}).value(), {id_of_name("test/t"), 1, kDim});
  }

  float weight(std::int64_t id) { return 1.0f - binding->lookup(ref({id}), true).value().row(0)[0]; }
  void other_updates(std::uint64_t key) {
    const std::vector<float> grad(kDim, 1000.0f);
    REQUIRE(others.push({&key, 1}, grad.data(), 1.0f).status.is_ok());
  }
  // Ends the step with a gradient of one for these ids, which were looked up in it.
  void step(const Ids& ids = {}) {
    if (!ids.empty()) stage_ones(*binding, ids);
    REQUIRE(session->seal(1.0f).is_ok());
    REQUIRE(session->commit().is_ok());
  }
  int pulls() const { return f.shards->pulls.load(); }

 private:
  static IdsRef ref(const Ids& ids) {
    static thread_local std::deque<Ids> kept;  // a lookup is remembered by its tensor's address
    kept.push_back(ids);
    return sparserow::ref(kept.back());
  }
};

constexpr std::uint64_t kRoom = 1 << 20;

}  // namespace

TEST_CASE("a row serves the steps of its staleness without a pull, then is asked about by its version") {
  Cached2 c({kRoom, 2});
  CHECK(c.weight(7) == 0.0f);
  c.other_updates(7);
  for (int step = 1; step <= 2; ++step) {
    c.step();
    const int before = c.pulls();
    CHECK(c.weight(7) == 0.0f);
    CHECK(c.pulls() == before);
  }
  c.step();
  CHECK(c.weight(7) == 1000.0f);
  c.step();
  c.step();
  c.step();
  CHECK(c.weight(7) == 1000.0f);
  const SessionStats stats = c.session->stats();
  CHECK(stats.cache_misses == 1);
  CHECK(stats.cache_hits == 2);
  CHECK(stats.cache_revalidated == 2);
  CHECK(stats.cache_refreshed == 1);
  CHECK(stats.cache_bytes_saved == 3 * kDim * sizeof(float));
  CHECK(stats.rows_pulled == 2);
}

TEST_CASE("own commits: exact sees them in the next step, bounded within the staleness") {
  for (const OwnCommits own : {OwnCommits::kExact, OwnCommits::kBounded}) {
    Cached2 c({kRoom, 2, own});
    CHECK(c.weight(7) == 0.0f);
    CHECK(c.weight(8) == 0.0f);
    c.step({7});
    const int before = c.pulls();
    CHECK(c.weight(7) == (own == OwnCommits::kExact ? 1.0f : 0.0f));
    CHECK(c.weight(8) == 0.0f);
    CHECK(c.pulls() == before + (own == OwnCommits::kExact ? 1 : 0));
    c.step();
    c.step();
    CHECK(c.weight(7) == 1.0f);
  }
}

TEST_CASE("a step that was aborted leaves the cache as it was") {
  Cached2 c({kRoom, 3});
  CHECK(c.weight(7) == 0.0f);
  stage_ones(*c.binding, {7});
  REQUIRE(c.session->seal(1.0f).is_ok());
  REQUIRE(c.session->abort().is_ok());
  const int before = c.pulls();
  CHECK(c.weight(7) == 0.0f);
  CHECK(c.pulls() == before);
}

TEST_CASE("rows that this session pushes, assigns or erases by key are asked for again, whatever the mode") {
  Cached2 c({kRoom, 100, OwnCommits::kBounded});
  TableAccess rows(c.session, {id_of_name("test/t"), 1, kDim});
  const std::uint64_t key = 7;
  const std::vector<float> ones(kDim, 1.0f), fives(kDim, -4.0f);
  CHECK(c.weight(7) == 0.0f);
  REQUIRE(rows.push({&key, 1}, ones.data(), 1.0f).status.is_ok());
  c.step();
  CHECK(c.weight(7) == 1.0f);
  REQUIRE(rows.assign({&key, 1}, fives.data()).is_ok());
  c.step();
  CHECK(c.weight(7) == 5.0f);
  CHECK(rows.erase({&key, 1}).value() == 1);
  c.step();
  CHECK(c.weight(7) == 0.0f);
}

TEST_CASE("a step that finds all its rows needs no shard; one that does not fails whole and can be tried again") {
  Cached2 c({kRoom, 5});
  CHECK(c.weight(1) == 0.0f);
  CHECK(c.weight(2) == 0.0f);
  c.step();
  c.f.shards->pull_refusal = Code::kUnavailable;
  CHECK(c.weight(1) == 0.0f);
  const Ids both{2, 3};
  CHECK(c.binding->lookup(ref(both), true).status().code() == Code::kUnavailable);
  c.f.shards->pull_refusal = Code::kOk;
  c.other_updates(3);
  CHECK(c.binding->lookup(ref(both), true).value().row(1)[0] == 1.0f - 1000.0f);
  CHECK(c.binding->lookup(ref(both), true).value().row(0)[0] == 1.0f);
}

TEST_CASE("reads without a clock see the newest rows and leave the cache alone") {
  Cached2 c({kRoom, 5});
  CHECK(c.weight(7) == 0.0f);
  c.other_updates(7);
  c.step();
  CHECK(first_weight(*c.binding, 7) == 1.0f - 1000.0f);
  CHECK(c.weight(7) == 0.0f);
  CHECK(c.session->stats().cache_misses == 1);
}

TEST_CASE("a batch pulled beside a commit in flight does not hide it from later steps") {
  Cached2 c({kRoom, 4});
  Prefetcher prefetcher(c.session, /*exact=*/false);
  CHECK(c.weight(7) == 0.0f);
  stage_ones(*c.binding, {7});
  REQUIRE(c.session->seal(1.0f).is_ok());
  REQUIRE(c.session->prepare().is_ok());
  REQUIRE(c.session->begin_commit().is_ok());
  const Ids ids{7};
  const AheadLookup lookup{"test/t", ref(ids)};
  auto batch = prefetcher.index({&lookup, 1}).value();
  REQUIRE(prefetcher.pull(*batch, 2).is_ok());  // does not wait for the commit
  REQUIRE(c.session->finish_commit().is_ok());
  CHECK(c.weight(7) == 1.0f);
}

TEST_CASE("tables share the bytes; one that is not cached is pulled as ever; too few bytes are refused") {
  const std::uint64_t bytes = 8 * (RowCache::bytes_per_row(kDim) + RowCache::bytes_per_row(5));
  Cached2 c({bytes, 5});
  TableSchema wide;
  wide.id = id_of_name("test/wide");
  wide.name = "test/wide";
  wide.dim = 5;
  wide.init = {InitKind::kConstant, 2.0f, 0.0f};
  TableSchema plain = wide;
  plain.id = id_of_name("test/plain");
  plain.name = "test/plain";
  for (auto& store : c.f.stores) {
    REQUIRE(store->create_table(wide).is_ok());
    REQUIRE(store->create_table(plain).is_ok());
  }
  REQUIRE(c.session->bind({"test/wide", wide.id, 1, 5, 100, 1.0f}).is_ok());
  REQUIRE(c.session->bind({"test/plain", plain.id, 1, 5, 100, 1.0f, /*cached=*/false}).is_ok());
  const Ids ids{1, 2};
  for (int step = 0; step < 2; ++step) {
    const AheadLookup lookups[]{{"test/t", ref(ids)}, {"test/wide", ref(ids)}, {"test/plain", ref(ids)}};
    REQUIRE(c.session->pull_ahead(lookups, true).is_ok());
    CHECK(find_binding("test/wide").value()->lookup(ref(ids), true).value().row(1)[4] == 2.0f);
    CHECK(find_binding("test/plain").value()->lookup(ref(ids), true).value().row(1)[4] == 2.0f);
    CHECK(c.weight(2) == 0.0f);
    c.step();
  }
  const SessionStats stats = c.session->stats();
  CHECK(stats.cache_misses == 4);
  CHECK(stats.cache_hits == 4);
  CHECK(stats.rows_pulled == 4 + 2 * 2);
  const Status refused = c.session->bind({"test/more", 5, 1, 5, 100, 1.0f});
  CHECK(refused.code() == Code::kInvalidArgument);
  CHECK(refused.message().find("cache.bytes: " + std::to_string(bytes)) == 0);
}

TEST_CASE("random steps, commits and other workers' commits: no row is older than allowed, and bits are never mixed") {
  const char* given = std::getenv("SPARSEROW_TEST_SEED");
  const auto seed = given == nullptr ? std::random_device{}() : static_cast<unsigned>(std::stoul(given));
  MESSAGE("SPARSEROW_TEST_SEED=" << seed);
  std::mt19937 random(seed);
  const auto below = [&random](std::uint32_t n) { return random() % n; };
  for (int run = 0; run < 60; ++run) {
    const std::int64_t staleness = below(5);
    const auto own = below(2) == 0 ? OwnCommits::kExact : OwnCommits::kBounded;
    const std::uint32_t keys = 10 + below(60);
    const std::uint64_t least = RowCache::kWays * RowCache::bytes_per_row(kDim);
    CAPTURE(run);
    CAPTURE(staleness);
    CAPTURE(static_cast<int>(own));
    Cached2 c({least * (1 + below(4)), staleness, own});
    Prefetcher prefetcher(c.session, /*exact=*/false);
    std::map<std::int64_t, int> own_now, other_now;
    std::deque<std::pair<std::map<std::int64_t, int>, std::map<std::int64_t, int>>> at_begin;  // of the last steps
    bool is_second_try = false;
    for (int round = 0; round < 60; ++round) {
      if (!is_second_try) at_begin.emplace_back(own_now, other_now);
      is_second_try = false;
      if (at_begin.size() > static_cast<std::size_t>(staleness) + 1) at_begin.pop_front();
      Ids looked_up;
      std::map<std::int64_t, float> seen;
      for (std::uint32_t lookup = below(4); lookup > 0; --lookup) {
        Ids ids(1 + below(12));
        for (auto& id : ids) id = static_cast<std::int64_t>(std::min(below(keys), below(keys)));
        if (below(3) == 0) {
          ++other_now[ids.front()];
          c.other_updates(static_cast<std::uint64_t>(ids.front()));
        }
        if (below(4) == 0) {
          const AheadLookup ahead{"test/t", sparserow::ref(ids)};
          auto batch = prefetcher.index({&ahead, 1}).value();
          REQUIRE(prefetcher.pull(*batch, c.session->step()).is_ok());
          REQUIRE(prefetcher.hand_over(std::move(batch)).is_ok());
        }
        const Lookup rows = c.binding->lookup(sparserow::ref(ids), true).value();
        for (std::size_t i = 0; i < ids.size(); ++i) {
          const float weight = 1.0f - rows.row(i)[0];
          for (std::uint32_t column = 1; column < kDim; ++column) REQUIRE(rows.row(i)[column] == rows.row(i)[0]);
          const auto before = seen.emplace(ids[i], weight);
          REQUIRE(before.first->second == weight);  // within a step a row never changes
          const int own_seen = static_cast<int>(weight) % 1000, other_seen = static_cast<int>(weight) / 1000;
          auto& [own_then, other_then] = at_begin.front();
          CAPTURE(ids[i]);
          CAPTURE(round);
          REQUIRE(own_seen >= (own == OwnCommits::kExact ? own_now[ids[i]] : own_then[ids[i]]));
          REQUIRE(own_seen <= own_now[ids[i]]);
          REQUIRE(other_seen >= other_then[ids[i]]);
        }
        looked_up.insert(looked_up.end(), ids.begin(), ids.end());
      }
      Ids pushed;
      for (const std::int64_t id : looked_up) {
        if (below(2) == 0 && std::find(pushed.begin(), pushed.end(), id) == pushed.end()) pushed.push_back(id);
      }
      if (below(8) == 0) {
        REQUIRE(c.session->abort().is_ok());
        is_second_try = true;  // by the same clock
        continue;
      }
      for (const std::int64_t id : pushed) ++own_now[id];
      c.step(pushed);
    }
    const SessionStats stats = c.session->stats();
    if (staleness == 0) CHECK(stats.cache_hits == 0);
  }
}
