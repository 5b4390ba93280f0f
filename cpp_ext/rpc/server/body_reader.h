// Reads the bodies of requests: small ones in the staging buffer, large ones into buffers that the budgets allow.
//
// A large body is charged step by step before its bytes are read, so an announced length costs the peer as much as it
// costs the shard. A body that is refused is read past, and the connection goes on.
#pragma once

#include <chrono>
#include <functional>

#include "rpc/server/frame_io.h"
#include "rpc/server/outcome.h"
#include "rpc/server/peer_accounts.h"
#include "rpc/server/request.h"
#include "rpc/transport/lane.h"

namespace sparserow::rpc {

class BodyReader {
 public:
  // `check` judges a large request by its header and its first table, before its body takes memory. It may fail the
  // request by the table's id; nullptr: the first table is not known.
  using Check = std::function<Status(const FrameHeader& header, const TableDescriptor* first)>;

  BodyReader(ServerCore& core, Peer& peer, FrameIo& io, PeerAccounts& accounts)
      : core_(core), peer_(peer), io_(io), accounts_(accounts) {}

  // Reads the body of the frame whose header lies staged. kResourceExhausted, or the check's status: the body was read
  // past. Any status with a closed FrameIo: the connection is lost.
  Task<Status> read(const FrameHeader& header, Body& body, std::chrono::steady_clock::time_point deadline,
                    const Check& check);
  // lane: where bodies may have their rows; null: nowhere.
  void open(std::shared_ptr<LaneRegion> lane) { lane_ = std::move(lane); }
  // Copies rows that a request to write has in the lane into its body, which is then as if they had come in the frame.
  // Each byte is read once, so that nothing changes after it was checked. A place that is none breaks the grammar.
  Task<Outcome> fetch_placed(Request& request, const Check& check);

 private:
  Task<Status> check_first_table(const FrameHeader& header, const Check& check);
  Task<Status> read_charged(const FrameHeader& header, Body& body, std::size_t& left,
                            std::chrono::steady_clock::time_point deadline);
  struct PlacedBody;
  Status lost();
  // Charges for a body of so many bytes, of which take_room() takes some or all.
  void open_charges(Body& body, std::size_t bytes);
  Task<Status> take_room(Body& body, std::size_t bytes, std::chrono::steady_clock::time_point deadline);

  ServerCore& core_;
  Peer& peer_;
  FrameIo& io_;
  PeerAccounts& accounts_;
  std::shared_ptr<LaneRegion> lane_;
};

}  // namespace sparserow::rpc
