#include "rpc/server/frame_io.h"

#include <cstring>

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

FrameIo::FrameIo(Counters& counters, const Strand& strand, std::unique_ptr<Stream> stream, std::size_t staging_bytes)
    : counters_(counters),
      strand_(strand),
      stream_(std::move(stream)),
      readiness_(strand_, stream_->fd()),
      staging_(staging_bytes) {
  mark_moved();
}

FrameIo::~FrameIo() {
  readiness_.release();  // the fd is the stream's
}

void FrameIo::close() {
  closed_ = true;
  const MutexLock lock(end_mutex_);
  shows_end_ = true;
  if (lane_uses_ == 0) stream_->reset();  // a coroutine that waits for the fd wakes and sees the end
}

bool FrameIo::begin_lane_use() noexcept {
  const MutexLock lock(end_mutex_);
  if (shows_end_) return false;
  ++lane_uses_;
  return true;
}

void FrameIo::end_lane_use() noexcept {
  const MutexLock lock(end_mutex_);
  if (--lane_uses_ == 0 && shows_end_) stream_->reset();
}

bool FrameIo::is_lane_used() const noexcept {
  const MutexLock lock(end_mutex_);
  return lane_uses_ > 0;
}

Task<bool> FrameIo::wait_for(Transfer::Want want) {
  asio::error_code error;
  const auto kind = want == Transfer::Want::kRead ? asio::posix::stream_descriptor::wait_read
                                                  : asio::posix::stream_descriptor::wait_write;
  co_await readiness_.async_wait(kind, asio::redirect_error(asio::use_awaitable, error));
  co_return !error && !closed_;
}

void FrameIo::mark_moved() noexcept {
  moved_at_ms_ = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count();
}

void FrameIo::note_received(std::size_t bytes) noexcept {
  received_ += bytes;
  counters_.bytes_received += bytes;
  mark_moved();
}

void FrameIo::consume(std::size_t bytes) noexcept {
  staged_begin_ += bytes;
  if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
}

// The I/O thread waits for the peer and looks at its first bytes; the rest is work for a CPU.
Task<bool> FrameIo::secure(asio::thread_pool& threads) {
  while (stream_->needs_handshake()) {
    Transfer moved = stream_->try_begin();
    if (moved.bytes > 0) {
      const auto go_on = [this]() -> Task<Transfer> { co_return closed_ ? Transfer{} : stream_->try_handshake(); };
      in_handshake_ = true;
      moved = co_await asio::co_spawn(threads.get_executor(), go_on, asio::use_awaitable);
      in_handshake_ = false;
    }
    if (moved.bytes == 0 && (moved.ended() || !co_await wait_for(moved.want))) co_return false;
  }
  co_return !closed_;
}

Task<bool> FrameIo::fill(std::size_t wanted) {
  if (staging_.size() - staged_begin_ < wanted) {
    std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_end_ - staged_begin_);
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
  }
  while (staged_end_ - staged_begin_ < wanted) {
    const iovec into{staging_.data() + staged_end_, staging_.size() - staged_end_};
    const Transfer moved = stream_->try_read(std::span(&into, 1));
    if (moved.bytes > 0) {
      staged_end_ += moved.bytes;
      note_received(moved.bytes);
      if (phase_ == Phase::kIdle) phase_ = Phase::kReceiving;
      continue;
    }
    if (moved.ended() || !co_await wait_for(moved.want)) co_return false;
  }
  co_return true;
}

Task<bool> FrameIo::read_into(std::span<std::byte> into) {
  while (!into.empty()) {
    const iovec piece{into.data(), into.size()};
    const Transfer moved = stream_->try_read(std::span(&piece, 1));
    if (moved.bytes > 0) {
      into = into.subspan(moved.bytes);
      note_received(moved.bytes);
      continue;
    }
    if (moved.ended() || !co_await wait_for(moved.want)) co_return false;
  }
  co_return true;
}

// A socket that is closed with unread bytes resets the last reply away.
Task<void> FrameIo::drain(std::size_t most) {
  asio::steady_timer pause(strand_);
  while (!closed_ && is_lane_used()) {  // by an answer to a pull that was parked
    asio::error_code error;
    pause.expires_after(std::chrono::milliseconds(1));
    co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
  }
  if (closed_) co_return;
  {
    const MutexLock lock(end_mutex_);
    shows_end_ = true;
  }
  stream_->shutdown_write();
  mark_moved();
  phase_ = Phase::kEnding;
  std::size_t dropped = 0;
  while (dropped < most) {
    const iovec into{staging_.data(), staging_.size()};
    const Transfer moved = stream_->try_read(std::span(&into, 1));
    if (moved.ended()) co_return;
    dropped += moved.bytes;
    if (moved.bytes == 0 && !co_await wait_for(moved.want)) co_return;
  }
}

Task<bool> FrameIo::write_part(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const Transfer moved = stream_->try_write(std::span(&piece, 1));
    if (moved.bytes > 0) {
      bytes = bytes.subspan(moved.bytes);
      sent_ += moved.bytes;
      counters_.bytes_sent += moved.bytes;
      continue;
    }
    if (moved.ended()) co_return false;
    mark_moved();
    sending_ = true;
    const bool is_open = co_await wait_for(moved.want);
    sending_ = false;
    if (!is_open) co_return false;
  }
  co_return true;
}

Task<bool> FrameIo::write_reply(std::span<const std::byte> bytes) {
  if (writing_) co_await take_turn();
  writing_ = true;
  bool is_alive = false;
  try {
    is_alive = co_await write_part(bytes);
  } catch (const std::exception&) {  // a part may have left
    mark_closed();
  }
  end_turn();
  co_return is_alive;
}

Task<void> FrameIo::take_turn() {
  while (writing_) {
    const auto turn = std::make_shared<asio::steady_timer>(strand_, asio::steady_timer::time_point::max());
    turns_.push_back(turn);
    asio::error_code error;
    co_await turn->async_wait(asio::redirect_error(asio::use_awaitable, error));
  }
  writing_ = true;
}

void FrameIo::end_turn() {
  writing_ = false;
  if (turns_.empty()) return;
  turns_.front()->cancel();
  turns_.pop_front();
}

}  // namespace sparserow::rpc
