// Followers of some tables: what others write costs them nothing, and what they want is never lost, whoever comes and
// goes beside them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "change_fixture.h"
#include "store/changes/change_log.h"
#include "store/stripe_log.h"

namespace sparserow {
namespace {

using Tables = std::vector<std::uint32_t>;

// The rows of the tables that are wanted (none: all).
Rows wanted_of(const Store& store, const Tables& tables) {
  Rows all = rows_of(store);
  std::erase_if(all, [&](const auto& row) {
    return !tables.empty() && std::find(tables.begin(), tables.end(), row.first.first) == tables.end();
  });
  return all;
}

TEST_CASE("what is written to a table that nobody follows is not noted, and its slots are not looked at") {
  const auto from = make_store();
  const auto to = make_store();
  push(*from, 1, range(0, 100));
  REQUIRE(from->changes().open("serving", from->changes().versions(), {1}, std::chrono::seconds(0)).is_ok());
  const std::uint64_t empty = from->changes().stats().used_bytes;
  push(*from, 2, range(0, 5000));
  CHECK(from->changes().stats().used_bytes == empty);
  CHECK(from->changes().behind("serving", 0).value().slots.empty());
  push(*from, 1, range(7, 8));
  CHECK(from->changes().behind("serving", 0).value().slots.size() == 1);
  follow(*from, "serving", *to);
  CHECK(rows_of(*to).size() == 1);
  CHECK(from->changes().stats().scans == 0);
  CHECK(from->changes().stats().snapshots == 0);
  CHECK(from->changes().stats().forgotten == 0);
}

TEST_CASE("a table of its id that is made later is followed") {
  const auto from = make_store();
  const auto to = make_store();
  REQUIRE(from->drop_table(2).is_ok());
  REQUIRE(from->changes().open("serving", from->changes().versions(), {2}, std::chrono::seconds(0)).is_ok());
  REQUIRE(from->create_table(schema_of(2)).is_ok());
  push(*from, 2, range(0, 100));
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
}

TEST_CASE("a table that goes and comes back sets nobody back who follows other tables") {
  const auto from = make_store();
  const auto to = make_store();
  const auto others = make_store();
  push(*from, 1, range(0, 100));
  push(*from, 2, range(0, 100));
  for (const std::uint32_t table : {1u, 2u}) {
    REQUIRE(from->changes()
                .open("of " + std::to_string(table), from->changes().versions(), {table}, std::chrono::seconds(0))
                .is_ok());
  }
  push(*from, 1, range(0, 100));
  REQUIRE(from->drop_table(2).is_ok());
  REQUIRE(from->create_table(schema_of(2)).is_ok());
  push(*from, 2, range(40, 50));
  push(*from, 1, range(3, 5));
  follow(*from, "of 1", *to);
  CHECK(from->changes().stats().snapshots == 0);
  CHECK(from->changes().stats().scans == 0);
  CHECK(rows_of(*to) == wanted_of(*from, {1}));
  push(*others, 2, range(0, 100));
  follow(*from, "of 2", *others);
  CHECK(from->changes().stats().snapshots > 0);
  CHECK(rows_of(*others) == wanted_of(*from, {2}));
  CHECK(from->changes().behind("of 1", 0).value().slots.empty());
}

TEST_CASE("a table came back while its follower was away, and all others have passed that") {
  const auto from = make_store();
  const auto to = make_store();
  const auto others = make_store();
  push(*from, 2, range(0, 100));
  REQUIRE(from->changes().open("stays", from->changes().versions(), {1}, std::chrono::seconds(0)).is_ok());
  REQUIRE(from->changes().open("goes", nothing(), {2}, std::chrono::seconds(0)).is_ok());
  follow(*from, "goes", *to);
  const auto had = from->changes().versions();
  from->changes().close("goes");
  for (int round = 0; round < 3; ++round) {  // more often than a table is noted
    REQUIRE(from->drop_table(2).is_ok());
    REQUIRE(from->create_table(schema_of(2)).is_ok());
    push(*from, 1, range(0, 300));
    follow(*from, "stays", *others);
  }
  REQUIRE(from->changes().open("goes", had, {2}, std::chrono::seconds(0)).is_ok());
  push(*from, 2, range(7, 9));
  follow(*from, "goes", *to);
  CHECK(rows_of(*to) == wanted_of(*from, {2}));
  CHECK(rows_of(*to).size() == 2);
}

TEST_CASE("when more tables go than are noted, every follower gets the slots whole") {
  ChangeBudget budget{.limit_bytes = 1u << 20};
  StripeLog log;
  log.open({0, 0});
  std::uint64_t sequence = 0;
  for (std::uint32_t table = 10; table < 10 + 1024; ++table) log.reset_table(table, ++sequence, false, budget);
  CHECK(log.last_reset({1}) == 0);
  CHECK(log.last_reset({12, 700}) == 700 - 9);
  CHECK(log.last_reset({}) == sequence);
  CHECK(log.erasures(0).floor() == 0);
  log.reset_table(9, ++sequence, false, budget);
  for (const std::uint32_t slot : {0u, 1u}) CHECK(log.erasures(slot).floor() == sequence);
  log.reset_table(12, ++sequence, false, budget);
  CHECK(log.last_reset({12}) == sequence);
  log.pass({sequence, sequence - 1}, budget);  // a cursor lacks one of the slots
  CHECK(log.last_reset({12}) == sequence);
  log.pass({sequence, sequence}, budget);
  CHECK(log.last_reset({12}) == 0);
  for (const std::uint32_t slot : {0u, 1u}) CHECK(log.erasures(slot).floor() == sequence);
}

TEST_CASE("a follower that wants one more table is not taken for one that had it") {
  const auto from = make_store();
  const auto published = make_store();
  REQUIRE(from->changes().open("first", from->changes().versions(), {1}, std::chrono::seconds(0)).is_ok());
  push(*from, 1, range(0, 100));
  push(*from, 2, range(0, 100));  // not noted
  const auto looked_at = from->changes().versions();
  follow(*from, "first", *published);
  push(*from, 2, range(0, 100));  // not noted, after the last look at the slots
  REQUIRE(from->changes().open("second", looked_at, {2}, std::chrono::seconds(0)).is_ok());
  const auto to = make_store();
  follow(*from, "second", *to);
  CHECK(wanted_of(*to, {2}) == wanted_of(*from, {2}));
}

// A process that follows: what it wants, has, and says that it has.
struct Peer {
  std::string name;
  Tables tables;
  std::unique_ptr<Store> store;
  std::vector<std::uint64_t> versions;
};

// As a publication that the follower loaded: the rows of now.
void publish(Store& from, Peer& peer) {
  peer.store = make_store();
  peer.versions = from.changes().versions();
  for (const auto& [name, row] : wanted_of(from, peer.tables)) {
    const std::vector<std::uint64_t> key = {name.second};
    REQUIRE(peer.store->changes().assign_newest(name.first, key, row.second.data(), &row.first, false).is_ok());
  }
}

void play(std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&random](std::uint32_t bound) { return static_cast<std::uint32_t>(random() % bound); };
  StoreOptions options;
  if (below(2) == 0) options.change_log_bytes = StripeLog::bytes_for(kSlots) + kSlots * 8 * sizeof(Change);
  const auto from = make_store(options);
  const std::vector<Tables> choices = {{1}, {2}, {1, 2}, {}};
  std::vector<Peer> peers(3);
  for (std::size_t i = 0; i < peers.size(); ++i) {
    peers[i] = {"peer" + std::to_string(i), choices[below(4)], nullptr, {}};
    publish(*from, peers[i]);
  }
  for (int step = 0; step < 300; ++step) {
    Peer& peer = peers[below(3)];
    const std::uint64_t begin = below(60);
    switch (below(10)) {
      case 0:
        REQUIRE(from->erase(1 + below(2), range(begin, begin + below(4) + 1)).is_ok());
        break;
      case 1:
      case 2:
        REQUIRE(from->changes().open(peer.name, peer.versions, peer.tables, std::chrono::seconds(0)).is_ok());
        break;
      case 3:
        from->changes().close(peer.name);
        break;
      case 4:
        if (below(3) == 0) {  // another model
          from->changes().close(peer.name);
          peer.tables = choices[below(4)];
          publish(*from, peer);
        }
        break;
      case 5:
      case 6:
        if (from->changes().is_open(peer.name)) {
          const bool acknowledges = below(3) > 0;
          for (const auto& [slot, version] : follow(*from, peer.name, *peer.store, 512, acknowledges)) {
            peer.versions[slot] = version;
          }
          REQUIRE(wanted_of(*peer.store, peer.tables) == wanted_of(*from, peer.tables));
        }
        break;
      default:
        push(*from, 1 + below(2), range(begin, begin + below(8) + 1));
    }
  }
}

TEST_CASE("nothing that a follower wants is lost, whoever follows beside it") {
  const char* given = std::getenv("SPARSEROW_TEST_SEED");
  const auto first = given != nullptr ? static_cast<std::uint32_t>(std::atoi(given)) : std::random_device{}();
  std::printf("seed %u\n", first);
  for (std::uint32_t seed = first; seed < first + 400; ++seed) {
    CAPTURE(seed);
    play(seed);
  }
}

}  // namespace
}  // namespace sparserow
