// One body over every implementation of Shards. To add one, add its maker below.
#include <doctest/doctest.h>

#include <functional>
#include <numeric>

#include "rpc_fixture.h"
#if __has_include("shards/local_shards.h")
#include "shards/local_shards.h"
#endif

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;

namespace {

// An implementation under test, with whatever must live as long.
struct Subject {
  std::string name;
  std::shared_ptr<Shards> shards;
  std::shared_ptr<void> owner;
};

std::vector<Subject> subjects(const std::vector<TableSchema>& tables) {
  std::vector<Subject> all;
  for (const std::uint32_t shards : {1u, 3u}) {
    const auto cluster = std::make_shared<Cluster>(shards, tables);
    all.push_back({"Client of " + std::to_string(shards), take(Client::connect(cluster->client_options())), cluster});
#if __has_include("shards/local_shards.h")
    std::vector<std::shared_ptr<Store>> stores;
    for (std::uint32_t s = 0; s < shards; ++s) {
      stores.push_back(make_store());
      for (const TableSchema& table : tables) REQUIRE(stores.back()->create_table(table).is_ok());
    }
    all.push_back({"LocalShards of " + std::to_string(shards), take(LocalShards::create(stores)), nullptr});
#endif
  }
  return all;
}

std::vector<std::uint64_t> iota_keys(std::size_t n, std::uint64_t first = 0) {
  std::vector<std::uint64_t> keys(n);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

void for_each(const std::vector<TableSchema>& tables, const std::function<void(Shards&)>& body) {
  for (const Subject& subject : subjects(tables)) {
    CAPTURE(subject.name);
    body(*subject.shards);
  }
}

// Every float of the rows of `keys`, which must all be equal.
float row_of(Shards& shards, const TableSchema& table, const std::vector<std::uint64_t>& keys) {
  const Grouped grouped(shards, table.id, keys);
  std::vector<float> rows(grouped.size() * table.dim);
  const auto pull = grouped.pull(table, rows.data());
  REQUIRE(shards.pull(std::span(&pull, 1), {}).is_ok());
  for (const float value : rows) REQUIRE(value == rows[0]);
  return rows[0];
}

const TableSchema kTable = sgd_table("t/a", 5, 2.0f);
const TableSchema kOther = sgd_table("t/b", 3, 4.0f);

}  // namespace

TEST_CASE("shards: owners are in range") {
  for_each({kTable},
           [](Shards& shards) { CHECK(check_slot_owner(shards.slot_owner(), shards.shard_count()).is_ok()); });
}

TEST_CASE("shards: an absent row reads as its initial row, and is not created by reading") {
  for_each({kTable}, [](Shards& shards) {
    const Grouped grouped(shards, kTable.id, iota_keys(50));
    std::vector<float> rows(250, -1.0f);
    std::vector<std::uint64_t> versions(50, 9);
    std::vector<std::uint8_t> found(50, 9);
    auto pull = grouped.pull(kTable, rows.data());
    pull.versions = versions;
    pull.found = found;
    for (int i = 0; i < 2; ++i) {
      REQUIRE(shards.pull(std::span(&pull, 1), {}).is_ok());
      CHECK(std::count(rows.begin(), rows.end(), 2.0f) == 250);
      CHECK(std::count(versions.begin(), versions.end(), 0u) == 50);
      CHECK(std::count(found.begin(), found.end(), 0) == 50);
    }
  });
}

TEST_CASE("shards: a commit applies every table once, however often it comes") {
  for_each({kTable, kOther}, [](Shards& shards) {
    const Grouped a(shards, kTable.id, iota_keys(40));
    const Grouped b(shards, kOther.id, iota_keys(40));
    const std::vector<float> grads(200, 1.0f);
    const std::vector<TablePush> pushes{a.push(kTable, grads.data(), 0.5f), b.push(kOther, grads.data(), 0.25f)};
    for (int i = 0; i < 2; ++i) REQUIRE(shards.commit(pushes, {.sequence = 1, .step = 0}).is_ok());
    CHECK(row_of(shards, kTable, iota_keys(40)) == 1.5f);
    CHECK(row_of(shards, kOther, iota_keys(40)) == 3.75f);
    REQUIRE(shards.commit({}, {.sequence = 2, .step = 1}).is_ok());
    REQUIRE(shards.commit(pushes, {.sequence = 3, .step = 2}).is_ok());
    CHECK(row_of(shards, kTable, iota_keys(40)) == 1.0f);
  });
}

TEST_CASE("shards: prepare applies nothing, commit_prepared all of it, abort none") {
  for_each({kTable}, [](Shards& shards) {
    const Grouped grouped(shards, kTable.id, iota_keys(40));
    std::vector<float> grads(200, 1.0f);
    const auto push = grouped.push(kTable, grads.data(), 1.0f);
    REQUIRE(shards.prepare(std::span(&push, 1), {.sequence = 1, .step = 0}).is_ok());
    std::fill(grads.begin(), grads.end(), 99.0f);  // what was prepared is held, not borrowed
    CHECK(row_of(shards, kTable, iota_keys(40)) == 2.0f);
    for (int i = 0; i < 2; ++i) REQUIRE(shards.commit_prepared({.sequence = 1, .step = 0}).is_ok());
    CHECK(row_of(shards, kTable, iota_keys(40)) == 1.0f);
    REQUIRE(shards.prepare(std::span(&push, 1), {.sequence = 2, .step = 1}).is_ok());
    REQUIRE(shards.abort({.sequence = 2, .step = 1}).is_ok());
    CHECK(shards.commit_prepared({.sequence = 2, .step = 1}).code() == Code::kFailedPrecondition);
    CHECK(row_of(shards, kTable, iota_keys(40)) == 1.0f);
  });
}

TEST_CASE("shards: an assign or erase that comes again under its sequence is answered again and changes nothing") {
  for_each({kTable}, [](Shards& shards) {
    const Grouped grouped(shards, kTable.id, iota_keys(40));
    const std::vector<float> sevens(200, 7.0f), ones(200, 1.0f);
    const auto rows = grouped.push(kTable, sevens.data(), 0.0f);
    const auto grads = grouped.push(kTable, ones.data(), 1.0f);
    CallOptions assign, erase;
    assign.sequence = 1;
    erase.sequence = 3;
    for (int i = 0; i < 2; ++i) REQUIRE(shards.assign({&rows, 1}, assign).is_ok());
    REQUIRE(shards.commit({&grads, 1}, {.sequence = 2, .step = 0}).is_ok());
    REQUIRE(shards.assign({&rows, 1}, assign).is_ok());
    CHECK(row_of(shards, kTable, iota_keys(40)) == 6.0f);
    CHECK(take(shards.erase(kTable.id, rows.keys, rows.shard_begin, erase)) == 40);
    REQUIRE(shards.commit({&grads, 1}, {.sequence = 4, .step = 1}).is_ok());
    CHECK(take(shards.erase(kTable.id, rows.keys, rows.shard_begin, erase)) == 40);
    CHECK(row_of(shards, kTable, iota_keys(40)) == 1.0f);
    assign.sequence = 5;
    REQUIRE(shards.assign({&rows, 1}, assign).is_ok());
    CHECK(row_of(shards, kTable, iota_keys(40)) == 7.0f);
  });
}

TEST_CASE("shards: a pull says whether anybody but this worker's steps wrote to the tables that it names") {
  for_each({kTable, kOther}, [](Shards& shards) {
    const Grouped a(shards, kTable.id, iota_keys(40));
    const Grouped none(shards, kOther.id, {});
    std::vector<float> rows(200);
    const std::vector<TablePull> pulls{a.pull(kTable, rows.data()), none.pull(kOther, rows.data())};
    const auto count = [&] {
      std::vector<std::uint64_t> counts(shards.shard_count());
      CallOptions options;
      options.writes_of_others = counts.data();
      REQUIRE(shards.pull(pulls, options).is_ok());
      return counts;
    };
    const std::vector<float> grads(200, 1.0f);
    const auto push = a.push(kTable, grads.data(), 0.5f);
    const Grouped b(shards, kOther.id, iota_keys(40));
    const auto other = b.push(kOther, grads.data(), 0.5f);
    auto before = count();
    REQUIRE(shards.commit({&push, 1}, {.sequence = 1, .step = 0}).is_ok());
    REQUIRE(shards.prepare({&push, 1}, {.sequence = 2, .step = 1}).is_ok());
    REQUIRE(shards.commit_prepared({.sequence = 2, .step = 1}).is_ok());
    CHECK(count() == before);
    const auto differs_everywhere = [&] {
      const auto now = count();
      for (std::size_t shard = 0; shard < now.size(); ++shard) CHECK(now[shard] != before[shard]);
      before = now;
    };
    REQUIRE(shards.commit({&push, 1}, {.sequence = 3}).is_ok());
    differs_everywhere();
    REQUIRE(shards.commit({&other, 1}, {.sequence = 4}).is_ok());
    differs_everywhere();
    REQUIRE(shards.assign({&push, 1}, {}).is_ok());
    differs_everywhere();
    REQUIRE(shards.erase(kTable.id, push.keys, push.shard_begin, {}).is_ok());
    differs_everywhere();
    CHECK(count() == before);
  });
}

TEST_CASE("local shards of two workers: each has its own sequences, and sees the other's writes") {
  std::vector<std::shared_ptr<Store>> stores{make_store()};
  REQUIRE(stores[0]->create_table(kTable).is_ok());
  const auto mine = take(LocalShards::create(stores));
  const auto theirs = mine->for_another_worker();
  const Grouped grouped(*mine, kTable.id, iota_keys(40));
  std::vector<float> rows(200);
  const auto pull = grouped.pull(kTable, rows.data());
  std::uint64_t before = 0, after = 0;
  CallOptions options;
  options.writes_of_others = &before;
  REQUIRE(mine->pull({&pull, 1}, options).is_ok());
  const std::vector<float> grads(200, 1.0f);
  const auto push = grouped.push(kTable, grads.data(), 0.5f);
  options.writes_of_others = &after;
  REQUIRE(mine->commit({&push, 1}, {.sequence = 1, .step = 0}).is_ok());
  REQUIRE(mine->pull({&pull, 1}, options).is_ok());
  CHECK(before == after);
  REQUIRE(theirs->commit({&push, 1}, {.sequence = 1, .step = 0}).is_ok());
  REQUIRE(mine->pull({&pull, 1}, options).is_ok());
  CHECK(before != after);
  CHECK(rows[0] == 1.0f);
}

TEST_CASE("local shards: a commit that ends half-way is not applied again from its beginning") {
  std::vector<std::shared_ptr<Store>> stores{make_store()};
  REQUIRE(stores[0]->create_table(kTable).is_ok());
  REQUIRE(stores[0]->create_table(kOther).is_ok());
  const auto shards = take(LocalShards::create(stores));
  const Grouped a(*shards, kTable.id, iota_keys(40)), b(*shards, kOther.id, iota_keys(40));
  const std::vector<float> grads(200, 1.0f);
  const std::vector<TablePush> pushes{a.push(kTable, grads.data(), 0.5f), b.push(kOther, grads.data(), 0.25f)};
  REQUIRE(shards->prepare(pushes, {.sequence = 1, .step = 0}).is_ok());
  REQUIRE(stores[0]->drop_table(kOther.id).is_ok());
  for (int i = 0; i < 2; ++i) {
    const Status status = shards->commit_prepared({.sequence = 1, .step = 0});
    CHECK(status.code() == Code::kDataLoss);
    CHECK(status.message().find("commit 1 was applied in part: ") == 0);
    CHECK(row_of(*shards, kTable, iota_keys(40)) == 1.5f);
  }
  CHECK(shards->commit(std::span(pushes).first(1), {.sequence = 2, .step = 1}).code() == Code::kDataLoss);
  CHECK(row_of(*shards, kTable, iota_keys(40)) == 1.5f);
}

TEST_CASE("local shards: a commit that fails before its first row changes may be made again") {
  std::vector<std::shared_ptr<Store>> stores{make_store()};
  const auto shards = take(LocalShards::create(stores));
  const Grouped grouped(*shards, kTable.id, iota_keys(40));
  const std::vector<float> grads(200, 1.0f);
  const auto push = grouped.push(kTable, grads.data(), 0.5f);
  CHECK(shards->commit({&push, 1}, {.sequence = 1, .step = 0}).code() == Code::kNotFound);
  REQUIRE(stores[0]->create_table(kTable).is_ok());
  REQUIRE(shards->commit({&push, 1}, {.sequence = 1, .step = 0}).is_ok());
  CHECK(row_of(*shards, kTable, iota_keys(40)) == 1.5f);
}

TEST_CASE("shards: another worker's step is a write of others") {
  Cluster cluster(2, {kTable});
  cluster.set_job(1u, 2);
  const auto mine = take(Client::connect(cluster.client_options(0)));
  const auto theirs = take(Client::connect(cluster.client_options(1)));
  const Grouped grouped(*mine, kTable.id, iota_keys(40));
  std::vector<float> rows(200);
  const auto pull = grouped.pull(kTable, rows.data());
  std::vector<std::uint64_t> before(2), after(2);
  CallOptions options;
  options.writes_of_others = before.data();
  REQUIRE(mine->pull({&pull, 1}, options).is_ok());
  const std::vector<float> grads(200, 1.0f);
  const auto push = grouped.push(kTable, grads.data(), 0.5f);
  options.writes_of_others = after.data();
  REQUIRE(mine->commit({&push, 1}, {.sequence = 1, .step = 0}).is_ok());
  REQUIRE(mine->pull({&pull, 1}, options).is_ok());
  CHECK(before == after);
  REQUIRE(theirs->commit({&push, 1}, {.sequence = 1, .step = 0}).is_ok());
  REQUIRE(mine->pull({&pull, 1}, options).is_ok());
  CHECK(before[0] != after[0]);
  CHECK(before[1] != after[1]);
}

TEST_CASE("shards: a conditional pull brings the rows whose version differs, and leaves the others alone") {
  for_each({kTable, kOther}, [](Shards& shards) {
    const Grouped grouped(shards, kTable.id, iota_keys(40));
    const Grouped other(shards, kOther.id, iota_keys(7));
    std::vector<float> rows(200), plain(21);
    std::vector<std::uint64_t> versions(40, kNoVersion);
    std::vector<std::uint8_t> found(40, 9), changed(40, 9);
    std::vector<TablePull> pulls{grouped.pull(kTable, rows.data()), other.pull(kOther, plain.data())};
    pulls[0].known = pulls[0].versions = versions;
    pulls[0].found = found;
    pulls[0].changed = changed;
    REQUIRE(shards.pull(pulls, {}).is_ok());  // it has nothing yet
    CHECK(std::count(changed.begin(), changed.end(), 1) == 40);
    CHECK(std::count(rows.begin(), rows.end(), 2.0f) == 200);
    CHECK(std::count(plain.begin(), plain.end(), 4.0f) == 21);
    CHECK(std::count(versions.begin(), versions.end(), 0u) == 40);

    const Grouped touched(shards, kTable.id, iota_keys(5, 10));
    const std::vector<float> grads(25, 1.0f);
    const auto push = touched.push(kTable, grads.data(), 1.0f);
    REQUIRE(shards.commit(std::span(&push, 1), {.sequence = 1, .step = 0}).is_ok());
    std::fill(rows.begin(), rows.end(), -7.0f);  // shows what is written
    REQUIRE(shards.pull(pulls, {}).is_ok());
    for (std::size_t i = 0; i < 40; ++i) {
      const std::uint64_t key = grouped.partition.keys[i];
      const bool is_touched = key >= 10 && key < 15;
      CHECK(changed[i] == (is_touched ? 1 : 0));
      CHECK(found[i] == (is_touched ? 1 : 0));
      CHECK(rows[i * 5] == (is_touched ? 1.0f : -7.0f));
      CHECK((versions[i] != 0) == is_touched);
    }
    // A version from the future is another one too: after a restore the right row may be the older one.
    std::vector<std::uint64_t> newer(versions);
    for (auto& version : newer) version += 1'000'000;
    pulls[0].known = newer;
    REQUIRE(shards.pull(pulls, {}).is_ok());
    CHECK(std::count(changed.begin(), changed.end(), 1) == 40);
    pulls[0].known = versions;
    REQUIRE(shards.pull(pulls, {}).is_ok());
    CHECK(std::count(changed.begin(), changed.end(), 1) == 0);
    pulls[0].versions = {};
    CHECK(shards.pull(pulls, {}).code() == Code::kInvalidArgument);
  });
}

TEST_CASE("shards: a pull whose outputs do not fit its keys is refused before a row is read") {
  for_each({kTable}, [](Shards& shards) {
    const Grouped grouped(shards, kTable.id, iota_keys(10));
    std::vector<float> rows(10 * std::size_t{kTable.dim}, -7.0f);
    std::vector<std::uint64_t> versions(10);
    std::vector<std::uint8_t> marks(10);
    const TablePull right = grouped.pull(kTable, rows.data());
    const auto refusal = [&](const auto& change) {
      TablePull pull = right;
      change(pull);
      const Status status = shards.pull(std::span(&pull, 1), {});
      CHECK(status.code() == Code::kInvalidArgument);
      return status.message();
    };
    CHECK(refusal([](TablePull& pull) { pull.rows = pull.rows.first(9); }).find("pull.rows") != std::string::npos);
    CHECK(refusal([&](TablePull& pull) { pull.versions = std::span(versions).first(9); }).find("pull.versions") !=
          std::string::npos);
    CHECK(refusal([&](TablePull& pull) { pull.found = std::span(marks).first(1); }).find("pull.found") !=
          std::string::npos);
    CHECK(refusal([&](TablePull& pull) { pull.known = versions; }).find("pull.versions") != std::string::npos);
    CHECK(std::count(rows.begin(), rows.end(), -7.0f) == static_cast<std::ptrdiff_t>(rows.size()));
    CHECK(shards.pull(std::span(&right, 1), {}).is_ok());
  });
}

TEST_CASE("shards: assign, erase and scan") {
  for_each({kTable}, [](Shards& shards) {
    const Grouped grouped(shards, kTable.id, iota_keys(100));
    const std::vector<float> values(500, 7.0f);
    const auto push = grouped.push(kTable, values.data(), 0.0f);
    REQUIRE(shards.assign(std::span(&push, 1), {}).is_ok());
    CHECK(row_of(shards, kTable, iota_keys(100)) == 7.0f);
    const Grouped some(shards, kTable.id, iota_keys(60, 50));
    CHECK(take(shards.erase(kTable.id, some.partition.keys, some.partition.shard_begin, {})) == 50);
    CHECK(row_of(shards, kTable, iota_keys(10, 50)) == 2.0f);
    std::vector<std::uint64_t> seen;
    for (std::uint32_t shard = 0; shard < shards.shard_count(); ++shard) {
      std::uint64_t cursor = 0;
      do {
        const auto page = take(shards.scan(shard, kTable.id, cursor, 7, false, {}));
        seen.insert(seen.end(), page.keys.begin(), page.keys.end());
        cursor = page.next_cursor;
      } while (cursor != 0);
    }
    std::sort(seen.begin(), seen.end());
    CHECK(seen == iota_keys(50));
  });
}

TEST_CASE("shards: an unknown table and a wrong dim are refused") {
  for_each({kTable}, [](Shards& shards) {
    std::vector<float> rows(800);
    const Grouped unknown(shards, kOther.id, iota_keys(10));
    const auto pull = unknown.pull(kOther, rows.data());
    CHECK(shards.pull(std::span(&pull, 1), {}).code() == Code::kNotFound);
    const Grouped grouped(shards, kTable.id, iota_keys(10));
    auto push = grouped.push(kTable, rows.data(), 1.0f);
    push.dim = 6;
    CHECK(shards.commit(std::span(&push, 1), {.sequence = 1, .step = 0}).code() == Code::kInvalidArgument);
    CHECK(row_of(shards, kTable, iota_keys(10)) == 2.0f);
  });
}
