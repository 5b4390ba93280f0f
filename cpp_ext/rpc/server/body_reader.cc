#include "rpc/server/body_reader.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "util/not_allowed.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;
using Phase = FrameIo::Phase;

constexpr std::size_t kFirstStep = 64u << 10;  // of a large body that is charged

struct CopiedRows {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
};

constexpr std::size_t kCopyBytes = 1u << 20;  // that one thread copies at a time

}  // namespace

// The sections of a body of which some have their rows in the lane.
struct BodyReader::PlacedBody {
  std::vector<Section> sections;       // but LANE_ROWS
  std::vector<std::uint64_t> offsets;  // by TABLE_GRADS
  std::uint64_t bytes = 0;             // of the body with its rows
  std::optional<TableDescriptor> first;

  Status parse(std::span<const std::byte> body, std::uint32_t count) {
    SectionReader reader(body, count);
    while (true) {
      auto section = reader.next();
      if (!section.is_ok()) return section.status();
      if (!section.value()) return Status::ok();
      if (section.value()->kind != SectionKind::kLaneRows) {
        sections.push_back(*section.value());
        continue;
      }
      auto named = parse_lane_rows(section.value()->payload);
      if (!named.is_ok()) return named.status();
      offsets = std::move(named).value();
    }
  }

  // Checks every place, and counts the bytes.
  Status measure(std::uint64_t lane_bytes) {
    std::size_t table = 0;
    for (const Section& section : sections) {
      bytes += sizeof(SectionHeader) + padded8(section.payload.size());
      if (section.kind != SectionKind::kTableGrads) continue;
      if (table == offsets.size()) return not_allowed("lane_rows", offsets.size(), "an offset for each table");
      const std::uint64_t offset = offsets[table++];
      TableDescriptor descriptor;
      if (section.payload.size() < sizeof descriptor) return must_be("table.n", "within its section");
      std::memcpy(&descriptor, section.payload.data(), sizeof descriptor);
      if (!first) first = descriptor;
      if (offset == kNotPlaced) continue;
      SR_RETURN_IF_ERROR(check_descriptor(descriptor));
      const std::uint64_t rows = std::uint64_t{descriptor.n} * descriptor.dim * sizeof(float);
      const bool fits =
          section.payload.size() == sizeof descriptor + std::uint64_t{descriptor.n} * sizeof(std::uint64_t);
      if (descriptor.flags != kTablePlaced || descriptor.dtype != Dtype::kFloat32 || !fits) {
        return must_be("lane_rows", "offsets of tables of float32 that are flagged and have keys alone");
      }
      if (offset % sizeof(float) != 0 || rows > lane_bytes || offset > lane_bytes - rows) {
        return not_allowed("lane_rows", offset,
                           "a place within the " + std::to_string(lane_bytes) + " bytes of its lane, a multiple of 4");
      }
      bytes += padded8(rows);
    }
    if (table != offsets.size()) return not_allowed("lane_rows", offsets.size(), "an offset for each table");
    return Status::ok();
  }

  // Writes the body, but for the rows in the lane: these are returned.
  std::vector<CopiedRows> write(std::byte* to, std::span<const std::byte> lane) const {
    std::vector<CopiedRows> copies;
    std::size_t table = 0;
    for (const Section& section : sections) {
      SectionHeader header;
      header.kind = static_cast<std::uint16_t>(section.kind);
      header.flags = kSectionRequired;
      header.payload_bytes = section.payload.size();
      std::byte* const payload = to + sizeof header;
      std::memcpy(payload, section.payload.data(), section.payload.size());
      std::size_t end = section.payload.size();
      if (section.kind == SectionKind::kTableGrads && offsets[table++] != kNotPlaced) {
        TableDescriptor descriptor;
        std::memcpy(&descriptor, payload, sizeof descriptor);
        descriptor.flags = 0;
        std::memcpy(payload, &descriptor, sizeof descriptor);
        const std::size_t rows = std::size_t{descriptor.n} * descriptor.dim * sizeof(float);
        for (std::size_t at = 0; at < rows; at += kCopyBytes) {
          copies.push_back(
              {payload + end + at, lane.data() + offsets[table - 1] + at, std::min(kCopyBytes, rows - at)});
        }
        end += rows;
        header.payload_bytes = sizeof descriptor + std::size_t{descriptor.n} * sizeof(std::uint64_t) + padded8(rows);
      }
      std::memset(payload + end, 0, padded8(end) - end);
      std::memcpy(to, &header, sizeof header);
      to = payload + padded8(end);
    }
    return copies;
  }
};

void BodyReader::open_charges(Body& body, std::size_t bytes) {
  if (peer_.inflight) body.client_charge = peer_.inflight->charge(peer_.inflight->account(accounts_.name()), bytes);
  body.charge = accounts_.charge_body(bytes);
}

Task<Status> BodyReader::take_room(Body& body, std::size_t bytes, Clock::time_point deadline) {
  Status status;
  if (peer_.inflight) {
    const std::string whose = peer_.address + "'s in-flight";
    status = co_await accounts_.take(body.client_charge, bytes, deadline, whose);
  }
  if (status.is_ok()) status = co_await accounts_.take(body.charge, bytes, deadline, "the shard's in-flight");
  co_return status;
}

Task<Outcome> BodyReader::fetch_placed(Request& request, const Check& check) {
  const FrameType type = request.type();
  const bool is_write = type == FrameType::kPrepare || type == FrameType::kCommit || type == FrameType::kAssign;
  if (!lane_ || !is_write) co_return Outcome{};
  PlacedBody placed;
  Status status = placed.parse(request.body.bytes, request.header.section_count);
  if (!status.is_ok()) co_return Outcome::broken_grammar(std::move(status));
  if (placed.offsets.empty()) co_return Outcome{};
  const FrameIo::LaneUse use(io_);
  if (!use.is_allowed()) co_return Outcome::refused(lost());
  const std::span<const std::byte> lane = lane_->bytes();
  status = placed.measure(lane.size());
  if (!status.is_ok()) co_return Outcome::broken_grammar(std::move(status));
  if (placed.bytes > core_.options.max_frame_bytes) {
    status = Status(Code::kInvalidArgument,
                    "the request has " + std::to_string(placed.bytes) + " bytes, a frame has at most " +
                        std::to_string(core_.options.max_frame_bytes) + "; send fewer rows at a time");
  }
  if (status.is_ok()) status = check(request.header, nullptr);
  if (status.is_ok() && placed.first) status = check(request.header, &*placed.first);
  Body whole;
  if (status.is_ok()) {
    open_charges(whole, placed.bytes);
    status = co_await take_room(whole, placed.bytes, request.deadline);
  }
  if (!status.is_ok()) co_return Outcome::refused(std::move(status));
  whole.buffer = core_.buffers.acquire(placed.bytes);
  whole.bytes = {whole.buffer.data(), placed.bytes};
  const auto copies = placed.write(whole.buffer.data(), lane);
  core_.parallel_for(static_cast<std::uint32_t>(copies.size()),
                     [&copies](std::uint32_t i) { std::memcpy(copies[i].to, copies[i].from, copies[i].bytes); });
  for (const CopiedRows& copy : copies) core_.counters.lane_received += copy.bytes;
  whole.staged = request.body.staged;
  request.body = std::move(whole);
  request.header.body_bytes = static_cast<std::uint32_t>(placed.bytes);
  request.header.section_count = static_cast<std::uint32_t>(placed.sections.size());
  co_return Outcome{};
}

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
  open_charges(body, bytes);
  std::size_t charged = 0;
  while (left > 0) {
    // The first steps are small, so what a peer announces costs it as much as it costs the shard.
    const std::size_t step =
        bytes <= FairBudget::kStepBytes ? bytes : std::clamp(charged, kFirstStep, std::size_t{FairBudget::kStepBytes});
    const std::size_t now = std::min(step, bytes - charged);
    io_.set_phase(Phase::kWorking);  // the peer does not stall while the shard waits for room
    Status status = co_await take_room(body, now, deadline);
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
