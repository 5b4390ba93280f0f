// Serves one SCAN: a page of a table's rows.
#pragma once

#include "rpc/server/frame_io.h"
#include "rpc/server/outcome.h"
#include "rpc/server/peer_accounts.h"
#include "rpc/server/request.h"

namespace sparserow::rpc {

class ScanHandler {
 public:
  // Both must outlive the handler.
  ScanHandler(const Request& request, PeerAccounts& accounts) : request_(request), accounts_(accounts) {}

  // Charges the page before it is read: as it comes from the store, as it is packed, and as a frame.
  Task<Outcome> serve();

 private:
  Outcome plan();
  [[nodiscard]] Outcome read_page() const;

  const Request& request_;
  PeerAccounts& accounts_;
  ScanPayload scan_ = {};
  std::uint32_t dim_ = 0;
  std::uint32_t page_rows_ = 0;
  std::uint64_t page_bytes_ = 0;
};

}  // namespace sparserow::rpc
