// The bytes of a large ROWS reply: gathered chunk by chunk, by whichever I/O threads are free, given in order.
//
// A chunk is a few hundred KiB, so that its rows are still in a cache when they are copied into the socket.
// While one chunk is written the next ones are gathered ahead, at most kChunkBuffers of them: a lone pull uses two
// cores, a busy server one per pull. Memory is kChunkBuffers chunk buffers, whatever the size of the reply.
//
// Used from one thread; the threads that help touch nothing of it after its destructor.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "rpc/server/server_core.h"
#include "rpc/wire/frame.h"

namespace sparserow::rpc {

// One table of a pull: what is asked, and the keys, which point into the request's body.
struct PullPart {
  TableDescriptor descriptor;
  std::span<const std::uint64_t> keys;   // (n)
  std::span<const std::uint64_t> known;  // (n) of a conditional pull, else empty
  // The reply to a conditional pull has the keys of rows that differ; these are their places among the keys asked
  // for, rising, with zeros up to 8 bytes. Else empty.
  std::span<const std::uint32_t> positions = {};
  std::byte* placed = nullptr;  // where its rows go, in the lane; null: into the reply
};

// Descriptor of the reply to a part.
[[nodiscard]] TableDescriptor reply_descriptor(const PullPart& part) noexcept;

class RowChunks {
 public:
  static constexpr std::size_t kChunkBytes = 512u << 10;
  static constexpr std::size_t kChunkBuffers = 3;

  // store, parts and what their keys point to must outlive the object. `header` is the reply's, complete.
  RowChunks(ServerCore& core, const Store& store, const FrameHeader& header, std::span<const PullPart> parts);
  RowChunks(const RowChunks&) = delete;
  RowChunks& operator=(const RowChunks&) = delete;
  ~RowChunks();  // waits for a chunk that another thread is gathering

  // What one reply to `parts` holds at most, beside what the caller owns.
  [[nodiscard]] static std::uint64_t memory_bytes(std::span<const PullPart> parts) noexcept;

  // The next bytes of the frame, valid until the next call; empty at its end. Fails when a table went away.
  Result<std::span<const std::byte>> next();

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace sparserow::rpc
