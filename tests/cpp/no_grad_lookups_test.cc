// Lookups of a step that no gradient will follow: whose rows they are, and how many are kept.
#include <doctest/doctest.h>

#include <thread>
#include <vector>

#include "session/binding.h"
#include "session_fixture.h"

using namespace sparserow;

namespace {

struct NoGradFixture : Fixture {
  explicit NoGradFixture(std::uint64_t bytes) {
    session->close();
    SessionOptions options;
    options.no_grad_bytes = bytes;
    session = Session::create(shards, options).value();
    REQUIRE(session->bind({"test/t", id_of_name("test/t"), 1, kDim, 0, 1.0f}).is_ok());
    binding = find_binding("test/t").value();
  }

  Lookup look_up(const std::vector<std::int64_t>& ids, bool with_gradient) {
    const NoGradScope scope(!with_gradient);
    return binding->lookup({ids, {ids.data(), {}, {}, 8}}, /*train=*/true).value();
  }

  std::shared_ptr<Binding> binding;
};

std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> ids;
  for (std::int64_t id = begin; id < end; ++id) ids.push_back(id);
  return ids;
}

}  // namespace

TEST_CASE("rows that a lookup without gradient read are those of a later one with it") {
  NoGradFixture f(1 << 20);
  const auto ids = range(0, 10);
  f.look_up(ids, false);
  CHECK(f.session->rows_in_step() == std::pair<std::uint64_t, std::uint64_t>{0, 10});
  const int pulls = f.shards->pulls;
  f.look_up(ids, true);
  CHECK(f.shards->pulls == pulls);
  f.look_up(range(5, 8), false);
  CHECK(f.shards->pulls == pulls);
  REQUIRE(f.session->abort().is_ok());
  CHECK(f.session->rows_in_step() == std::pair<std::uint64_t, std::uint64_t>{0, 0});
}

TEST_CASE("what is kept is dropped before the next lookup when it is too much, and given out rows stay") {
  NoGradFixture f(1);
  const Lookup first = f.look_up(range(0, 1000), false);
  for (int i = 1; i < 20; ++i) {
    f.look_up(range(1000 * i, 1000 * (i + 1)), false);
    CHECK(f.session->rows_in_step().second == 1000);
  }
  for (std::size_t i = 0; i < 1000; ++i) CHECK(first.row(i)[0] == 1.0f);
}

TEST_CASE("a pull that fails leaves both parts as they were") {
  NoGradFixture f(1 << 20);
  f.look_up(range(0, 10), false);
  f.shards->pull_refusal = Code::kUnavailable;
  for (const bool with_gradient : {false, true}) {
    const auto ids = range(5, 15);
    const NoGradScope scope(!with_gradient);
    CHECK(!f.binding->lookup({ids, {ids.data(), {}, {}, 8}}, /*train=*/true).is_ok());
    CHECK(f.session->rows_in_step() == std::pair<std::uint64_t, std::uint64_t>{0, 10});
  }
  f.shards->pull_refusal = Code::kOk;
  CHECK(f.look_up(range(5, 15), true).row(0)[0] == 1.0f);
}

TEST_CASE("lookups with and without gradient from several threads") {
  NoGradFixture f(20'000);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&f, &wrong, t] {
      for (int i = 0; i < 200; ++i) {
        const Lookup lookup = f.look_up(range(37 * i, 37 * i + 200), t % 2 == 0);
        for (std::size_t r = 0; r < lookup.size(); ++r) wrong += lookup.row(r)[0] == 1.0f ? 0 : 1;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("a refusal of lookups spares those without gradient, and ends with the step") {
  NoGradFixture f(1 << 20);
  const auto ids = range(0, 10);
  f.look_up(ids, true);
  f.session->state().refuse_lookups("an optimizer stepped");
  CHECK(f.binding->lookup({ids, {ids.data(), {}, {}, 8}}, /*train=*/true).status().message() == "an optimizer stepped");
  f.look_up(ids, false);
  CHECK(f.binding->lookup({ids, {ids.data(), {}, {}, 8}}, /*train=*/false).is_ok());
  REQUIRE(f.session->abort().is_ok());
  f.look_up(ids, true);
}
