// Memory that a client and a shard of one host share: rows go there and come from there, and frames stay on the socket.
//
// A client makes one region and passes it with the HELLO of each connection by a local socket, which no socket but one
// of the same kernel can. With a request it names places in it: for the rows of tables, pulled or pushed, where the
// caller's memory lies in the region, or for the whole body of a reply, which the client then copies out. The
// deadlines, the order and the end of a connection stay those of frames.
//
//   client  LaneArena::make() --HELLO, descriptor--> shard  LaneRegion::map()
//           take() --PULL, LANE_PLACE or LANE_ROWS--> writes there --ROWS--> reads; free with its last owner
//           take() --COMMIT, LANE_ROWS--> copies once --ACK--> free with its last owner
//
// Invariants:
//  1. Memory that was named has an owner until its answer has been read, or the shard has shown the end of the
//     connection, which it does after its last use of it. So what a request that was given up has named is nobody's
//     until then.
//  2. The shard writes only where a request says. What it reads, it copies once before it is checked.
//  3. No memory that a user can hold lies in the region.
//  4. The region cannot shrink below a write (sealed), and a child of fork does not have it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "util/file_descriptor.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow::rpc {

class LaneRegion {
 public:
  static constexpr std::uint64_t kUnit = 4096;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 30;
  [[nodiscard]] static std::string allowed();  // sizes of a region, for errors

  // A new region; its pages take memory once they are touched. kUnavailable: the system gives none.
  static Result<std::unique_ptr<LaneRegion>> make(std::uint64_t bytes);
  // Maps that of a peer, which says how large it is. kInvalidArgument: it is no region of that size, or it could
  // shrink.
  static Result<std::unique_ptr<LaneRegion>> map(FileDescriptor descriptor, std::uint64_t bytes);
  LaneRegion(const LaneRegion&) = delete;
  LaneRegion& operator=(const LaneRegion&) = delete;
  ~LaneRegion();

  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }  // -1: of a peer's region
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  LaneRegion(FileDescriptor descriptor, std::span<std::byte> bytes);

  FileDescriptor descriptor_;
  const std::span<std::byte> bytes_;
  const pid_t pid_;
};

// The places of a region, as its client gives them out. Not thread-safe: LaneArena guards them.
class LanePlaces {
 public:
  static constexpr std::size_t kAlignment = 64;

  struct Place {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;  // a multiple of kAlignment
  };

  explicit LanePlaces(std::span<std::byte> region);
  // The lowest place with room for `bytes`, its pages touched, so that they are the client's memory. nullopt: none has.
  [[nodiscard]] std::optional<Place> take(std::uint64_t bytes);
  // Invariant 1 is the caller's.
  void give_back(const Place& place);
  [[nodiscard]] std::uint64_t taken() const noexcept;

 private:
  const std::span<std::byte> region_;
  std::map<std::uint64_t, std::uint64_t> free_;  // bytes by offset; neighbours are one
  std::uint64_t touched_ = 0;                    // bytes from the first on whose pages are there
};

// The region of one client, which gives out its memory and takes it back. Thread-safe.
class LaneArena : public std::enable_shared_from_this<LaneArena> {
 public:
  // kUnavailable: the system gives none.
  static Result<std::shared_ptr<LaneArena>> make(std::uint64_t bytes);
  // Memory there, which is free again with its last owner; null: there is no room.
  [[nodiscard]] std::shared_ptr<std::byte[]> take(std::uint64_t bytes);
  // Where this memory lies; nullopt: not within the region.
  [[nodiscard]] std::optional<std::uint64_t> offset_of(const void* first, std::uint64_t bytes) const noexcept;
  [[nodiscard]] int descriptor() const noexcept { return region_->descriptor(); }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return region_->bytes().size(); }

 private:
  explicit LaneArena(std::unique_ptr<LaneRegion> region) : region_(std::move(region)), places_(region_->bytes()) {}

  const std::unique_ptr<LaneRegion> region_;
  mutable Mutex mutex_;
  LanePlaces places_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow::rpc
