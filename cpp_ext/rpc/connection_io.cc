// How a connection reads frames and writes replies, within its budgets: the I/O half of rpc/connection.h.
#include <algorithm>
#include <cstring>
#include <new>

#include "rpc/connection.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Connection::Task<bool> Connection::wait_for(Transfer::Want want) {
  asio::error_code error;
  const auto kind = want == Transfer::Want::kRead ? asio::posix::stream_descriptor::wait_read
                                                  : asio::posix::stream_descriptor::wait_write;
  co_await readiness_.async_wait(kind, asio::redirect_error(asio::use_awaitable, error));
  co_return !error && !closed_;
}

void Connection::mark_moved() noexcept {
  moved_at_ms_ = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count();
}

void Connection::consume(std::size_t bytes) noexcept {
  staged_begin_ += bytes;
  if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
}

// Reads until `wanted` bytes are staged; wanted <= staging_.size().
Connection::Task<bool> Connection::fill(std::size_t wanted) {
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
      core_.counters.bytes_received += moved.bytes;
      mark_moved();
      if (phase_ == Phase::kIdle) phase_ = Phase::kReceiving;
      continue;
    }
    if (moved.ended() || !co_await wait_for(moved.want)) co_return false;
  }
  co_return true;
}

Connection::Task<bool> Connection::read_into(std::span<std::byte> into) {
  while (!into.empty()) {
    const iovec piece{into.data(), into.size()};
    const Transfer moved = stream_->try_read(std::span(&piece, 1));
    if (moved.bytes > 0) {
      into = into.subspan(moved.bytes);
      core_.counters.bytes_received += moved.bytes;
      mark_moved();
      continue;
    }
    if (moved.ended() || !co_await wait_for(moved.want)) co_return false;
  }
  co_return true;
}

// Ok; or ResourceExhausted with the body read past; or, the connection lost, anything with closed_ set.
Connection::Task<Status> Connection::read_body(const FrameHeader& header, Body& body, Clock::time_point deadline) {
  const Status lost(Code::kUnavailable, "connection lost");
  const std::size_t frame_bytes = sizeof header + header.body_bytes;
  phase_ = Phase::kReceiving;
  if (frame_bytes <= staging_.size()) {
    if (!co_await fill(frame_bytes)) {
      closed_ = true;
      co_return lost;
    }
    body.bytes = std::span(staging_).subspan(staged_begin_ + sizeof header, header.body_bytes);
    body.staged = frame_bytes;
    co_return Status::ok();
  }
  phase_ = Phase::kWorking;  // waiting for budget is our matter, not a stall of the peer
  Status status = co_await acquire(peer_->inflight, header.body_bytes, deadline);
  if (status.is_ok()) {
    body.client_charge = Charge(&peer_->inflight, header.body_bytes);
    status = co_await acquire(core_.inflight, header.body_bytes, deadline);
  }
  phase_ = Phase::kReceiving;
  mark_moved();
  if (status.is_ok()) {
    body.charge = Charge(&core_.inflight, header.body_bytes);
    try {
      body.buffer = core_.buffers.acquire(header.body_bytes);
    } catch (const std::bad_alloc&) {
      status =
          Status(Code::kResourceExhausted, "no memory for a frame of " + std::to_string(header.body_bytes) + " bytes");
    }
  }
  consume(sizeof header);
  std::size_t left = header.body_bytes;
  while (!status.is_ok() && left > 0 && !closed_) {  // read past
    const std::size_t staged = std::min(left, staged_end_ - staged_begin_);
    consume(staged);
    left -= staged;
    if (left > 0 && !co_await fill(1)) closed_ = true;
  }
  if (!status.is_ok()) co_return status;
  const std::size_t staged = std::min(left, staged_end_ - staged_begin_);
  std::memcpy(body.buffer.data(), staging_.data() + staged_begin_, staged);
  consume(staged);
  body.bytes = {body.buffer.data(), header.body_bytes};
  if (!co_await read_into({body.buffer.data() + staged, header.body_bytes - staged})) {
    closed_ = true;
    co_return lost;
  }
  co_return Status::ok();
}

Connection::Task<Status> Connection::acquire(InflightBudget& budget, std::uint64_t bytes, Clock::time_point deadline) {
  while (!budget.try_acquire(bytes)) {
    budget_timer_.expires_at(deadline);
    const bool waits = budget.wait(bytes, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self) return;
      asio::post(self->strand_, [self] { self->budget_timer_.cancel(); });
    });
    if (!waits) continue;
    asio::error_code error;
    co_await budget_timer_.async_wait(asio::redirect_error(asio::use_awaitable, error));
    if (closed_) co_return Status(Code::kUnavailable, "connection closed");
    if (error != asio::error::operation_aborted) {
      const std::string whose = &budget == &core_.inflight ? "the shard's" : peer_->address + "'s";
      co_return Status(Code::kResourceExhausted, whose + " in-flight budget of " + std::to_string(budget.limit()) +
                                                     " bytes stayed full until the deadline; " + std::to_string(bytes) +
                                                     " needed");
    }
  }
  co_return Status::ok();
}

Connection::Task<bool> Connection::write_all(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const Transfer moved = stream_->try_write(std::span(&piece, 1));
    if (moved.bytes > 0) {
      bytes = bytes.subspan(moved.bytes);
      core_.counters.bytes_sent += moved.bytes;
      continue;
    }
    if (moved.ended()) co_return false;
    mark_moved();
    const Phase before = phase_.exchange(Phase::kSending);
    if (!co_await wait_for(moved.want)) co_return false;
    phase_ = before;
  }
  co_return true;
}

Connection::Task<bool> Connection::write_reply(std::span<const std::byte> bytes) {
  if (writing_) co_await take_turn();
  writing_ = true;
  const bool alive = co_await write_all(bytes);
  end_turn();
  co_return alive;
}

// On return it is the caller's turn to write; end_turn() passes it on.
Connection::Task<void> Connection::take_turn() {
  while (writing_) {
    const auto turn = std::make_shared<asio::steady_timer>(strand_, asio::steady_timer::time_point::max());
    turns_.push_back(turn);
    asio::error_code error;
    co_await turn->async_wait(asio::redirect_error(asio::use_awaitable, error));
  }
  writing_ = true;
}

void Connection::end_turn() {
  writing_ = false;
  if (turns_.empty()) return;
  turns_.front()->cancel();
  turns_.pop_front();
}

}  // namespace sparserow::rpc
