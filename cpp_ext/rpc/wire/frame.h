// The frames of the data plane: every byte two processes exchange about rows. Little-endian.
//
//   frame   = header(64) section*                     body_bytes counts the sections
//   section = section_header(16) payload padding      padding to 8 bytes, zero
//
//   HELLO      client -> server  section HELLO, WORKER?, LANE?       first frame of a connection
//   HELLO_ACK  server -> client  section HELLO
//   PULL       client -> server  section TABLE_KEYS per table, LANE_PLACE?    header.step: clock, or kNoStep
//   ROWS       server -> client  section TABLE_ROWS per table, in the order asked
//   LOOKUP     client -> server  section TABLE_KEYS per table        a PULL of a served model; answered by ROWS
//   PREPARE    client -> server  section TABLE_GRADS per table       held, memory reserved, nothing applied
//   COMMIT     client -> server  section TABLE_GRADS per table (one-phase), or none
//   ABORT      client -> server  none                                drops what was prepared under sequence
//              flagged kFrameLost: section TABLE_KEYS, sequences in place of keys: acknowledged once, held no more
//   ASSIGN     client -> server  section TABLE_GRADS (rows in place of gradients)
//   DELETE     client -> server  section TABLE_KEYS
//   SCAN       client -> server  section SCAN
//   SCAN_PAGE  server -> client  section SCAN_PAGE
//   ACK        server -> client  section ACK
//   ERROR      server -> client  section ERROR                       reply to any request; of kOutsideQuorum
//              header.step is the lowest step that still takes members
//   HINT       client -> server  section TABLE_KEYS per table        a feature of HELLO; answered by ACK at once
//   PING / PONG                  none
//
//   table payload = table_descriptor(40) keys u64[n]? known u64[n]? positions u32[n]? pad8
//                   exponents i8[n]? pad8 rows dtype[n * dim]? pad8 versions u64[n]? found u8[n]? pad8
//
// TABLE_KEYS has keys; TABLE_ROWS has rows (no keys: the order is the request's) and what the request
// flagged; TABLE_GRADS has keys and rows, and exponents (scaled_rows.h) where rows have 16 bits. SCAN_PAGE: see
// ScanPagePayload.
//
// A conditional pull (table flag kTableKnown, a feature of HELLO) sends with each key the version that the
// client has, or kNoVersion. The reply has the n rows whose version differs, older or newer, their versions,
// and their positions among the keys asked for, which rise.
//
// A PULL flagged kFrameWrites has in its reply's `sequence` how often others than this worker wrote to the tables it
// names, up to a constant (commit/write_counts.h), as of before its rows were read. It may name tables without keys.
//
// A LOOKUP names its model by header.namespace_id (rpc/server/served_models.h) and by header.sequence a key that routes
// between versions, or 0; `sequence` of the reply is the number of the version that answered. A feature of HELLO.
//
// A large ROWS is made while it is sent, so its checksum cannot stand in the header. Such a reply to a client that
// asked for checksums and reads kFrameCrcLast carries a CHECKSUM section at its end instead.
//
// A client of the same host may pass memory with HELLO (rpc/transport/lane.h) and name a place in it with a PULL or a
// LOOKUP. The body of a ROWS flagged kFrameInLane lies there, and the stream has its header alone. A feature of HELLO.
//
// A frame has at most kMaxSections sections, so that what is parsed from it stays small beside its bytes.
//
// A HINT names keys that will be pulled. A shard with an SSD brings their rows to memory when it has the time, another
// one does nothing; the ACK's count says how many it took. What a hint names that is wrong costs reads and nothing
// else.
//
// Unknown sections are skipped unless flagged kRequired, then the frame is refused. Lengths are checked
// before the first byte they cover is used; version N speaks to N-1 (min/max in HELLO). Every length is a
// multiple of 8, so what follows is aligned in place.
//
// Two kinds of error. A frame that breaks this grammar is answered by ERROR and its connection is closed,
// for nothing after it can be trusted. A frame that is well formed and cannot be served (no such table,
// another dim, a stale route) is answered by ERROR and the connection goes on.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "schema/schema.h"
#include "util/dtype.h"
#include "util/status.h"

namespace sparserow::rpc {

inline constexpr std::uint32_t kHelloMagic = 0x4f525053;  // "SPRO"
inline constexpr std::uint8_t kProtocolVersion = 1;       // the newest that is spoken
inline constexpr std::uint8_t kProtocolMin = 1;           // the oldest
// HELLO, its answer and an error of no request have it for ever, because these find out what both sides speak.
inline constexpr std::uint8_t kGreetingVersion = 1;
inline constexpr std::uint32_t kMaxSections = 1u << 14;

enum Features : std::uint64_t {
  kFeatureConditionalPull = 1,
  kFeatureWriteCounts = 2,
  kFeatureLookup = 4,
  kFeatureHints = 8,
  kFeatureIncarnation = 16,
  kFeatureLostWrites = 32,
  kFeatureChecksumLast = 64,  // the client reads replies whose checksum stands in their last section
  kFeatureLane = 128,         // client: memory comes with this HELLO; server: it is mapped, and has places
};
inline constexpr std::uint64_t kFeatures = kFeatureConditionalPull | kFeatureWriteCounts | kFeatureLookup |
                                           kFeatureHints | kFeatureIncarnation | kFeatureLostWrites |
                                           kFeatureChecksumLast;  // this build's, apart from a lane

enum class FrameType : std::uint16_t {
  kHello = 1,
  kHelloAck = 2,
  kPull = 3,
  kRows = 4,
  kPrepare = 5,
  kCommit = 6,
  kAbort = 7,
  kAck = 8,
  kError = 9,
  kAssign = 10,
  kDelete = 11,
  kScan = 12,
  kScanPage = 13,
  kPing = 14,
  kPong = 15,
  kLookup = 16,
  kHint = 17,
};

enum FrameFlags : std::uint8_t {
  kFrameHasCrc = 1,    // header.crc32c covers header (with crc32c = 0) and body
  kFramePrepared = 2,  // COMMIT: applies what PREPARE brought under the same sequence
  kFrameGradSum = 4,   // COMMIT/PREPARE: do not scale gradients by 1/N
  kFrameWrites = 8,    // PULL: count the writes of others. A feature of HELLO
  kFrameLost = 16,     // ABORT: what is named is lost where the shard does not know it. A feature of HELLO
  kFrameCrcLast = 32,  // ROWS: the last section is CHECKSUM. A feature of HELLO
  kFrameInLane = 64,   // ROWS: the body is not in the stream. A feature of HELLO
};

struct FrameHeader {
  std::uint32_t body_bytes = 0;
  std::uint16_t type = 0;
  std::uint8_t version = kGreetingVersion;  // a channel puts the one that both sides speak in its place
  std::uint8_t flags = 0;
  std::uint64_t request_id = 0;   // chosen by the client, echoed in the reply
  std::uint32_t deadline_ms = 0;  // time left when sent; 0 = the server's default
  std::uint32_t namespace_id = 0;
  std::uint32_t job_id = 0;
  std::uint32_t worker_id = 0;
  std::uint32_t worker_epoch = 0;
  std::uint32_t route_epoch = 0;
  std::uint64_t sequence =
      0;  // of commits, ASSIGN and DELETE by this worker; of ROWS: kFrameWrites, LOOKUP; 0 where none
  std::int64_t step = kNoStep;
  std::uint32_t section_count = 0;
  std::uint32_t crc32c = 0;
};
static_assert(sizeof(FrameHeader) == 64);

enum class SectionKind : std::uint16_t {
  kHello = 1,
  kTableKeys = 2,
  kTableRows = 3,
  kTableGrads = 4,
  kAck = 5,
  kError = 6,
  kScan = 7,
  kScanPage = 8,
  kChecksum = 10,  // 9: rpc/wire/trace_context.h
  kWorker = 11,
  kLane = 12,
  kLanePlace = 13,
  kLaneRows = 14,
};

enum SectionFlags : std::uint16_t { kSectionRequired = 1 };

struct SectionHeader {
  std::uint16_t kind = 0;
  std::uint16_t flags = 0;
  std::uint32_t reserved = 0;
  std::uint64_t payload_bytes = 0;  // without padding
};
static_assert(sizeof(SectionHeader) == 16);

enum TableFlags : std::uint8_t {
  kTableVersions = 1,   // request: send versions too; reply: they are there
  kTableFound = 2,      // request: send the found mask; reply: it is there
  kTableKnown = 4,      // request: known versions are there; reply: positions are. Needs kTableVersions
  kTableExponents = 8,  // TABLE_GRADS: the exponents of the rows are there, as rows of 16 bits need
  kTablePlaced = 16,    // the rows are where the request says (LANE_ROWS), and not here
};

struct TableDescriptor {
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 0;
  std::uint32_t dim = 0;
  Dtype dtype = Dtype::kFloat32;  // of rows in this section, or wanted in the reply
  std::uint8_t flags = 0;
  std::uint16_t reserved = 0;
  std::uint32_t n = 0;
  float lr = 0.0f;  // TABLE_GRADS of a commit
  std::uint64_t reserved2 = 0;
  std::uint64_t reserved3 = 0;
};
static_assert(sizeof(TableDescriptor) == 40);

// What a section of a table begins with.
struct TableHead {
  SectionHeader section;
  TableDescriptor descriptor;
};
static_assert(sizeof(TableHead) == 56);

struct HelloPayload {
  std::uint32_t magic = kHelloMagic;
  std::uint8_t protocol_min = kProtocolMin;
  std::uint8_t protocol_max = kProtocolVersion;
  std::uint16_t shard_index = 0;  // server -> client
  std::uint64_t cluster_id = 0;   // 0 = any (client)
  std::uint64_t features = 0;     // bit set of Features; server -> client: what it can do; client: what it wants
  std::uint32_t hash_version = 0;
  std::uint32_t slot_count = 0;       // server -> client
  std::uint32_t route_epoch = 0;      // server -> client
  std::uint32_t max_frame_bytes = 0;  // server -> client
  std::uint32_t token_bytes = 0;      // auth token follows
  std::uint32_t incarnation = 0;      // server -> client that wants it: random number of the process, not 0; else 0
};
static_assert(sizeof(HelloPayload) == 48);

struct AckPayload {
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;      // rows applied, assigned or erased
  std::uint32_t duplicate = 0;  // 1 when answered again from the window
  std::uint32_t reserved = 0;
};
static_assert(sizeof(AckPayload) == 24);

struct ErrorPayload {  // message bytes follow
  std::uint16_t code = 0;
  std::uint16_t reserved = 0;
  std::uint32_t message_bytes = 0;
};
static_assert(sizeof(ErrorPayload) == 8);

// HELLO names the worker, and the number that the coordinator gave this epoch of the worker to prove it. Steps, commits
// and writes of a worker with such a number are served only on connections that have shown it.
struct WorkerPayload {
  std::uint32_t job_id = 0;
  std::uint32_t worker_id = 0;
  std::uint32_t epoch = 0;
  std::uint32_t reserved = 0;
  std::array<std::byte, 16> proof{};
};
static_assert(sizeof(WorkerPayload) == 32);

// HELLO of a client that passes memory. A shard that has another version does not take it.
inline constexpr std::uint32_t kLaneVersion = 1;
struct LanePayload {
  std::uint32_t version = kLaneVersion;
  std::uint32_t reserved = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(LanePayload) == 16);

// Where the body of a reply may go.
struct LanePlacePayload {
  std::uint64_t offset = 0;  // a multiple of 8
  std::uint64_t bytes = 0;   // 0: nowhere
};
static_assert(sizeof(LanePlacePayload) == 16);

// LANE_ROWS: for each table of the request, in order, an offset in the lane where its float32 rows go, or are (a
// TABLE_GRADS, flagged kTablePlaced), or kNotPlaced. A multiple of 4.
inline constexpr std::uint64_t kNotPlaced = UINT64_MAX;

struct LanePlaceSection {
  SectionHeader section{.kind = static_cast<std::uint16_t>(SectionKind::kLanePlace),
                        .payload_bytes = sizeof(LanePlacePayload)};
  LanePlacePayload place;
};
static_assert(sizeof(LanePlaceSection) == 32);

struct ChecksumPayload {
  std::uint32_t crc32c = 0;  // over the header and all that stands before the section
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ChecksumPayload) == 8);

struct ScanPayload {
  std::uint64_t cursor = 0;
  std::uint32_t table_id = 0;
  std::uint32_t max_rows = 0;
  std::uint32_t with_state = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ScanPayload) == 24);

struct ScanPagePayload {  // then keys u64[n] versions u64[n] update_counts u32[n] pad8 rows f32[n*dim] state
                          // f32[n*state]
  std::uint64_t next_cursor = 0;
  std::uint32_t n = 0;
  std::uint32_t dim = 0;
  std::uint32_t state_floats = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ScanPagePayload) == 24);

[[nodiscard]] constexpr std::uint64_t padded8(std::uint64_t bytes) noexcept { return (bytes + 7) & ~std::uint64_t{7}; }

[[nodiscard]] std::string_view type_name(FrameType type) noexcept;  // "PULL"; "unknown" outside of the enum

[[nodiscard]] bool is_request(FrameType type) noexcept;  // of a client, after HELLO

// This build reads frames of the type in this version.
[[nodiscard]] bool is_spoken(std::uint8_t version, FrameType type) noexcept;

// ---- Reading. Views point into the bytes given, which must be 8-byte aligned and outlive them.

// Checks what a header alone can show: version, flags, a length that is a multiple of 8 and at most max_body_bytes.
// kInvalidArgument. The type is not checked: dispatch refuses an unknown one.
Status check_header(const FrameHeader& header, std::uint64_t max_body_bytes);

// kFailedPrecondition when `peer` speaks no version that this build speaks; `its` and `own` name both sides.
Status check_protocol(const HelloPayload& peer, std::string_view its, std::string_view own);

// DataLoss when the frame carries a checksum that does not match; Ok when it carries none.
Status check_crc(const FrameHeader& header, std::span<const std::byte> body);

struct Section {
  SectionKind kind;
  std::span<const std::byte> payload;
};

// Walks the sections of a body. next() gives each known section once, skips unknown optional ones, and
// nullopt at the end, which is reached only when count and bytes agree. InvalidArgument else.
class SectionReader {
 public:
  SectionReader(std::span<const std::byte> body, std::uint32_t section_count)
      : rest_(body), sections_left_(section_count) {}
  Result<std::optional<Section>> next();

 private:
  std::span<const std::byte> rest_;
  std::uint32_t sections_left_;
};

// Which parts a table payload of this kind has.
struct TableLayout {
  bool keys = false;
  bool known = false;
  bool positions = false;
  bool exponents = false;
  bool rows = false;
  bool versions = false;
  bool found = false;
};
// The layout of a section in a frame. kInvalidArgument for flags that the kind cannot carry.
Result<TableLayout> layout_of(SectionKind kind, std::uint8_t flags);
// Bytes of a whole payload, descriptor included; a multiple of 8.
[[nodiscard]] std::uint64_t table_payload_bytes(const TableDescriptor& descriptor, const TableLayout& layout) noexcept;

// Bytes of a section of rows that answers to keys with this descriptor, header and padding included. The positions of a
// conditional pull count, whether they are known yet or not.
[[nodiscard]] std::uint64_t rows_section_bytes(const TableDescriptor& asked) noexcept;

struct TableView {
  TableDescriptor descriptor;
  std::span<const std::uint64_t> keys;       // (n) or empty
  std::span<const std::uint64_t> known;      // (n) versions or empty
  std::span<const std::uint32_t> positions;  // (n) rising, or empty
  std::span<const std::int8_t> exponents;    // (n) by which rows were scaled (scaled_rows.h), or empty
  std::span<const std::byte> rows;           // (n, dim) of descriptor.dtype or empty
  std::span<const std::uint64_t> versions;   // (n) or empty
  std::span<const std::uint8_t> found;       // (n) or empty
};
Result<TableView> parse_table(SectionKind kind, std::span<const std::byte> payload);
// Field checks that parse_table and a reader of streamed sections share.
Status check_descriptor(const TableDescriptor& descriptor);

Result<HelloPayload> parse_hello(std::span<const std::byte> payload);
Result<AckPayload> parse_ack(std::span<const std::byte> payload);
Status parse_error(std::span<const std::byte> payload);  // the error that the peer sent, or InvalidArgument
Result<ScanPayload> parse_scan(std::span<const std::byte> payload);
Result<LanePayload> parse_lane(std::span<const std::byte> payload);
Result<LanePlacePayload> parse_lane_place(std::span<const std::byte> payload);
Result<std::vector<std::uint64_t>> parse_lane_rows(std::span<const std::byte> payload);

struct ScanPageView {
  ScanPagePayload page;
  std::span<const std::uint64_t> keys;           // (n)
  std::span<const std::uint64_t> versions;       // (n)
  std::span<const std::uint32_t> update_counts;  // (n)
  std::span<const float> rows;                   // (n, dim)
  std::span<const float> state;                  // (n, state_floats)
};
Result<ScanPageView> parse_scan_page(std::span<const std::byte> payload);

// ---- Writing.

// A frame of one section made of `head` (a payload struct) and `tail`, padded; or of none.
[[nodiscard]] std::vector<std::byte> small_frame(FrameHeader header, SectionKind kind, std::span<const std::byte> head,
                                                 std::span<const std::byte> tail);
[[nodiscard]] std::vector<std::byte> empty_frame(FrameHeader header);
// The frame with one more section, which a reader that does not know its kind skips.
[[nodiscard]] std::vector<std::byte> with_section(std::span<const std::byte> frame, SectionKind kind,
                                                  std::span<const std::byte> payload);
[[nodiscard]] std::vector<std::byte> error_frame(FrameHeader header, const Status& status);

template <class T>
[[nodiscard]] std::span<const std::byte> bytes_of(const T& value) noexcept {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

// Sets kFrameHasCrc and crc32c for a frame given as its header and the pieces of its body.
void seal_crc(FrameHeader& header, std::span<const iovec> body) noexcept;

}  // namespace sparserow::rpc
