#include "rpc/client/reply_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "rpc/wire/crc32c.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kStagingBytes = 64u << 10;
constexpr std::size_t kAwaitedBytes = 256u << 10;  // of a large body, before its reader wakes

}  // namespace

Status malformed_reply(const std::string& what) { return Status(Code::kDataLoss, "malformed reply: " + what); }

ReplyReader::ReplyReader() : staging_(kStagingBytes) {}

Status ReplyReader::ScatteredRows::deliver() const {
  const std::uint32_t asked = sink.expected.n;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] >= asked || (i > 0 && positions[i] <= positions[i - 1])) {
      return malformed_reply("positions of rows");
    }
  }
  const std::size_t row_bytes = std::size_t{descriptor.dim} * size_of(descriptor.dtype);
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const std::size_t at = positions[i];
    convert_to_float(descriptor.dtype, rows.data() + i * row_bytes, sink.rows.data() + at * descriptor.dim,
                     descriptor.dim);
    sink.versions[at] = versions[i];
    if (!sink.found.empty()) sink.found[at] = found[i];
    if (!sink.changed.empty()) sink.changed[at] = 1;
  }
  return Status::ok();
}

void ReplyReader::reset() {
  staged_begin_ = staged_end_ = 0;
  stage_ = Stage::kHeader;
  mode_ = Mode::kDrop;
  pieces_.clear();
  scattered_.reset();
}

void ReplyReader::abandon() {
  mode_ = Mode::kDrop;
  scattered_.reset();
  for (Piece& piece : pieces_) {
    piece.to = nullptr;
    piece.packed = nullptr;
  }
}

std::span<const iovec> ReplyReader::space() noexcept {
  std::size_t count = 0;
  if (stage_ == Stage::kPieces && !pieces_.empty() && pieces_.front().to != nullptr) {
    space_[count++] = {pieces_.front().to, pieces_.front().left};
  }
  space_[count++] = {staging_.data() + staged_end_, staging_.size() - staged_end_};
  return {space_.data(), count};
}

std::size_t ReplyReader::awaited() const noexcept {
  const bool is_large = stage_ == Stage::kPieces && !pieces_.empty() && pieces_.front().left > kStagingBytes;
  return is_large ? std::min(pieces_.front().left, kAwaitedBytes) : 1;
}

void ReplyReader::filled(std::size_t bytes) {
  if (stage_ == Stage::kPieces && !pieces_.empty() && pieces_.front().to != nullptr) {
    Piece& piece = pieces_.front();
    const std::size_t part = std::min(bytes, piece.left);
    consumed(piece.to, part);
    piece.to += part;
    piece.left -= part;
    bytes -= part;
  }
  staged_end_ += bytes;
}

void ReplyReader::unstage(std::size_t bytes) noexcept {
  staged_begin_ += bytes;
  if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
}

bool ReplyReader::take(void* into, std::size_t bytes) {
  if (staged() < bytes) {
    std::memmove(staging_.data(), staging_.data() + staged_begin_, staged());
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
    return false;
  }
  std::memcpy(into, staging_.data() + staged_begin_, bytes);
  unstage(bytes);
  return true;
}

void ReplyReader::consumed(const void* bytes, std::size_t count) {
  body_left_ -= count;
  if ((header_.flags & (kFrameHasCrc | kFrameCrcLast)) != 0) crc_ = crc32c(crc_, bytes, count);
}

// Moves staged bytes through the reply's stages until they are used up, or the owner is to be asked.
Result<ReplyReader::Event> ReplyReader::next() {
  while (true) {
    Result<bool> has_moved = true;
    switch (stage_) {
      case Stage::kHeader:
        if (!take(&header_, sizeof header_)) return Event::kStarved;
        SR_RETURN_IF_ERROR(on_header());
        stage_ = Stage::kTarget;
        return Event::kHeader;
      case Stage::kTarget:  // the owner did not say where the body goes
        return Status(Code::kInternal, "a reply has no target");
      case Stage::kSection:
        if (sections_left_ == 0) {
          if (body_left_ != 0) return malformed_reply("bytes after the last section");
          SR_RETURN_IF_ERROR(on_end());
          return Event::kEnd;
        }
        has_moved = on_section();
        break;
      case Stage::kChecksum:
        has_moved = on_checksum();
        break;
      case Stage::kDescriptor:
        has_moved = on_descriptor();
        break;
      case Stage::kPieces:
        has_moved = on_pieces();
        if (has_moved.is_ok() && has_moved.value() && stage_ == Stage::kHeader) {
          SR_RETURN_IF_ERROR(on_end());
          return Event::kEnd;
        }
        break;
    }
    if (!has_moved.is_ok()) return has_moved.status();
    if (!has_moved.value()) return Event::kStarved;
  }
}

Status ReplyReader::on_header() {
  if (Status status = check_header(header_, UINT32_MAX); !status.is_ok()) return malformed_reply(status.message());
  FrameHeader plain = header_;
  plain.crc32c = 0;
  if ((plain.flags & (kFrameHasCrc | kFrameCrcLast)) != 0) crc_ = crc32c(0, &plain, sizeof plain);
  body_left_ = header_.body_bytes;
  sections_left_ = header_.section_count;
  return Status::ok();
}

void ReplyReader::expect_whole_body(Mode mode, std::byte* to) {
  mode_ = mode;
  pieces_.clear();
  pieces_.push_back({.to = to, .left = body_left_});
  stage_ = Stage::kPieces;
}

void ReplyReader::drop() {
  if ((header_.flags & kFrameInLane) != 0) body_left_ = 0;
  expect_whole_body(Mode::kDrop, nullptr);
}

void ReplyReader::collect() {
  collected_.resize(body_left_);
  expect_whole_body(Mode::kCollect, collected_.data());
}

void ReplyReader::read_rows(std::span<const RowsSink> sinks) {
  mode_ = Mode::kRows;
  sinks_ = sinks;
  sink_ = 0;
  stage_ = Stage::kSection;
}

void ReplyReader::feed(std::span<const std::byte>& bytes) {
  std::size_t moved = 0;
  for (const iovec& piece : space()) {
    const std::size_t part = std::min(piece.iov_len, bytes.size() - moved);
    std::memcpy(piece.iov_base, bytes.data() + moved, part);
    moved += part;
  }
  filled(moved);
  bytes = bytes.subspan(moved);
}

Status ReplyReader::read_whole(FrameHeader header, std::span<const std::byte> body, std::span<const RowsSink> sinks) {
  reset();
  header.flags &= static_cast<std::uint8_t>(~kFrameInLane);
  std::span<const std::byte> rest = bytes_of(header);
  feed(rest);
  if (auto event = next(); !event.is_ok()) return event.status();
  read_rows(sinks);
  rest = body;
  while (true) {
    const auto event = next();
    if (!event.is_ok()) return event.status();
    if (event.value() == Event::kEnd) return Status::ok();
    if (rest.empty()) return malformed_reply("truncated body");
    feed(rest);
  }
}

Result<bool> ReplyReader::on_section() {
  SectionHeader section;
  if (body_left_ < sizeof section) return malformed_reply("truncated section");
  if (sections_left_ == 1 && (header_.flags & kFrameCrcLast) != 0) {
    stage_ = Stage::kChecksum;
    return true;
  }
  if (!take(&section, sizeof section)) return false;
  consumed(&section, sizeof section);
  if (section.reserved != 0 || padded8(section.payload_bytes) > body_left_ || section.payload_bytes > body_left_) {
    return malformed_reply("section length");
  }
  --sections_left_;
  section_bytes_ = section.payload_bytes;
  if (section.kind == static_cast<std::uint16_t>(SectionKind::kTableRows)) {
    if (section.payload_bytes < sizeof(TableDescriptor)) return malformed_reply("table section length");
    stage_ = Stage::kDescriptor;
  } else if ((section.flags & kSectionRequired) != 0) {
    return malformed_reply("section kind " + std::to_string(section.kind) + " in ROWS");
  } else {
    pieces_.push_back({.left = padded8(section.payload_bytes)});
    stage_ = Stage::kPieces;
  }
  return true;
}

Result<bool> ReplyReader::on_checksum() {
  struct {
    SectionHeader section;
    ChecksumPayload checksum;
  } last;
  if (body_left_ != sizeof last) return malformed_reply("CHECKSUM section length");
  if (!take(&last, sizeof last)) return false;
  if (last.section.kind != static_cast<std::uint16_t>(SectionKind::kChecksum) ||
      last.section.payload_bytes != sizeof last.checksum) {
    return malformed_reply("its last section is not CHECKSUM");
  }
  if (crc_ != last.checksum.crc32c) return Status(Code::kDataLoss, "reply checksum does not match");
  consumed(&last, sizeof last);
  --sections_left_;
  stage_ = Stage::kSection;
  return true;
}

Result<bool> ReplyReader::on_descriptor() {
  TableDescriptor descriptor;
  if (!take(&descriptor, sizeof descriptor)) return false;
  consumed(&descriptor, sizeof descriptor);
  if (mode_ == Mode::kDrop) {  // abandoned between two sections
    drop();
    return true;
  }
  if (sink_ == sinks_.size()) return malformed_reply("more tables than asked for");
  const RowsSink& sink = sinks_[sink_++];
  const auto layout = layout_of(SectionKind::kTableRows, descriptor.flags);
  const bool is_conditional = layout.is_ok() && layout.value().positions;
  TableDescriptor expected = sink.expected;
  if (is_conditional && descriptor.n < expected.n) expected.n = descriptor.n;
  if (std::memcmp(&descriptor, &expected, sizeof descriptor) != 0 || !layout.is_ok() ||
      table_payload_bytes(descriptor, layout.value()) != section_bytes_) {
    return malformed_reply("table " + std::to_string(descriptor.table_id) + " is not what was asked for");
  }
  stage_ = Stage::kPieces;
  if (is_conditional) {
    expect_scattered(sink, descriptor, layout.value());
  } else {
    expect_rows(sink, descriptor, layout.value());
  }
  return true;
}

void ReplyReader::expect_rows(const RowsSink& sink, const TableDescriptor& descriptor, const TableLayout& layout) {
  const std::size_t n = descriptor.n;
  const std::size_t floats = n * descriptor.dim;
  const std::size_t bytes = floats * size_of(descriptor.dtype);
  if (!layout.rows) {
    // They are there already.
  } else if (descriptor.dtype == Dtype::kFloat32) {
    pieces_.push_back({.to = reinterpret_cast<std::byte*>(sink.rows.data()), .left = bytes});
  } else {
    if (narrow_.size() < bytes) narrow_.resize(bytes);
    pieces_.push_back({.to = narrow_.data(),
                       .left = bytes,
                       .packed = narrow_.data(),
                       .widened = sink.rows.data(),
                       .floats = floats,
                       .dtype = descriptor.dtype});
  }
  if (layout.rows) pieces_.push_back({.left = padded8(bytes) - bytes});
  if (layout.versions) pieces_.push_back({.to = reinterpret_cast<std::byte*>(sink.versions.data()), .left = n * 8});
  if (layout.found) {
    pieces_.push_back({.to = reinterpret_cast<std::byte*>(sink.found.data()), .left = n});
    pieces_.push_back({.left = padded8(n) - n});
  }
}

void ReplyReader::expect_scattered(const RowsSink& sink, const TableDescriptor& descriptor, const TableLayout& layout) {
  const std::size_t n = descriptor.n;
  const std::size_t bytes = n * descriptor.dim * size_of(descriptor.dtype);
  scattered_ = std::make_unique<ScatteredRows>(ScatteredRows{.sink = sink,
                                                             .descriptor = descriptor,
                                                             .positions = std::vector<std::uint32_t>(n),
                                                             .rows = std::vector<std::byte>(bytes),
                                                             .versions = std::vector<std::uint64_t>(n),
                                                             .found = {}});
  ScatteredRows& parts = *scattered_;
  pieces_.push_back({.to = reinterpret_cast<std::byte*>(parts.positions.data()), .left = n * 4});
  pieces_.push_back({.left = padded8(n * 4) - n * 4});
  pieces_.push_back({.to = parts.rows.data(), .left = bytes});
  pieces_.push_back({.left = padded8(bytes) - bytes});
  pieces_.push_back({.to = reinterpret_cast<std::byte*>(parts.versions.data()), .left = n * 8});
  if (layout.found) {
    parts.found.resize(n);
    pieces_.push_back({.to = reinterpret_cast<std::byte*>(parts.found.data()), .left = n});
    pieces_.push_back({.left = padded8(n) - n});
  }
}

// Leaves stage_ at kHeader when the body ended.
Result<bool> ReplyReader::on_pieces() {
  while (!pieces_.empty()) {
    Piece& piece = pieces_.front();
    const std::size_t part = std::min(piece.left, staged());
    if (part > 0) {
      const std::byte* from = staging_.data() + staged_begin_;
      if (piece.to != nullptr) {
        std::memcpy(piece.to, from, part);
        piece.to += part;
      }
      consumed(from, part);
      piece.left -= part;
      unstage(part);
    }
    if (piece.left > 0) return false;
    if (piece.packed != nullptr && piece.floats > 0) {
      convert_to_float(piece.dtype, piece.packed, piece.widened, piece.floats);
    }
    pieces_.pop_front();
  }
  if (mode_ == Mode::kRows) {
    if (const auto scattered = std::move(scattered_)) SR_RETURN_IF_ERROR(scattered->deliver());
    stage_ = Stage::kSection;
  } else if (body_left_ > 0) {  // abandoned in the middle of its rows
    drop();
  } else {
    stage_ = Stage::kHeader;
  }
  return true;
}

Status ReplyReader::on_end() {
  stage_ = Stage::kHeader;
  if ((header_.flags & kFrameHasCrc) != 0 && crc_ != header_.crc32c) {
    return Status(Code::kDataLoss, "reply checksum does not match");
  }
  if (mode_ == Mode::kRows && sink_ != sinks_.size()) return malformed_reply("fewer tables than asked for");
  return Status::ok();
}

}  // namespace sparserow::rpc
