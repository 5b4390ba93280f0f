#include "rpc/client/channel_lane.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>

namespace sparserow::rpc {
namespace {

// The rows of a larger body are copied while the shard gathers the next ones, which a lane does not do.
constexpr std::uint64_t kMostInLane = 4u << 20;

template <class T>
void append(std::vector<std::byte>& out, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}

void name_offsets(LaneNames& names, const std::vector<std::uint64_t>& offsets) {
  ++names.count;
  append(names.sections, SectionHeader{.kind = static_cast<std::uint16_t>(SectionKind::kLaneRows),
                                       .payload_bytes = offsets.size() * sizeof(std::uint64_t)});
  for (const std::uint64_t offset : offsets) append(names.sections, offset);
}

// Puts the gradients back.
void take_back_gradients(ShardRequest& request) {
  request.body = std::move(request.names.whole_body);
  for (const RowsSource& source : request.sources) {
    if ((source.head->descriptor.flags & kTablePlaced) == 0) continue;
    const std::uint64_t bytes = padded8(request.body[source.piece].iov_len);
    source.head->descriptor.flags &= static_cast<std::uint8_t>(~kTablePlaced);
    source.head->section.payload_bytes += bytes;
    request.header.body_bytes += static_cast<std::uint32_t>(bytes);
  }
}

// Calls `use` with each memory of rows that the request has named.
template <class Use>
void for_each_named(const ShardRequest& request, Use&& use) {
  if (request.names.count == 0) return;
  for (const RowsSink& sink : request.sinks) {
    if ((sink.expected.flags & kTablePlaced) != 0) use(sink.memory);
  }
  for (const RowsSource& source : request.sources) {
    if ((source.head->descriptor.flags & kTablePlaced) != 0) use(source.memory);
  }
}

}  // namespace

Result<std::shared_ptr<LaneArena>> ClientArena::open() {
  if (!arena) {
    auto made = LaneArena::make(bytes);
    if (!made.is_ok()) return made.status();
    arena = std::move(made).value();
  }
  return arena;
}

std::optional<std::uint64_t> ChannelLane::place_of(const RowMemory* memory, const void* rows,
                                                   std::uint64_t bytes) const {
  if (memory == nullptr || bytes < least_) return std::nullopt;
  return arena_->offset_of(rows, bytes);
}

std::uint64_t ChannelLane::name_rows(ShardRequest& request) const {
  std::vector<std::uint64_t> offsets(request.sinks.size(), kNotPlaced);
  std::uint64_t placed = 0;
  for (std::size_t i = 0; i < request.sinks.size(); ++i) {
    RowsSink& sink = request.sinks[i];
    if (sink.expected.dtype != Dtype::kFloat32 || (sink.expected.flags & kTableKnown) != 0) continue;
    const auto offset = place_of(sink.memory.get(), sink.rows.data(), sink.rows.size_bytes());
    if (!offset) continue;
    offsets[i] = *offset;
    sink.expected.flags |= kTablePlaced;
    placed += padded8(sink.rows.size_bytes());
  }
  if (placed == 0) return 0;
  request.names.has_rows = true;
  name_offsets(request.names, offsets);
  return placed;
}

void ChannelLane::name_gradients(ShardRequest& request) const {
  std::vector<std::uint64_t> offsets(request.sources.size(), kNotPlaced);
  std::vector<bool> is_left_out(request.body.size(), false);
  bool is_any = false;
  for (std::size_t i = 0; i < request.sources.size(); ++i) {
    const RowsSource& source = request.sources[i];
    const iovec& piece = request.body[source.piece];
    const auto offset = place_of(source.memory.get(), piece.iov_base, piece.iov_len);
    if (!offset) continue;
    is_any = true;
    offsets[i] = *offset;
    source.head->descriptor.flags |= kTablePlaced;
    source.head->section.payload_bytes -= padded8(piece.iov_len);
    request.header.body_bytes -= static_cast<std::uint32_t>(padded8(piece.iov_len));
    is_left_out[source.piece] = true;
    if (piece.iov_len % 8 != 0) is_left_out[source.piece + 1] = true;
  }
  if (!is_any) return;
  request.names.whole_body = std::move(request.body);
  request.body.clear();
  for (std::size_t i = 0; i < is_left_out.size(); ++i) {
    if (!is_left_out[i]) request.body.push_back(request.names.whole_body[i]);
  }
  name_offsets(request.names, offsets);
}

bool ChannelLane::name(ShardRequest& request, std::uint32_t max_body_bytes) const {
  const std::size_t tables = std::max(request.sinks.size(), request.sources.size());
  const std::uint64_t most = sizeof(SectionHeader) + tables * sizeof(std::uint64_t) + sizeof(LanePlaceSection);
  const bool fits =
      request.header.body_bytes + most <= max_body_bytes && request.header.section_count + 2 <= kMaxSections;
  if (!is_taken_ || !fits) return true;
  bool has_room = true;
  LaneNames& names = request.names;
  if (!request.sources.empty()) name_gradients(request);
  if (request.reply_bytes >= least_) {
    const std::uint64_t left = request.reply_bytes - name_rows(request);
    if (left >= least_ && left <= kMostInLane) {
      names.body = arena_->take(left);
      has_room = names.body != nullptr;
      if (has_room) {
        names.body_bytes = left;
        ++names.count;
        append(names.sections,
               LanePlaceSection{.place = {.offset = *arena_->offset_of(names.body.get(), left), .bytes = left}});
      }
    }
  }
  if (names.count > 0) {
    request.body.push_back({names.sections.data(), names.sections.size()});
    request.header.body_bytes += static_cast<std::uint32_t>(names.sections.size());
    request.header.section_count += names.count;
  }
  return has_room;
}

void ChannelLane::forget(ShardRequest& request) {
  if (request.names.count > 0) {
    request.body.pop_back();
    request.header.body_bytes -= static_cast<std::uint32_t>(request.names.sections.size());
    request.header.section_count -= request.names.count;
    for (RowsSink& sink : request.sinks) sink.expected.flags &= static_cast<std::uint8_t>(~kTablePlaced);
    if (!request.names.whole_body.empty()) take_back_gradients(request);
  }
  request.names = {};
}

Status ChannelLane::read(const FrameHeader& header, const ShardRequest& request) {
  if (header.body_bytes > request.names.body_bytes) return malformed_reply("place in the lane");
  return reader_.read_whole(header, {request.names.body.get(), header.body_bytes}, request.sinks);
}

void ChannelLane::add_owners(const ShardRequest& request, Owners& owners) {
  if (request.names.body) owners.push_back(request.names.body);
  for_each_named(request, [&owners](const std::shared_ptr<RowMemory>& memory) { owners.push_back(memory); });
}

void ChannelLane::abandon_rows(const ShardRequest& request) {
  for_each_named(request, [](const std::shared_ptr<RowMemory>& memory) { memory->abandon(); });
}

void ChannelLane::give_up(const ShardRequest& request) {
  Owners owners;
  add_owners(request, owners);
  abandon_rows(request);
  if (!owners.empty()) late_.emplace(request.header.request_id, std::move(owners));
}

ChannelLane::Owners ChannelLane::take_late() {
  Owners all;
  for (auto& [id, owners] : late_) all.insert(all.end(), owners.begin(), owners.end());
  late_.clear();
  return all;
}

bool EndingLane::has_ended() const noexcept {
  std::array<std::byte, 4096> dropped;
  const iovec into{dropped.data(), dropped.size()};
  while (true) {
    const Transfer moved = stream->try_read(std::span(&into, 1));
    if (moved.bytes == 0) return moved.ended();
  }
}

}  // namespace sparserow::rpc
