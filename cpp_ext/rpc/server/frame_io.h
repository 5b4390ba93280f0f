// The bytes of one connection: it stages what the peer sends and writes replies in turns.
//
// All members run on the connection's strand, except close() and the figures, which any thread may ask.
// A reply is written whole in one turn, so replies of parked pulls never mix with others.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "rpc/server/server_core.h"
#include "rpc/transport/event_loop.h"
#include "rpc/transport/stream.h"
#include "util/mutex.h"

namespace sparserow::rpc {

template <class T>
using Task = asio::awaitable<T>;
using Strand = asio::strand<asio::io_context::executor_type>;

class FrameIo {
 public:
  enum class Phase : std::uint8_t { kHello, kIdle, kReceiving, kWorking, kEnding };

  // `staging_bytes` is what one fill() can ask for.
  FrameIo(Counters& counters, const Strand& strand, std::unique_ptr<Stream> stream, std::size_t staging_bytes);
  FrameIo(const FrameIo&) = delete;
  FrameIo& operator=(const FrameIo&) = delete;
  ~FrameIo();

  // Any thread. Every read and write that waits ends with false.
  void close();
  void mark_closed() noexcept { closed_ = true; }
  [[nodiscard]] bool is_closed() const noexcept { return closed_; }

  [[nodiscard]] bool needs_handshake() const noexcept { return stream_->needs_handshake(); }
  // Makes the handshake of the stream on one of these threads. False: it failed, the peer left, or close().
  Task<bool> secure(asio::thread_pool& threads);

  void expect_descriptor() noexcept { stream_->expect_descriptor(); }
  [[nodiscard]] FileDescriptor take_descriptor() noexcept { return stream_->take_descriptor(); }

  // The staged bytes that were not consumed. They move with the next fill().
  [[nodiscard]] std::span<std::byte> staged() noexcept {
    return std::span(staging_).subspan(staged_begin_, staged_end_ - staged_begin_);
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return staging_.size(); }
  void set_capacity(std::size_t bytes) { staging_.resize(bytes); }
  // Reads until `wanted` bytes are staged, at most capacity(). False: the peer left, or close().
  Task<bool> fill(std::size_t wanted);
  void consume(std::size_t bytes) noexcept;
  // Reads into the caller's memory, past staging, which must be empty. False: the peer left, or close().
  Task<bool> read_into(std::span<std::byte> into);
  // Reads and drops at most `most` bytes after the last reply, so that the peer can still read it.
  Task<void> drain(std::size_t most);

  // Writes a whole reply in a turn of its own. False: the peer left, or close().
  Task<bool> write_reply(std::span<const std::byte> bytes);
  // A reply of several parts: take_turn(), any number of write_part(), end_turn().
  Task<void> take_turn();
  Task<bool> write_part(std::span<const std::byte> bytes);
  void end_turn();

  // While one lives, which uses memory of the peer, that does not see the end of this connection: once it sees that,
  // its memory is its own again.
  class LaneUse {
   public:
    explicit LaneUse(FrameIo& io) noexcept : io_(io), is_allowed_(io.begin_lane_use()) {}
    LaneUse(const LaneUse&) = delete;
    LaneUse& operator=(const LaneUse&) = delete;
    ~LaneUse() {
      if (is_allowed_) io_.end_lane_use();
    }
    // False: the peer may have seen the end.
    [[nodiscard]] bool is_allowed() const noexcept { return is_allowed_; }

   private:
    FrameIo& io_;
    const bool is_allowed_;
  };

  void set_phase(Phase phase) noexcept { phase_ = phase; }
  void mark_moved() noexcept;
  // Any thread.
  [[nodiscard]] Phase phase() const noexcept { return phase_; }
  [[nodiscard]] std::int64_t moved_at_ms() const noexcept { return moved_at_ms_; }  // steady clock
  [[nodiscard]] std::uint64_t received() const noexcept { return received_; }       // bytes
  [[nodiscard]] std::uint64_t sent() const noexcept { return sent_; }               // bytes
  [[nodiscard]] bool is_sending() const noexcept { return sending_; }               // a reply waits for the peer
  [[nodiscard]] bool is_in_handshake() const noexcept { return in_handshake_; }     // it waits for the shard, or works

 private:
  Task<bool> wait_for(Transfer::Want want);
  [[nodiscard]] bool begin_lane_use() noexcept;
  void end_lane_use() noexcept;
  [[nodiscard]] bool is_lane_used() const noexcept;
  void note_received(std::size_t bytes) noexcept;

  Counters& counters_;
  const Strand strand_;
  std::unique_ptr<Stream> stream_;
  asio::posix::stream_descriptor readiness_;  // waits on the stream's fd; does not own it
  std::vector<std::byte> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  bool writing_ = false;
  std::deque<std::shared_ptr<asio::steady_timer>> turns_;

  mutable Mutex end_mutex_;
  unsigned lane_uses_ SR_GUARDED_BY(end_mutex_) = 0;
  bool shows_end_ SR_GUARDED_BY(end_mutex_) = false;

  std::atomic<Phase> phase_{Phase::kHello};
  std::atomic<std::int64_t> moved_at_ms_{0};
  std::atomic<std::uint64_t> received_{0};
  std::atomic<std::uint64_t> sent_{0};
  std::atomic<bool> sending_{false};
  std::atomic<bool> in_handshake_{false};
  std::atomic<bool> closed_{false};
};

}  // namespace sparserow::rpc
