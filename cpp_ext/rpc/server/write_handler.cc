#include "rpc/server/write_handler.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "rpc/server/reply_frames.h"
#include "rpc/wire/scaled_rows.h"
#include "util/finite.h"
#include "util/not_allowed.h"

namespace sparserow::rpc {

const float* WriteHandler::floats_of(const TableView& view, std::vector<std::shared_ptr<void>>& owners) {
  if (view.descriptor.dtype == Dtype::kFloat32) return reinterpret_cast<const float*>(view.rows.data());
  const std::size_t count = std::size_t{view.descriptor.n} * view.descriptor.dim;
  auto widened = std::make_shared<Buffer>(core_.buffers.acquire(count * sizeof(float)));
  auto* floats = reinterpret_cast<float*>(widened->data());
  unscale_rows(view.descriptor.dtype, view.rows.data(), view.exponents, view.descriptor.dim, floats);
  owners.push_back(std::move(widened));
  return floats;
}

namespace {

// Rows that a client sends by key, and learning rates, are checked here: one row with NaN or Inf blocks every later
// publication of its table. Gradients of a step are the session's matter, which knows what the job wants of them.
Status check_finite(const TableView& view, const float* values, const ArrivingRows& arriving) {
  const std::size_t dim = view.descriptor.dim;
  if (arriving.are_finite(view.rows) || all_finite(values, view.keys.size() * dim)) return Status::ok();
  for (std::size_t i = 0; i < view.keys.size(); ++i) {
    if (all_finite(values + i * dim, dim)) continue;
    return {Code::kInvalidArgument, "key " + std::to_string(view.keys[i]) + " of table " +
                                        std::to_string(view.descriptor.table_id) +
                                        ": its values are NaN or infinite; allowed: finite numbers"};
  }
  return Status::ok();
}

}  // namespace

Outcome WriteHandler::serve() {
  switch (request_.type()) {
    case FrameType::kAbort:
      return abort();
    case FrameType::kAssign:
      return assign();
    case FrameType::kDelete:
      return erase();
    default:
      return commit();
  }
}

Outcome WriteHandler::commit() {
  Body& body = request_.body;
  const bool prepared = (header_.flags & kFramePrepared) != 0;
  if (body.buffer.data() == nullptr) {  // what may be kept must not point into the staging buffer
    body.buffer = core_.buffers.acquire(std::max<std::size_t>(1, body.bytes.size()));
    if (!body.bytes.empty()) std::memcpy(body.buffer.data(), body.bytes.data(), body.bytes.size());
    body.bytes = {body.buffer.data(), body.bytes.size()};
  }
  std::vector<TableView> views;
  if (Outcome outcome = request_.parse_tables(SectionKind::kTableGrads, views); !outcome.is_ok()) {
    return outcome;
  }
  const bool commits = request_.type() == FrameType::kCommit;
  if (prepared && (!commits || !views.empty())) {
    return Outcome::broken_grammar({Code::kInvalidArgument, "header.flags: PREPARED is for a COMMIT without tables"});
  }
  std::vector<std::shared_ptr<void>> owners;
  Commit commit{.job_id = header_.job_id,
                .worker_id = header_.worker_id,
                .worker_epoch = header_.worker_epoch,
                .sequence = header_.sequence,
                .step = header_.step,
                .grad_sum = (header_.flags & kFrameGradSum) != 0,
                .blocks = {},
                .owner = nullptr};
  for (const TableView& view : views) {
    Status status = request_.check_table(*core_.store, view.descriptor);
    if (status.is_ok()) status = check_owner(core_, view.descriptor.table_id, view.keys);
    if (status.is_ok() && !std::isfinite(view.descriptor.lr)) {
      status = not_allowed("table.lr", view.descriptor.lr, "a finite number");
    }
    const float* grads = status.is_ok() ? floats_of(view, owners) : nullptr;
    if (status.is_ok() && header_.step == kNoStep) status = check_finite(view, grads, body.arriving);
    if (!status.is_ok()) return Outcome::refused(std::move(status));
    commit.blocks.push_back({.table_id = view.descriptor.table_id,
                             .dim = view.descriptor.dim,
                             .lr = view.descriptor.lr,
                             .keys = view.keys,
                             .grads = grads});
  }
  owners.push_back(std::make_shared<Buffer>(std::move(body.buffer)));
  commit.owner = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(owners));
  if (!commits) {
    Status status = core_.commits.prepare(std::move(commit));
    if (!status.is_ok()) return refused(std::move(status));
    return acknowledged(0, false);
  }
  auto result = core_.commits.commit(std::move(commit), prepared);
  if (!result.is_ok()) return refused(result.status());
  if (!result.value().duplicate) core_.counters.rows_written += result.value().applied_rows;
  return acknowledged(result.value().applied_rows, result.value().duplicate);
}

Outcome WriteHandler::abort() {
  const bool names_lost = (header_.flags & kFrameLost) != 0;
  std::vector<TableView> views;
  if (Outcome outcome = request_.parse_tables(names_lost ? SectionKind::kTableKeys : SectionKind::kTableGrads, views);
      !outcome.is_ok()) {
    return outcome;
  }
  if (names_lost) {
    for (const TableView& view : views) {
      Status status = core_.commits.note_lost(header_.job_id, {header_.worker_id, header_.worker_epoch}, view.keys);
      if (!status.is_ok()) return Outcome::refused(std::move(status));
    }
    return acknowledged(0, false);
  }
  if (!views.empty()) return Outcome::broken_grammar({Code::kInvalidArgument, "ABORT: no table is allowed"});
  Status status = core_.commits.abort(header_.job_id, header_.worker_id, header_.worker_epoch, header_.sequence);
  if (!status.is_ok()) return Outcome::refused(std::move(status));
  return acknowledged(0, false);
}

// The refusal of a commit; a worker outside of the step's quorum learns which step it may take.
Outcome WriteHandler::refused(Status status) const {
  const bool is_outside = status.code() == Code::kOutsideQuorum;
  Outcome outcome = Outcome::refused(std::move(status));
  if (is_outside) outcome.open_step = core_.commits.open_step(header_.job_id);
  return outcome;
}

Outcome WriteHandler::acknowledged(std::uint64_t rows, bool is_duplicate) const {
  return Outcome::reply(ack_frame(header_, rows, is_duplicate));
}

Outcome WriteHandler::write_rows(const std::function<Result<std::uint64_t>()>& write) {
  if (header_.sequence == 0) {
    const auto rows = core_.commits.write_unnamed(write);
    if (!rows.is_ok()) return Outcome::refused(rows.status());
    return acknowledged(rows.value(), false);
  }
  const auto result =
      core_.commits.write_once({header_.worker_id, header_.worker_epoch}, header_.job_id, header_.sequence, write);
  if (!result.is_ok()) return Outcome::refused(result.status());
  return acknowledged(result.value().applied_rows, result.value().duplicate);
}

Outcome WriteHandler::assign() {
  std::vector<TableView> views;
  if (Outcome outcome = request_.parse_tables(SectionKind::kTableGrads, views); !outcome.is_ok()) {
    return outcome;
  }
  return write_rows([&]() -> Result<std::uint64_t> {
    // All memory is promised before the first row is set: a frame is assigned whole or not at all.
    std::vector<Store::Reservation> reservations;
    std::vector<std::shared_ptr<void>> owners;
    std::vector<const float*> rows_of_view;
    for (const TableView& view : views) {
      SR_RETURN_IF_ERROR(request_.check_table(*core_.store, view.descriptor));
      SR_RETURN_IF_ERROR(check_owner(core_, view.descriptor.table_id, view.keys));
      rows_of_view.push_back(floats_of(view, owners));
      SR_RETURN_IF_ERROR(check_finite(view, rows_of_view.back(), request_.body.arriving));
      auto reservation = core_.store->reserve(view.descriptor.table_id, view.keys);
      if (!reservation.is_ok()) return reservation.status();
      reservations.push_back(std::move(reservation).value());
    }
    std::uint64_t rows = 0;
    for (std::size_t i = 0; i < views.size(); ++i) {
      const TableView& view = views[i];
      const Status status = core_.store->assign(view.descriptor.table_id, view.keys, rows_of_view[i]);
      core_.commits.count_write(view.descriptor.table_id);
      SR_RETURN_IF_ERROR(status);
      rows += view.keys.size();
    }
    core_.counters.rows_written += rows;
    return rows;
  });
}

Outcome WriteHandler::erase() {
  std::vector<TableView> views;
  if (Outcome outcome = request_.parse_tables(SectionKind::kTableKeys, views); !outcome.is_ok()) {
    return outcome;
  }
  return write_rows([&]() -> Result<std::uint64_t> {
    for (const TableView& view : views) {
      SR_RETURN_IF_ERROR(check_refusal(core_, view.descriptor.table_id));
      SR_RETURN_IF_ERROR(check_owner(core_, view.descriptor.table_id, view.keys));
      if (!view.known.empty()) return Status(Code::kInvalidArgument, "DELETE: takes no known versions");
      const auto schema = core_.store->schema(view.descriptor.table_id);
      if (!schema) return no_table(view.descriptor.table_id);
      SR_RETURN_IF_ERROR(request_.grant.allows_table(schema->name));
    }
    std::uint64_t rows = 0;
    for (const TableView& view : views) {
      auto erased = core_.store->erase(view.descriptor.table_id, view.keys);
      core_.commits.count_write(view.descriptor.table_id);
      if (!erased.is_ok()) return erased.status();
      rows += erased.value();
    }
    core_.counters.rows_written += rows;
    return rows;
  });
}

}  // namespace sparserow::rpc
