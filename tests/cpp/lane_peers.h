// What the tests of shared memory use: a shard that has a local socket, and peers on either side that pass, name and
// answer what a real one would not.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "knock.h"
#include "rpc/transport/lane.h"
#include "rpc/transport/local_socket.h"
#include "rpc_fixture.h"

namespace sparserow::testing {

using namespace sparserow::rpc;  // NOLINT: of tests alone

inline constexpr std::uint64_t kBytes = 1u << 20;

inline FileDescriptor memory(std::uint64_t bytes, int seals) {
  FileDescriptor made(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(made.get(), static_cast<off_t>(bytes)) == 0);
  REQUIRE(::fcntl(made.get(), F_ADD_SEALS, seals) == 0);
  return made;
}

// One shard that listens at its local socket too.
struct LocalShard {
  TableSchema wide;
  TableSchema narrow;
  Cluster cluster;

  explicit LocalShard(ServerOptions options = {})
      : wide(random_table("test/wide", 48)),
        narrow(random_table("test/narrow", 3)),
        cluster(1, {wide, narrow}, local(options)) {}

  static TableSchema random_table(const std::string& name, std::uint32_t dim) {
    TableSchema schema = sgd_table(name, dim);
    schema.init = {InitKind::kUniform, -1.0f, 1.0f};
    return schema;
  }
  static ServerOptions local(ServerOptions options) {
    options.is_local = true;
    return options;
  }
  [[nodiscard]] std::string name() const {
    return local_socket_name(cluster.cluster_id, 0, cluster.servers[0]->port());
  }
  [[nodiscard]] std::shared_ptr<Client> connect(std::uint64_t lane_bytes = kBytes, Dtype dtype = Dtype::kFloat32,
                                                bool crc = false) const {
    ClientOptions options = cluster.client_options();
    options.lane_bytes = lane_bytes;
    options.wire_dtype = dtype;
    options.frame_crc = crc;
    return take(Client::connect(options));
  }
  [[nodiscard]] std::shared_ptr<Client> connect_by_tcp(Dtype dtype = Dtype::kFloat32) const {
    ClientOptions options = cluster.client_options();
    options.transport = Transport::kTcp;
    options.wire_dtype = dtype;
    return take(Client::connect(options));
  }
};

struct Pulled {
  std::vector<float> rows;
  std::vector<std::uint64_t> versions;
  std::vector<std::uint8_t> found;
  bool operator==(const Pulled&) const = default;
};

inline Pulled pull(Client& client, const TableSchema& table, const std::vector<std::uint64_t>& ids) {
  const Grouped keys(client, table.id, ids);
  Pulled out{std::vector<float>(keys.size() * table.dim), std::vector<std::uint64_t>(keys.size()),
             std::vector<std::uint8_t>(keys.size())};
  TablePull wanted = keys.pull(table, out.rows.data());
  wanted.versions = out.versions;
  wanted.found = out.found;
  const Status status = client.pull({&wanted, 1}, {.step = kNoStep});
  INFO(status.message());
  REQUIRE(status.is_ok());
  return out;
}

inline std::vector<std::uint64_t> ids_from(std::uint64_t first, std::size_t n) {
  std::vector<std::uint64_t> ids(n);
  for (std::size_t i = 0; i < n; ++i) ids[i] = first + i * 7;
  return ids;
}

// A peer of a local socket that passes what it likes with its HELLO.
class PassingPeer {
 public:
  explicit PassingPeer(const std::string& name) : fd_(knock(name)) { REQUIRE(fd_.is_open()); }

  // The reply to a HELLO that says that `bytes` of memory come with it.
  FrameHeader greet(std::uint64_t cluster_id, std::uint64_t bytes, std::span<const int> descriptors,
                    std::uint32_t version = kLaneVersion) {
    HelloPayload hello;
    hello.cluster_id = cluster_id;
    hello.features = kFeatureLane;
    hello.hash_version = kHashVersion;
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kHello);
    const LanePayload lane{.version = version, .bytes = bytes};
    const auto frame =
        with_section(small_frame(header, SectionKind::kHello, bytes_of(hello), {}), SectionKind::kLane, bytes_of(lane));
    send(frame, descriptors);
    return read();
  }
  void send(std::span<const std::byte> frame, std::span<const int> descriptors = {}) {
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * 8)> control{};
    iovec piece{const_cast<std::byte*>(frame.data()), frame.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    if (!descriptors.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
      cmsghdr* const passed = CMSG_FIRSTHDR(&message);
      *passed = {.cmsg_len = CMSG_LEN(descriptors.size_bytes()), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
      std::memcpy(CMSG_DATA(passed), descriptors.data(), descriptors.size_bytes());
    }
    REQUIRE(::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(frame.size()));
  }
  // The next frame's header; type 0 at the end of the stream.
  FrameHeader read() {
    FrameHeader header;
    if (::recv(fd_.get(), &header, sizeof header, MSG_WAITALL) != static_cast<ssize_t>(sizeof header)) return {};
    const bool in_lane = (header.flags & kFrameInLane) != 0;
    body.resize(in_lane ? 0 : header.body_bytes);
    if (!body.empty()) REQUIRE(::recv(fd_.get(), body.data(), body.size(), MSG_WAITALL) > 0);
    return header;
  }
  [[nodiscard]] std::uint64_t features() const {
    SectionReader sections(body, 1);
    return parse_hello(sections.next().value()->payload).value().features;
  }
  [[nodiscard]] std::string refusal() const {
    SectionReader sections(body, 1);
    return parse_error(sections.next().value()->payload).message();
  }
  // A PULL of n keys of a table that names a place.
  void ask(const TableSchema& table, std::uint32_t n, LanePlacePayload place) {
    const auto frame = pull_frame(table, n, Dtype::kFloat32, 0);
    send(with_section(frame, SectionKind::kLanePlace, bytes_of(place)));
  }

  // A PULL of n keys of a table whose rows are to go to these offsets.
  void ask_placed(const TableSchema& table, std::uint32_t n, const std::vector<std::uint64_t>& offsets,
                  Dtype dtype = Dtype::kFloat32, std::uint8_t flags = 0) {
    const auto frame = pull_frame(table, n, dtype, flags);
    send(with_section(frame, SectionKind::kLaneRows, std::as_bytes(std::span(offsets))));
  }

  // A COMMIT of n keys of a table whose gradients are said to be at these offsets.
  void push_placed(const TableSchema& table, std::uint32_t n, const std::vector<std::uint64_t>& offsets,
                   Dtype dtype = Dtype::kFloat32, std::uint8_t flags = kTablePlaced, std::uint32_t said = 0) {
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kCommit);
    header.route_epoch = 1;
    header.job_id = 1;
    header.worker_epoch = 1;
    header.sequence = 1;
    header.step = 0;
    const TableDescriptor descriptor{.table_id = table.id,
                                     .schema_version = table.version,
                                     .dim = table.dim,
                                     .dtype = dtype,
                                     .flags = flags,
                                     .n = said == 0 ? n : said};
    const auto frame = small_frame(header, SectionKind::kTableGrads, with_keys(descriptor, n), {});
    send(with_section(frame, SectionKind::kLaneRows, std::as_bytes(std::span(offsets))));
  }

  std::vector<std::byte> body;

 private:
  static std::vector<std::byte> with_keys(const TableDescriptor& descriptor, std::uint32_t n) {
    std::vector<std::byte> payload(sizeof descriptor + n * 8);
    std::memcpy(payload.data(), &descriptor, sizeof descriptor);
    const auto keys = ids_from(0, n);
    std::memcpy(payload.data() + sizeof descriptor, keys.data(), n * 8);
    return payload;
  }
  static std::vector<std::byte> pull_frame(const TableSchema& table, std::uint32_t n, Dtype dtype, std::uint8_t flags) {
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kPull);
    header.route_epoch = 1;
    const TableDescriptor descriptor{.table_id = table.id,
                                     .schema_version = table.version,
                                     .dim = table.dim,
                                     .dtype = dtype,
                                     .flags = flags,
                                     .n = n};
    return small_frame(header, SectionKind::kTableKeys, with_keys(descriptor, n), {});
  }

  FileDescriptor fd_;
};

// A shard of one connection that answers when the test says, and what the test says.
class ScriptedShard {
 public:
  ScriptedShard()
      : reserves_port_(take(listen_tcp("127.0.0.1", 0))),
        listener_(take(listen_local(local_socket_name(0, 0, port())))) {}
  [[nodiscard]] std::uint16_t port() const { return local_port(reserves_port_.get()); }

  // Takes a connection and its memory, where it passes one.
  void accept(bool has_lane = true) {
    int fd = -1;
    while (fd < 0) fd = ::accept(listener_.get(), nullptr, nullptr);  // NOLINT: the listener does not block
    stream_ = make_socket_stream(fd);
    stream_->expect_descriptor();
    const auto hello = read();
    REQUIRE(hello.type == static_cast<std::uint16_t>(FrameType::kHello));
    if (has_lane) lane = take(LaneRegion::map(stream_->take_descriptor(), kBytes));
    HelloPayload mine;
    mine.features = kFeatures;
    if (has_lane) mine.features |= kFeatureLane;
    mine.hash_version = kHashVersion;
    mine.slot_count = kSlots;
    mine.max_frame_bytes = 1u << 30;
    FrameHeader header;
    header.type = kAckOfHello;
    write(small_frame(header, SectionKind::kHello, bytes_of(mine), {}));
  }
  // The next request; `place` is what it names.
  FrameHeader read() {
    FrameHeader header;
    read_exact(std::as_writable_bytes(std::span(&header, 1)));
    body.resize(header.body_bytes);
    read_exact(body);
    SectionReader sections(body, header.section_count);
    while (const auto section = take(sections.next())) {
      if (section->kind == SectionKind::kLanePlace) place = take(parse_lane_place(section->payload));
      if (section->kind == SectionKind::kLaneRows) rows = take(parse_lane_rows(section->payload));
    }
    return header;
  }
  // Answers a request of `n` rows of a table with `value` in each, at a place.
  void answer(const FrameHeader& asked, const TableSchema& table, std::uint32_t n, const LanePlacePayload& at,
              float value, std::uint64_t more_bytes = 0) {
    TableHead head;
    head.descriptor = {.table_id = table.id, .schema_version = table.version, .dim = table.dim, .n = n};
    head.section.kind = static_cast<std::uint16_t>(SectionKind::kTableRows);
    head.section.payload_bytes = rows_section_bytes(head.descriptor) - sizeof head.section;
    std::byte* const to = lane->bytes().data() + at.offset;
    std::memcpy(to, &head, sizeof head);
    const std::vector<float> rows(std::size_t{n} * table.dim, value);
    std::memcpy(to + sizeof head, rows.data(), rows.size() * sizeof(float));
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kRows);
    header.flags = kFrameInLane;
    header.request_id = asked.request_id;
    header.section_count = 1;
    header.body_bytes = static_cast<std::uint32_t>(rows_section_bytes(head.descriptor) + more_bytes);
    write(std::as_bytes(std::span(&header, 1)));
  }

  // Writes n rows with `value` in each where a request said, and answers.
  void place_rows(const FrameHeader& asked, const TableSchema& table, std::uint32_t n, std::uint64_t at, float value) {
    const std::vector<float> written(std::size_t{n} * table.dim, value);
    std::memcpy(lane->bytes().data() + at, written.data(), written.size() * sizeof(float));
    const TableDescriptor descriptor{
        .table_id = table.id, .schema_version = table.version, .dim = table.dim, .flags = kTablePlaced, .n = n};
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kRows);
    header.request_id = asked.request_id;
    write(small_frame(header, SectionKind::kTableRows, bytes_of(descriptor), {}));
  }
  void answer_with(const FrameHeader& header) { write(std::as_bytes(std::span(&header, 1))); }
  void acknowledge(const FrameHeader& asked) {
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kAck);
    header.request_id = asked.request_id;
    write(small_frame(header, SectionKind::kAck, bytes_of(AckPayload{}), {}));
  }
  void pong(const FrameHeader& ping) {
    FrameHeader header;
    header.type = static_cast<std::uint16_t>(FrameType::kPong);
    header.request_id = ping.request_id;
    write(empty_frame(header));
  }
  // Whether a connection waits to be taken.
  [[nodiscard]] bool has_caller() const {
    pollfd waits{listener_.get(), POLLIN, 0};
    return ::poll(&waits, 1, 0) == 1;
  }
  void end() { stream_.reset(); }
  // The connection, which stays open.
  std::unique_ptr<Stream> leave() { return std::move(stream_); }

  std::unique_ptr<LaneRegion> lane;
  LanePlacePayload place;
  std::vector<std::uint64_t> rows;  // places of the newest request that named some
  std::vector<std::byte> body;

 private:
  static constexpr auto kAckOfHello = static_cast<std::uint16_t>(FrameType::kHelloAck);

  void read_exact(std::span<std::byte> into) {
    while (!into.empty()) {
      const iovec piece{into.data(), into.size()};
      const Transfer moved = stream_->try_read(std::span(&piece, 1));
      REQUIRE(!moved.ended());
      into = into.subspan(moved.bytes);
    }
  }
  void write(std::span<const std::byte> bytes) {
    const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
    REQUIRE(stream_->try_write(std::span(&piece, 1)).bytes == bytes.size());
  }

  FileDescriptor reserves_port_;
  FileDescriptor listener_;
  std::unique_ptr<Stream> stream_;
};

// A client of a scripted shard, which is dialled when it is asked.
inline std::shared_ptr<Client> client_of(const ScriptedShard& shard, std::uint64_t lane_bytes = kBytes) {
  ClientOptions options;
  options.shards = {{"127.0.0.1", shard.port()}};
  options.slot_owner = round_robin(1);
  options.lane_bytes = lane_bytes;
  options.is_lazy = true;
  return take(Client::connect(options));
}

inline bool overlap(const LanePlacePayload& one, const LanePlacePayload& other) {
  return one.offset < other.offset + other.bytes && other.offset < one.offset + one.bytes;
}

inline constexpr auto kAck = static_cast<std::uint16_t>(FrameType::kHelloAck);
inline constexpr auto kRefused = static_cast<std::uint16_t>(FrameType::kError);
inline constexpr auto kRows = static_cast<std::uint16_t>(FrameType::kRows);

}  // namespace sparserow::testing
