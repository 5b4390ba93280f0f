// What a connection does with each request: the serve_* half of rpc/connection.h.
#include <algorithm>
#include <cstring>

#include "rpc/changed_rows.h"
#include "rpc/connection.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMaxScanBytes = 16u << 20;

FrameHeader reply_to(const FrameHeader& request, FrameType type) {
  FrameHeader reply;
  reply.type = static_cast<std::uint16_t>(type);
  reply.request_id = request.request_id;
  reply.flags = request.flags & kFrameHasCrc;
  return reply;
}

std::vector<std::byte> ack_frame(const FrameHeader& request, std::uint64_t count, bool duplicate) {
  AckPayload ack;
  ack.sequence = request.sequence;
  ack.count = count;
  ack.duplicate = duplicate ? 1 : 0;
  return small_frame(reply_to(request, FrameType::kAck), SectionKind::kAck, bytes_of(ack), {});
}

Status no_table(std::uint32_t table_id) {
  return Status(Code::kNotFound, "table " + std::to_string(table_id) + " is not known to this shard");
}

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

Status Connection::check_request(const FrameHeader& header) const {
  if (core_.draining) return Status(Code::kUnavailable, "the shard is draining");
  const std::uint32_t epoch = core_.route()->epoch;
  if (header.route_epoch > epoch) {
    return Status(Code::kUnavailable, "route epoch " + std::to_string(header.route_epoch) +
                                          " is not known yet to this shard, which has " + std::to_string(epoch));
  }
  if (header.route_epoch < epoch) {
    return Status(Code::kStaleRoute, "route epoch: the request has " + std::to_string(header.route_epoch) +
                                         ", this shard " + std::to_string(epoch));
  }
  return Status::ok();
}

Status Connection::check_table(const Store& store, const TableDescriptor& descriptor) const {
  const auto schema = store.schema(descriptor.table_id);
  if (!schema) {
    return no_table(descriptor.table_id);
  }
  SR_RETURN_IF_ERROR(grant_.allows_table(schema->name));
  if (descriptor.schema_version != schema->version) {
    return Status(Code::kInvalidArgument, "table '" + schema->name + "': the request has schema version " +
                                              std::to_string(descriptor.schema_version) + ", the table " +
                                              std::to_string(schema->version));
  }
  if (descriptor.dim != schema->dim) {
    return Status(Code::kInvalidArgument, "table '" + schema->name + "': the request has dim " +
                                              std::to_string(descriptor.dim) + ", the table " +
                                              std::to_string(schema->dim));
  }
  return Status::ok();
}

Status Connection::check_owner(std::uint32_t table_id, std::span<const std::uint64_t> keys) const {
  const auto route = core_.route();
  if (route->slot_owner.empty()) return Status::ok();
  const auto slots = static_cast<std::uint32_t>(route->slot_owner.size());
  for (const std::uint64_t key : keys) {
    const std::uint16_t owner = route->slot_owner[slot_of(row_hash(table_id, key), slots)];
    if (owner == core_.options.shard_index) continue;
    return Status(Code::kStaleRoute, "key " + std::to_string(key) + " belongs to shard " + std::to_string(owner) +
                                         ", not to shard " + std::to_string(core_.options.shard_index));
  }
  return Status::ok();
}

Connection::Task<Connection::Outcome> Connection::dispatch(const FrameHeader& header, Body& body,
                                                           Clock::time_point deadline) {
  const auto type = static_cast<FrameType>(header.type);
  if (type == FrameType::kPing) {
    // Sections of a PING are walked like any other's, so that a broken one is noticed.
    std::vector<TableView> none;
    Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableKeys, none);
    if (outcome.status.is_ok()) outcome.reply = empty_frame(reply_to(header, FrameType::kPong));
    co_return outcome;
  }
  if (type != FrameType::kPull && type != FrameType::kPrepare && type != FrameType::kCommit &&
      type != FrameType::kAbort && type != FrameType::kAssign && type != FrameType::kDelete &&
      type != FrameType::kScan && type != FrameType::kLookup && type != FrameType::kHint) {
    co_return Outcome{Status(Code::kInvalidArgument, "header.type: " + std::to_string(header.type) + " (" +
                                                         std::string(type_name(type)) + ") is not a request"),
                      true,
                      {}};
  }
  if (Status status = check_access(header); !status.is_ok()) co_return Outcome{std::move(status), false, {}};
  if (Status status = check_request(header); !status.is_ok()) co_return Outcome{std::move(status), false, {}};
  if (Clock::now() >= deadline) {
    co_return Outcome{
        Status(Code::kDeadlineExceeded, "the deadline passed before the shard could serve the request"), false, {}};
  }
  if (type == FrameType::kPull) co_return co_await serve_pull(header, body, deadline);
  if (type == FrameType::kLookup) co_return co_await serve_lookup(header, body);
  if (type == FrameType::kHint) co_return serve_hint(header, body);
  // Of what was prepared, rows that exist are in memory; for those to be born the SSD is asked again.
  if (core_.disk != nullptr && type != FrameType::kAbort) co_return co_await serve_on_disk_threads(header, body);
  co_return serve_write_or_scan(header, body);
}

Connection::Outcome Connection::serve_write_or_scan(const FrameHeader& header, Body& body) {
  switch (static_cast<FrameType>(header.type)) {
    case FrameType::kPrepare:
    case FrameType::kCommit:
      return serve_commit(header, body);
    case FrameType::kAbort:
      return serve_abort(header, body);
    case FrameType::kAssign:
      return serve_assign(header, body);
    case FrameType::kDelete:
      return serve_delete(header, body);
    default:
      return serve_scan(header, body);
  }
}

// Answered at once: what becomes of it is nobody's business.
Connection::Outcome Connection::serve_hint(const FrameHeader& header, const Body& body) {
  std::vector<TableView> views;
  if (Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableKeys, views); !outcome.status.is_ok()) {
    return outcome;
  }
  std::uint64_t taken = 0;
  for (const TableView& view : views) {
    if (core_.hints != nullptr) taken += core_.hints->take(view.descriptor.table_id, view.keys);
  }
  return {Status::ok(), false, ack_frame(header, taken, false)};
}

Connection::Task<Connection::Outcome> Connection::serve_on_disk_threads(const FrameHeader& header, Body& body) {
  const auto serve = [this, &header, &body]() -> Task<Outcome> { co_return serve_write_or_scan(header, body); };
  co_return co_await asio::co_spawn(core_.disk->get_executor(), serve, asio::use_awaitable);
}

Connection::Outcome Connection::parse_tables(const FrameHeader& header, std::span<const std::byte> body,
                                             SectionKind kind, std::vector<TableView>& out) const {
  SectionReader sections(body, header.section_count);
  while (true) {
    auto section = sections.next();
    if (!section.is_ok()) return {section.status(), true, {}};
    if (!section.value()) return {};
    if (section.value()->kind != kind) {
      return {Status(Code::kInvalidArgument,
                     "section.kind: " + std::to_string(static_cast<int>(section.value()->kind)) +
                         " does not belong in " + std::string(type_name(static_cast<FrameType>(header.type)))),
              true,
              {}};
    }
    auto view = parse_table(kind, section.value()->payload);
    if (!view.is_ok()) return {view.status(), true, {}};
    out.push_back(std::move(view).value());
  }
}

Connection::Task<Connection::Outcome> Connection::serve_pull(const FrameHeader& header, Body& body,
                                                             Clock::time_point deadline) {
  auto request = std::make_shared<PullRequest>();
  request->header = header;
  request->store = core_.store;
  if (Outcome outcome = plan_pull(body, *request); !outcome.status.is_ok()) co_return outcome;
  if (header.step != kNoStep) {
    bool parked = false;
    Outcome outcome = park_until_readable(request, body, deadline, parked);
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
  bool alive = !closed_;
  if (alive && status.is_ok()) {
    alive = co_await send_rows(*request);
  } else if (alive) {
    ++core_.counters.frames_refused;
    const auto refusal = error_frame(reply_to(request->header, FrameType::kError), status);
    alive = co_await write_reply(refusal);
  }
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

const float* Connection::floats_of(const TableView& view, std::vector<std::shared_ptr<void>>& owners) {
  if (view.descriptor.dtype == Dtype::kFloat32) return reinterpret_cast<const float*>(view.rows.data());
  const std::size_t count = std::size_t{view.descriptor.n} * view.descriptor.dim;
  auto widened = std::make_shared<Buffer>(core_.buffers.acquire(count * sizeof(float)));
  auto* floats = reinterpret_cast<float*>(widened->data());
  convert_to_float(view.descriptor.dtype, view.rows.data(), floats, count);
  owners.push_back(std::move(widened));
  return floats;
}

Connection::Outcome Connection::serve_commit(const FrameHeader& header, Body& body) {
  const bool prepared = (header.flags & kFramePrepared) != 0;
  if (body.buffer.data() == nullptr) {  // what may be kept must not point into the staging buffer
    body.buffer = core_.buffers.acquire(std::max<std::size_t>(1, body.bytes.size()));
    if (!body.bytes.empty()) std::memcpy(body.buffer.data(), body.bytes.data(), body.bytes.size());
    body.bytes = {body.buffer.data(), body.bytes.size()};
  }
  std::vector<TableView> views;
  if (Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableGrads, views); !outcome.status.is_ok()) {
    return outcome;
  }
  const bool commits = static_cast<FrameType>(header.type) == FrameType::kCommit;
  if (prepared && (!commits || !views.empty())) {
    return {Status(Code::kInvalidArgument, "header.flags: PREPARED is for a COMMIT without tables"), true, {}};
  }
  std::vector<std::shared_ptr<void>> owners;
  Commit commit{.job_id = header.job_id,
                .worker_id = header.worker_id,
                .worker_epoch = header.worker_epoch,
                .sequence = header.sequence,
                .step = header.step,
                .grad_sum = (header.flags & kFrameGradSum) != 0,
                .blocks = {},
                .owner = nullptr};
  for (const TableView& view : views) {
    Status status = check_table(*core_.store, view.descriptor);
    if (status.is_ok()) status = check_owner(view.descriptor.table_id, view.keys);
    if (!status.is_ok()) return {std::move(status), false, {}};
    commit.blocks.push_back({.table_id = view.descriptor.table_id,
                             .dim = view.descriptor.dim,
                             .lr = view.descriptor.lr,
                             .keys = view.keys,
                             .grads = floats_of(view, owners)});
  }
  owners.push_back(std::make_shared<Buffer>(std::move(body.buffer)));
  commit.owner = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(owners));
  if (!commits) {
    Status status = core_.commits.prepare(std::move(commit));
    if (!status.is_ok()) return {std::move(status), false, {}};
    return {Status::ok(), false, ack_frame(header, 0, false)};
  }
  auto result = core_.commits.commit(std::move(commit), prepared);
  if (!result.is_ok()) return {result.status(), false, {}};
  if (!result.value().duplicate) core_.counters.rows_written += result.value().applied_rows;
  return {Status::ok(), false, ack_frame(header, result.value().applied_rows, result.value().duplicate)};
}

Connection::Outcome Connection::serve_abort(const FrameHeader& header, const Body& body) {
  std::vector<TableView> views;
  if (Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableGrads, views); !outcome.status.is_ok()) {
    return outcome;
  }
  if (!views.empty()) return {Status(Code::kInvalidArgument, "ABORT: no table is allowed"), true, {}};
  Status status = core_.commits.abort(header.job_id, header.worker_id, header.worker_epoch, header.sequence);
  if (!status.is_ok()) return {std::move(status), false, {}};
  return {Status::ok(), false, ack_frame(header, 0, false)};
}

// A write by key that has a sequence is done once; one that has none is nobody's.
Connection::Outcome Connection::write_rows(const FrameHeader& header,
                                           const std::function<Result<std::uint64_t>()>& write) {
  if (header.sequence == 0) {
    const auto rows = core_.commits.write_unnamed(write);
    if (!rows.is_ok()) return {rows.status(), false, {}};
    return {Status::ok(), false, ack_frame(header, rows.value(), false)};
  }
  const auto result =
      core_.commits.write_once({header.worker_id, header.worker_epoch}, header.job_id, header.sequence, write);
  if (!result.is_ok()) return {result.status(), false, {}};
  return {Status::ok(), false, ack_frame(header, result.value().applied_rows, result.value().duplicate)};
}

Connection::Outcome Connection::serve_assign(const FrameHeader& header, const Body& body) {
  std::vector<TableView> views;
  if (Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableGrads, views); !outcome.status.is_ok()) {
    return outcome;
  }
  return write_rows(header, [&]() -> Result<std::uint64_t> {
    // All memory is promised before the first row is set: a frame is assigned whole or not at all.
    std::vector<Store::Reservation> reservations;
    for (const TableView& view : views) {
      SR_RETURN_IF_ERROR(check_table(*core_.store, view.descriptor));
      SR_RETURN_IF_ERROR(check_owner(view.descriptor.table_id, view.keys));
      auto reservation = core_.store->reserve(view.descriptor.table_id, view.keys);
      if (!reservation.is_ok()) return reservation.status();
      reservations.push_back(std::move(reservation).value());
    }
    std::uint64_t rows = 0;
    for (const TableView& view : views) {
      std::vector<std::shared_ptr<void>> owners;
      const Status status = core_.store->assign(view.descriptor.table_id, view.keys, floats_of(view, owners));
      core_.commits.writes().add(view.descriptor.table_id, nullptr);
      SR_RETURN_IF_ERROR(status);
      rows += view.keys.size();
    }
    core_.counters.rows_written += rows;
    return rows;
  });
}

Connection::Outcome Connection::serve_delete(const FrameHeader& header, const Body& body) {
  std::vector<TableView> views;
  if (Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableKeys, views); !outcome.status.is_ok()) {
    return outcome;
  }
  return write_rows(header, [&]() -> Result<std::uint64_t> {
    for (const TableView& view : views) {
      SR_RETURN_IF_ERROR(check_owner(view.descriptor.table_id, view.keys));
      if (!view.known.empty()) return Status(Code::kInvalidArgument, "DELETE: takes no known versions");
      const auto schema = core_.store->schema(view.descriptor.table_id);
      if (!schema) return no_table(view.descriptor.table_id);
      SR_RETURN_IF_ERROR(grant_.allows_table(schema->name));
    }
    std::uint64_t rows = 0;
    for (const TableView& view : views) {
      auto erased = core_.store->erase(view.descriptor.table_id, view.keys);
      core_.commits.writes().add(view.descriptor.table_id, nullptr);
      if (!erased.is_ok()) return erased.status();
      rows += erased.value();
    }
    core_.counters.rows_written += rows;
    return rows;
  });
}

Connection::Outcome Connection::serve_scan(const FrameHeader& header, const Body& body) {
  SectionReader sections(body.bytes, header.section_count);
  std::optional<ScanPayload> scan;
  while (true) {
    auto section = sections.next();
    if (!section.is_ok()) return {section.status(), true, {}};
    if (!section.value()) break;
    if (section.value()->kind != SectionKind::kScan || scan) {
      return {Status(Code::kInvalidArgument, "SCAN: exactly one SCAN section is allowed"), true, {}};
    }
    auto parsed = parse_scan(section.value()->payload);
    if (!parsed.is_ok()) return {parsed.status(), true, {}};
    scan = parsed.value();
  }
  if (!scan) return {Status(Code::kInvalidArgument, "SCAN: the section is missing"), true, {}};
  const auto schema = core_.store->schema(scan->table_id);
  if (!schema) return {no_table(scan->table_id), false, {}};
  if (Status status = grant_.allows_table(schema->name); !status.is_ok()) return {std::move(status), false, {}};
  if (scan->max_rows == 0) {
    return {Status(Code::kInvalidArgument, "scan.max_rows: 0 is not allowed; allowed: >= 1"), false, {}};
  }
  // State of the optimizers has at most two floats per column.
  const std::uint32_t row_bytes = 20 + 12 * schema->dim;
  const std::uint32_t page_rows = std::clamp(kMaxScanBytes / row_bytes, 1u, scan->max_rows);
  auto page = core_.store->scan(scan->table_id, scan->cursor, page_rows, scan->with_state != 0);
  if (!page.is_ok()) return {page.status(), false, {}};
  const ScanPage& rows = page.value();
  ScanPagePayload head;
  head.next_cursor = rows.next_cursor;
  head.n = static_cast<std::uint32_t>(rows.keys.size());
  head.dim = schema->dim;
  head.state_floats = head.n == 0 ? 0 : static_cast<std::uint32_t>(rows.state.size() / head.n);
  std::vector<std::byte> tail;
  const auto add = [&tail](const auto& values) {
    const auto bytes = std::as_bytes(std::span(values));
    tail.insert(tail.end(), bytes.begin(), bytes.end());
  };
  add(rows.keys);
  add(rows.versions);
  add(rows.update_counts);
  tail.resize(padded8(tail.size()));
  add(rows.rows);
  add(rows.state);
  return {Status::ok(), false,
          small_frame(reply_to(header, FrameType::kScanPage), SectionKind::kScanPage, bytes_of(head), tail)};
}

}  // namespace sparserow::rpc
