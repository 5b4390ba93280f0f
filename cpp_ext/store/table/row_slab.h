// The rows of one (table, stripe): chunks of equal rows, cut from the shared arenas.
//
// A row id is chunk << 12 | row in chunk, stable for the row's life. A row is [its head][its data] (row.h); rows whose
// data are of whole lines, or halves of them, lie in groups of five instead, [a line with their heads][data of each]:
// data then begin at a line, so that a pull reads as few lines as of a plain matrix.
//
// Tried: heads of a whole chunk at its end (pushes took a seventh longer: each touches one page more), and groups for
// rows below 128 bytes (a push takes a line more than it saves, 6 % longer for 64 bytes).
//
// Chunks grow with the slab, in the end to a hundred-and-twenty-eighth of it, so that a small table
// stays small and so does slack; where an arena's rest is shorter than a chunk, the chunk is as long as the rest. A
// chunk without rows gives its memory back at once.
//
// A slab with meta has two bytes more per row (row_meta.h), together at the end of each chunk, so that eviction reads
// those of many rows at once. Chunks that are mostly empty can be given up one by one: their rows must move, which
// the index alone can do (table.cc).
//
// Not thread-safe: guarded by its stripe's lock. Owns its chunks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/table/arena_pool.h"
#include "store/table/row.h"
#include "store/table/row_meta.h"
#include "util/fetch_lines.h"

namespace sparserow {

class RowSlab {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  static constexpr std::uint32_t kRowBits = 12;
  static constexpr std::uint32_t kMaxChunks = 1u << 20;

  // used: where its bytes are counted too, beside the pool; outlives this, or null.
  RowSlab(ArenaPool& pool, std::size_t data_bytes, bool has_meta = false,
          std::atomic<std::uint64_t>* used = nullptr) noexcept
      : pool_(&pool),
        used_(used),
        data_bytes_(data_bytes),
        group_(data_bytes >= 2 * kLine && data_bytes % (kLine / 2) == 0 ? kHeadsTogether : 1),
        head_bytes_(group_ == 1 ? RowLayout::kHeadBytes : kLine),
        meta_bytes_(has_meta ? sizeof(std::uint16_t) : 0) {}
  RowSlab(const RowSlab&) = delete;
  RowSlab& operator=(const RowSlab&) = delete;
  ~RowSlab();

  [[nodiscard]] std::byte* data(std::uint32_t row) const noexcept {
    return data_at(bases_[row >> kRowBits], row & kRowMask);
  }
  [[nodiscard]] std::byte* head(std::uint32_t row) const noexcept {
    const std::uint32_t place = row & kRowMask;
    const std::uint32_t group = group_of(place);
    return bases_[row >> kRowBits] + group * group_bytes() + (place - group * group_) * RowLayout::kHeadBytes;
  }
  [[nodiscard]] RowRef at(std::uint32_t row) const noexcept { return {data(row), head(row)}; }

  // The meta of a row; the slab must have been made with meta.
  [[nodiscard]] RowMeta meta(std::uint32_t row) const noexcept { return RowMeta(*meta_at(row)); }
  [[gnu::always_inline]] void fetch_meta(std::uint32_t row) const noexcept { __builtin_prefetch(meta_at(row), 1); }

  // A place for one row, its content unspecified; kNone when the system has no memory or the slab is full.
  [[nodiscard]] std::uint32_t allocate();
  void free(std::uint32_t row);

  // Closes the emptiest chunks, as many as the others have room for beside `spare_rows` free places: allocate() uses
  // them no more, and each goes when its last row does. Returns whether there are any.
  bool close_chunks(std::uint64_t spare_rows);
  [[nodiscard]] bool is_closed(std::uint32_t row) const noexcept { return chunks_[row >> kRowBits].is_closed; }

  // Moves the chunks that are in such arenas, from the one of number `first` on, until so many bytes have moved. Rows
  // keep their ids. Returns where to go on; 0 at the end, or where the system has no memory.
  std::uint32_t move_chunks(const ArenaPool::Emptying& from, std::uint32_t first, std::size_t most_bytes);

  [[nodiscard]] std::uint64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::uint64_t free_places() const noexcept { return places_ - rows_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  // Upper bound of the memory that `rows` more rows take.
  [[nodiscard]] std::uint64_t bytes_for(std::uint64_t rows) const noexcept;

 private:
  static constexpr std::uint32_t kRowMask = (1u << kRowBits) - 1;
  static constexpr std::uint32_t kHeadsTogether = 5;
  static constexpr std::uint16_t kNoFree = 0xffff;

  struct ChunkInfo {
    std::uint16_t capacity : 15 = 0;  // rows
    std::uint16_t is_closed : 1 = 0;
    std::uint16_t bumped = 0;  // rows handed out at least once
    std::uint16_t live = 0;
    std::uint16_t first_free = kNoFree;  // list through the first bytes of freed rows
  };
  static_assert(kRowBits < 15);
  // Rows that a new chunk should have, and the fewest for which it is made.
  struct Wish {
    std::uint32_t most;
    std::uint32_t least;
  };

  [[nodiscard]] std::uint16_t* meta_at(std::uint32_t row) const noexcept {
    const std::uint32_t chunk = row >> kRowBits;
    std::byte* metas = bases_[chunk] + places().bytes(chunks_[chunk].capacity);
    return reinterpret_cast<std::uint16_t*>(metas) + (row & kRowMask);
  }
  [[nodiscard]] std::size_t group_bytes() const noexcept { return head_bytes_ + group_ * data_bytes_; }
  [[nodiscard]] std::uint32_t group_of(std::uint32_t place) const noexcept {
    return group_ == 1 ? place : place / kHeadsTogether;
  }
  [[nodiscard]] std::byte* data_at(std::byte* base, std::uint32_t place) const noexcept {
    return base + (group_of(place) + 1) * head_bytes_ + place * data_bytes_;
  }
  [[nodiscard]] ArenaPool::Units places() const noexcept { return {data_bytes_, head_bytes_, group_}; }
  [[nodiscard]] ArenaPool::Units units() const noexcept { return {data_bytes_ + meta_bytes_, head_bytes_, group_}; }
  [[nodiscard]] std::uint64_t most_row_bytes(std::uint32_t least) const noexcept;
  [[nodiscard]] Wish wish_at(std::uint64_t places) const noexcept;
  [[nodiscard]] bool back_chunk();
  std::uint32_t take_from(std::uint32_t chunk) noexcept;
  void add_bytes(std::uint64_t bytes) noexcept {  // wraps where it shrinks
    bytes_ += bytes;
    if (used_ != nullptr) used_->fetch_add(bytes, std::memory_order_relaxed);
  }

  ArenaPool* pool_;
  std::atomic<std::uint64_t>* used_;
  std::size_t data_bytes_;
  std::uint32_t group_;     // rows
  std::size_t head_bytes_;  // of a group
  std::size_t meta_bytes_;
  std::vector<std::byte*> bases_;        // per chunk; null when its memory is given back
  std::vector<ChunkInfo> chunks_;        // per chunk
  std::vector<std::uint32_t> open_;      // chunks with room (or given back since)
  std::vector<std::uint32_t> unbacked_;  // chunk ids without memory, to be used again
  std::uint64_t rows_ = 0;
  std::uint64_t places_ = 0;  // of backed chunks
  std::uint64_t bytes_ = 0;
};

}  // namespace sparserow
