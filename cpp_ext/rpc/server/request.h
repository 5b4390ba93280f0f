// One request of a connection, and the checks that every kind of request shares.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rpc/server/access.h"
#include "rpc/server/arriving_rows.h"
#include "rpc/server/outcome.h"
#include "rpc/server/server_core.h"
#include "rpc/wire/frame.h"
#include "util/status.h"

namespace sparserow::rpc {

// When a request came, and of which trace.
struct Arrival {
  std::chrono::steady_clock::time_point at = {};
  TraceContext trace;
};

// Where a request says that its reply goes, in the lane of its connection.
struct NamedPlaces {
  LanePlacePayload body;
  std::vector<std::uint64_t> rows;  // by table, an offset or kNotPlaced; empty: of none
};

// A body, in place in the staging buffer or in a buffer of its own.
struct Body {
  std::span<const std::byte> bytes;
  Buffer buffer;
  FairBudget::Charge client_charge;
  FairBudget::Charge charge;
  std::size_t staged = 0;  // bytes to consume from staging when the request was served
  ArrivingRows arriving;

  // Gives the buffer's bytes back to the budgets. The buffer goes on without a charge.
  void release_charges() {
    charge.reset();
    client_charge.reset();
  }
};

struct Request {
  ServerCore& core;
  const Grant& grant;  // what the connection's token allows
  FrameHeader header;
  Body body;
  std::chrono::steady_clock::time_point deadline;
  Arrival arrival;

  [[nodiscard]] FrameType type() const noexcept { return static_cast<FrameType>(header.type); }

  // kUnavailable or kStaleRoute: this shard does not serve requests of the header's route now.
  [[nodiscard]] Status check_route() const;
  // The table exists, the token may reach it, and its schema is the one that the request names.
  [[nodiscard]] Status check_table(const Store& store, const TableDescriptor& descriptor) const;
  // The same for a request that names a table by its id alone; kNotFound. `dim` is the table's.
  [[nodiscard]] Status check_table_id(const Store& store, std::uint32_t table_id, std::uint32_t& dim) const;

  // Parses the body, whose sections must all be of one kind. A request for rows may name places for its reply among
  // them; places: null for one that may not.
  [[nodiscard]] Outcome parse_tables(SectionKind kind, std::vector<TableView>& out,
                                     NamedPlaces* places = nullptr) const;
};

// kUnavailable while a table is refused, because its rows are not whole.
[[nodiscard]] Status check_refusal(const ServerCore& core, std::uint32_t table_id);
// kStaleRoute names the first key that another shard owns.
[[nodiscard]] Status check_owner(const ServerCore& core, std::uint32_t table_id, std::span<const std::uint64_t> keys);
[[nodiscard]] Status check_route(const ServerCore& core, const FrameHeader& header);

// Enters a request that is over in the shard's times and its log.
void note_request(ServerCore& core, const Peer& peer, RequestTimes::Kind kind, const FrameHeader& header,
                  const Status& status, const Arrival& arrival);

}  // namespace sparserow::rpc
