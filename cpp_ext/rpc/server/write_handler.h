// Serves one write: PREPARE, COMMIT, ABORT, ASSIGN or DELETE. It needs no socket.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "rpc/server/outcome.h"
#include "rpc/server/request.h"

namespace sparserow::rpc {

class WriteHandler {
 public:
  // `request` must outlive the handler.
  explicit WriteHandler(Request& request) : request_(request), core_(request.core), header_(request.header) {}

  [[nodiscard]] Outcome serve();

 private:
  Outcome commit();
  Outcome abort();
  Outcome assign();
  Outcome erase();
  // Runs `write` once for the header's sequence; a write without a sequence runs each time that it comes.
  Outcome write_rows(const std::function<Result<std::uint64_t>()>& write);
  [[nodiscard]] Outcome refused(Status status) const;
  [[nodiscard]] Outcome acknowledged(std::uint64_t rows, bool is_duplicate) const;
  // float32 gradients of a view: in place, or widened into memory that is added to `owners`.
  const float* floats_of(const TableView& view, std::vector<std::shared_ptr<void>>& owners);

  Request& request_;
  ServerCore& core_;
  const FrameHeader& header_;
};

}  // namespace sparserow::rpc
