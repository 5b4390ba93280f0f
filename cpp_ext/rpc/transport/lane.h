// Memory that a client and a shard of one host share, into which the shard writes the bodies of replies.
//
// A client makes a region for each connection by a local socket and passes it with HELLO, which no socket but one of
// the same kernel can. With each request that wants one it names a place in it, and the reply then has its header alone
// in the stream. So the deadlines, the order and the end of a connection stay those of frames.
//
//   client  make() --HELLO, descriptor--> shard  map()
//           LanePlaces::take() --PULL, LANE_PLACE--> writes there --ROWS, kFrameInLane--> reads, give_back()
//
// Invariants:
//  1. A place that was named is free only when the answer has been read. One whose request was given up stays taken
//     until its answer comes, or the connection ends, and the region with it.
//  2. The shard reads nothing there, and writes only where a request says.
//  3. What the caller gets is copied out of the region: no memory that a user can hold lies in it.
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

  [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }  // -1 once it was passed
  void close_descriptor() noexcept { descriptor_.reset(); }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  LaneRegion(FileDescriptor descriptor, std::span<std::byte> bytes);

  FileDescriptor descriptor_;
  const std::span<std::byte> bytes_;
  const pid_t pid_;
};

// The places of a region, as its client gives them out. Not thread-safe.
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

}  // namespace sparserow::rpc
