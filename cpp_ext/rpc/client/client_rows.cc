// The requests of a client: rows pulled, looked up, pushed, hinted, erased and scanned.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "rpc/client/client_impl.h"
#include "rpc/wire/scaled_rows.h"
#include "util/finite.h"
#include "util/not_allowed.h"
#include "util/partition.h"

namespace sparserow::rpc {
namespace {

// Entries of a shard's keys in an optional output of all keys.
template <typename T>
std::span<T> part_of(std::span<T> all, std::uint32_t begin, std::uint32_t n) {
  return all.empty() ? all : all.subspan(begin, n);
}

const std::array<std::byte, 8> kZeros{};

iovec piece_of(const void* bytes, std::size_t count) { return {const_cast<void*>(bytes), count}; }

void add_piece(ShardRequest& request, const void* bytes, std::size_t count) {
  if (count == 0) return;
  request.body.push_back(piece_of(bytes, count));
  // It stays at the most that a frame can say, which the channel refuses.
  const std::uint64_t whole = std::uint64_t{request.header.body_bytes} + count;
  request.header.body_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(whole, UINT32_MAX));
}

// Names rows by their keys; out.heads must have room.
void name_rows(Outgoing& out, std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  TableHead& head = out.heads.emplace_back();
  head.descriptor.table_id = table_id;
  head.descriptor.dim = 1;  // not looked at: keys alone name rows
  head.descriptor.n = static_cast<std::uint32_t>(keys.size());
  head.section.kind = static_cast<std::uint16_t>(SectionKind::kTableKeys);
  head.section.flags = kSectionRequired;
  head.section.payload_bytes = table_payload_bytes(head.descriptor, {.keys = true});
  ++out.request.header.section_count;
  add_piece(out.request, &head, sizeof head);
  add_piece(out.request, keys.data(), keys.size_bytes());
}

// The count of a reply that is an ACK.
Result<std::uint64_t> acknowledged(const ShardRequest& request) {
  SectionReader sections(request.reply, 1);
  auto section = sections.next();
  if (!section.is_ok()) return section.status();
  const auto ack = parse_ack(section.value() ? section.value()->payload : std::span<const std::byte>());
  if (!ack.is_ok()) return ack.status();
  return ack.value().count;
}

Status check_groups(const char* field, std::uint32_t dim, std::span<const std::uint64_t> keys,
                    std::span<const std::uint32_t> shard_begin, std::size_t shards) {
  const bool ordered = std::is_sorted(shard_begin.begin(), shard_begin.end());
  if (shard_begin.size() != shards + 1 || !ordered || shard_begin.front() != 0 || shard_begin.back() != keys.size()) {
    return Status(Code::kInvalidArgument,
                  std::string(field) + ".shard_begin: must rise from 0 to the number of keys (" +
                      std::to_string(keys.size()) + ") in " + std::to_string(shards + 1) + " entries");
  }
  if (dim == 0 || dim > kMaxDim) {
    return not_allowed(std::string(field) + ".dim", dim, range_text(1, kMaxDim));
  }
  return Status::ok();
}

// Rows that crossed in 16 bits: one with values beyond them has come as infinities.
Status check_range(const TablePull& table, Dtype dtype) {
  if (dtype == Dtype::kFloat32 || all_finite_of_many(table.rows.data(), table.rows.size())) return Status::ok();
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    if (!std::isinf(table.rows[i])) continue;
    const std::string name = table.name.empty() ? std::to_string(table.table_id) : "'" + std::string(table.name) + "'";
    return not_allowed("wire_dtype", dtype == Dtype::kFloat16 ? "float16" : "bfloat16",
                       "float32, because the row of key " + std::to_string(table.keys[i / table.dim]) + " of table " +
                           name + " has values beyond it");
  }
  return Status::ok();
}

}  // namespace

Status Client::Impl::pull(std::span<const TablePull> tables, const CallOptions& options) {
  for (const TablePull& table : tables) {
    SR_RETURN_IF_ERROR(check_groups("pull", table.dim, table.keys, table.shard_begin, shards()));
    SR_RETURN_IF_ERROR(check_outputs(table));
    std::fill(table.changed.begin(), table.changed.end(), std::uint8_t{0});
  }
  Call call(options.deadline);
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    Outgoing* out = nullptr;
    for (const TablePull& table : tables) {
      const std::uint32_t begin = table.shard_begin[shard];
      const std::uint32_t n = table.shard_begin[shard + 1] - begin;
      if (n == 0 && options.writes_of_others == nullptr) continue;
      if (out == nullptr) {
        out = &add(call, shard, FrameType::kPull, FrameType::kRows, options.step);
        out->heads.reserve(tables.size());
        if (options.writes_of_others != nullptr) {
          out->request.header.flags |= kFrameWrites;
          out->request.needs |= kFeatureWriteCounts;
          out->request.reply_sequence = options.writes_of_others + shard;
        }
      }
      add_keys(*out, table, shard);
    }
  }
  SR_RETURN_IF_ERROR(run(call));
  for (const TablePull& table : tables) SR_RETURN_IF_ERROR(check_range(table, options_.wire_dtype));
  return Status::ok();
}

// A shard's keys of one table, and where its rows go. The heads have their room.
void Client::Impl::add_keys(Outgoing& out, const TablePull& table, std::uint32_t shard) const {
  const std::uint32_t begin = table.shard_begin[shard];
  const std::uint32_t n = table.shard_begin[shard + 1] - begin;
  TableHead& head = add_head(out, table, n, SectionKind::kTableKeys);
  head.descriptor.flags =
      static_cast<std::uint8_t>((!table.versions.empty() ? kTableVersions : 0) |
                                (!table.found.empty() ? kTableFound : 0) | (!table.known.empty() ? kTableKnown : 0));
  const bool conditional = !table.known.empty();
  head.section.payload_bytes = table_payload_bytes(head.descriptor, {.keys = true, .known = conditional});
  add_piece(out.request, &head, sizeof head);
  add_piece(out.request, table.keys.data() + begin, std::size_t{n} * 8);
  if (conditional) {
    add_piece(out.request, table.known.data() + begin, std::size_t{n} * 8);
    out.request.needs |= kFeatureConditionalPull;
  }
  ++out.request.header.section_count;
  out.request.reply_bytes += rows_section_bytes(head.descriptor);
  out.request.sinks.push_back({.expected = head.descriptor,
                               .rows = table.rows.subspan(std::size_t{begin} * table.dim, std::size_t{n} * table.dim),
                               .versions = part_of(table.versions, begin, n),
                               .found = part_of(table.found, begin, n),
                               .changed = part_of(table.changed, begin, n),
                               .memory = table.memory});
}

Status Client::Impl::lookup(std::span<const TablePull> tables, const LookupOptions& options,
                            std::vector<ShardAnswer>& answers) {
  for (const TablePull& table : tables) {
    SR_RETURN_IF_ERROR(check_groups("lookup", table.dim, table.keys, table.shard_begin, shards()));
    SR_RETURN_IF_ERROR(check_outputs(table));
  }
  answers.assign(shards(), {});
  Call call(options.deadline);
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    Outgoing* out = nullptr;
    for (const TablePull& table : tables) {
      if (table.shard_begin[shard + 1] == table.shard_begin[shard]) continue;
      if (out == nullptr) {
        out = &add(call, shard, FrameType::kLookup, FrameType::kRows, kNoStep);
        out->heads.reserve(tables.size());
        out->request.header.namespace_id = options.model;
        out->request.header.sequence = options.routing_key;
        out->request.needs |= kFeatureLookup;
        out->request.reply_sequence = &answers[shard].version;
      }
      add_keys(*out, table, shard);
    }
  }
  const Status status = run(call);
  bool is_theirs = false;
  for (const Outgoing& out : call.requests) {
    answers[out.request.shard].is_asked = true;
    answers[out.request.shard].status = out.request.status;
    is_theirs |= !out.request.status.is_ok();
  }
  return is_theirs ? Status::ok() : status;
}

// Adds a shard's part of some tables to what it is sent.
Status Client::Impl::add_rows(Outgoing& out, std::span<const TablePush> tables) const {
  const std::uint32_t shard = out.request.shard;
  out.heads.reserve(tables.size());
  std::uint64_t body_bytes = 0;
  for (const TablePush& table : tables) {
    const std::uint32_t begin = table.shard_begin[shard];
    const std::uint32_t n = table.shard_begin[shard + 1] - begin;
    if (n == 0) continue;
    TableHead& head = add_head(out, table, n, SectionKind::kTableGrads);
    head.descriptor.lr = table.lr;
    const bool is_scaled = options_.wire_dtype != Dtype::kFloat32;
    if (is_scaled) head.descriptor.flags = kTableExponents;
    head.section.payload_bytes =
        table_payload_bytes(head.descriptor, {.keys = true, .exponents = is_scaled, .rows = true});
    body_bytes += sizeof(SectionHeader) + head.section.payload_bytes;
    if (body_bytes > UINT32_MAX - 7) {
      return Status(Code::kInvalidArgument, "push: " + std::to_string(body_bytes) +
                                                " bytes for one shard; a frame has less than 2^32, send fewer rows");
    }
    const std::size_t count = std::size_t{n} * table.dim;
    const float* grads = table.grads.data() + std::size_t{begin} * table.dim;
    const void* sent = grads;
    std::size_t bytes = count * size_of(options_.wire_dtype);
    if (is_scaled) {
      const std::size_t exponents = padded8(n);
      auto& narrowed = out.narrowed.emplace_back(exponents + bytes);
      scale_rows(options_.wire_dtype, grads, n, table.dim, reinterpret_cast<std::int8_t*>(narrowed.data()),
                 narrowed.data() + exponents);
      sent = narrowed.data();
      bytes += exponents;
    }
    add_piece(out.request, &head, sizeof head);
    add_piece(out.request, table.keys.data() + begin, std::size_t{n} * 8);
    const std::size_t piece = out.request.body.size();
    out.request.sources.push_back({&head, piece, is_scaled ? nullptr : table.memory});
    add_piece(out.request, sent, bytes);
    add_piece(out.request, kZeros.data(), padded8(bytes) - bytes);
    ++out.request.header.section_count;
  }
  return Status::ok();
}

Status Client::Impl::push(FrameType type, std::span<const TablePush> tables, const CommitOptions& options,
                          std::uint8_t flags, bool every_shard, Range range) {
  for (const TablePush& table : tables) {
    SR_RETURN_IF_ERROR(check_groups("push", table.dim, table.keys, table.shard_begin, shards()));
  }
  Call call(options.deadline);
  for (std::uint32_t shard = range.first; shard < std::min(range.last, shards()); ++shard) {
    const bool any = std::any_of(tables.begin(), tables.end(), [&](const TablePush& table) {
      return table.shard_begin[shard + 1] > table.shard_begin[shard];
    });
    if (!any && !every_shard) continue;
    Outgoing& out = add(call, shard, type, FrameType::kAck, options.step);
    out.request.header.sequence = options.sequence;
    out.request.header.flags = static_cast<std::uint8_t>(flags | (options.grad_sum ? kFrameGradSum : 0));
    SR_RETURN_IF_ERROR(add_rows(out, tables));
  }
  const bool is_by_key = type == FrameType::kAssign && options.sequence != 0;
  const bool has_content = type == FrameType::kPrepare || (type == FrameType::kCommit && (flags & kFramePrepared) == 0);
  if (options_.replay_bytes > 0 && (has_content || is_by_key)) buffer_for_replay(call, type != FrameType::kPrepare);
  Status status = run(call);
  if (type == FrameType::kCommit || is_by_key) count_acknowledged(call);
  report_outcome(call, status, options);
  if (is_by_key && !status.is_ok()) drop_held(options.sequence);
  if (type == FrameType::kCommit && has_content && !status.is_ok()) drop_refused(call);
  return status;
}

void Client::Impl::count_acknowledged(const Call& call) {
  const MutexLock lock(mutex_);
  for (const Outgoing& out : call.requests) {
    if (out.request.done && out.request.status.is_ok()) ++acknowledged_[out.request.shard];
  }
}

std::vector<std::uint64_t> Client::Impl::acknowledged_commits() const {
  const MutexLock lock(mutex_);
  return acknowledged_;
}

// Writes what the options ask for: whether a commit that failed may be applied, and the step that a quorum left open.
void Client::Impl::report_outcome(const Call& call, const Status& status, const CommitOptions& options) {
  if (options.may_be_applied != nullptr) *options.may_be_applied = false;
  for (const Outgoing& out : call.requests) {
    const ShardRequest& request = out.request;
    const bool is_taken = (request.done && request.status.is_ok()) || request.may_be_taken;
    if (options.may_be_applied != nullptr && !status.is_ok()) *options.may_be_applied |= is_taken;
    if (options.open_step != nullptr) *options.open_step = std::max(*options.open_step, request.open_step);
  }
}

// A shard that refused a commit of one phase has nothing of it, and its caller may send it under another sequence.
// Where the outcome is unknown the copy stays: a process in the shard's place gets it.
void Client::Impl::drop_refused(const Call& call) {
  const MutexLock lock(mutex_);
  for (const Outgoing& out : call.requests) {
    const ShardRequest& request = out.request;
    const bool is_refused = (!request.done || !request.status.is_ok()) && !request.may_be_taken;
    if (is_refused) channels_[request.shard].replay_buffer().drop(request.header.sequence);
  }
}

Status Client::Impl::signal(FrameType type, const CommitOptions& options, std::uint8_t flags, Range range) {
  return push(type, {}, options, flags, true, range);
}

// With a quorum shard 0 names the members of a step. The other shards hear only from members, so that a COMMIT there
// says that shard 0 has it (docs/internals/consistency.md, rule 20). Both calls together have the deadline.
Status Client::Impl::commit_prepared(const CommitOptions& options) {
  constexpr auto kType = FrameType::kCommit;
  if (!options_.has_quorum || options.step == kNoStep || shards() == 1) {
    return signal(kType, options, kFramePrepared, {});
  }
  const auto begun = Clock::now();
  SR_RETURN_IF_ERROR(signal(kType, options, kFramePrepared, {.first = 0, .last = 1}));
  CommitOptions others = options;
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun);
  others.deadline = std::max(options.deadline - waited, std::chrono::milliseconds(1));
  return signal(kType, others, kFramePrepared, {.first = 1});
}

// Shards are asked together; one that does not know hints, or fails, brings nothing. One that took none is asked
// seldom.
std::uint64_t Client::Impl::hint(std::span<const TablePull> tables, std::chrono::milliseconds deadline) {
  Call call(deadline);
  for (const TablePull& table : tables) {
    if (!check_groups("hint", table.dim, table.keys, table.shard_begin, shards()).is_ok()) return 0;
  }
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    const bool has_keys = std::any_of(tables.begin(), tables.end(), [shard](const TablePull& table) {
      return table.shard_begin[shard + 1] > table.shard_begin[shard];
    });
    if (!has_keys || !takes_hint(shard)) continue;
    Outgoing* out = nullptr;
    for (const TablePull& table : tables) {
      const std::uint32_t begin = table.shard_begin[shard];
      const std::uint32_t n = table.shard_begin[shard + 1] - begin;
      if (n == 0) continue;
      if (out == nullptr) {
        out = &add(call, shard, FrameType::kHint, FrameType::kAck, kNoStep);
        out->request.needs = kFeatureHints;
        out->heads.reserve(tables.size());
      }
      name_rows(*out, table.table_id, table.keys.subspan(begin, n));
    }
  }
  if (call.requests.empty()) return 0;
  static_cast<void>(run(call).is_ok());
  std::uint64_t taken = 0;
  const MutexLock lock(mutex_);
  for (const Outgoing& out : call.requests) {
    std::uint64_t by_shard = 0;
    if (out.request.done && out.request.status.is_ok()) {
      if (const auto count = acknowledged(out.request); count.is_ok()) by_shard = count.value();
    }
    hint_paces_[out.request.shard].note_answer(by_shard);
    taken += by_shard;
  }
  return taken;
}

bool Client::Impl::takes_hint(std::uint32_t shard) {
  const MutexLock lock(mutex_);
  return hint_paces_[shard].take_turn();
}

Result<std::uint64_t> Client::Impl::erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                          std::span<const std::uint32_t> shard_begin, const CallOptions& options) {
  SR_RETURN_IF_ERROR(check_groups("erase", 1, keys, shard_begin, shards()));
  Call call(options.deadline);
  for (std::uint32_t shard = 0; shard < shards(); ++shard) {
    const std::uint32_t begin = shard_begin[shard];
    const std::uint32_t n = shard_begin[shard + 1] - begin;
    if (n == 0) continue;
    Outgoing& out = add(call, shard, FrameType::kDelete, FrameType::kAck, options.step);
    out.request.header.sequence = options.sequence;
    name_rows(out, table_id, keys.subspan(begin, n));
  }
  if (options_.replay_bytes > 0 && options.sequence != 0) buffer_for_replay(call, true);
  const Status status = run(call);
  if (options.sequence != 0) count_acknowledged(call);
  if (!status.is_ok()) {
    drop_held(options.sequence);
    return status;
  }
  std::uint64_t count = 0;
  for (const Outgoing& out : call.requests) {
    const auto one = acknowledged(out.request);
    if (!one.is_ok()) return one.status();
    count += one.value();
  }
  return count;
}

Result<ScanPage> Client::Impl::scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor,
                                    std::uint32_t max_rows, bool with_state, const CallOptions& options) {
  if (shard >= shards()) {
    return not_allowed("shard", shard, below_text(shards()));
  }
  Call call(options.deadline);
  Outgoing& out = add(call, shard, FrameType::kScan, FrameType::kScanPage, options.step);
  out.scan = {.cursor = cursor, .table_id = table_id, .max_rows = max_rows, .with_state = with_state ? 1u : 0u};
  TableHead& head = out.heads.emplace_back();
  head.section.kind = static_cast<std::uint16_t>(SectionKind::kScan);
  head.section.flags = kSectionRequired;
  head.section.payload_bytes = sizeof out.scan;
  ++out.request.header.section_count;
  add_piece(out.request, &head.section, sizeof head.section);
  add_piece(out.request, &out.scan, sizeof out.scan);
  SR_RETURN_IF_ERROR(run(call));
  SectionReader sections(out.request.reply, 1);
  auto section = sections.next();
  if (!section.is_ok()) return section.status();
  if (!section.value() || section.value()->kind != SectionKind::kScanPage) {
    return Status(Code::kDataLoss, "malformed reply: no SCAN_PAGE section");
  }
  auto view = parse_scan_page(section.value()->payload);
  if (!view.is_ok()) return view.status();
  const ScanPageView& page = view.value();
  return ScanPage{.keys = {page.keys.begin(), page.keys.end()},
                  .versions = {page.versions.begin(), page.versions.end()},
                  .update_counts = {page.update_counts.begin(), page.update_counts.end()},
                  .rows = {page.rows.begin(), page.rows.end()},
                  .state = {page.state.begin(), page.state.end()},
                  .next_cursor = page.page.next_cursor};
}

}  // namespace sparserow::rpc
