// Reads the replies of one connection from its bytes, without a socket: rows go straight to the caller's memory.
//
// The owner gives bytes (space(), filled()) and asks for events (next()) until it is starved. At each header it says
// where the body goes: drop(), collect() or read_rows(). At each end it takes what was read.
//
//   header --read_rows--> sections and pieces --.
//      |----collect----> one piece -------------+--> end --> header
//      '----drop-------> one piece -------------'
//
// A status that is not ok means that nothing this peer sends can be trusted; reset() starts anew. Not thread-safe.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rpc/wire/frame.h"
#include "shards/shards.h"
#include "util/status.h"

namespace sparserow::rpc {

// Where one table of a ROWS reply goes, and what it must look like.
struct RowsSink {
  TableDescriptor expected;
  std::span<float> rows;                   // (n, dim)
  std::span<std::uint64_t> versions;       // (n) or empty
  std::span<std::uint8_t> found;           // (n) or empty
  std::span<std::uint8_t> changed;         // (n) or empty; for a conditional pull
  std::shared_ptr<RowMemory> memory = {};  // that rows lie in; null: in other memory
};

// kDataLoss, "malformed reply: ...".
[[nodiscard]] Status malformed_reply(const std::string& what);

class ReplyReader {
 public:
  enum class Event : std::uint8_t { kStarved, kHeader, kEnd };

  ReplyReader();

  // Memory for the next bytes: the piece that is being read, where there is one, then staging.
  [[nodiscard]] std::span<const iovec> space() noexcept;
  // So many bytes lie in it, from its first one on.
  void filled(std::size_t bytes);
  // After kHeader one of drop(), collect() and read_rows() must follow. kDataLoss: the bytes are no reply that was
  // asked for.
  Result<Event> next();

  // The body of a reply that is flagged kFrameInLane is not in these bytes, so nothing is dropped.
  void drop();
  void collect();
  // Every section must match the sink of its place. The sinks must live until the end, or until abandon().
  void read_rows(std::span<const RowsSink> sinks);
  // Reads a whole reply from memory, the body behind its header as it was sent. kDataLoss as next().
  Status read_whole(FrameHeader header, std::span<const std::byte> body, std::span<const RowsSink> sinks);
  // The memory of the reply being read goes away: what is left of it is dropped.
  void abandon();
  // A new connection begins.
  void reset();

  // The bytes to wait for once all that came is taken: more than one within a large body.
  [[nodiscard]] std::size_t awaited() const noexcept;

  // The reply that is being read, or that has just ended.
  [[nodiscard]] const FrameHeader& header() const noexcept { return header_; }
  [[nodiscard]] bool is_collected() const noexcept { return mode_ == Mode::kCollect; }
  [[nodiscard]] const std::vector<std::byte>& body() const noexcept { return collected_; }

 private:
  enum class Mode : std::uint8_t { kDrop, kCollect, kRows };
  enum class Stage : std::uint8_t { kHeader, kTarget, kSection, kDescriptor, kPieces, kChecksum };
  // A run of reply bytes and where it goes; null drops it.
  struct Piece {
    std::byte* to = nullptr;
    std::size_t left = 0;
    // When all is there, `floats` elements of `dtype` are widened from `packed`; null: nothing is widened.
    const std::byte* packed = nullptr;
    float* widened = nullptr;
    std::size_t floats = 0;
    Dtype dtype = Dtype::kFloat32;
  };
  // The rows of a conditional reply on their way to their places among the rows asked for.
  struct ScatteredRows {
    RowsSink sink;
    TableDescriptor descriptor;            // of the reply
    std::vector<std::uint32_t> positions;  // (n)
    std::vector<std::byte> rows;           // (n, dim) of descriptor.dtype
    std::vector<std::uint64_t> versions;   // (n)
    std::vector<std::uint8_t> found;       // (n), empty unless asked

    // kDataLoss for positions that do not rise below the number of rows asked for; nothing is written then.
    [[nodiscard]] Status deliver() const;
  };

  Status on_header();
  Result<bool> on_section();  // false: starved
  Result<bool> on_checksum();
  Result<bool> on_descriptor();
  Result<bool> on_pieces();
  Status on_end();
  void expect_rows(const RowsSink& sink, const TableDescriptor& descriptor, const TableLayout& layout);
  void expect_scattered(const RowsSink& sink, const TableDescriptor& descriptor, const TableLayout& layout);
  void expect_whole_body(Mode mode, std::byte* to);
  [[nodiscard]] std::size_t staged() const noexcept { return staged_end_ - staged_begin_; }
  void feed(std::span<const std::byte>& bytes);
  bool take(void* into, std::size_t bytes);
  void unstage(std::size_t bytes) noexcept;
  void consumed(const void* bytes, std::size_t count);

  std::vector<std::byte> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  std::array<iovec, 2> space_ = {};
  Stage stage_ = Stage::kHeader;
  Mode mode_ = Mode::kDrop;
  FrameHeader header_;
  std::uint64_t body_left_ = 0;
  std::uint32_t sections_left_ = 0;
  std::uint64_t section_bytes_ = 0;
  std::span<const RowsSink> sinks_;
  std::size_t sink_ = 0;
  std::deque<Piece> pieces_;
  std::vector<std::byte> narrow_;             // 16-bit rows before they are widened
  std::unique_ptr<ScatteredRows> scattered_;  // a conditional reply's rows, until they are all there
  std::vector<std::byte> collected_;
  std::uint32_t crc_ = 0;
};

}  // namespace sparserow::rpc
