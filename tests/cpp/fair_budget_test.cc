// Budgets that peers share: limits, fair shares, order, and progress when memory is short.
#include "rpc/server/fair_budget.h"

#include <doctest/doctest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "rpc/server/seats.h"

namespace sparserow::rpc {
namespace {

constexpr std::uint64_t kMiB = 1u << 20;

const auto kNever = [] { FAIL("granted twice, or after it was taken"); };

// Takes bytes and waits for them.
void take_or_wait(FairBudget::Charge& charge, std::uint64_t bytes) {
  struct Wait {
    std::mutex mutex;
    std::condition_variable told;
    bool is_granted = false;
  };
  const auto wait = std::make_shared<Wait>();
  if (charge.take(bytes, [wait] {
        const std::lock_guard lock(wait->mutex);
        wait->is_granted = true;
        wait->told.notify_all();
      })) {
    return;
  }
  std::unique_lock lock(wait->mutex);
  wait->told.wait(lock, [&] { return wait->is_granted; });
}

}  // namespace

TEST_CASE("an account that is alone has nearly everything, and a newcomer still finds room") {
  FairBudget budget(90 * kMiB);
  const auto greedy = budget.account("greedy");
  std::vector<FairBudget::Charge> charges;
  while (true) {
    auto charge = budget.charge(greedy, kMiB / 2);
    if (!charge.take(kMiB / 2, kNever)) {
      CHECK_FALSE(charge.give_up());
      break;
    }
    charges.push_back(std::move(charge));
  }
  CHECK(budget.used() >= 80 * kMiB);
  const auto newcomer = budget.account("newcomer");
  auto small = budget.charge(newcomer, kMiB);
  CHECK(small.take(kMiB, kNever));
  CHECK(budget.used() <= budget.limit());
  charges.clear();
  small.reset();
  CHECK(budget.used() == 0);
}

TEST_CASE("a charge as large as the budget is taken when nothing else is") {
  FairBudget budget(4 * kMiB);
  const auto account = budget.account("a");
  auto all = budget.charge(account, 4 * kMiB);
  CHECK(all.take(4 * kMiB, kNever));
  auto other = budget.charge(account, 1);
  bool is_granted = false;
  CHECK_FALSE(other.take(1, [&] { is_granted = true; }));
  CHECK(budget.has_waiting());
  all.reset();
  CHECK(is_granted);
  CHECK_FALSE(budget.has_waiting());
  CHECK(budget.used() == 1);
}

TEST_CASE("the account that has least is served first, then the one that came first") {
  FairBudget budget(8 * kMiB);
  const auto rich = budget.account("rich");
  const auto poor = budget.account("poor");
  auto first = budget.charge(rich, 4 * kMiB);
  REQUIRE(first.take(4 * kMiB, kNever));
  auto second = budget.charge(rich, kMiB);
  REQUIRE(second.take(kMiB, kNever));
  std::vector<int> order;
  std::vector<FairBudget::Charge> waiting;
  for (int i = 0; i < 4; ++i) {
    waiting.push_back(budget.charge(i < 2 ? rich : poor, 4 * kMiB));
    REQUIRE_FALSE(waiting.back().take(4 * kMiB, [&order, i] { order.push_back(i); }));
  }
  first.reset();
  second.reset();
  while (order.size() < 4) {
    REQUIRE_FALSE(order.empty());
    waiting[static_cast<std::size_t>(order.back())].reset();
  }
  // While the poor one has its 4 MiB, the rich one has none: its two go before.
  CHECK(order == std::vector<int>{2, 0, 1, 3});
}

TEST_CASE("a charge that gives up is told nothing, and its room goes to others") {
  FairBudget budget(2 * kMiB);
  const auto account = budget.account("a");
  auto first = budget.charge(account, 2 * kMiB);
  REQUIRE(first.take(2 * kMiB, kNever));
  {
    auto leaves = budget.charge(account, kMiB);
    REQUIRE_FALSE(leaves.take(kMiB, kNever));
  }
  auto gives_up = budget.charge(account, kMiB);
  REQUIRE_FALSE(gives_up.take(kMiB, kNever));
  CHECK_FALSE(gives_up.give_up());
  first.reset();
  CHECK(budget.used() == 0);
}

TEST_CASE("bodies that are received in part never wait for each other in a circle") {
  const auto seed = std::random_device{}();
  MESSAGE("seed " << seed);
  constexpr std::uint64_t kLimit = 24 * kMiB;
  FairBudget budget(kLimit);
  std::atomic<std::uint64_t> in_use{0}, most{0};
  std::atomic<int> finished{0};
  std::vector<std::thread> peers;
  for (unsigned peer = 0; peer < 12; ++peer) {
    peers.emplace_back([&, peer] {
      std::mt19937 random(seed + peer);
      const auto account = budget.account("peer " + std::to_string(peer % 5));
      for (int round = 0; round < 40; ++round) {
        const std::uint64_t announced = 1 + random() % (16 * kMiB);
        auto charge = budget.charge(account, announced);
        std::uint64_t taken = 0;
        while (taken < announced) {
          const std::uint64_t step =
              announced <= FairBudget::kStepBytes ? announced : std::min<std::uint64_t>(announced - taken, kMiB);
          take_or_wait(charge, step);
          taken += step;
          const std::uint64_t now = in_use += step;
          std::uint64_t seen = most;
          while (now > seen && !most.compare_exchange_weak(seen, now)) {
          }
          if (random() % 4 == 0) std::this_thread::yield();
          if (random() % 64 == 0) break;  // the peer went away
        }
        in_use -= taken;
        charge.reset();
        ++finished;
      }
    });
  }
  for (auto& peer : peers) peer.join();
  CHECK(finished == 12 * 40);
  CHECK(most <= kLimit);
  CHECK(budget.used() == 0);
  CHECK_FALSE(budget.has_waiting());
}

TEST_CASE("a full house gives an account with fewer seats the seat that has been idle longest") {
  Seats seats(3);
  std::vector<int> closed;
  const auto sitter = [&closed](int name, std::optional<std::int64_t> idle_since) {
    return Seats::Sitter{.idle_since_ms = [idle_since] { return idle_since; },
                         .close = [&closed, name] { closed.push_back(name); }};
  };
  std::vector<Seats::Seat> taken;
  const auto sit = [&](const std::string& account, int name, std::optional<std::int64_t> idle_since) {
    auto seat = seats.take(account, sitter(name, idle_since));
    if (!seat.is_ok()) return seat.status();
    taken.push_back(std::move(seat).value());
    return Status::ok();
  };
  REQUIRE(sit("greedy", 0, 50).is_ok());
  REQUIRE(sit("greedy", 1, 20).is_ok());
  REQUIRE(sit("greedy", 2, std::nullopt).is_ok());
  CHECK(sit("greedy", 3, 60).code() == Code::kResourceExhausted);  // nobody else is there to be fair to
  CHECK(sit("honest", 4, 60).is_ok());
  CHECK(closed == std::vector<int>{1});
  CHECK(sit("honest", 5, 60).code() == Code::kResourceExhausted);  // two and one: no account would gain
  CHECK(sit("third", 6, 60).is_ok());
  CHECK(closed == std::vector<int>{1, 0});
  CHECK(sit("fourth", 7, 60).code() == Code::kResourceExhausted);
  taken.clear();
  for (int name = 10; name < 13; ++name) CHECK(sit("greedy", name, 0).is_ok());
}

}  // namespace sparserow::rpc
