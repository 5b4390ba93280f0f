// Sends a worker's buffered commits again to a process that has taken its shard's place. It needs no socket.
//
// The frames follow each other in the order of their sequences, one at a time; whatever else is asked waits. First of
// all the shard learns which writes by key were evicted from the buffer, so that it can count them as lost.
//
// Not thread-safe: the client's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rpc/client/replay_buffer.h"
#include "rpc/wire/frame.h"
#include "util/status.h"

namespace sparserow::rpc {

class Replay {
 public:
  // `has_crc`: frames carry a checksum in their header.
  Replay(std::uint64_t budget_bytes, bool has_crc) : buffer_(budget_bytes), has_crc_(has_crc) {}

  [[nodiscard]] ReplayBuffer& buffer() noexcept { return buffer_; }
  // The process that answers now, 0 when it does not say, and the version that it is spoken to in. Another process than
  // before lacks what is buffered.
  void note_shard(std::uint32_t incarnation, std::uint8_t protocol);
  [[nodiscard]] bool is_due() const noexcept { return is_due_; }

  // Starts with the first frame. `counts_lost`: the shard can count evicted writes.
  void begin(bool counts_lost);
  // Makes the next frame under this id. False: all commits are sent again.
  bool next(std::uint64_t request_id);
  // The bytes of the frame that were not sent yet.
  [[nodiscard]] std::span<const std::byte> unsent() const noexcept { return std::span(frame_).subspan(sent_); }
  void note_sent(std::size_t bytes) noexcept { sent_ += bytes; }
  // The same frame is sent once more.
  void send_again() noexcept { sent_ = 0; }

  struct Answer {
    Status refusal;           // kUnavailable: the frame is to be sent again later; ok: next() makes the one after it
    bool is_applied = false;  // the shard had not got this commit
  };
  // What the shard says to the frame. kDataLoss: the reply is malformed. A refusal for good ends the commit: the shard
  // counts it.
  Result<Answer> on_reply(std::span<const std::byte> body, std::uint32_t section_count);

 private:
  void make_lost_frame(std::uint64_t request_id);
  void seal(FrameHeader header, std::uint64_t request_id);

  ReplayBuffer buffer_;
  const bool has_crc_;
  std::uint8_t protocol_ = kGreetingVersion;
  std::uint32_t incarnation_ = 0;  // of the shard's process that answered last; 0: none has
  bool is_due_ = false;            // the process there lacks what is buffered
  std::uint64_t from_ = 0;         // sequence of the commit that is being sent
  std::vector<std::byte> frame_;
  std::size_t sent_ = 0;
  bool is_decided_ = false;
  bool names_lost_ = false;      // the frame names evicted writes
  bool has_lost_frame_ = false;  // that frame exists
};

}  // namespace sparserow::rpc
