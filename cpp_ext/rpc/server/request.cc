#include "rpc/server/request.h"

#include <algorithm>

#include "rpc/server/reply_frames.h"

namespace sparserow::rpc {

Status check_route(const ServerCore& core, const FrameHeader& header) {
  if (core.draining) return Status(Code::kUnavailable, "the shard is draining");
  const std::uint32_t epoch = core.route()->epoch;
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

Status check_refusal(const ServerCore& core, std::uint32_t table_id) {
  const auto route = core.route();
  const auto& refused = route->refused_tables;
  return std::binary_search(refused.begin(), refused.end(), table_id) ? route->refusal : Status::ok();
}

Status check_owner(const ServerCore& core, std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  const auto route = core.route();
  if (route->slot_owner.empty()) return Status::ok();
  const auto slots = static_cast<std::uint32_t>(route->slot_owner.size());
  for (const std::uint64_t key : keys) {
    const std::uint16_t owner = route->slot_owner[slot_of(row_hash(table_id, key), slots)];
    if (owner == core.options.shard_index) continue;
    return Status(Code::kStaleRoute, "key " + std::to_string(key) + " belongs to shard " + std::to_string(owner) +
                                         ", not to shard " + std::to_string(core.options.shard_index));
  }
  return Status::ok();
}

void note_request(ServerCore& core, const Peer& peer, RequestTimes::Kind kind, const FrameHeader& header,
                  const Status& status, const Arrival& arrival) {
  if (core.options.observe) core.request_times.add(kind, std::chrono::steady_clock::now() - arrival.at);
  core.request_log.note(header, peer.address, status, arrival.trace, arrival.at);
}

Status Request::check_route() const { return rpc::check_route(core, header); }

Status Request::check_table_id(const Store& store, std::uint32_t table_id, std::uint32_t& dim) const {
  SR_RETURN_IF_ERROR(check_refusal(core, table_id));
  const auto schema = store.schema(table_id);
  if (!schema) return no_table(table_id);
  dim = schema->dim;
  return grant.allows_table(schema->name);
}

Status Request::check_table(const Store& store, const TableDescriptor& descriptor) const {
  SR_RETURN_IF_ERROR(check_refusal(core, descriptor.table_id));
  const auto schema = store.schema(descriptor.table_id);
  if (!schema) return no_table(descriptor.table_id);
  SR_RETURN_IF_ERROR(grant.allows_table(schema->name));
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

Outcome Request::parse_tables(SectionKind kind, std::vector<TableView>& out, NamedPlaces* places) const {
  SectionReader sections(body.bytes, header.section_count);
  while (true) {
    auto section = sections.next();
    if (!section.is_ok()) return Outcome::broken_grammar(section.status());
    if (!section.value()) return {};
    if (section.value()->kind == SectionKind::kLanePlace && places != nullptr) {
      const auto named = parse_lane_place(section.value()->payload);
      if (!named.is_ok()) return Outcome::broken_grammar(named.status());
      places->body = named.value();
      continue;
    }
    if (section.value()->kind == SectionKind::kLaneRows && places != nullptr) {
      auto named = parse_lane_rows(section.value()->payload);
      if (!named.is_ok()) return Outcome::broken_grammar(named.status());
      places->rows = std::move(named).value();
      continue;
    }
    if (section.value()->kind != kind) {
      return Outcome::broken_grammar(
          {Code::kInvalidArgument, "section.kind: " + std::to_string(static_cast<int>(section.value()->kind)) +
                                       " does not belong in " + std::string(type_name(type()))});
    }
    auto view = parse_table(kind, section.value()->payload);
    if (!view.is_ok()) return Outcome::broken_grammar(view.status());
    out.push_back(std::move(view).value());
  }
}

}  // namespace sparserow::rpc
