#include "rpc/server/row_chunks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "rpc/transport/event_loop.h"
#include "util/caught.h"
#include "util/mutex.h"

namespace sparserow::rpc {
namespace {

// Rows [begin, begin + count) of a part; its padding goes after the last row.
struct Slice {
  std::uint32_t part = 0;
  std::size_t begin = 0;
  std::size_t count = 0;
  bool has_head = false;  // the section's head stands before
};

// Values of the last slice's part that follow a chunk and lie in another buffer.
enum class Tail : std::uint8_t { kPositions, kVersions, kFound };

struct Chunk {
  std::vector<Slice> slices;
  std::size_t bytes = 0;
  std::vector<Tail> tails;
};

std::size_t row_bytes_of(const PullPart& part) noexcept {
  return std::size_t{part.descriptor.dim} * size_of(part.descriptor.dtype);
}
bool wants(const PullPart& part, TableFlags flag) noexcept { return (part.descriptor.flags & flag) != 0; }

std::vector<Chunk> plan(std::span<const PullPart> parts) {
  std::vector<Chunk> chunks(1);
  chunks.back().bytes = sizeof(FrameHeader);
  for (std::uint32_t p = 0; p < parts.size(); ++p) {
    const std::size_t n = parts[p].keys.size();
    const std::size_t row_bytes = row_bytes_of(parts[p]);
    std::size_t begin = 0;
    bool has_head = true;
    do {
      if (chunks.back().bytes + row_bytes + sizeof(SectionHeader) + sizeof(TableDescriptor) > RowChunks::kChunkBytes) {
        chunks.emplace_back();
      }
      Chunk& chunk = chunks.back();
      if (has_head) chunk.bytes += sizeof(SectionHeader) + sizeof(TableDescriptor);
      if (has_head && n > 0 && !parts[p].positions.empty()) {
        chunk.slices.push_back({p, 0, 0, true});
        chunk.tails = {Tail::kPositions};
        chunks.emplace_back();
        has_head = false;
        continue;
      }
      const std::size_t count = std::min(n - begin, (RowChunks::kChunkBytes - chunk.bytes) / row_bytes);
      chunk.slices.push_back({p, begin, count, std::exchange(has_head, false)});
      chunk.bytes += count * row_bytes;
      begin += count;
    } while (begin < n);
    chunks.back().bytes += padded8(n * row_bytes) - n * row_bytes;
    if (n > 0 && (wants(parts[p], kTableVersions) || wants(parts[p], kTableFound))) {
      if (wants(parts[p], kTableVersions)) chunks.back().tails.push_back(Tail::kVersions);
      if (wants(parts[p], kTableFound)) chunks.back().tails.push_back(Tail::kFound);
      chunks.emplace_back();
    }
  }
  if (chunks.back().bytes == 0) chunks.pop_back();
  return chunks;
}

}  // namespace

TableDescriptor reply_descriptor(const PullPart& part) noexcept {
  TableDescriptor descriptor = part.descriptor;
  descriptor.lr = 0.0f;
  return descriptor;
}

struct RowChunks::Shared {
  Shared(ServerCore& server, const Store& rows_of, const FrameHeader& reply, std::span<const PullPart> asked)
      : core(server),
        store(rows_of),
        header(reply),
        parts(asked),
        chunks(plan(asked)),
        versions(asked.size()),
        found(asked.size()) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      if (wants(parts[p], kTableVersions)) versions[p].resize(parts[p].keys.size());
      if (wants(parts[p], kTableFound)) found[p].resize(padded8(parts[p].keys.size()));
    }
    // Padding after a part's last row: up to 7 bytes beyond the chunk.
    for (Buffer& buffer : buffers) buffer = core.buffers.acquire(kChunkBytes + 8);
  }

  // Gathers one more chunk, when one may be gathered; the mutex is free meanwhile.
  bool gather_next() SR_REQUIRES(mutex) {
    const std::size_t limit = std::min(chunks.size(), written + kChunkBuffers);
    if (ended || !status.is_ok() || next_to_gather >= limit) return false;
    const std::size_t index = next_to_gather++;
    ++gathering;
    Status outcome;
    {
      const MutexUnlock unlocked(mutex);
      try {
        outcome = gather(index);
      } catch (...) {  // the other thread waits for this chunk
        outcome = caught_status("a part of the reply");
      }
    }
    --gathering;
    ready[index % kChunkBuffers] = index + 1;
    if (!outcome.is_ok() && status.is_ok()) status = std::move(outcome);
    changed.notify_all();
    return true;
  }

  Status gather(std::size_t index) {
    std::byte* at = buffers[index % kChunkBuffers].data();
    const auto put = [&at](const auto& value) {
      std::memcpy(at, &value, sizeof value);
      at += sizeof value;
    };
    if (index == 0) put(header);
    for (const Slice& slice : chunks[index].slices) {
      const PullPart& part = parts[slice.part];
      if (slice.has_head) {
        SectionHeader section;
        section.kind = static_cast<std::uint16_t>(SectionKind::kTableRows);
        section.flags = kSectionRequired;
        section.payload_bytes = rows_section_bytes(part.descriptor) - sizeof section;
        put(section);
        put(reply_descriptor(part));
      }
      PullExtras extras;
      if (!versions[slice.part].empty())
        extras.versions = std::span(versions[slice.part]).subspan(slice.begin, slice.count);
      if (!found[slice.part].empty()) extras.found = std::span(found[slice.part]).subspan(slice.begin, slice.count);
      SR_RETURN_IF_ERROR(store.pull(part.descriptor.table_id, part.keys.subspan(slice.begin, slice.count),
                                    part.descriptor.dtype, at, extras));
      const std::size_t bytes = slice.count * row_bytes_of(part);
      at += bytes;
      if (slice.begin + slice.count == part.keys.size()) {
        const std::size_t all = part.keys.size() * row_bytes_of(part);
        std::memset(at, 0, padded8(all) - all);
        at += padded8(all) - all;
        core.counters.rows_pulled += part.keys.size();
      }
    }
    return Status::ok();
  }

  std::span<const std::byte> bytes_of_tail(Tail tail, std::uint32_t part) const {
    switch (tail) {
      case Tail::kPositions:
        return std::as_bytes(parts[part].positions);
      case Tail::kVersions:
        return std::as_bytes(std::span(versions[part]));
      default:
        return std::as_bytes(std::span(found[part]));
    }
  }

  ServerCore& core;
  const Store& store;
  const FrameHeader header;
  const std::span<const PullPart> parts;
  const std::vector<Chunk> chunks;
  std::vector<std::vector<std::uint64_t>> versions;  // by part; each gathered chunk fills its own range
  std::vector<std::vector<std::uint8_t>> found;
  std::array<Buffer, kChunkBuffers> buffers;  // chunk i lies in buffer i % kChunkBuffers

  Mutex mutex;
  CondVar changed;
  // 1 + index of the chunk that is complete in each buffer.
  std::array<std::size_t, kChunkBuffers> ready SR_GUARDED_BY(mutex){};
  std::size_t next_to_gather SR_GUARDED_BY(mutex) = 0;
  std::size_t written SR_GUARDED_BY(mutex) = 0;  // chunks whose buffers may be used again
  std::size_t gathering SR_GUARDED_BY(mutex) = 0;
  bool helped SR_GUARDED_BY(mutex) = false;  // a helper is under way
  bool ended SR_GUARDED_BY(mutex) = false;
  Status status SR_GUARDED_BY(mutex);

  // The consumer's own: the chunks it has, and the next tail of the last one.
  std::size_t given = 0;
  std::size_t tail = 0;
};

RowChunks::RowChunks(ServerCore& core, const Store& store, const FrameHeader& header, std::span<const PullPart> parts)
    : shared_(std::make_shared<Shared>(core, store, header, parts)) {}

std::uint64_t RowChunks::memory_bytes(std::span<const PullPart> parts) noexcept {
  std::uint64_t bytes = kChunkBuffers * kChunkBytes;
  for (const PullPart& part : parts) {
    if (wants(part, kTableVersions)) bytes += part.keys.size() * sizeof(std::uint64_t);
    if (wants(part, kTableFound)) bytes += part.keys.size();
  }
  return bytes;
}

RowChunks::~RowChunks() {
  const MutexLock lock(shared_->mutex);
  shared_->ended = true;
  shared_->changed.wait(shared_->mutex, [&]() SR_REQUIRES(shared_->mutex) { return shared_->gathering == 0; });
}

Result<std::span<const std::byte>> RowChunks::next() {
  Shared& shared = *shared_;
  if (shared.given > 0 && shared.tail < shared.chunks[shared.given - 1].tails.size()) {
    const Chunk& last = shared.chunks[shared.given - 1];
    return shared.bytes_of_tail(last.tails[shared.tail++], last.slices.back().part);
  }
  const MutexLock lock(shared.mutex);
  shared.written = shared.given;
  const std::size_t index = shared.given;
  if (index == shared.chunks.size()) return std::span<const std::byte>();
  const bool more = std::max(shared.next_to_gather, index + 1) < std::min(shared.chunks.size(), index + kChunkBuffers);
  if (more && !shared.helped && shared.core.options.io_threads > 1) {
    shared.helped = true;
    asio::post(shared.core.io, [state = shared_] {
      const MutexLock helper_lock(state->mutex);
      while (state->gather_next()) {
      }
      state->helped = false;
    });
  }
  while (shared.ready[index % kChunkBuffers] != index + 1 && shared.status.is_ok()) {
    if (!shared.gather_next()) shared.changed.wait(shared.mutex);
  }
  if (!shared.status.is_ok()) return shared.status;
  ++shared.given;
  shared.tail = 0;
  return std::span<const std::byte>(shared.buffers[index % kChunkBuffers].data(), shared.chunks[index].bytes);
}

}  // namespace sparserow::rpc
