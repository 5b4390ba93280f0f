// How a connection reads frames and writes replies, within its budgets: the I/O half of rpc/server/connection.h.
#include <algorithm>
#include <cstring>
#include <new>

#include "rpc/server/connection.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kFirstStep = 64u << 10;  // of a large body that is charged

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
      received_ += moved.bytes;
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
      received_ += moved.bytes;
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
  Status status = co_await check_before_body(header);
  consume(sizeof header);
  std::size_t left = header.body_bytes;
  if (status.is_ok()) status = co_await read_charged(header, body, left, deadline);
  while (!status.is_ok() && left > 0 && !closed_) {  // read past
    const std::size_t staged = std::min(left, staged_end_ - staged_begin_);
    consume(staged);
    left -= staged;
    if (left > 0 && !co_await fill(1)) closed_ = true;
  }
  co_return status;
}

// Reads a body into a buffer of its own, charged step by step before the bytes are read; `left` counts down.
Connection::Task<Status> Connection::read_charged(const FrameHeader& header, Body& body, std::size_t& left,
                                                  Clock::time_point deadline) {
  const std::size_t bytes = header.body_bytes;
  if (peer_->inflight) {
    body.client_charge = peer_->inflight->charge(peer_->inflight->account(account_), bytes);
  }
  body.charge = core_.inflight.charge(inflight_account_, bytes);
  const std::string whose = peer_->address + "'s in-flight";
  std::size_t charged = 0;
  while (left > 0) {
    // The first steps are small, so what a peer announces costs it as much as it costs the shard.
    const std::size_t step =
        bytes <= FairBudget::kStepBytes ? bytes : std::clamp(charged, kFirstStep, std::size_t{FairBudget::kStepBytes});
    const std::size_t now = std::min(step, bytes - charged);
    phase_ = Phase::kWorking;  // the peer does not stall while the shard waits for room
    Status status;
    if (peer_->inflight) status = co_await take(body.client_charge, now, deadline, whose);
    if (status.is_ok()) status = co_await take(body.charge, now, deadline, "the shard's in-flight");
    phase_ = Phase::kReceiving;
    if (status.is_ok() && charged == 0) {
      try {
        body.buffer = core_.buffers.acquire(bytes);
      } catch (const std::bad_alloc&) {
        status = Status(Code::kResourceExhausted, "no memory for a frame of " + std::to_string(bytes) + " bytes");
      }
    }
    if (!status.is_ok()) {  // nothing is kept while the rest is read past
      body.buffer = Buffer{};
      body.charge.reset();
      body.client_charge.reset();
      co_return status;
    }
    charged += now;
    std::size_t at = bytes - left;
    const std::size_t staged = std::min(charged - at, staged_end_ - staged_begin_);
    std::memcpy(body.buffer.data() + at, staging_.data() + staged_begin_, staged);
    consume(staged);
    at += staged;
    if (!co_await read_into({body.buffer.data() + at, charged - at})) {
      closed_ = true;
      co_return Status(Code::kUnavailable, "connection lost");
    }
    left = bytes - charged;
  }
  body.bytes = {body.buffer.data(), bytes};
  co_return Status::ok();
}

Connection::Task<Status> Connection::check_before_body(const FrameHeader& header) {
  if (Status status = check_access(header); !status.is_ok()) co_return status;
  if (Status status = check_request(header); !status.is_ok()) co_return status;
  // The first section tells the first table; the others are checked when they are here.
  struct {
    FrameHeader header;
    SectionHeader section;
    TableDescriptor table;
  } first;
  if (header.body_bytes < sizeof first - sizeof header) co_return Status::ok();
  if (!co_await fill(sizeof first)) {
    closed_ = true;
    co_return Status(Code::kUnavailable, "connection lost");
  }
  std::memcpy(&first, staging_.data() + staged_begin_, sizeof first);
  const auto kind = static_cast<SectionKind>(first.section.kind);
  const bool names_table = kind == SectionKind::kTableKeys || kind == SectionKind::kTableGrads;
  if (!names_table || header.type == static_cast<std::uint16_t>(FrameType::kLookup)) co_return Status::ok();
  const auto schema = core_.store->schema(first.table.table_id);
  co_return schema ? grant_.allows_table(schema->name) : Status::ok();
}

Connection::Task<Status> Connection::take(FairBudget::Charge& charge, std::uint64_t bytes, Clock::time_point deadline,
                                          std::string_view whose) {
  const auto timer = std::make_shared<asio::steady_timer>(strand_, deadline);
  const auto granted = [weak = weak_from_this(), timer] {
    if (const auto self = weak.lock()) asio::post(self->strand_, [self, timer] { timer->cancel(); });
  };
  if (charge.take(bytes, granted)) co_return Status::ok();
  asio::error_code error;
  waits_.insert(timer.get());
  co_await timer->async_wait(asio::redirect_error(asio::use_awaitable, error));
  waits_.erase(timer.get());
  const bool is_taken = charge.give_up();
  if (closed_) co_return Status(Code::kUnavailable, "connection closed");
  if (is_taken) co_return Status::ok();
  co_return Status(Code::kResourceExhausted, std::string(whose) + " budget stayed full until the deadline; " +
                                                 std::to_string(bytes) + " bytes needed");
}

Connection::Task<Status> Connection::charge_reply(FairBudget::Charge& charge, std::uint64_t bytes,
                                                  Clock::time_point deadline) {
  if (bytes > core_.replies.limit()) {
    co_return Status(Code::kInvalidArgument,
                     "the reply would take " + std::to_string(bytes) + " bytes of the shard's reply budget of " +
                         std::to_string(core_.replies.limit()) + "; ask for fewer rows at a time");
  }
  charge = core_.replies.charge(reply_account_, bytes);
  co_return co_await take(charge, bytes, deadline, "the shard's reply");
}

Connection::Task<bool> Connection::write_all(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const Transfer moved = stream_->try_write(std::span(&piece, 1));
    if (moved.bytes > 0) {
      bytes = bytes.subspan(moved.bytes);
      sent_ += moved.bytes;
      core_.counters.bytes_sent += moved.bytes;
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
