// Replies by shared memory between processes of which one is stopped, killed or forked at any moment.
//
// The shard is this program again (`shard PORT`), and so is a client that is killed (`client PORT`). Rows are a
// function of their key, so that each row says whether it is the one that was asked for.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>

#include "rpc/transport/stream.h"
#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using std::chrono::milliseconds;

namespace {

constexpr std::uint32_t kDim = 64;
constexpr std::size_t kKeys = 16'000;  // 4 MB
constexpr std::uint64_t kLane = 16u << 20;

TableSchema table_of_keys() {
  TableSchema schema = sgd_table("test/rows", kDim);
  schema.init = {InitKind::kUniform, -1.0f, 1.0f};
  return schema;
}

ServerOptions at(std::uint16_t port) {
  ServerOptions options;
  options.is_local = true;
  options.port = port;
  return options;
}

// No process has it now.
std::uint16_t free_port() {
  const FileDescriptor listener(take(listen_tcp("127.0.0.1", 0)));
  return local_port(listener.get());
}

std::shared_ptr<Client> connect(std::uint16_t port) {
  ClientOptions options;
  options.shards = {{"127.0.0.1", port}};
  options.transport = Transport::kSharedMemory;
  options.slot_owner = round_robin(1);
  options.route_epoch = 1;
  options.cluster_id = 77;
  options.lane_bytes = kLane;
  options.connect_timeout_ms = 20'000;
  return take(Client::connect(options));
}

// A pull of rows to memory that the shard writes itself, or to other memory.
struct RowRequest {
  Grouped keys;
  std::shared_ptr<RowMemory> memory;

  RowRequest(Client& client, std::uint64_t first, bool is_placed = false)
      : keys(client, table_of_keys().id, ids_from(first)),
        memory(is_placed ? client.make_rows(kKeys * kDim) : RowMemory::on_heap(kKeys * kDim)) {
    std::fill_n(memory->data(), memory->size(), 1e9f);
  }
  static std::vector<std::uint64_t> ids_from(std::uint64_t first) {
    std::vector<std::uint64_t> ids(kKeys);
    for (std::size_t i = 0; i < kKeys; ++i) ids[i] = first + i;
    return ids;
  }
  Status pull(Client& client, milliseconds deadline) {
    TablePull wanted = keys.pull(table_of_keys(), memory->data());
    wanted.memory = memory;
    return client.pull({&wanted, 1}, {.deadline = deadline, .step = kNoStep});
  }
  [[nodiscard]] std::vector<float> rows() const { return {memory->data(), memory->data() + memory->size()}; }
  // What a store of this process has for the same keys.
  [[nodiscard]] bool is_right(const Store& store) const {
    std::vector<float> expected(memory->size());
    REQUIRE(store
                .pull(table_of_keys().id, keys.partition.keys, Dtype::kFloat32,
                      reinterpret_cast<std::byte*>(expected.data()))
                .is_ok());
    return rows() == expected;
  }
};

std::shared_ptr<Store> store_of_this_process() {
  auto store = make_store();
  REQUIRE(store->create_table(table_of_keys()).is_ok());
  return store;
}

// This program in another process, which ends with this one.
class Process {
 public:
  Process(const char* role, std::uint16_t port) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::execl("/proc/self/exe", "lane_processes_test", role, std::to_string(port).c_str(), nullptr);
    ::_exit(127);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() { end(); }
  void signal(int number) const { ::kill(pid_, number); }
  void end() {
    if (pid_ <= 0) return;
    signal(SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
  }
  [[nodiscard]] bool maps_a_lane() const {
    std::ifstream maps("/proc/" + std::to_string(pid_) + "/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("sparserow-lane") != std::string::npos) return true;
    }
    return false;
  }

 private:
  pid_t pid_;
};

int serve(std::uint16_t port) {
  const Cluster cluster(1, {table_of_keys()}, at(port));
  while (true) ::pause();
}

int ask_for_ever(std::uint16_t port) {
  const auto client = connect(port);
  for (std::uint64_t first = 0;; first += kKeys) {
    if (!RowRequest(*client, first).pull(*client, milliseconds(30'000)).is_ok()) return 1;
  }
}

}  // namespace

TEST_CASE("a shard that is stopped in a pull writes later, and into nothing that others were given") {
  bool is_placed = false;
  SUBCASE("by places for replies") {}
  SUBCASE("by places for rows") { is_placed = true; }
  const std::uint16_t port = free_port();
  const Process shard("shard", port);
  const auto client = connect(port);
  const auto mine = store_of_this_process();
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 random(seed);
  int given_up = 0;
  for (std::uint64_t round = 0; round < 12; ++round) {
    RowRequest late(*client, round * 1'000'000, is_placed);
    std::thread stops([&] {  // in the middle of it, or before it begins
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
      shard.signal(SIGSTOP);
    });
    const Status status = late.pull(*client, milliseconds(60));
    stops.join();
    if (status.is_ok()) CHECK(late.is_right(*mine));
    given_up += status.is_ok() ? 0 : 1;
    CHECK(late.memory->is_abandoned() == (is_placed && !status.is_ok()));
    const std::vector<float> kept = late.rows();
    if (!status.is_ok() && is_placed) late.memory.reset();  // whoever has the memory next must not see the late rows
    RowRequest next(*client, round * 1'000'000 + 500'000, is_placed);
    Status of_next;
    std::thread asks([&] { of_next = next.pull(*client, milliseconds(60'000)); });
    std::this_thread::sleep_for(milliseconds(20));
    shard.signal(SIGCONT);
    asks.join();
    CHECK(of_next.is_ok());
    CHECK(next.is_right(*mine));
    if (late.memory) CHECK(late.rows() == kept);  // what was given up is not written any more
  }
  CHECK(given_up > 0);
  CHECK(client->stats().lane_replies >= 12);
  // The answers that came late have given their places back.
  RowRequest last(*client, 99'000'000, is_placed);
  const std::uint64_t full = client->stats().lane_full;
  for (int i = 0; i < 8; ++i) REQUIRE(last.pull(*client, milliseconds(60'000)).is_ok());
  CHECK(client->stats().lane_full == full);
}

TEST_CASE("a shard that is killed in a pull, and comes back, answers by memory again") {
  bool is_placed = false;
  SUBCASE("by places for replies") {}
  SUBCASE("by places for rows") { is_placed = true; }
  const std::uint16_t port = free_port();
  auto shard = std::make_unique<Process>("shard", port);
  const auto client = connect(port);
  const auto mine = store_of_this_process();
  for (std::uint64_t round = 0; round < 5; ++round) {
    RowRequest rows(*client, round * 1'000'000, is_placed);
    Status status;
    std::thread asks([&] { status = rows.pull(*client, milliseconds(60'000)); });
    std::this_thread::sleep_for(std::chrono::microseconds(round * 900));
    shard.reset();
    shard = std::make_unique<Process>("shard", port);  // by this thread, with whose end the process would end
    asks.join();
    INFO(status.message());
    CHECK(status.is_ok());
    CHECK(rows.is_right(*mine));
  }
  const std::uint64_t replies = client->stats().lane_replies;
  RowRequest again(*client, 0, is_placed);
  REQUIRE(again.pull(*client, milliseconds(60'000)).is_ok());
  CHECK(again.is_right(*mine));
  CHECK(client->stats().lane_replies == replies + 1);
}

TEST_CASE("the memory of a client that is killed is given up, and one that is stopped keeps none waiting") {
  const std::uint16_t port = free_port();
  Cluster cluster(1, {table_of_keys()}, at(port));
  const auto mapped = [&cluster] { return cluster.servers[0]->stats().lane_bytes; };
  for (int round = 0; round < 5; ++round) {
    Process other("client", port);
    for (int i = 0; i < 20'000 && mapped() == 0; ++i) std::this_thread::sleep_for(milliseconds(1));
    REQUIRE(mapped() == kLane);
    std::this_thread::sleep_for(milliseconds(round * 3));
    other.signal(SIGSTOP);
    const auto client = connect(port);
    RowRequest rows(*client, 0);
    CHECK(rows.pull(*client, milliseconds(60'000)).is_ok());
    CHECK(rows.is_right(*cluster.stores[0]));
    other.end();
    for (int i = 0; i < 20'000 && mapped() > kLane; ++i) std::this_thread::sleep_for(milliseconds(1));
    CHECK(mapped() == kLane);  // of the client of this process alone
  }
}

TEST_CASE("a child of fork has no memory of its parent's lane") {
  const std::uint16_t port = free_port();
  const Process shard("shard", port);
  auto client = connect(port);
  RowRequest rows(*client, 0);
  REQUIRE(rows.pull(*client, milliseconds(60'000)).is_ok());
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::ifstream maps("/proc/self/maps");
    char found = 'n';
    for (std::string line; std::getline(maps, line);) {
      if (line.find("sparserow-lane") != std::string::npos) found = 'y';
    }
    static_cast<void>(::write(ends[1], &found, 1));
    ::_exit(0);
  }
  char found = '?';
  CHECK(::read(ends[0], &found, 1) == 1);
  CHECK(found == 'n');
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(ends[0]);
  ::close(ends[1]);
  REQUIRE(rows.pull(*client, milliseconds(60'000)).is_ok());
  CHECK(shard.maps_a_lane());
}

int main(int argc, char** argv) {
  if (argc == 3) {
    const auto port = static_cast<std::uint16_t>(std::atoi(argv[2]));
    if (std::strcmp(argv[1], "shard") == 0) return serve(port);
    if (std::strcmp(argv[1], "client") == 0) return ask_for_ever(port);
  }
  return doctest::Context(argc, argv).run();
}
