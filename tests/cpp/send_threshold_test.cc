// Followers that do not want every change at once: when a row goes, and that nothing stays behind.
#include "store/changes/send_threshold.h"

#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "change_fixture.h"

namespace sparserow {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{3'600'000};

void open(Store& store, const std::vector<std::uint64_t>& versions, const ThresholdOptions& threshold) {
  REQUIRE(store.changes().open("serving", versions, {}, std::chrono::seconds(0), threshold).is_ok());
}

// push() moves a row by 0.5 * value in each of its kDim weights.
float step_of(float value) { return 0.5f * value * std::sqrt(static_cast<float>(kDim)); }

TEST_CASE("a row goes when it was written often enough") {
  const auto from = make_store();
  const auto to = make_store();
  open(*from, from->changes().versions(), {.updates = 3, .longest = kLong});
  push(*from, 1, range(0, 100));
  push(*from, 1, range(0, 50));
  CHECK(follow(*from, "serving", *to).empty());
  CHECK(from->changes().stats().waiting_rows == 100);
  push(*from, 1, range(0, 10));
  follow(*from, "serving", *to);
  CHECK(from->changes().stats().waiting_rows == 90);
  const auto got = rows_of(*to);
  const auto all = rows_of(*from);
  CHECK(got.size() == 10);
  for (const auto& [name, row] : got) CHECK(row == all.at(name));
  for (int i = 0; i < 3; ++i) push(*from, 1, {60});  // counts the one before too
  follow(*from, "serving", *to);
  CHECK(rows_of(*to).size() == 11);
  push(*from, 1, {3});  // begins to count anew
  CHECK(follow(*from, "serving", *to).empty());
}

TEST_CASE("a row that was written before the follower came goes at once, since nobody counted") {
  const auto from = make_store();
  const auto to = make_store();
  const std::vector<std::uint64_t> published = from->changes().versions();
  REQUIRE(from->changes().open("publication", published, {}, std::chrono::seconds(0)).is_ok());
  push(*from, 1, range(0, 50));
  push(*from, 1, range(0, 50));
  open(*from, published, {.updates = 3, .longest = kLong});
  push(*from, 1, range(0, 10));
  push(*from, 1, range(60, 70));
  follow(*from, "serving", *to);
  const auto got = rows_of(*to);
  const auto all = rows_of(*from);
  for (const std::uint64_t key : range(0, 50)) CHECK((got.contains({1, key}) && got.at({1, key}) == all.at({1, key})));
  for (int i = 0; i < 2; ++i) {  // from here on they are counted
    push(*from, 1, range(0, 50));
    CHECK(follow(*from, "serving", *to).empty());
  }
  push(*from, 1, range(0, 50));
  follow(*from, "serving", *to);
  for (const std::uint64_t key : range(0, 50)) CHECK(rows_of(*to).at({1, key}) == rows_of(*from).at({1, key}));
  // Another follower that counts finds counting as it is: what this one knows goes on.
  REQUIRE(
      from->changes()
          .open("another", from->changes().versions(), {}, std::chrono::seconds(0), {.updates = 3, .longest = kLong})
          .is_ok());
  push(*from, 1, range(0, 50));
  CHECK(follow(*from, "serving", *to).empty());
}

TEST_CASE("a row goes when it has moved far enough from what was sent") {
  const auto from = make_store();
  const auto to = make_store();
  open(*from, from->changes().versions(), {.move = 2.5f * step_of(1.0f), .longest = kLong});
  push(*from, 1, range(0, 20));
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));  // the follower had none of them
  push(*from, 1, range(0, 20));
  push(*from, 1, range(0, 20));
  CHECK(follow(*from, "serving", *to).empty());
  push(*from, 1, range(0, 5));
  follow(*from, "serving", *to);
  const auto got = rows_of(*to);
  const auto all = rows_of(*from);
  for (const std::uint64_t key : range(0, 20)) CHECK((got.at({1, key}) == all.at({1, key})) == (key < 5));
  for (int i = 0; i < 10; ++i) push(*from, 1, {7}, i % 2 == 0 ? -1.0f : 1.0f);  // there and back
  CHECK(follow(*from, "serving", *to).empty());
}

TEST_CASE("a row whose copy has no room goes whenever it changes") {
  const auto from = make_store();
  const auto to = make_store();
  open(*from, from->changes().versions(), {.move = 100.0f, .longest = kLong, .bytes = 2000});
  std::uint64_t rounds_with_waiting = 0;
  for (int i = 0; i < 100; ++i) {  // copies of one slot make room for those of another now and then
    push(*from, 1, range(0, 200));
    follow(*from, "serving", *to);
    CHECK(from->changes().stats().waiting_rows < 30);
    rounds_with_waiting += from->changes().stats().waiting_rows > 0 ? 1 : 0;
  }
  CHECK(rows_of(*to).size() == 200);
  CHECK(rounds_with_waiting > 50);
}

TEST_CASE("no row waits for longer than its limit") {
  const auto from = make_store();
  const auto to = make_store();
  open(*from, from->changes().versions(), {.updates = 1000, .longest = milliseconds(5)});
  push(*from, 1, range(0, 100));
  push(*from, 2, range(50, 60));
  const auto began = std::chrono::steady_clock::now();
  follow(*from, "serving", *to);  // may be slow enough to get some
  std::this_thread::sleep_until(began + milliseconds(50));
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
  CHECK(from->changes().stats().waiting_rows == 0);
}

TEST_CASE("a follower whose cursor is lost gets what waited, without whole slots") {
  const auto from = make_store();
  const auto to = make_store();
  std::vector<std::uint64_t> versions = from->changes().versions();
  REQUIRE(from->changes().open("another", versions, {}, std::chrono::seconds(0)).is_ok());  // keeps the rings
  open(*from, versions, {.updates = 2, .longest = kLong});
  push(*from, 1, range(0, 200));
  push(*from, 1, range(0, 100));
  REQUIRE(from->erase(1, range(0, 10)).is_ok());
  for (const auto& [slot, version] : follow(*from, "serving", *to)) versions[slot] = version;
  CHECK(rows_of(*to).size() == 90);
  from->changes().close("serving");
  open(*from, versions, {});
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
  CHECK(from->changes().stats().snapshots == 0);
}

TEST_CASE("tombstones that the follower may ask for again are kept while rows wait") {
  const auto from = make_store();
  const auto to = make_store();
  std::vector<std::uint64_t> versions = from->changes().versions();
  open(*from, versions, {.updates = 2, .longest = kLong});
  push(*from, 1, range(0, 200));
  for (const auto& [slot, version] : follow(*from, "serving", *to)) versions[slot] = version;
  REQUIRE(from->erase(1, range(0, 20)).is_ok());
  for (const auto& [slot, version] : follow(*from, "serving", *to)) versions[slot] = version;
  open(*from, versions, {});  // begins anew: from versions before the erasures
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
}

TEST_CASE("what was not acknowledged is sent again, and is not what a row has moved from") {
  const auto from = make_store();
  const auto to = make_store();
  const auto lost = make_store();
  open(*from, from->changes().versions(), {.move = 1.5f * step_of(1.0f), .longest = kLong});
  push(*from, 1, range(0, 50));
  follow(*from, "serving", *to);
  push(*from, 1, range(0, 50), 2.0f);
  follow(*from, "serving", *lost, 1 << 20, false);
  CHECK(rows_of(*lost).size() == 50);
  push(*from, 1, range(0, 50), -0.1f);  // near to what was lost, far from what the follower has
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
}

TEST_CASE("erasures, creations after them and whole slots do not wait") {
  const auto from = make_store({.lineage = 3});
  const auto to = make_store();
  open(*from, from->changes().versions(), {.updates = 2, .move = 50.0f, .longest = kLong});
  push(*from, 1, range(0, 100));
  follow(*from, "serving", *to);
  REQUIRE(from->erase(1, range(0, 60)).is_ok());
  push(*from, 1, range(0, 30));
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
  push(*from, 1, range(60, 70));
  CHECK(follow(*from, "serving", *to).empty());
  from->set_lineage(4);
  follow(*from, "serving", *to);
  CHECK(rows_of(*to).size() == 70);
  for (const auto& [name, row] : rows_of(*to)) CHECK(row.second == rows_of(*from).at(name).second);
  CHECK(from->changes().stats().waiting_rows == 0);
}

}  // namespace
}  // namespace sparserow
