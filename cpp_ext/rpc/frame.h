// The frames of the data plane: every byte two processes exchange about rows. Little-endian.
//
//   frame   = header(64) section*                     body_bytes counts the sections
//   section = section_header(16) payload padding      padding to 8 bytes, zero
//
//   HELLO      client -> server  section HELLO                       first frame of a connection
//   HELLO_ACK  server -> client  section HELLO
//   PULL       client -> server  section TABLE_KEYS per table        header.step: clock, or kNoStep
//   ROWS       server -> client  section TABLE_ROWS per table, in the order asked
//   PREPARE    client -> server  section TABLE_GRADS per table       held, memory reserved, nothing applied
//   COMMIT     client -> server  section TABLE_GRADS per table (one-phase), or none
//   ABORT      client -> server  none                                drops what was prepared under sequence
//   ASSIGN     client -> server  section TABLE_GRADS (rows in place of gradients)
//   DELETE     client -> server  section TABLE_KEYS
//   SCAN       client -> server  section SCAN
//   SCAN_PAGE  server -> client  section SCAN_PAGE
//   ACK        server -> client  section ACK
//   ERROR      server -> client  section ERROR                       reply to any request
//   PING / PONG                  none
//
//   table payload = table_descriptor(40) keys u64[n] rows dtype[n * dim]? pad8 versions u64[n]? found u8[n]? pad8
//
// TABLE_KEYS has keys (and versions when flagged: a conditional pull); TABLE_ROWS has rows (no keys: the
// order is the request's) and what the request flagged; TABLE_GRADS has keys and rows.
// Unknown sections are skipped unless flagged kRequired, then the frame is refused. Lengths are checked
// before the first byte they cover is used; version N speaks to N-1 (min/max in HELLO).
#pragma once

#include <cstddef>
#include <cstdint>

#include "util/dtype.h"
#include "util/status.h"

namespace sparserow::rpc {

inline constexpr std::uint32_t kHelloMagic = 0x4f525053;  // "SPRO"
inline constexpr std::uint8_t kProtocolVersion = 1;
inline constexpr std::uint8_t kProtocolMin = 1;
inline constexpr std::int64_t kNoStep = -1;

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
};

enum FrameFlags : std::uint8_t {
  kFrameHasCrc = 1,    // header.crc32c covers header (with crc32c = 0) and body
  kFramePrepared = 2,  // COMMIT: applies what PREPARE brought under the same sequence
  kFrameGradSum = 4,   // COMMIT/PREPARE: do not scale gradients by 1/N
};

struct FrameHeader {
  std::uint32_t body_bytes = 0;
  std::uint16_t type = 0;
  std::uint8_t version = kProtocolVersion;
  std::uint8_t flags = 0;
  std::uint64_t request_id = 0;   // chosen by the client, echoed in the reply
  std::uint32_t deadline_ms = 0;  // time left when sent; 0 = the server's default
  std::uint32_t namespace_id = 0;
  std::uint32_t job_id = 0;
  std::uint32_t worker_id = 0;
  std::uint32_t worker_epoch = 0;
  std::uint32_t route_epoch = 0;
  std::uint64_t sequence = 0;  // of commits by this worker; 0 where none
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
  kTableVersions = 1,  // request: send versions too; reply: they are there
  kTableFound = 2,     // request: send the found mask; reply: it is there
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

struct HelloPayload {
  std::uint32_t magic = kHelloMagic;
  std::uint8_t protocol_min = kProtocolMin;
  std::uint8_t protocol_max = kProtocolVersion;
  std::uint16_t shard_index = 0;  // server -> client
  std::uint64_t cluster_id = 0;   // 0 = any (client)
  std::uint64_t features = 0;     // bit set; none defined in version 1
  std::uint32_t hash_version = 0;
  std::uint32_t slot_count = 0;       // server -> client
  std::uint32_t route_epoch = 0;      // server -> client
  std::uint32_t max_frame_bytes = 0;  // server -> client
  std::uint32_t token_bytes = 0;      // auth token follows
  std::uint32_t reserved = 0;
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

struct ScanPayload {
  std::uint64_t cursor = 0;
  std::uint32_t table_id = 0;
  std::uint32_t max_rows = 0;
  std::uint32_t with_state = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ScanPayload) == 24);

struct ScanPagePayload {  // keys u64[n] versions u64[n] update_counts u32[n] pad8 rows f32[n*dim] state f32[n*state]
  std::uint64_t next_cursor = 0;
  std::uint32_t n = 0;
  std::uint32_t dim = 0;
  std::uint32_t state_floats = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ScanPagePayload) == 24);

[[nodiscard]] constexpr std::uint64_t padded8(std::uint64_t bytes) noexcept { return (bytes + 7) & ~std::uint64_t{7}; }

}  // namespace sparserow::rpc
