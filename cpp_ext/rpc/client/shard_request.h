// What a caller asks one shard, as a channel takes it.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "rpc/client/reply_reader.h"
#include "rpc/wire/frame.h"
#include "util/status.h"

namespace sparserow::rpc {

// What a request names in the memory that client and shard share (rpc/client/channel_lane.h).
struct LaneNames {
  std::vector<std::byte> sections;    // the body's last piece
  std::uint32_t count = 0;            // of the sections
  std::shared_ptr<std::byte[]> body;  // where the reply's body may go; null: nowhere
  std::uint64_t body_bytes = 0;       // that may go there
  std::vector<iovec> whole_body;      // of the request, where it is sent without rows; else empty
  bool has_rows = false;              // rows go to the caller's memory
};

// The gradients of one table in the body of a request.
struct RowsSource {
  TableHead* head = nullptr;
  std::size_t piece = 0;              // of the body
  std::shared_ptr<RowMemory> memory;  // that they lie in; null: in other memory
};

struct ShardRequest {
  // Written by the caller before submit().
  std::uint32_t shard = 0;
  FrameHeader header;       // type, flags, ids, sequence, step, section_count, body_bytes
  std::vector<iovec> body;  // pieces of the body in order, in memory that outlives the request
  FrameType expected = FrameType::kAck;
  std::uint64_t needs = 0;  // Features that the shard must have
  std::vector<RowsSink> sinks;
  std::uint64_t reply_bytes = 0;    // of the body of a ROWS, at most; 0: not known
  std::vector<RowsSource> sources;  // by TABLE_GRADS
  std::chrono::steady_clock::time_point deadline;
  std::uint32_t* open_requests = nullptr;   // counted down when done
  std::uint64_t* reply_sequence = nullptr;  // where `sequence` of a ROWS goes; null: nowhere

  // Written by the channel.
  bool done = false;
  Status status;
  bool may_be_taken = false;         // of an error: a copy of the request is out that has no answer
  std::int64_t open_step = kNoStep;  // of kOutsideQuorum: `step` of the ERROR
  std::vector<std::byte> reply;      // body of an ACK or SCAN_PAGE

  // The channel's own: what it names in shared memory, and how much is sent.
  LaneNames names;
  bool waits_for_end = false;  // of the connection on which a shard may still write to its rows
  bool sending = false;
  bool sent = false;
  bool header_sent = false;
  std::size_t piece = 0;
  std::size_t offset = 0;
};

}  // namespace sparserow::rpc
