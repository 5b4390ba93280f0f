// The memory that the requests of one connection have named in the region that client and shard share
// (rpc/transport/lane.h). It has an owner here until the shard is done with it. The client's mutex guards every call,
// as it guards those of Channel.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "rpc/client/reply_reader.h"
#include "rpc/client/shard_request.h"
#include "rpc/transport/lane.h"
#include "rpc/transport/stream.h"

namespace sparserow::rpc {

// The memory of one client, made when the first shard of its host is greeted.
struct ClientArena {
  std::uint64_t bytes = 0;  // 0: there is to be none
  std::shared_ptr<LaneArena> arena;

  // kUnavailable: the system gives none.
  Result<std::shared_ptr<LaneArena>> open();
};

class ChannelLane {
 public:
  using Owners = std::vector<std::shared_ptr<void>>;
  // least: bytes of rows or of a reply that are worth naming.
  ChannelLane(std::shared_ptr<LaneArena> arena, std::uint64_t least) : arena_(std::move(arena)), least_(least) {}

  [[nodiscard]] const LaneArena& arena() const noexcept { return *arena_; }
  void note_taken() noexcept { is_taken_ = true; }  // the shard has mapped it

  // Names memory for the rows and the reply of a request that is about to be sent. False: there was no room for the
  // reply's body.
  bool name(ShardRequest& request, std::uint32_t max_body_bytes) const;
  // Takes the names out again.
  static void forget(ShardRequest& request);
  // Reads a reply whose body lies where the request said.
  Status read(const FrameHeader& header, const ShardRequest& request);

  // The request ends without its answer: what it named has an owner until that comes, and its rows are no longer used.
  void give_up(const ShardRequest& request);
  // The answer to a request that was given up has come.
  void note_answer(std::uint64_t id) { late_.erase(id); }
  // What requests that were given up have named; they are forgotten.
  [[nodiscard]] Owners take_late();
  // Nobody uses the memory of this request's rows again, as the shard may write or read there late.
  static void abandon_rows(const ShardRequest& request);
  // What a request has named.
  static void add_owners(const ShardRequest& request, Owners& owners);

 private:
  // Where memory of a table lies, if it is worth naming.
  [[nodiscard]] std::optional<std::uint64_t> place_of(const RowMemory* memory, const void* rows,
                                                      std::uint64_t bytes) const;
  // Names where rows are to go that lie in the arena; returns their bytes.
  std::uint64_t name_rows(ShardRequest& request) const;
  // Takes gradients that lie in the arena out of a request's body, and names where they are.
  void name_gradients(ShardRequest& request) const;

  const std::shared_ptr<LaneArena> arena_;
  const std::uint64_t least_;
  bool is_taken_ = false;
  std::map<std::uint64_t, Owners> late_;  // by id
  ReplyReader reader_;
};

// A connection that this side has left, on which the shard may still write: it shows its end after its last write.
struct EndingLane {
  std::unique_ptr<Stream> stream;
  ChannelLane::Owners owners;

  [[nodiscard]] bool has_ended() const noexcept;
};

}  // namespace sparserow::rpc
