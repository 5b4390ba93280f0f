// The result of one request: a reply, a refusal, or nothing, because its rows were sent already or are sent later.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "rpc/server/fair_budget.h"
#include "schema/schema.h"
#include "util/status.h"

namespace sparserow::rpc {

struct Outcome {
  // The handler has sent its reply itself.
  [[nodiscard]] static Outcome sent() { return {}; }
  // The frame is sent to the peer.
  [[nodiscard]] static Outcome reply(std::vector<std::byte> frame) {
    Outcome outcome;
    outcome.frame = std::move(frame);
    return outcome;
  }
  // The peer gets a status that is not ok as an ERROR, and its connection goes on.
  [[nodiscard]] static Outcome of(Status status) {
    Outcome outcome;
    outcome.status = std::move(status);
    return outcome;
  }
  [[nodiscard]] static Outcome refused(Status status) { return of(std::move(status)); }
  // The peer gets the status as an ERROR, and its connection ends: the next frame cannot be found.
  [[nodiscard]] static Outcome broken_grammar(Status status) {
    Outcome outcome = refused(std::move(status));
    outcome.is_grammar_broken = true;
    return outcome;
  }
  // The request waits for its job's clock and is answered later.
  [[nodiscard]] static Outcome parked() {
    Outcome outcome;
    outcome.is_parked = true;
    return outcome;
  }

  [[nodiscard]] bool is_ok() const noexcept { return status.is_ok(); }

  Status status;
  std::int64_t open_step = kNoStep;  // of kOutsideQuorum: the lowest step that still takes members
  std::vector<std::byte> frame;      // empty: nothing is left to be sent
  bool is_grammar_broken = false;
  bool is_parked = false;
  FairBudget::Charge charge;  // for the bytes of the frame
};

}  // namespace sparserow::rpc
