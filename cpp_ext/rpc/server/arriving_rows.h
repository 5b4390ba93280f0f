// Looks for NaN and infinite values in the rows of a request while its body arrives: a part that was just received is
// in the core's cache, where a look costs a fraction of what it costs once the whole body is there.
//
// A finding spares a second look and decides nothing else: a handler checks rows that were not seen whole, and those
// that are not finite.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "rpc/wire/frame.h"

namespace sparserow::rpc {

class ArrivingRows {
 public:
  // Whether a request has rows that must be finite: those that are sent by key, in place of a step.
  [[nodiscard]] static bool are_looked_at(const FrameHeader& header) noexcept;

  // `arrived`: the body up to here, from its first byte; the memory may not move between calls.
  void look(std::span<const std::byte> arrived);
  // True when these bytes are all the rows of one table of the body, and are finite float32.
  [[nodiscard]] bool are_finite(std::span<const std::byte> rows) const noexcept;

 private:
  [[nodiscard]] bool begin_table(std::span<const std::byte> arrived);
  void end_table(std::span<const std::byte> arrived);

  static constexpr std::size_t kLeastBytes = 64u << 10;  // of a table's rows that are worth a note

  std::size_t section_ = 0;  // where the section begins that arrives
  std::size_t next_ = 0;     // where the one after it does; 0: the section's head has not arrived
  std::size_t rows_begin_ = 0;
  std::size_t seen_ = 0;  // up to where rows were looked at
  std::size_t rows_end_ = 0;
  bool is_finite_ = true;  // the rows of the section so far
  bool is_over_ = false;   // what comes is not looked at
  std::vector<std::span<const std::byte>> finite_;
};

}  // namespace sparserow::rpc
