#include "rpc/server/pull_handler.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "rpc/server/reply_frames.h"
#include "rpc/wire/crc32c.h"
#include "util/not_allowed.h"

namespace sparserow::rpc {
namespace {

constexpr std::uint32_t kChecksumBytes = sizeof(SectionHeader) + sizeof(ChecksumPayload);
constexpr std::uint64_t kUncharged = 64u << 10;  // bytes of a reply that cost no more than its connection
constexpr std::size_t kChunksATurn = 8;  // of a large reply that are written before other connections are served

// Appends into memory that the caller has sized.
class Packer {
 public:
  explicit Packer(std::byte* out) : at_(out) {}
  template <class T>
  void put(const T& value) {
    std::memcpy(at_, &value, sizeof value);
    at_ += sizeof value;
  }
  // Gives `count` bytes to be written by the caller.
  std::byte* claim(std::size_t count) { return std::exchange(at_, at_ + count); }
  void zero(std::size_t count) { std::memset(claim(count), 0, count); }

 private:
  std::byte* at_;
};

// Rows [begin, end) of a part, so many at a time.
struct RowSlices {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t slice = 1;
};

// Gathers rows on the threads that are free. rows, extras: of the whole part.
Status pull_slices(ServerCore& core, const Store& store, const PullPart& part, RowSlices wanted, std::byte* rows,
                   const PullExtras& extras) {
  const std::size_t row_bytes = part.descriptor.dim * size_of(part.descriptor.dtype);
  const auto slices = static_cast<std::uint32_t>((wanted.end - wanted.begin + wanted.slice - 1) / wanted.slice);
  std::vector<Status> outcomes(slices);
  const auto gather = [&](std::uint32_t i) {
    const std::size_t begin = wanted.begin + i * wanted.slice;
    const std::size_t n = std::min(wanted.slice, wanted.end - begin);
    PullExtras mine;
    if (!extras.versions.empty()) mine.versions = extras.versions.subspan(begin, n);
    if (!extras.found.empty()) mine.found = extras.found.subspan(begin, n);
    outcomes[i] = store.pull(part.descriptor.table_id, part.keys.subspan(begin, n), part.descriptor.dtype,
                             rows + begin * row_bytes, mine);
  };
  slices == 1 ? gather(0) : core.parallel_for(slices, gather);
  const auto failed = std::find_if(outcomes.begin(), outcomes.end(), [](const Status& one) { return !one.is_ok(); });
  return failed == outcomes.end() ? Status::ok() : *failed;
}

void put_section(Packer& packer, const PullPart& part) {
  SectionHeader section;
  section.kind = static_cast<std::uint16_t>(SectionKind::kTableRows);
  section.flags = kSectionRequired;
  section.payload_bytes = rows_section_bytes(part.descriptor) - sizeof section;
  packer.put(section);
  packer.put(reply_descriptor(part));
}

}  // namespace

PullHandler::PullHandler(ServerCore& core, const Strand& strand, const Peer& peer, FrameIo& io, PeerAccounts& accounts,
                         std::uint64_t sampler_seed)
    : core_(core), strand_(strand), peer_(peer), io_(io), accounts_(accounts), sampler_(sampler_seed) {}

void PullHandler::open(std::weak_ptr<void> connection, std::function<void()> close, bool reads_checksum_last,
                       std::shared_ptr<LaneRegion> lane) {
  connection_ = std::move(connection);
  close_ = std::move(close);
  reads_checksum_last_ = reads_checksum_last;
  lane_ = std::move(lane);
}

Task<Outcome> PullHandler::serve_pull(Request& request) {
  const auto pull = std::make_shared<PullRequest>();
  pull->header = request.header;
  pull->arrival = request.arrival;
  pull->deadline = request.deadline;
  pull->store = core_.store;
  if (Outcome outcome = plan(request, *pull); !outcome.is_ok()) co_return outcome;
  if (request.header.step != kNoStep) {
    Outcome outcome = park_until_readable(pull, request.body);
    if (outcome.is_parked || !outcome.is_ok()) co_return outcome;
  }
  if (!co_await send_rows(*pull)) io_.mark_closed();
  co_return Outcome::sent();
}

Task<Outcome> PullHandler::serve_lookup(Request& request) {
  const ServedVersion served = core_.models.find(request.header.namespace_id, request.header.sequence);
  if (served.store == nullptr) {
    co_return Outcome::refused({Code::kNotFound, "model: there is none with handle " +
                                                     std::to_string(request.header.namespace_id) + " in this process"});
  }
  PullRequest pull;
  pull.header = request.header;
  pull.header.step = kNoStep;  // a lookup has no clock
  pull.store = served.store;
  pull.deadline = request.deadline;
  pull.reply_sequence = served.number;
  if (Outcome outcome = plan(request, pull); !outcome.is_ok()) co_return outcome;
  for (const PullPart& part : pull.parts) {
    Status status = check_owner(core_, part.descriptor.table_id, part.keys);
    if (!status.is_ok()) co_return Outcome::refused(std::move(status));
  }
  if (!co_await send_rows(pull)) io_.mark_closed();
  co_return Outcome::sent();
}

Outcome PullHandler::plan(const Request& request, PullRequest& pull) const {
  std::vector<TableView> views;
  Outcome outcome = request.parse_tables(SectionKind::kTableKeys, views, &pull.places);
  if (!outcome.is_ok()) return outcome;
  for (const TableView& view : views) {
    Status status = request.check_table(*pull.store, view.descriptor);
    if (!status.is_ok()) return Outcome::refused(std::move(status));
    pull.parts.push_back({view.descriptor, view.keys, view.known});
  }
  if (Status placed = place_rows(pull); !placed.is_ok()) return Outcome::broken_grammar(std::move(placed));
  for (const PullPart& part : pull.parts) pull.reply_bytes += rows_section_bytes(part.descriptor);
  if (pull.reply_bytes > core_.options.max_frame_bytes) {
    return Outcome::refused({Code::kInvalidArgument, "the reply would have " + std::to_string(pull.reply_bytes) +
                                                         " bytes, a frame has at most " +
                                                         std::to_string(core_.options.max_frame_bytes) +
                                                         "; pull fewer rows at a time"});
  }
  return outcome;
}

Status PullHandler::place_rows(PullRequest& pull) const {
  const std::uint64_t lane_bytes = lane_ ? lane_->bytes().size() : 0;
  const std::string within = "a place within the " + std::to_string(lane_bytes) + " bytes of its lane";
  const LanePlacePayload& body = pull.places.body;
  if (body.bytes > lane_bytes || body.offset > lane_bytes - body.bytes) {
    return not_allowed("lane_place.bytes", body.bytes, within);
  }
  if (pull.places.rows.empty()) return Status::ok();
  if (pull.places.rows.size() != pull.parts.size()) {
    return not_allowed("lane_rows", pull.places.rows.size(),
                       "an offset for each of " + std::to_string(pull.parts.size()) + " tables");
  }
  for (std::size_t p = 0; p < pull.parts.size(); ++p) {
    const std::uint64_t offset = pull.places.rows[p];
    if (offset == kNotPlaced) continue;
    PullPart& part = pull.parts[p];
    if (part.descriptor.dtype != Dtype::kFloat32 || (part.descriptor.flags & kTableKnown) != 0) {
      return not_allowed("lane_rows", offset, "no offset, as its rows are not float32 or their versions are compared");
    }
    const std::uint64_t bytes = std::uint64_t{part.descriptor.n} * part.descriptor.dim * sizeof(float);
    if (offset % sizeof(float) != 0 || bytes > lane_bytes || offset > lane_bytes - bytes) {
      return not_allowed("lane_rows", offset, within + ", a multiple of 4");
    }
    part.placed = lane_->bytes().data() + offset;
    part.descriptor.flags |= kTablePlaced;
  }
  return Status::ok();
}

bool PullHandler::is_placed(const PullRequest& pull) {
  return std::any_of(pull.parts.begin(), pull.parts.end(), [](const PullPart& part) { return part.placed != nullptr; });
}

Task<bool> PullHandler::send_refusal(const PullRequest& pull, const Status& status) {
  ++core_.counters.frames_refused;
  const auto refusal = error_frame(reply_to(pull.header, FrameType::kError), status);
  co_return co_await io_.write_reply(refusal);
}

// The header of a reply with every row that was asked for.
FrameHeader PullHandler::rows_header(const PullRequest& pull) {
  FrameHeader header = reply_to(pull.header, FrameType::kRows);
  header.section_count = static_cast<std::uint32_t>(pull.parts.size());
  header.body_bytes = static_cast<std::uint32_t>(pull.reply_bytes);
  header.sequence = pull.reply_sequence;
  return header;
}

Task<Status> PullHandler::fetch_rows(const PullRequest& pull) {
  const bool blocks =
      core_.disk != nullptr && std::any_of(pull.parts.begin(), pull.parts.end(), [&pull](const PullPart& part) {
        return pull.store->would_block(part.descriptor.table_id, part.keys);
      });
  if (!blocks) co_return Status::ok();
  const auto fetch = [&pull]() -> Task<Status> {
    for (const PullPart& part : pull.parts) {
      Status status = pull.store->fetch_to_memory(part.descriptor.table_id, part.keys, Store::FetchCause::kPull);
      if (!status.is_ok()) co_return status;
    }
    co_return Status::ok();
  };
  co_return co_await asio::co_spawn(core_.disk->get_executor(), fetch, asio::use_awaitable);
}

Task<bool> PullHandler::send_rows(PullRequest& pull) {
  if (const Status fetched = co_await fetch_rows(pull); !fetched.is_ok()) {
    co_return co_await send_refusal(pull, fetched);
  }
  if (pull.header.step != kNoStep) {
    const std::uint64_t behind = core_.commits.steps_behind(pull.header.job_id, pull.header.step);
    const auto exists = [&pull](std::uint32_t table_id) { return pull.store->schema(table_id).has_value(); };
    for (const PullPart& part : pull.parts) core_.staleness.add(part.descriptor.table_id, behind, exists);
  }
  if (core_.options.observe) {
    for (const PullPart& part : pull.parts) core_.hot_keys.look_at(sampler_, part.descriptor.table_id, part.keys);
  }
  count_writes(pull);
  Status status;
  if (is_conditional(pull)) status = co_await keep_changed(pull);
  const bool has_place = pull.places.body.bytes > 0 && pull.places.body.bytes >= pull.reply_bytes;
  if (status.is_ok() && has_place && (pull.header.flags & kFrameHasCrc) == 0) {
    co_return co_await send_rows_by_lane(pull);
  }
  // A checksum in the header needs the whole frame before the first byte leaves.
  const bool crc_first =
      (pull.header.flags & kFrameHasCrc) != 0 && (!reads_checksum_last_ || pull.parts.size() == kMaxSections ||
                                                  pull.reply_bytes + kChecksumBytes > core_.options.max_frame_bytes);
  const bool whole = sizeof(FrameHeader) + pull.reply_bytes <= RowChunks::kChunkBytes || crc_first || is_placed(pull);
  const std::uint64_t reply_memory =
      whole ? sizeof(FrameHeader) + pull.reply_bytes : RowChunks::memory_bytes(pull.parts);
  if (status.is_ok() && reply_memory > kUncharged) {
    status = co_await accounts_.charge_reply(pull.charge, reply_memory, pull.deadline);
  }
  if (!status.is_ok()) co_return co_await send_refusal(pull, status);
  if (whole) co_return co_await send_rows_whole(pull);
  FrameHeader header = rows_header(pull);
  const bool has_checksum = (header.flags & kFrameHasCrc) != 0;
  if (has_checksum) {
    header.flags = static_cast<std::uint8_t>((header.flags & ~kFrameHasCrc) | kFrameCrcLast);
    header.body_bytes += kChecksumBytes;
    ++header.section_count;
  }
  RowChunks chunks(core_, *pull.store, header, pull.parts);
  co_await io_.take_turn();
  bool is_alive = false;
  try {
    is_alive = co_await send_chunks(chunks, has_checksum);
  } catch (const std::exception&) {  // a part may have left, so only the end of the connection notifies the peer
  }
  io_.end_turn();
  co_return is_alive;
}

bool PullHandler::is_conditional(const PullRequest& pull) {
  return std::any_of(pull.parts.begin(), pull.parts.end(),
                     [](const PullPart& part) { return (part.descriptor.flags & kTableKnown) != 0; });
}

// Leaves in each conditional part the keys whose rows differ.
Task<Status> PullHandler::keep_changed(PullRequest& pull) {
  std::uint64_t most = 0;
  for (const PullPart& part : pull.parts) most += part.known.size() * kChangedKeyBytes;
  if (most > kUncharged) {
    Status status = co_await accounts_.charge_reply(pull.changed_charge, most, pull.deadline);
    if (!status.is_ok()) co_return status;
  }
  pull.changed.resize(pull.parts.size());
  pull.reply_bytes = 0;
  for (std::size_t p = 0; p < pull.parts.size(); ++p) {
    PullPart& part = pull.parts[p];
    if ((part.descriptor.flags & kTableKnown) != 0) {
      auto changed = changed_keys(*pull.store, part);
      if (!changed.is_ok()) co_return changed.status();
      core_.counters.rows_pulled += part.keys.size() - changed.value().keys.size();
      pull.changed[p] = std::move(changed).value();
      part.keys = pull.changed[p].keys;
      part.known = {};
      part.positions = pull.changed[p].positions;
      part.descriptor.n = static_cast<std::uint32_t>(part.keys.size());
    }
    pull.reply_bytes += rows_section_bytes(part.descriptor);
  }
  co_return Status::ok();
}

void PullHandler::count_writes(PullRequest& pull) {
  const FrameHeader& header = pull.header;
  if ((header.flags & kFrameWrites) == 0) return;
  std::vector<std::uint32_t> tables;
  for (const PullPart& part : pull.parts) tables.push_back(part.descriptor.table_id);
  pull.reply_sequence = core_.commits.writes_by_others(tables, header.job_id, {header.worker_id, header.worker_epoch});
}

// Writes the body of a reply, on the threads that are free and in turns with other connections. to: pull.reply_bytes.
Task<Status> PullHandler::write_body(PullRequest& pull, std::byte* to) {
  const FrameIo::LaneUse use(io_);
  if (!use.is_allowed()) co_return Status(Code::kUnavailable, "the connection has ended");
  Packer packer(to);
  for (const PullPart& part : pull.parts) {
    put_section(packer, part);
    const auto positions = std::as_bytes(part.positions);
    if (!positions.empty()) std::memcpy(packer.claim(positions.size()), positions.data(), positions.size());
    const std::size_t n = part.keys.size();
    const std::size_t row_bytes = part.descriptor.dim * size_of(part.descriptor.dtype);
    std::byte* rows = part.placed;
    if (rows == nullptr) {
      rows = packer.claim(n * row_bytes);
      packer.zero(padded8(n * row_bytes) - n * row_bytes);
    } else {
      core_.counters.lane_sent += n * row_bytes;
    }
    PullExtras extras;
    if ((part.descriptor.flags & kTableVersions) != 0) {
      extras.versions = {reinterpret_cast<std::uint64_t*>(packer.claim(n * 8)), n};
    }
    if ((part.descriptor.flags & kTableFound) != 0) {
      extras.found = {reinterpret_cast<std::uint8_t*>(packer.claim(n)), n};
      packer.zero(padded8(n) - n);
    }
    const std::size_t slice = std::max<std::size_t>(1, RowChunks::kChunkBytes / row_bytes);
    for (std::size_t begin = 0; begin < n; begin += kChunksATurn * slice) {
      const std::size_t end = std::min(n, begin + kChunksATurn * slice);
      const Status status = pull_slices(core_, *pull.store, part, {begin, end, slice}, rows, extras);
      if (!status.is_ok()) co_return status;
      if (end < n) co_await asio::post(strand_, asio::use_awaitable);
    }
    core_.counters.rows_pulled += n;
  }
  co_return Status::ok();
}

Task<bool> PullHandler::send_rows_whole(PullRequest& pull) {
  FrameHeader header = rows_header(pull);
  Buffer out = core_.buffers.acquire(sizeof header + pull.reply_bytes);
  const Status status = co_await write_body(pull, out.data() + sizeof header);
  if (!status.is_ok()) co_return co_await send_refusal(pull, status);
  if ((header.flags & kFrameHasCrc) != 0) {
    const iovec body{out.data() + sizeof header, pull.reply_bytes};
    seal_crc(header, std::span(&body, 1));
  }
  std::memcpy(out.data(), &header, sizeof header);
  co_return co_await io_.write_reply({out.data(), sizeof header + pull.reply_bytes});
}

// Writes the body where the request said, and sends the header alone. The memory is the client's, so that it costs no
// room for replies.
Task<bool> PullHandler::send_rows_by_lane(PullRequest& pull) {
  const Status status = co_await write_body(pull, lane_->bytes().data() + pull.places.body.offset);
  if (!status.is_ok()) co_return co_await send_refusal(pull, status);
  FrameHeader header = rows_header(pull);
  header.flags |= kFrameInLane;
  core_.counters.lane_sent += pull.reply_bytes;
  co_return co_await io_.write_reply(bytes_of(header));
}

// The header promises the length, then chunk after chunk is gathered and written. A table that is dropped
// in between can no longer be reported: the connection ends, and the retry gets the error.
Task<bool> PullHandler::send_chunks(RowChunks& chunks, bool has_checksum) {
  std::uint32_t crc = 0;
  for (std::size_t written = 1;; ++written) {
    const auto bytes = chunks.next();
    if (!bytes.is_ok()) co_return false;
    if (bytes.value().empty()) break;
    if (has_checksum) crc = crc32c(crc, bytes.value().data(), bytes.value().size());
    if (!co_await io_.write_part(bytes.value())) co_return false;
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
  co_return co_await io_.write_part(last);
}

}  // namespace sparserow::rpc
