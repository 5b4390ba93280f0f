// Pulls and look-ups: planned, parked until the clock allows them, and sent whole, in part or chunk by chunk.
#include <algorithm>
#include <cstring>

#include "rpc/changed_rows.h"
#include "rpc/connection.h"
#include "rpc/reply_frames.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

// Appends into memory that the caller has sized.
class Packer {
 public:
  explicit Packer(std::byte* out) : begin_(out), at_(out) {}
  template <class T>
  void put(const T& value) {
    std::memcpy(at_, &value, sizeof value);
    at_ += sizeof value;
  }
  // Gives `count` bytes to be written by the caller.
  std::byte* claim(std::size_t count) { return std::exchange(at_, at_ + count); }
  void zero(std::size_t count) { std::memset(claim(count), 0, count); }
  [[nodiscard]] std::size_t used() const noexcept { return static_cast<std::size_t>(at_ - begin_); }

 private:
  std::byte* begin_;
  std::byte* at_;
};

void put_section(Packer& packer, const PullPart& part) {
  SectionHeader section;
  section.kind = static_cast<std::uint16_t>(SectionKind::kTableRows);
  section.flags = kSectionRequired;
  section.payload_bytes = reply_section_bytes(part) - sizeof section;
  packer.put(section);
  packer.put(reply_descriptor(part));
}

}  // namespace

Connection::Task<Connection::Outcome> Connection::serve_pull(const FrameHeader& header, Body& body,
                                                             Clock::time_point deadline, const Arrival& arrival) {
  auto request = std::make_shared<PullRequest>();
  request->header = header;
  request->arrival = arrival;
  request->store = core_.store;
  if (Outcome outcome = plan_pull(body, *request); !outcome.status.is_ok()) co_return outcome;
  if (header.step != kNoStep) {
    bool parked = false;
    Outcome outcome = park_until_readable(request, body, deadline, parked);
    outcome.is_parked = parked;
    if (parked || !outcome.status.is_ok()) co_return outcome;
  }
  if (!co_await send_rows(*request)) closed_ = true;
  co_return Outcome{};
}

Connection::Outcome Connection::plan_pull(const Body& body, PullRequest& request) const {
  std::vector<TableView> views;
  Outcome outcome = parse_tables(request.header, body.bytes, SectionKind::kTableKeys, views);
  if (!outcome.status.is_ok()) return outcome;
  for (const TableView& view : views) {
    if (Status status = check_table(*request.store, view.descriptor); !status.is_ok()) {
      return {std::move(status), false, {}};
    }
    request.parts.push_back({view.descriptor, view.keys, view.known});
    request.reply_bytes += reply_section_bytes(request.parts.back());
  }
  if (request.reply_bytes > core_.options.max_frame_bytes) {
    return {Status(Code::kInvalidArgument,
                   "the reply would have " + std::to_string(request.reply_bytes) + " bytes, a frame has at most " +
                       std::to_string(core_.options.max_frame_bytes) + "; pull fewer rows at a time"),
            false,
            {}};
  }
  return outcome;
}

Connection::Task<Connection::Outcome> Connection::serve_lookup(const FrameHeader& header, Body& body) {
  const ServedVersion served = core_.models.find(header.namespace_id, header.sequence);
  if (served.store == nullptr) {
    co_return Outcome{Status(Code::kNotFound, "model: there is none with handle " +
                                                  std::to_string(header.namespace_id) + " in this process"),
                      false,
                      {}};
  }
  PullRequest request;
  request.header = header;
  request.header.step = kNoStep;  // a lookup has no clock
  request.store = served.store;
  request.reply_sequence = served.number;
  if (Outcome outcome = plan_pull(body, request); !outcome.status.is_ok()) co_return outcome;
  for (const PullPart& part : request.parts) {
    Status status = check_owner(part.descriptor.table_id, part.keys);
    if (!status.is_ok()) co_return Outcome{std::move(status), false, {}};
  }
  if (!co_await send_rows(request)) closed_ = true;
  co_return Outcome{};
}

// Asks the clock. A pull that must wait takes its keys along and gives its in-flight bytes back.
Connection::Outcome Connection::park_until_readable(const std::shared_ptr<PullRequest>& request, Body& body,
                                                    Clock::time_point deadline, bool& parked) {
  struct Wait {
    std::mutex mutex;
    bool answered = false;
    bool is_parked = false;
    Status status;
  };
  const auto wait = std::make_shared<Wait>();
  const FrameHeader& header = request->header;
  core_.commits.when_readable(
      header.job_id, header.worker_id, header.worker_epoch, header.step, deadline,
      [wait, request, weak = weak_from_this()](Status status) {
        const std::lock_guard lock(wait->mutex);
        wait->answered = true;
        wait->status = std::move(status);
        if (!wait->is_parked) return;
        if (const auto self = weak.lock()) resume_parked(self, request, wait->status);
      },
      this);
  has_parked_ = true;
  {
    const std::lock_guard lock(wait->mutex);
    if (wait->answered) return {wait->status, false, {}};
  }
  if (!core_.parked.try_acquire(body.bytes.size())) {
    return {Status(Code::kResourceExhausted, "pulls that wait for the clock fill their budget of " +
                                                 std::to_string(core_.options.kept_budget_bytes) + " bytes"),
            false,
            {}};
  }
  request->charge = Charge(&core_.parked, body.bytes.size());
  if (body.buffer.data() != nullptr) {
    request->body = std::move(body.buffer);
    body.charge.reset();
    body.client_charge.reset();
  } else {
    request->body = core_.buffers.acquire(body.bytes.size());
    std::memcpy(request->body.data(), body.bytes.data(), body.bytes.size());
    for (PullPart& part : request->parts) {
      const auto offset = reinterpret_cast<const std::byte*>(part.keys.data()) - body.bytes.data();
      part.keys = {reinterpret_cast<const std::uint64_t*>(request->body.data() + offset), part.keys.size()};
      if (!part.known.empty()) part.known = {part.keys.data() + part.keys.size(), part.keys.size()};
    }
  }
  const std::lock_guard lock(wait->mutex);
  if (wait->answered) return {wait->status, false, {}};
  wait->is_parked = true;
  parked = true;
  if (core_.disk != nullptr) {  // its rows come to memory while it waits
    asio::post(*core_.disk, [&core = core_, request] {
      for (const PullPart& part : request->parts) {
        // The pull itself will tell of an error.
        static_cast<void>(core.store->bring(part.descriptor.table_id, part.keys, Store::Bring::kForPull));
      }
    });
  }
  return {};
}

void Connection::resume_parked(const std::shared_ptr<Connection>& self, const std::shared_ptr<PullRequest>& request,
                               const Status& status) {
  // Posted: the commit that made it readable may be running on this very strand.
  asio::post(self->strand_, [self, request, status] {
    asio::co_spawn(
        self->strand_, [self, request, status] { return self->finish_parked(request, status); }, asio::detached);
  });
}

Connection::Task<void> Connection::finish_parked(std::shared_ptr<PullRequest> request, Status status) {
  ++core_.counters.requests_active;
  const CountedRequest counted(core_.counters.requests_dispatched);
  bool alive = !closed_;
  for (const PullPart& part : request->parts) {
    if (status.is_ok()) status = check_refusal(part.descriptor.table_id);
  }
  if (alive && status.is_ok()) {
    alive = co_await send_rows(*request);
  } else if (alive) {
    ++core_.counters.frames_refused;
    const auto refusal = error_frame(reply_to(request->header, FrameType::kError), status);
    alive = co_await write_reply(refusal);
  }
  note(RequestTimes::Kind::kWaitedPull, request->header, status, request->arrival);
  if (!alive) close();
  --core_.counters.requests_active;
}

// Of a reply with every row that was asked for.
FrameHeader Connection::rows_header(const PullRequest& request) {
  FrameHeader header = reply_to(request.header, FrameType::kRows);
  header.section_count = static_cast<std::uint32_t>(request.parts.size());
  header.body_bytes = static_cast<std::uint32_t>(request.reply_bytes);
  header.sequence = request.reply_sequence;
  return header;
}

Connection::Task<Status> Connection::bring_rows(const PullRequest& request) {
  const bool blocks = core_.disk != nullptr &&
                      std::any_of(request.parts.begin(), request.parts.end(), [&request](const PullPart& part) {
                        return request.store->would_block(part.descriptor.table_id, part.keys);
                      });
  if (!blocks) co_return Status::ok();
  const auto bring = [&request]() -> Task<Status> {
    for (const PullPart& part : request.parts) {
      Status status = request.store->bring(part.descriptor.table_id, part.keys, Store::Bring::kForPull);
      if (!status.is_ok()) co_return status;
    }
    co_return Status::ok();
  };
  co_return co_await asio::co_spawn(core_.disk->get_executor(), bring, asio::use_awaitable);
}

Connection::Task<bool> Connection::send_rows(PullRequest& request) {
  if (const Status brought = co_await bring_rows(request); !brought.is_ok()) {
    ++core_.counters.frames_refused;
    const auto refusal = error_frame(reply_to(request.header, FrameType::kError), brought);
    co_return co_await write_reply(refusal);
  }
  if (request.header.step != kNoStep) {
    const std::uint64_t behind = core_.commits.steps_behind(request.header.job_id, request.header.step);
    for (const PullPart& part : request.parts) core_.staleness.add(part.descriptor.table_id, behind);
  }
  if (core_.options.observe) {
    for (const PullPart& part : request.parts) core_.hot_keys.look_at(sampler_, part.descriptor.table_id, part.keys);
  }
  count_writes(request);
  const bool conditional =
      std::any_of(request.parts.begin(), request.parts.end(), [](const PullPart& part) { return !part.known.empty(); });
  if (conditional) co_return co_await send_changed_rows(request);
  // A checksum stands in the header, so its frame must be whole before the first byte leaves.
  const bool whole =
      sizeof(FrameHeader) + request.reply_bytes <= RowChunks::kChunkBytes || (request.header.flags & kFrameHasCrc) != 0;
  if (whole) co_return co_await send_rows_whole(request);
  co_await take_turn();
  const bool alive = co_await send_rows_chunked(request);
  end_turn();
  co_return alive;
}

void Connection::count_writes(PullRequest& request) {
  const FrameHeader& header = request.header;
  if ((header.flags & kFrameWrites) == 0) return;
  std::vector<std::uint32_t> tables;
  for (const PullPart& part : request.parts) tables.push_back(part.descriptor.table_id);
  request.reply_sequence =
      core_.commits.writes().by_others(tables, {header.job_id, header.worker_id, header.worker_epoch});
}

Connection::Task<bool> Connection::send_rows_whole(PullRequest& request) {
  FrameHeader header = rows_header(request);
  Buffer out = core_.buffers.acquire(sizeof header + request.reply_bytes);
  Packer packer(out.data());
  packer.put(header);
  Status status;
  for (const PullPart& part : request.parts) {
    put_section(packer, part);
    const std::size_t n = part.keys.size();
    const std::size_t bytes = n * part.descriptor.dim * size_of(part.descriptor.dtype);
    std::byte* rows = packer.claim(bytes);
    packer.zero(padded8(bytes) - bytes);
    PullExtras extras;
    if ((part.descriptor.flags & kTableVersions) != 0) {
      extras.versions = reinterpret_cast<std::uint64_t*>(packer.claim(n * 8));
    }
    if ((part.descriptor.flags & kTableFound) != 0) {
      extras.found = reinterpret_cast<std::uint8_t*>(packer.claim(n));
      packer.zero(padded8(n) - n);
    }
    status = request.store->pull(part.descriptor.table_id, part.keys, part.descriptor.dtype, rows, extras);
    if (!status.is_ok()) break;
    core_.counters.rows_pulled += n;
  }
  if (!status.is_ok()) {
    ++core_.counters.frames_refused;
    const auto refusal = error_frame(reply_to(request.header, FrameType::kError), status);
    co_return co_await write_reply(refusal);
  }
  if ((header.flags & kFrameHasCrc) != 0) {
    const iovec body{out.data() + sizeof header, request.reply_bytes};
    seal_crc(header, std::span(&body, 1));
    std::memcpy(out.data(), &header, sizeof header);
  }
  co_return co_await write_reply({out.data(), packer.used()});
}

Connection::Task<bool> Connection::send_changed_rows(PullRequest& request) {
  const auto body = changed_rows_body(*request.store, request.parts);
  if (!body.is_ok()) {
    ++core_.counters.frames_refused;
    const auto refusal = error_frame(reply_to(request.header, FrameType::kError), body.status());
    co_return co_await write_reply(refusal);
  }
  FrameHeader header = rows_header(request);
  header.body_bytes = static_cast<std::uint32_t>(body.value().size());
  if ((header.flags & kFrameHasCrc) != 0) {
    const iovec piece{const_cast<std::byte*>(body.value().data()), body.value().size()};
    seal_crc(header, std::span(&piece, 1));
  }
  std::vector<std::byte> frame(sizeof header + body.value().size());
  std::memcpy(frame.data(), &header, sizeof header);
  std::memcpy(frame.data() + sizeof header, body.value().data(), body.value().size());
  for (const PullPart& part : request.parts) core_.counters.rows_pulled += part.keys.size();
  co_return co_await write_reply(frame);
}

// The header promises the length, then chunk after chunk is gathered and written. A table that is dropped
// in between cannot be told any more: the connection ends, and the retry learns it.
Connection::Task<bool> Connection::send_rows_chunked(PullRequest& request) {
  const FrameHeader header = rows_header(request);
  RowChunks chunks(core_, *request.store, header, request.parts);
  while (true) {
    const auto bytes = chunks.next();
    if (!bytes.is_ok()) co_return false;
    if (bytes.value().empty()) co_return true;
    if (!co_await write_all(bytes.value())) co_return false;
  }
}

}  // namespace sparserow::rpc
