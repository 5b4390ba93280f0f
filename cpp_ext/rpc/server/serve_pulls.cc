// Pulls and look-ups: planned, parked until the clock allows them, and sent whole, in part or chunk by chunk.
#include <algorithm>
#include <array>
#include <cstring>

#include "rpc/server/changed_rows.h"
#include "rpc/server/connection.h"
#include "rpc/server/reply_frames.h"
#include "rpc/wire/crc32c.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kChecksumBytes = sizeof(SectionHeader) + sizeof(ChecksumPayload);
constexpr std::uint64_t kUncharged = 64u << 10;  // a reply of so many bytes costs no more than its connection
constexpr std::size_t kChunksATurn = 8;       // of a large reply that are written before other connections are served
constexpr std::uint32_t kMostParked = 1024;   // pulls of one connection that wait for the clock
constexpr std::uint64_t kParkedBytes = 1024;  // that a parked pull takes beside its body

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
  request->deadline = deadline;
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

Connection::Task<Connection::Outcome> Connection::serve_lookup(const FrameHeader& header, Body& body,
                                                               Clock::time_point deadline) {
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
  request.deadline = deadline;
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
  const std::uint64_t parked_bytes = body.bytes.size() + kParkedBytes + request->parts.size() * sizeof(PullPart);
  const Status room = charge_parked(*request, parked_bytes);
  // Without room a pull that must wait is not kept.
  const auto until = room.is_ok() ? deadline : Clock::now();
  core_.commits.when_readable(
      header.job_id, header.worker_id, header.worker_epoch, header.step, until,
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
    if (wait->answered) {
      request->parked.reset();
      const bool must_wait = wait->status.code() == Code::kDeadlineExceeded;
      return {must_wait && !room.is_ok() ? room : wait->status, false, {}};
    }
  }
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
  ++parked_;
  if (core_.disk != nullptr) {  // its rows come to memory while it waits
    asio::post(*core_.disk, [&core = core_, request] {
      for (const PullPart& part : request->parts) {
        // The pull itself will tell of an error.
        static_cast<void>(core.store->fetch_to_memory(part.descriptor.table_id, part.keys, Store::FetchCause::kPull));
      }
    });
  }
  return {};
}

Status Connection::charge_parked(PullRequest& request, std::uint64_t bytes) {
  if (parked_ >= kMostParked) {
    return {Code::kResourceExhausted,
            "this connection has " + std::to_string(kMostParked) + " pulls already that wait for the clock"};
  }
  request.parked = core_.parked.charge(parked_account_, bytes);
  const bool fits = bytes <= core_.parked.limit();
  if (fits && (request.parked.take(bytes, [] {}) || request.parked.give_up())) return Status::ok();
  return {Code::kResourceExhausted,
          "pulls that wait for the clock fill their budget of " + std::to_string(core_.parked.limit()) + " bytes"};
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
  --parked_;
  request->parked.reset();
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
  const auto fetch = [&request]() -> Task<Status> {
    for (const PullPart& part : request.parts) {
      Status status = request.store->fetch_to_memory(part.descriptor.table_id, part.keys, Store::FetchCause::kPull);
      if (!status.is_ok()) co_return status;
    }
    co_return Status::ok();
  };
  co_return co_await asio::co_spawn(core_.disk->get_executor(), fetch, asio::use_awaitable);
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
  Status status;
  if (is_conditional(request)) status = co_await keep_changed(request);
  // A checksum in the header needs the whole frame before the first byte leaves.
  const bool crc_first = (request.header.flags & kFrameHasCrc) != 0 &&
                         (!reads_checksum_last_ || request.parts.size() == kMaxSections ||
                          request.reply_bytes + kChecksumBytes > core_.options.max_frame_bytes);
  const bool whole = sizeof(FrameHeader) + request.reply_bytes <= RowChunks::kChunkBytes || crc_first;
  const std::uint64_t reply_memory =
      whole ? sizeof(FrameHeader) + request.reply_bytes : RowChunks::memory_bytes(request.parts);
  if (status.is_ok() && reply_memory > kUncharged) {
    status = co_await charge_reply(request.charge, reply_memory, request.deadline);
  }
  if (!status.is_ok()) {
    ++core_.counters.frames_refused;
    const auto refusal = error_frame(reply_to(request.header, FrameType::kError), status);
    co_return co_await write_reply(refusal);
  }
  if (whole) co_return co_await send_rows_whole(request);
  co_await take_turn();
  const bool alive = co_await send_rows_chunked(request);
  end_turn();
  co_return alive;
}

bool Connection::is_conditional(const PullRequest& request) {
  return std::any_of(request.parts.begin(), request.parts.end(),
                     [](const PullPart& part) { return (part.descriptor.flags & kTableKnown) != 0; });
}

// Leaves in each conditional part the keys whose rows differ.
Connection::Task<Status> Connection::keep_changed(PullRequest& request) {
  std::uint64_t most = 0;
  for (const PullPart& part : request.parts) most += part.known.size() * kChangedKeyBytes;
  if (most > kUncharged) {
    Status status = co_await charge_reply(request.changed_charge, most, request.deadline);
    if (!status.is_ok()) co_return status;
  }
  request.changed.resize(request.parts.size());
  request.reply_bytes = 0;
  for (std::size_t p = 0; p < request.parts.size(); ++p) {
    PullPart& part = request.parts[p];
    if ((part.descriptor.flags & kTableKnown) != 0) {
      auto changed = changed_keys(*request.store, part);
      if (!changed.is_ok()) co_return changed.status();
      core_.counters.rows_pulled += part.keys.size() - changed.value().keys.size();
      request.changed[p] = std::move(changed).value();
      part.keys = request.changed[p].keys;
      part.known = {};
      part.positions = request.changed[p].positions;
      part.descriptor.n = static_cast<std::uint32_t>(part.keys.size());
    }
    request.reply_bytes += reply_section_bytes(part);
  }
  co_return Status::ok();
}

void Connection::count_writes(PullRequest& request) {
  const FrameHeader& header = request.header;
  if ((header.flags & kFrameWrites) == 0) return;
  std::vector<std::uint32_t> tables;
  for (const PullPart& part : request.parts) tables.push_back(part.descriptor.table_id);
  request.reply_sequence =
      core_.commits.writes_by_others(tables, header.job_id, {header.worker_id, header.worker_epoch});
}

Connection::Task<bool> Connection::send_rows_whole(PullRequest& request) {
  FrameHeader header = rows_header(request);
  Buffer out = core_.buffers.acquire(sizeof header + request.reply_bytes);
  Packer packer(out.data());
  packer.put(header);
  Status status;
  for (const PullPart& part : request.parts) {
    put_section(packer, part);
    const auto positions = std::as_bytes(part.positions);
    if (!positions.empty()) std::memcpy(packer.claim(positions.size()), positions.data(), positions.size());
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

// The header promises the length, then chunk after chunk is gathered and written. A table that is dropped
// in between cannot be told any more: the connection ends, and the retry learns it.
Connection::Task<bool> Connection::send_rows_chunked(PullRequest& request) {
  FrameHeader header = rows_header(request);
  const bool has_checksum = (header.flags & kFrameHasCrc) != 0;
  if (has_checksum) {
    header.flags = static_cast<std::uint8_t>((header.flags & ~kFrameHasCrc) | kFrameCrcLast);
    header.body_bytes += kChecksumBytes;
    ++header.section_count;
  }
  RowChunks chunks(core_, *request.store, header, request.parts);
  std::uint32_t crc = 0;
  for (std::size_t written = 1;; ++written) {
    const auto bytes = chunks.next();
    if (!bytes.is_ok()) co_return false;
    if (bytes.value().empty()) break;
    if (has_checksum) crc = crc32c(crc, bytes.value().data(), bytes.value().size());
    if (!co_await write_all(bytes.value())) co_return false;
    // A socket that takes everything must not keep the thread from other connections.
    if (written % kChunksATurn == 0) co_await asio::post(strand_, asio::use_awaitable);
  }
  if (!has_checksum) co_return true;
  std::array<std::byte, kChecksumBytes> last;
  Packer packer(last.data());
  SectionHeader section;
  section.kind = static_cast<std::uint16_t>(SectionKind::kChecksum);
  section.flags = kSectionRequired;
  section.payload_bytes = sizeof(ChecksumPayload);
  packer.put(section);
  packer.put(ChecksumPayload{.crc32c = crc});
  co_return co_await write_all(last);
}

}  // namespace sparserow::rpc
