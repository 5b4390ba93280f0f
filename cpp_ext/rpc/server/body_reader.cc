#include "rpc/server/body_reader.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;
using Phase = FrameIo::Phase;

constexpr std::size_t kFirstStep = 64u << 10;  // of a large body that is charged

}  // namespace

Status BodyReader::lost() {
  io_.mark_closed();
  return {Code::kUnavailable, "connection lost"};
}

Task<Status> BodyReader::read(const FrameHeader& header, Body& body, Clock::time_point deadline, const Check& check) {
  const std::size_t frame_bytes = sizeof header + header.body_bytes;
  io_.set_phase(Phase::kReceiving);
  if (frame_bytes <= io_.capacity()) {
    if (!co_await io_.fill(frame_bytes)) co_return lost();
    body.bytes = io_.staged().subspan(sizeof header, header.body_bytes);
    body.staged = frame_bytes;
    co_return Status::ok();
  }
  Status status = co_await check_first_table(header, check);
  io_.consume(sizeof header);
  std::size_t left = header.body_bytes;
  if (status.is_ok()) status = co_await read_charged(header, body, left, deadline);
  while (!status.is_ok() && left > 0 && !io_.is_closed()) {  // read past
    const std::size_t staged = std::min(left, io_.staged().size());
    io_.consume(staged);
    left -= staged;
    if (left > 0 && !co_await io_.fill(1)) io_.mark_closed();
  }
  co_return status;
}

// The first section names the first table; the others are checked when they are here.
Task<Status> BodyReader::check_first_table(const FrameHeader& header, const Check& check) {
  struct {
    FrameHeader header;
    TableHead table;
  } first;
  if (Status status = check(header, nullptr); !status.is_ok()) co_return status;
  if (header.body_bytes < sizeof first - sizeof header) co_return Status::ok();
  if (!co_await io_.fill(sizeof first)) co_return lost();
  std::memcpy(&first, io_.staged().data(), sizeof first);
  const auto kind = static_cast<SectionKind>(first.table.section.kind);
  const bool names_table = kind == SectionKind::kTableKeys || kind == SectionKind::kTableGrads;
  if (!names_table || header.type == static_cast<std::uint16_t>(FrameType::kLookup)) co_return Status::ok();
  co_return check(header, &first.table.descriptor);
}

// `left` counts the bytes down that were not read yet.
Task<Status> BodyReader::read_charged(const FrameHeader& header, Body& body, std::size_t& left,
                                      Clock::time_point deadline) {
  const std::size_t bytes = header.body_bytes;
  if (peer_.inflight) body.client_charge = peer_.inflight->charge(peer_.inflight->account(accounts_.name()), bytes);
  body.charge = accounts_.charge_body(bytes);
  const std::string whose = peer_.address + "'s in-flight";
  std::size_t charged = 0;
  while (left > 0) {
    // The first steps are small, so what a peer announces costs it as much as it costs the shard.
    const std::size_t step =
        bytes <= FairBudget::kStepBytes ? bytes : std::clamp(charged, kFirstStep, std::size_t{FairBudget::kStepBytes});
    const std::size_t now = std::min(step, bytes - charged);
    io_.set_phase(Phase::kWorking);  // the peer does not stall while the shard waits for room
    Status status;
    if (peer_.inflight) status = co_await accounts_.take(body.client_charge, now, deadline, whose);
    if (status.is_ok()) status = co_await accounts_.take(body.charge, now, deadline, "the shard's in-flight");
    io_.set_phase(Phase::kReceiving);
    if (status.is_ok() && charged == 0) {
      try {
        body.buffer = core_.buffers.acquire(bytes);
      } catch (const std::bad_alloc&) {
        status = Status(Code::kResourceExhausted, "no memory for a frame of " + std::to_string(bytes) + " bytes");
      }
    }
    if (!status.is_ok()) {  // nothing is kept while the rest is read past
      body.buffer = Buffer{};
      body.release_charges();
      co_return status;
    }
    charged += now;
    std::size_t at = bytes - left;
    const std::size_t staged = std::min(charged - at, io_.staged().size());
    std::memcpy(body.buffer.data() + at, io_.staged().data(), staged);
    io_.consume(staged);
    at += staged;
    if (!co_await io_.read_into({body.buffer.data() + at, charged - at})) co_return lost();
    left = bytes - charged;
    if (ArrivingRows::are_looked_at(header)) body.arriving.look({body.buffer.data(), charged});
  }
  body.bytes = {body.buffer.data(), bytes};
  co_return Status::ok();
}

}  // namespace sparserow::rpc
