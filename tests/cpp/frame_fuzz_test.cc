// A million frames (or SPARSEROW_FUZZ_FRAMES) that no client of ours would send, against a live server on
// loopback, while another client goes on pulling and its latency is measured. Valid frames of every type are changed
// field by field (identities, counts, lengths, kinds, flags, payload), cut short, given sections, or sealed with a
// right checksum after the change so that it reaches what lies behind. Run under the address and undefined-behaviour
// sanitizers by `make test`.
//
//   frame_fuzz_test [frames] [seed]
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>

#include "raw_peer.h"
#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;

namespace {

constexpr std::uint64_t kPingId = 0xfeedfeedfeedfeedull;
constexpr std::size_t kFramesPerWrite = 64;

const TableSchema kFuzzed = sgd_table("fuzz/a", 4);
const TableSchema kWatched = sgd_table("watched/a", 64);

using Frame = std::vector<std::byte>;

class Fuzzer {
 public:
  explicit Fuzzer(std::uint64_t seed) : random_(seed) {}

  // Valid but for its unlikely identities.
  Frame valid() {
    FrameHeader header;
    header.request_id = random_();
    header.route_epoch = 1;
    header.job_id = 1;
    header.worker_id = pick(4);
    header.worker_epoch = 1;
    header.sequence = 1 + pick(100'000);
    header.step = pick(3) == 0 ? static_cast<std::int64_t>(pick(3)) : kNoStep;
    header.deadline_ms = 1 + pick(50);
    TableDescriptor table;
    table.table_id = kFuzzed.id;
    table.schema_version = 1;
    table.dim = kFuzzed.dim;
    table.dtype = static_cast<Dtype>(pick(3));
    table.n = pick(8);
    std::vector<std::uint64_t> keys(table.n);
    for (auto& key : keys) key = pick(1000);
    const auto key_bytes = std::as_bytes(std::span(keys));
    Frame tail(key_bytes.begin(), key_bytes.end());
    switch (pick(8)) {
      case 0:
        table.flags = static_cast<std::uint8_t>(pick(8));
        if ((table.flags & kTableKnown) != 0) {  // known versions: none, an old one, any
          table.flags |= kTableVersions;
          for (auto& key : keys) key = pick(3) == 0 ? random_() : (pick(2) == 0 ? kNoVersion : 0);
          tail.insert(tail.end(), key_bytes.begin(), key_bytes.end());
        }
        return frame(header, FrameType::kPull, SectionKind::kTableKeys, bytes_of(table), tail);
      case 1:
      case 2: {
        header.flags = pick(2) == 0 ? kFrameGradSum : 0;
        const bool is_scaled = (table.dtype != Dtype::kFloat32) != (pick(8) == 0);
        if (is_scaled) {  // exponents; some are not allowed
          table.flags = kTableExponents;
          const auto exponent = static_cast<std::byte>(pick(4) == 0 ? pick(256) : pick(127));
          tail.resize(tail.size() + table.n, exponent);
          tail.resize(padded8(tail.size()));
        }
        tail.resize(tail.size() + padded8(table.n * table.dim * size_of(table.dtype)));
        const FrameType types[] = {FrameType::kCommit, FrameType::kPrepare, FrameType::kAssign};
        return frame(header, types[pick(3)], SectionKind::kTableGrads, bytes_of(table), tail);
      }
      case 3:
        header.flags = kFramePrepared;
        header.type = static_cast<std::uint16_t>(FrameType::kCommit);
        return empty_frame(header);
      case 4:
        header.type = static_cast<std::uint16_t>(pick(2) == 0 ? FrameType::kAbort : FrameType::kPing);
        return empty_frame(header);
      case 5:
        if (pick(3) == 0) {
          header.flags = kFrameLost;
          return frame(header, FrameType::kAbort, SectionKind::kTableKeys, bytes_of(table), tail);
        }
        return frame(header, FrameType::kDelete, SectionKind::kTableKeys, bytes_of(table), tail);
      case 6: {
        const ScanPayload scan{.cursor = 0, .table_id = kFuzzed.id, .max_rows = 1 + pick(20), .with_state = pick(2)};
        return frame(header, FrameType::kScan, SectionKind::kScan, bytes_of(scan), {});
      }
      default:
        return frame(header, FrameType::kPull, SectionKind::kTableKeys, bytes_of(table), tail);
    }
  }

  // Changes what leaves the frame's shape alone: most such frames are refused, the connection goes on.
  void change_meaning(Frame& bytes) {
    // (offset, size) of header fields: ids, deadline, names, epochs, sequence, step; and of the table's.
    constexpr std::pair<std::size_t, std::size_t> kFields[] = {{8, 8},  {16, 4}, {20, 4}, {24, 4}, {28, 4}, {32, 4},
                                                               {36, 4}, {40, 8}, {48, 8}, {80, 4}, {84, 4}, {100, 4}};
    const auto [offset, size] = kFields[pick(std::size(kFields))];
    if (offset + size <= bytes.size()) write(bytes, offset, size);
    if (bytes.size() > 128 && pick(2) == 0) bytes[120 + pick(bytes.size() - 120)] = static_cast<std::byte>(random_());
  }

  // Changes the shape: type, flags, lengths, counts, kinds, dtypes, reserved bytes, or any byte at all.
  void break_shape(Frame& bytes) {
    constexpr std::pair<std::size_t, std::size_t> kFields[] = {{0, 4},  {4, 2},  {6, 1},  {7, 1},  {56, 4}, {60, 4},
                                                               {64, 2}, {66, 2}, {68, 4}, {72, 8}, {88, 4}, {92, 1},
                                                               {93, 1}, {94, 2}, {96, 4}, {104, 8}};
    const int changes = 1 + static_cast<int>(pick(3));
    for (int i = 0; i < changes; ++i) {
      if (pick(6) == 0) {
        bytes[pick(bytes.size())] ^= static_cast<std::byte>(1u << pick(8));
        continue;
      }
      const auto [offset, size] = kFields[pick(std::size(kFields))];
      if (offset + size <= bytes.size()) write(bytes, offset, size);
    }
  }

  // Adds a section of a random kind, with the frame's counts made right.
  void add_section(Frame& bytes) {
    FrameHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    SectionHeader section;
    section.kind = static_cast<std::uint16_t>(pick(2) == 0 ? pick(10) : 100 + pick(100));
    section.flags = static_cast<std::uint16_t>(pick(2));
    section.payload_bytes = pick(40);
    const std::size_t added = sizeof section + padded8(section.payload_bytes);
    const bool in_front = pick(2) == 0;
    const auto place = in_front ? sizeof header : bytes.size();
    Frame inserted(added);
    std::memcpy(inserted.data(), &section, sizeof section);
    for (std::size_t i = 0; i < section.payload_bytes; ++i)
      inserted[sizeof section + i] = static_cast<std::byte>(pick(256));
    bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(place), inserted.begin(), inserted.end());
    header.body_bytes += static_cast<std::uint32_t>(added);
    ++header.section_count;
    std::memcpy(bytes.data(), &header, sizeof header);
  }

  void seal(Frame& bytes) {
    FrameHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    const iovec body{bytes.data() + sizeof header, bytes.size() - sizeof header};
    seal_crc(header, std::span(&body, 1));
    std::memcpy(bytes.data(), &header, sizeof header);
  }

  // One more frame for a write; `open_ended` is set when its length may not be what it says.
  Frame next(bool& open_ended) {
    Frame bytes = valid();
    const std::uint32_t kind = pick(100);
    if (kind < 75) {
      change_meaning(bytes);
    } else if (kind < 87) {
      add_section(bytes);
    } else if (kind < 99) {
      break_shape(bytes);
      open_ended = true;
    } else {
      bytes.resize(pick(bytes.size()));
      open_ended = true;
    }
    if (pick(4) == 0 && bytes.size() >= sizeof(FrameHeader)) seal(bytes);
    return bytes;
  }

  std::uint32_t pick(std::size_t below) { return static_cast<std::uint32_t>(random_() % below); }

 private:
  static Frame frame(FrameHeader header, FrameType type, SectionKind kind, std::span<const std::byte> head,
                     const Frame& tail) {
    header.type = static_cast<std::uint16_t>(type);
    return small_frame(header, kind, head, tail);
  }

  void write(Frame& bytes, std::size_t offset, std::size_t size) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + offset, size);
    switch (pick(8)) {
      case 0:
        value = 0;
        break;
      case 1:
        value = UINT64_MAX;
        break;
      case 2:
        value += 1;
        break;
      case 3:
        value -= 1;
        break;
      case 4:
        value ^= std::uint64_t{1} << pick(size * 8);
        break;
      case 5:
        value = pick(64);
        break;
      case 6:
        value = std::uint64_t{1} << pick(64);
        break;
      default:
        value = random_();
    }
    std::memcpy(bytes.data() + offset, &value, size);
  }

  std::mt19937_64 random_;
};

// One connection's life: writes of many frames, each followed by a PING whose PONG says that all were served.
// Returns how many frames it sent.
std::uint64_t run_connection(Fuzzer& fuzzer, const Cluster& cluster) {
  RawPeer peer(cluster.servers[0]->port());
  if (!peer.greet(cluster.cluster_id)) return 0;
  std::uint64_t sent = 0;
  while (true) {
    Frame out;
    bool open_ended = false;
    for (std::size_t i = 0; i < kFramesPerWrite && !open_ended; ++i) {
      const Frame frame = fuzzer.next(open_ended);
      out.insert(out.end(), frame.begin(), frame.end());
      ++sent;
    }
    FrameHeader ping;
    ping.type = static_cast<std::uint16_t>(FrameType::kPing);
    ping.request_id = kPingId;
    const Frame last = empty_frame(ping);
    out.insert(out.end(), last.begin(), last.end());
    if (!peer.send(out)) return sent;
    if (open_ended) peer.end_writing();  // a frame that waits for bytes that never come must end as well
    FrameHeader header;
    std::vector<std::byte> body;
    do {
      if (!peer.read_frame(header, body, 20'000)) return sent;
    } while (header.request_id != kPingId);
    if (open_ended) return sent;
  }
}

struct Watch {
  std::vector<double> ms;
  std::uint64_t failures = 0;
  std::string first_failure;
};

void watch(const Cluster& cluster, const std::atomic<bool>& stop, Watch& out) {
  const auto client = take(Client::connect(cluster.client_options()));
  std::vector<std::uint64_t> keys(100);
  std::iota(keys.begin(), keys.end(), 0);
  const Grouped grouped(*client, kWatched.id, keys);
  std::vector<float> rows(grouped.size() * kWatched.dim);
  const auto pull = grouped.pull(kWatched, rows.data());
  while (!stop) {
    const auto begin = std::chrono::steady_clock::now();
    const Status status = client->pull(std::span(&pull, 1), {});
    out.ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    const bool right = std::count(rows.begin(), rows.end(), 1.0f) == static_cast<std::ptrdiff_t>(rows.size());
    if (!status.is_ok() || !right) {
      if (out.failures++ == 0) out.first_failure = status.message();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* full = std::getenv("SPARSEROW_FUZZ_FRAMES");
  const std::uint64_t frames = argc > 1 ? std::strtoull(argv[1], nullptr, 10)
                               : full   ? std::strtoull(full, nullptr, 10)
                                        : 1'000'000;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);

  ServerOptions options;
  options.max_frame_bytes = 1u << 20;
  options.inflight_budget_bytes = 8u << 20;
  options.kept_budget_bytes = 8u << 20;
  options.stall_timeout_ms = 2'000;
  Cluster cluster(1, {kFuzzed, kWatched}, options);
  cluster.set_job(0u, 4);

  std::atomic<bool> stop{false};
  Watch watched;
  std::thread watcher([&] { watch(cluster, stop, watched); });
  std::atomic<std::uint64_t> sent{0};
  std::atomic<std::uint64_t> connections{0};
  std::vector<std::thread> fuzzers;
  for (std::uint64_t i = 0; i < 3; ++i) {
    fuzzers.emplace_back([&, i] {
      Fuzzer fuzzer(seed + i);
      while (cluster.servers[0]->stats().frames_received < frames) {
        sent += run_connection(fuzzer, cluster);
        ++connections;
      }
    });
  }
  for (auto& fuzzer : fuzzers) fuzzer.join();
  stop = true;
  watcher.join();

  const ServerStats stats = cluster.servers[0]->stats();
  std::sort(watched.ms.begin(), watched.ms.end());
  const auto at = [&](double q) {
    return watched.ms[static_cast<std::size_t>(q * static_cast<double>(watched.ms.size() - 1))];
  };
  std::printf(
      "%llu frames received, %llu refused, over %llu connections; another client: %zu pulls, p50 %.3f ms, p99 %.3f "
      "ms\n",
      static_cast<unsigned long long>(stats.frames_received), static_cast<unsigned long long>(stats.frames_refused),
      static_cast<unsigned long long>(connections.load()), watched.ms.size(), at(0.5), at(0.99));
  if (watched.failures > 0) {
    std::printf("%llu pulls of the other client failed, the first: %s\n",
                static_cast<unsigned long long>(watched.failures), watched.first_failure.c_str());
    return 1;
  }
  if (stats.frames_received < frames || stats.frames_refused == 0 || stats.inflight_bytes != 0) return 1;
  return 0;
}
