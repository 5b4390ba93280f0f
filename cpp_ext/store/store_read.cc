// Store's reads: pull and scan. Neither changes logical state.
#include <algorithm>
#include <mutex>

#include "store/store_impl.h"
#include "store/tiering.h"
#include "util/not_allowed.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace sparserow {
namespace {

// Rows are written in scattered order, so the lines of an output that the caches do not hold are what a pull waits for.
// Those of outputs from kAheadBytes on are fetched with the rows. Of outputs from kStreamBytes on, whole lines are
// streamed past the caches instead, where rows have enough of them: a line that is streamed in parts is slower than one
// that is fetched (Intel Xeon, 50,000 rows of 256 bytes, 16 bytes off a line: 3.3 M rows/s by units of 16 bytes, 6.0
// fetched, 6.8 by whole lines; on a line 3.5 copied, 5.8 fetched, 6.8 streamed).
constexpr std::size_t kAheadBytes = std::size_t{64} << 10;
constexpr std::size_t kStreamBytes = std::size_t{4} << 20;
constexpr std::size_t kStreamedRow = 256;      // bytes of a row that may begin anywhere in a line
constexpr std::size_t kStreamedAligned = 128;  // of one that begins and ends with a line

[[gnu::always_inline]] inline std::size_t bytes_to_line(const std::byte* at) noexcept {
  return -reinterpret_cast<std::uintptr_t>(at) % kLine;
}

// Copies a row. Sizes that many tables have are known to the compiler, so that no call is made for them.
[[gnu::always_inline]] inline void copy_row(const std::byte* from, std::byte* to, std::size_t bytes) noexcept {
  switch (bytes) {
    case 16:
      std::memcpy(to, from, 16);
      break;
    case 32:
      std::memcpy(to, from, 32);
      break;
    case 64:
      std::memcpy(to, from, 64);
      break;
    case 128:
      std::memcpy(to, from, 128);
      break;
    default:
      std::memcpy(to, from, bytes);
  }
}

// Copies a row of whole 16-byte units to a place that begins at one: the place's whole lines without fetching them.
void copy_streaming(const std::byte* from, std::byte* to, std::size_t bytes) noexcept {
#if defined(__SSE2__)
  std::size_t at = bytes_to_line(to);
  std::memcpy(to, from, at);
  for (; at + kLine <= bytes; at += kLine) {
    for (std::size_t unit = at; unit < at + kLine; unit += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + unit),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + unit)));
    }
  }
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

// Makes streamed rows visible to the next reader of the buffer, on another thread too.
void finish_streaming() noexcept {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Writes rows of one table as `out_dtype` into `out`; keeps the scratch that conversions need.
class RowOutput {
 public:
  RowOutput(const Table& table, Dtype out_dtype, const std::byte* out, std::size_t rows) noexcept
      : table_(table), out_dtype_(out_dtype), row_bytes_(table.schema.dim * size_of(out_dtype)) {
    const std::size_t bytes = rows * row_bytes_;
    const auto address = reinterpret_cast<std::uintptr_t>(out);
    const bool is_aligned = address % kLine == 0 && row_bytes_ % kLine == 0;
    const bool is_streaming = bytes >= kStreamBytes && row_bytes_ >= (is_aligned ? kStreamedAligned : kStreamedRow) &&
                              row_bytes_ % 16 == 0 && address % 16 == 0 && table.schema.dtype == out_dtype;
    how_ = is_streaming ? How::kStreamed : bytes >= kAheadBytes ? How::kFetched : How::kCopied;
  }
  RowOutput(const RowOutput&) = delete;
  RowOutput& operator=(const RowOutput&) = delete;
  ~RowOutput() {
    if (how_ == How::kStreamed) finish_streaming();
  }

  [[nodiscard]] std::size_t row_bytes() const noexcept { return row_bytes_; }

  // Before a row is written: fetches the lines of its place that a write would wait for.
  [[gnu::always_inline]] void fetch_place(const std::byte* to) const noexcept {
    if (how_ == How::kFetched) {
      fetch_lines<true>(to, std::min(row_bytes_, kMaxFetched));
    } else if (how_ == How::kStreamed && bytes_to_line(to) != 0) {
      __builtin_prefetch(to, 1);
      __builtin_prefetch(to + row_bytes_ - 1, 1);
    }
  }

  [[gnu::always_inline]] void write_stored(const std::byte* weights, std::byte* out) {
    if (table_.schema.dtype != out_dtype_) {
      write_converted(weights, out);
    } else if (how_ == How::kStreamed) {
      copy_streaming(weights, out, row_bytes_);
    } else {
      copy_row(weights, out, row_bytes_);
    }
  }

  // As it would be read just after its creation: rounded to the stored dtype.
  void write_initial(std::uint64_t key, std::byte* out) {
    table_.initial_rows.fill(key, scratch());
    stored_.resize(sparserow::row_bytes(table_.schema.dtype, table_.schema.dim));
    convert_from_float(table_.schema.dtype, scratch(), stored_.data(), table_.schema.dim);
    write_stored(stored_.data(), out);
  }

 private:
  enum class How : std::uint8_t { kCopied, kFetched, kStreamed };  // where rows are written

  void write_converted(const std::byte* weights, std::byte* out) {
    const std::uint32_t dim = table_.schema.dim;
    if (out_dtype_ == Dtype::kFloat32) {
      convert_to_float(table_.schema.dtype, weights, reinterpret_cast<float*>(out), dim);
    } else {
      convert_to_float(table_.schema.dtype, weights, scratch(), dim);
      convert_from_float(out_dtype_, scratch(), out, dim);
    }
  }

  float* scratch() {
    scratch_.resize(table_.schema.dim);
    return scratch_.data();
  }

  const Table& table_;
  Dtype out_dtype_;
  std::size_t row_bytes_;
  How how_ = How::kCopied;
  std::vector<float> scratch_;
  std::vector<std::byte> stored_;
};

// Appends rows of one stripe from `suffix` on, in order of suffixes; returns false when the page is full before the
// end.
bool scan_stripe(const Table& table, const SlotOrder& slots, std::uint32_t stripe, std::uint64_t suffix,
                 std::uint32_t max_rows, bool with_state, ScanPage& page) {
  const TableStripe& stripe_rows = *table.stripes[stripe];
  for (;;) {
    RowIndex::Range range = stripe_rows.index.range_at(suffix);
    std::erase_if(range.entries, [suffix](const RowIndex::Entry& entry) { return entry.suffix < suffix; });
    std::sort(range.entries.begin(), range.entries.end(),
              [](const RowIndex::Entry& left, const RowIndex::Entry& right) { return left.suffix < right.suffix; });
    for (const RowIndex::Entry& entry : range.entries) __builtin_prefetch(stripe_rows.slab.data(entry.row));
    for (const RowIndex::Entry& entry : range.entries) {
      if (page.keys.size() == max_rows) {
        page.next_cursor = slots.position(stripe, entry.suffix);
        return false;
      }
      const RowRef found = stripe_rows.slab.at(entry.row);
      append_row(page, table, key_of_hash(table.schema.id, slots.hash(stripe, entry.suffix)), found.version(),
                 found.update_count(), found.weights(), with_state);
    }
    if (range.next == 0) return true;
    suffix = range.next;
  }
}

}  // namespace

void append_row(ScanPage& page, const Table& table, std::uint64_t key, std::uint64_t version,
                std::uint32_t update_count, const std::byte* data, bool with_state) {
  const std::uint32_t dim = table.schema.dim;
  page.keys.push_back(key);
  page.versions.push_back(version);
  page.update_counts.push_back(update_count);
  page.rows.resize(page.rows.size() + dim);
  convert_to_float(table.schema.dtype, data, page.rows.data() + page.rows.size() - dim, dim);
  if (!with_state) return;
  const auto* state = reinterpret_cast<const float*>(data + table.layout.state_offset);
  page.state.insert(page.state.end(), state, state + table.optimizer->state_floats());
}

Status Store::pull(std::uint32_t table_id, std::span<const std::uint64_t> keys, Dtype out_dtype, std::byte* out,
                   PullExtras extras) const {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (!is_valid(out_dtype)) return not_allowed("pull: output dtype", static_cast<int>(out_dtype), range_text(0, 2));
  SR_RETURN_IF_ERROR(table->failure());
  RowOutput writer(*table, out_dtype, out, keys.size());
  const bool is_plain = extras.versions.empty() && extras.found.empty() && !table->is_tiered;
  BatchOrder order;
  std::vector<Tiering::Miss> misses;
  for (std::size_t begin = 0; begin < keys.size(); begin += BatchOrder::kBlock) {
    const auto block = keys.subspan(begin, std::min(BatchOrder::kBlock, keys.size() - begin));
    const auto give = [&](std::size_t position, const std::byte* weights, std::uint64_t version) {
      const std::size_t at = begin + position;
      std::byte* to = out + at * writer.row_bytes();
      const bool exists = weights != nullptr;
      if (exists) {
        writer.write_stored(weights, to);
      } else {
        writer.write_initial(block[position], to);
      }
      if (!extras.versions.empty()) extras.versions[at] = version;
      if (!extras.found.empty()) extras.found[at] = exists ? 1 : 0;
    };
    const auto give_row = [&](std::size_t position, std::uint32_t stripe, std::uint32_t id) {
      const std::uint64_t version = extras.versions.empty() ? 0 : table->row(stripe, id).version();
      give(position, table->stripes[stripe]->slab.data(id), version);
    };
    order.group(table_id, impl_->slots, block);
    const auto visit = [&](std::uint32_t stripe, std::uint16_t position, std::uint64_t suffix, std::uint32_t id) {
      if (id != RowIndex::kNone && is_plain) {
        writer.write_stored(table->stripes[stripe]->slab.data(id), out + (begin + position) * writer.row_bytes());
      } else if (id != RowIndex::kNone) {
        give_row(position, stripe, id);
        if (table->is_tiered) table->stripes[stripe]->slab.meta(id).touch();
      } else if (table->ssd_rows[stripe].load(std::memory_order_relaxed) > 0) {
        misses.push_back({.key = block[position],
                          .suffix = suffix,
                          .position = position,
                          .stripe = static_cast<std::uint16_t>(stripe)});
      } else {
        give(position, nullptr, 0);
      }
    };
    const auto ahead = [&](std::size_t position) __attribute__((always_inline)) {
      writer.fetch_place(out + (begin + position) * writer.row_bytes());
    };
    for (std::uint32_t stripe = 0, end = 0; stripe < kStripes; stripe = end) {
      end = order.run_from(stripe, kMostProbed);
      const Impl::ReadLocks locks(*impl_, order, stripe, end);
      if (extras.versions.empty()) {
        walk_stripes<Fetch::kWeights>(*table, order, stripe, end, visit, ahead);
      } else {
        walk_stripes<Fetch::kWeightsAndHead>(*table, order, stripe, end, visit, ahead);
      }
    }
    if (table->is_tiered) impl_->count(block.size(), misses.size());
    if (misses.empty()) continue;
    SR_RETURN_IF_ERROR(impl_->tiering->resolve(*table, std::exchange(misses, {}), /*must_install=*/false,
                                               [&](const Tiering::Miss& miss, std::uint32_t id, const RowImage* image) {
                                                 if (id != RowIndex::kNone) {
                                                   give_row(miss.position, miss.stripe, id);
                                                 } else if (image != nullptr) {
                                                   give(miss.position, image->data, image->version);
                                                 } else {
                                                   give(miss.position, nullptr, 0);
                                                 }
                                               }));
  }
  return Status::ok();
}

// A cursor is a position in the order of slots, which growth of the index, creations and erasures do not disturb.
Result<ScanPage> Store::scan(std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                             bool with_state) const {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (max_rows == 0) return not_allowed("scan.max_rows", max_rows, ">= 1");
  if (impl_->tiering != nullptr) return scan_tiered(*table, cursor, max_rows, with_state);
  ScanPage page;
  std::uint64_t suffix = impl_->slots.path_at(cursor);
  for (std::uint32_t stripe = impl_->slots.stripe_at(cursor); stripe < impl_->slots.stripe_count();
       ++stripe, suffix = 0) {
    const std::shared_lock lock(impl_->stripes[stripe].mutex);
    if (table->stripes[stripe] == nullptr) continue;
    if (!scan_stripe(*table, impl_->slots, stripe, suffix, max_rows, with_state, page)) return page;
  }
  return page;
}

}  // namespace sparserow
