// Following a store's changes: what a cursor is told, what is forgotten, and pages from one store to another.
#include "store/changes/change_log.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "change_fixture.h"
#include "store/changes/change_page.h"
#include "store/stripe_log.h"

namespace sparserow {
namespace {

TEST_CASE("a store that nobody follows keeps no changes") {
  const auto store = make_store();
  push(*store, 1, range(0, 1000));
  CHECK(store->changes().stats().used_bytes == 0);
  CHECK(store->changes().behind("serving", 0).status().code() == Code::kNotFound);
}

TEST_CASE("a follower gets what is there, then what changes, and acknowledged changes are dropped") {
  const auto from = make_store();
  const auto to = make_store();
  push(*from, 1, range(0, 500));
  REQUIRE(from->changes().open("serving", nothing(), {}, std::chrono::seconds(0)).is_ok());
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
  const std::uint64_t empty = from->changes().stats().used_bytes;
  CHECK(from->changes().stats().snapshots == kSlots);
  push(*from, 1, range(100, 200));
  push(*from, 2, range(0, 50));
  REQUIRE(from->erase(1, range(0, 30)).is_ok());
  CHECK(from->changes().stats().used_bytes > empty);
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
  CHECK(from->changes().stats().snapshots == kSlots);
  CHECK(from->changes().stats().scans == 0);
  CHECK(from->changes().stats().used_bytes == empty);
  from->changes().close("serving");
  CHECK(from->changes().stats().used_bytes == 0);
}

TEST_CASE("the next change after it was armed wakes a reader, once") {
  const auto store = make_store();
  ChangeSignal& signal = store->changes().signal();
  const auto descriptor = signal.descriptor();
  REQUIRE(descriptor.is_ok());
  const auto woken = [&] {
    std::uint64_t count = 0;
    return ::read(descriptor.value(), &count, sizeof(count)) == sizeof(count);
  };
  signal.arm();
  push(*store, 1, range(0, 10));
  CHECK_FALSE(woken());  // nobody follows
  REQUIRE(store->changes().open("one", store->changes().versions(), {1}, std::chrono::seconds(0)).is_ok());
  push(*store, 2, range(0, 10));
  CHECK_FALSE(woken());  // another table
  push(*store, 1, range(0, 10));
  CHECK(woken());
  push(*store, 1, range(0, 10));
  CHECK_FALSE(woken());  // it was not armed again
  signal.arm();
  REQUIRE(store->erase(1, range(0, 1)).is_ok());
  CHECK(woken());
  signal.arm();
  REQUIRE(store->drop_table(1).is_ok());
  CHECK(woken());
}

TEST_CASE("no change is missed between a look and the wait for the next one") {
  const auto store = make_store();
  ChangeSignal& signal = store->changes().signal();
  const int descriptor = signal.descriptor().value();
  REQUIRE(store->changes().open("one", store->changes().versions(), {}, std::chrono::seconds(0)).is_ok());
  constexpr int kPushes = 2000;
  std::atomic<int> seen = 0;
  std::thread writer([&] {
    for (int i = 0; i < kPushes; ++i) {
      push(*store, 1, range(0, 1));
      while (seen.load() <= i) std::this_thread::yield();  // the reader finds each change by itself
    }
  });
  std::uint64_t before = 0;
  for (int found = 0; found < kPushes;) {
    signal.arm();
    const auto versions = store->changes().versions();
    const std::uint64_t now = std::accumulate(versions.begin(), versions.end(), std::uint64_t{0});
    if (now != before) {
      before = now;
      seen.store(++found);
      continue;
    }
    pollfd wanted{.fd = descriptor, .events = POLLIN, .revents = 0};
    REQUIRE(::poll(&wanted, 1, 20'000) == 1);
    std::uint64_t count = 0;
    REQUIRE(::read(descriptor, &count, sizeof(count)) == sizeof(count));
  }
  writer.join();
}

TEST_CASE("the slowest cursor holds changes back") {
  const auto from = make_store();
  const auto now = from->changes().versions();
  REQUIRE(from->changes().open("fast", now, {}, std::chrono::seconds(0)).is_ok());
  REQUIRE(from->changes().open("slow", now, {}, std::chrono::seconds(0)).is_ok());
  const auto fast = make_store();
  const auto slow = make_store();
  push(*from, 1, range(0, 200));
  REQUIRE(from->erase(1, range(0, 20)).is_ok());
  follow(*from, "fast", *fast);
  follow(*from, "slow", *slow);
  CHECK(rows_of(*slow) == rows_of(*from));
  CHECK(from->changes().stats().snapshots == 0);
  CHECK(from->changes().stats().scans == 0);
}

TEST_CASE("a version that somebody wrote down, and looked at nothing, lacks nothing either") {
  const auto from = make_store();
  const auto to = make_store();
  push(*from, 1, range(0, 100));
  REQUIRE(from->changes().open("first", from->changes().versions(), {}, std::chrono::seconds(0)).is_ok());
  push(*from, 1, range(0, 50));  // noted for the first one
  const auto written_down = from->changes().versions();
  const auto had = rows_of(*from);
  for (const auto& [name, row] : had) {
    const std::vector<std::uint64_t> key = {name.second};
    REQUIRE(to->changes().assign_newest(1, key, row.second.data(), &row.first, false).is_ok());
  }
  push(*from, 1, range(0, 50));  // and not again
  REQUIRE(from->changes().open("second", written_down, {}, std::chrono::seconds(0)).is_ok());
  follow(*from, "second", *to);
  CHECK(rows_of(*to) == rows_of(*from));
  CHECK(from->changes().stats().snapshots == 0);
}

TEST_CASE("a read that is repeated gives each row once") {
  const auto from = make_store();
  const auto to = make_store();
  REQUIRE(from->changes().open("serving", from->changes().versions(), {}, std::chrono::seconds(0)).is_ok());
  for (int i = 0; i < 3; ++i) {
    push(*from, 1, range(0, 100));
    follow(*from, "serving", *to, 1 << 20, /*acknowledges=*/false);
  }
  const auto page = read_changes(*from, "serving", 0, 1 << 20);
  REQUIRE(page.is_ok());
  CHECK(page.value().is_last);
  const auto applied = apply_changes(*make_store(), page.value().bytes);
  REQUIRE(applied.is_ok());
  CHECK(applied.value().rows == 100);
  CHECK(applied.value().unchanged == 0);
  CHECK(from->changes().stats().scans == 0);
}

TEST_CASE("what the budget has no room for is found by a scan, or sent as a snapshot") {
  const std::uint64_t tiny = StripeLog::bytes_for(kSlots) + kSlots * 64 * sizeof(Change);
  const auto from = make_store({.change_log_bytes = tiny});
  const auto to = make_store();
  REQUIRE(from->changes().open("serving", from->changes().versions(), {}, std::chrono::seconds(0)).is_ok());
  push(*from, 1, range(0, 5000));
  CHECK(from->changes().stats().forgotten > 4000);
  CHECK(from->changes().stats().used_bytes <= tiny);
  follow(*from, "serving", *to);
  CHECK(from->changes().stats().scans > 0);
  CHECK(from->changes().stats().snapshots == 0);
  REQUIRE(from->erase(1, range(1000, 4000)).is_ok());
  follow(*from, "serving", *to);
  CHECK(from->changes().stats().snapshots > 0);
  CHECK(rows_of(*to) == rows_of(*from));
}

TEST_CASE("a log without room for its rings is refused") {
  const auto store = make_store({.change_log_bytes = 10});
  const Status status = store->changes().open("serving", nothing(), {}, std::chrono::seconds(0));
  CHECK(status.code() == Code::kResourceExhausted);
  CHECK(status.message().find("change_log_bytes: 10") != std::string::npos);
}

TEST_CASE("a cursor of another lineage, or of a dropped table, gets snapshots that replace") {
  const auto from = make_store({.lineage = 7});
  const auto to = make_store();
  push(*to, 1, range(0, 100));  // rows that the follower must lose
  std::vector<std::uint64_t> versions(kSlots, std::uint64_t{6} << 48 | 1000);
  REQUIRE(from->changes().open("serving", versions, {}, std::chrono::seconds(0)).is_ok());
  push(*from, 1, range(50, 60));
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
  CHECK(rows_of(*to).size() == 10);
  push(*from, 2, range(0, 40));
  follow(*from, "serving", *to);
  REQUIRE(from->drop_table(2).is_ok());
  REQUIRE(from->create_table(schema_of(2)).is_ok());
  push(*from, 2, range(5, 8));
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
  CHECK(rows_of(*to).size() == 13);
}

TEST_CASE("rows of a table that was dropped stay with a follower, which is told of the tables that are left") {
  for (const auto& wanted : {std::vector<std::uint32_t>{}, std::vector<std::uint32_t>{1, 2}}) {
    const auto from = make_store();
    const auto to = make_store();
    push(*from, 1, range(0, 100));
    push(*from, 2, range(0, 40));
    REQUIRE(from->changes().open("serving", nothing(), wanted, std::chrono::seconds(0)).is_ok());
    follow(*from, "serving", *to);
    const auto before = rows_of(*to);
    REQUIRE(from->drop_table(2).is_ok());
    const auto page = read_changes(*from, "serving", 0, 1u << 20);
    REQUIRE(page.is_ok());
    const auto applied = apply_changes(*to, page.value().bytes);
    REQUIRE(applied.is_ok());
    CHECK(applied.value().has_whole_slots);
    CHECK(applied.value().tables == std::vector<std::uint32_t>{1});
    CHECK(applied.value().erased == 0);
    follow(*from, "serving", *to);
    CHECK(rows_of(*to) == before);
    const auto gone = from->erase(1, range(0, 99));
    REQUIRE(gone.is_ok());
    follow(*from, "serving", *to);
    CHECK(rows_of(*to).size() == 41);
    // A table of the name that is made anew takes the place of the one that was dropped.
    REQUIRE(from->create_table(schema_of(2)).is_ok());
    push(*from, 2, range(70, 73));
    follow(*from, "serving", *to);
    CHECK(rows_of(*to).size() == (1 + 3));
  }
}

TEST_CASE("a follower that sees a restore half done has the restored rows in the end") {
  const auto from = make_store();
  const auto to = make_store();
  push(*from, 1, range(0, 200));
  const auto kept = from->scan(1, 0, 1000, false);
  std::vector<std::uint64_t> sequences = from->changes().versions();
  for (std::uint64_t& sequence : sequences) sequence &= (std::uint64_t{1} << 48) - 1;
  REQUIRE(from->changes().open("serving", nothing(), {}, std::chrono::seconds(0)).is_ok());
  push(*from, 1, range(0, 100));
  push(*from, 2, range(0, 300));
  follow(*from, "serving", *to);
  from->set_lineage(2);
  follow(*from, "serving", *to);
  for (const std::uint32_t table : {1u, 2u}) {
    REQUIRE(from->drop_table(table).is_ok());
    REQUIRE(from->create_table(schema_of(table)).is_ok());
  }
  follow(*from, "serving", *to);
  CHECK(rows_of(*to).empty());
  const ScanPage& rows = kept.value();
  for (const std::size_t half : {std::size_t{0}, std::size_t{100}}) {
    REQUIRE(from->install(1, {.keys = std::span(rows.keys).subspan(half, 100),
                              .versions = std::span(rows.versions).subspan(half, 100),
                              .update_counts = std::span(rows.update_counts).subspan(half, 100),
                              .weights = std::as_bytes(std::span(rows.rows).subspan(half * kDim, 100 * kDim)),
                              .state = {}})
                .is_ok());
    if (half == 0) follow(*from, "serving", *to);
  }
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) from->set_sequence(slot, sequences[slot]);
  follow(*from, "serving", *to);
  CHECK(rows_of(*to).size() == 200);
  CHECK(rows_of(*to) == rows_of(*from));
  push(*from, 1, range(0, 10));
  follow(*from, "serving", *to);
  CHECK(rows_of(*to) == rows_of(*from));
}

TEST_CASE("a table is dropped between a version that somebody wrote down and a cursor from it") {
  const auto from = make_store();
  const auto to = make_store();
  push(*from, 1, range(0, 100));
  REQUIRE(from->changes().open("first", nothing(), {}, std::chrono::seconds(0)).is_ok());
  follow(*from, "first", *to);
  const auto written_down = from->changes().versions();
  from->changes().close("first");
  REQUIRE(from->drop_table(1).is_ok());
  REQUIRE(from->create_table(schema_of(1)).is_ok());
  REQUIRE(from->changes().open("second", written_down, {}, std::chrono::seconds(0)).is_ok());
  follow(*from, "second", *to);
  CHECK(rows_of(*to).empty());
}

TEST_CASE("slots and tables that are not wanted are not sent, and hold nothing back") {
  const auto from = make_store();
  std::vector<std::uint64_t> half = nothing();
  std::fill(half.begin() + kSlots / 2, half.end(), ChangeLog::kNotFollowed);
  push(*from, 1, range(0, 300));
  push(*from, 2, range(0, 300));
  REQUIRE(from->changes().open("serving", half, {2}, std::chrono::seconds(0)).is_ok());
  const auto to = make_store();
  follow(*from, "serving", *to);
  std::size_t wanted = 0;
  for (const std::uint64_t key : range(0, 300)) wanted += slot_of(row_hash(2, key), kSlots) < kSlots / 2 ? 1 : 0;
  const auto got = rows_of(*to);
  CHECK(got.size() == wanted);
  CHECK(std::all_of(got.begin(), got.end(), [](const auto& row) { return row.first.first == 2; }));
}

TEST_CASE("a cursor that is not used is closed") {
  const auto store = make_store();
  REQUIRE(store->changes().open("gone", nothing(), {}, std::chrono::seconds(-1)).is_ok());  // a limit that is past
  REQUIRE(store->changes().open("forever", nothing(), {}, std::chrono::seconds(0)).is_ok());
  REQUIRE(store->changes().open("here", nothing(), {}, std::chrono::seconds(3600)).is_ok());
  store->changes().close_idle();
  CHECK(store->changes().is_open("forever"));
  CHECK(store->changes().is_open("here"));
}

TEST_CASE("pages that are damaged, or of another schema, change nothing") {
  const auto from = make_store();
  push(*from, 1, range(0, 100));
  REQUIRE(from->changes().open("serving", nothing(), {}, std::chrono::seconds(0)).is_ok());
  const auto page = read_changes(*from, "serving", 0, 1 << 20);
  REQUIRE(page.is_ok());
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    auto bytes = page.value().bytes;
    const std::size_t at = random() % bytes.size();
    bytes[at] ^= std::byte{static_cast<unsigned char>(1 + random() % 255)};
    const bool is_format = at == 4 || at == 5;  // a page of another build is none that is damaged
    const bool is_cut = i % 3 == 0;
    if (is_cut) bytes.resize(random() % bytes.size());
    const auto to = make_store();
    const auto expected = is_format && !is_cut ? Code::kFailedPrecondition : Code::kDataLoss;
    CHECK(apply_changes(*to, bytes).status().code() == expected);
    CHECK(rows_of(*to).empty());
  }
  auto newer = page.value().bytes;
  newer[4] = std::byte{77};
  const Status refused = apply_changes(*make_store(), newer).status();
  CHECK(refused.code() == Code::kFailedPrecondition);
  CHECK(refused.message().find("has format 77, and this process reads formats ") != std::string::npos);
  StoreOptions options;
  options.slot_count = kSlots;
  const auto other = Store::create(options);
  auto wider = schema_of(1);
  wider.dim = kDim + 1;
  REQUIRE(other.value()->create_table(wider).is_ok());
  // A table of another dim is left as it is, and the others of the page are applied.
  REQUIRE(other.value()->create_table(schema_of(2)).is_ok());
  const std::vector<float> mine(wider.dim, 9.0F);
  REQUIRE(other.value()->assign(1, range(0, 1), mine.data()).is_ok());
  std::vector<float> rows(kDim, 7.0F);
  REQUIRE(from->assign(2, range(5, 6), rows.data()).is_ok());
  REQUIRE(from->changes().open("again", nothing(), {}, std::chrono::seconds(0)).is_ok());
  const auto both = read_changes(*from, "again", 0, 1 << 20);
  REQUIRE(both.is_ok());
  const auto applied = apply_changes(*other.value(), both.value().bytes);
  REQUIRE(applied.is_ok());
  REQUIRE(applied.value().others.size() == 1);
  CHECK(applied.value().others[0].table_id == 1);
  CHECK(applied.value().others[0].dim == kDim);
  CHECK(applied.value().applied_tables == std::vector<std::uint32_t>{2});
  CHECK(applied.value().tables == std::vector<std::uint32_t>{2});
  CHECK(applied.value().rows == 1);
  CHECK(other.value()->scan(1, 0, 1u << 20, false).value().keys.size() == 1);
  CHECK(other.value()->scan(2, 0, 1u << 20, false).value().keys == std::vector<std::uint64_t>{5});
}

TEST_CASE("rows arrive in the dtype of the store that follows") {
  const auto from = make_store();
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> rows(64 * kDim);
  for (float& value : rows) value = normal(random);
  REQUIRE(from->assign(1, range(0, 64), rows.data()).is_ok());
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kInt8}) {
    StoreOptions options;
    options.slot_count = kSlots;
    auto to = Store::create(options);
    REQUIRE(to.value()->create_table(schema_of(1, dtype)).is_ok());
    REQUIRE(from->changes().open("serving", nothing(), {}, std::chrono::seconds(0)).is_ok());
    follow(*from, "serving", *to.value());
    std::vector<float> got(rows.size());
    REQUIRE(to.value()->pull(1, range(0, 64), Dtype::kFloat32, reinterpret_cast<std::byte*>(got.data())).is_ok());
    for (std::size_t row = 0; row < 64; ++row) {
      std::vector<std::byte> packed(row_bytes(dtype, kDim));
      std::vector<float> expected(kDim);
      convert_from_float(dtype, rows.data() + row * kDim, packed.data(), kDim);
      convert_to_float(dtype, packed.data(), expected.data(), kDim);
      CHECK(std::equal(expected.begin(), expected.end(), got.begin() + static_cast<std::ptrdiff_t>(row * kDim)));
    }
  }
}

TEST_CASE("rows of int8 are read and not trained") {
  StoreOptions options;
  auto store = Store::create(options);
  REQUIRE(store.value()->create_table(schema_of(1, Dtype::kInt8)).is_ok());
  const std::vector<float> row = {1.0f, -2.0f, 0.5f, 0.0f};
  const std::vector<std::uint64_t> key = {9};
  REQUIRE(store.value()->assign(1, key, row.data()).is_ok());
  std::vector<float> got(kDim);
  REQUIRE(store.value()->pull(1, key, Dtype::kFloat32, reinterpret_cast<std::byte*>(got.data())).is_ok());
  for (std::size_t i = 0; i < kDim; ++i) CHECK(got[i] == doctest::Approx(row[i]).epsilon(0.01));
  CHECK(store.value()->apply(1, key, row.data(), {.lr = 1.0f}).code() == Code::kInvalidArgument);
  auto adagrad = schema_of(2, Dtype::kInt8);
  adagrad.optimizer.kind = OptimizerKind::kAdagrad;
  CHECK(store.value()->create_table(adagrad).code() == Code::kInvalidArgument);
}

}  // namespace
}  // namespace sparserow
