// Store's reads: pull and scan. Neither changes logical state.
#include <algorithm>
#include <mutex>

#include "store/store_impl.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace sparserow {
namespace {

// Outputs beyond this are streamed past the caches: rows are written in scattered order, and fetching each
// output line only to overwrite it costs a third of a pull's memory traffic.
constexpr std::size_t kStreamBytes = std::size_t{4} << 20;

// Copies whole 16-byte units to an aligned place without fetching its lines.
void copy_streaming(const std::byte* from, std::byte* to, std::size_t bytes) noexcept {
#if defined(__SSE2__)
  for (std::size_t at = 0; at < bytes; at += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

// Makes streamed rows visible to whom the buffer is handed to next, on another thread too.
void finish_streaming() noexcept {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Writes rows of one table as `out_dtype` into `out`; keeps the scratch that conversions need.
class RowWriter {
 public:
  RowWriter(const Table& table, Dtype out_dtype, const std::byte* out, std::size_t rows) noexcept
      : table_(table), out_dtype_(out_dtype) {
    is_streaming_ =
        rows * row_bytes() >= kStreamBytes && row_bytes() % 16 == 0 && reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  }
  RowWriter(const RowWriter&) = delete;
  RowWriter& operator=(const RowWriter&) = delete;
  ~RowWriter() {
    if (is_streaming_) finish_streaming();
  }

  [[nodiscard]] std::size_t row_bytes() const noexcept { return table_.schema.dim * size_of(out_dtype_); }

  void write_stored(const std::byte* weights, std::byte* out) {
    const std::uint32_t dim = table_.schema.dim;
    if (table_.schema.dtype == out_dtype_) {
      if (is_streaming_) {
        copy_streaming(weights, out, row_bytes());
      } else {
        std::memcpy(out, weights, row_bytes());
      }
    } else if (out_dtype_ == Dtype::kFloat32) {
      convert_to_float(table_.schema.dtype, weights, reinterpret_cast<float*>(out), dim);
    } else {
      convert_to_float(table_.schema.dtype, weights, scratch(), dim);
      convert_from_float(out_dtype_, scratch(), out, dim);
    }
  }

  // As it would be read just after its birth: rounded to the stored dtype.
  void write_initial(std::uint64_t key, std::byte* out) {
    table_.initial_rows.fill(key, scratch());
    stored_.resize(table_.schema.dim * size_of(table_.schema.dtype));
    convert_from_float(table_.schema.dtype, scratch(), stored_.data(), table_.schema.dim);
    write_stored(stored_.data(), out);
  }

 private:
  float* scratch() {
    scratch_.resize(table_.schema.dim);
    return scratch_.data();
  }

  const Table& table_;
  Dtype out_dtype_;
  bool is_streaming_ = false;
  std::vector<float> scratch_;
  std::vector<std::byte> stored_;
};

// Appends rows of one stripe from `row` on; returns the row to go on from, or RowSlab::kNone at its end.
std::uint32_t scan_stripe(const Table& table, const TableStripe& held, std::uint32_t row, std::uint32_t max_rows,
                          bool with_state, ScanPage& page) {
  const std::uint32_t dim = table.schema.dim;
  const std::uint32_t state_floats = with_state ? table.optimizer->state_floats() : 0;
  for (row = held.slab.next(row); row != RowSlab::kNone; row = held.slab.next(row + 1)) {
    if (page.keys.size() == max_rows) return row;
    const RowRef found(held.slab.at(row));
    page.keys.push_back(found.key());
    page.versions.push_back(found.version());
    page.update_counts.push_back(found.update_count());
    page.rows.resize(page.rows.size() + dim);
    convert_to_float(table.schema.dtype, found.weights(), page.rows.data() + page.rows.size() - dim, dim);
    const float* state = found.state(table.layout);
    page.state.insert(page.state.end(), state, state + state_floats);
  }
  return RowSlab::kNone;
}

}  // namespace

Status Store::pull(std::uint32_t table_id, std::span<const std::uint64_t> keys, Dtype out_dtype, std::byte* out,
                   PullExtras extras) const {
  const std::shared_ptr<Table> table = impl_->table(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (!is_valid(out_dtype)) return {Code::kInvalidArgument, "pull: unknown output dtype; allowed: 0 to 2"};
  RowWriter writer(*table, out_dtype, out, keys.size());
  BatchOrder order;
  for (std::size_t begin = 0; begin < keys.size(); begin += BatchOrder::kBlock) {
    const auto block = keys.subspan(begin, std::min(BatchOrder::kBlock, keys.size() - begin));
    order.group(table_id, impl_->options.slot_count, block);
    for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
      if (order.positions(stripe).empty()) continue;
      const std::shared_lock lock(impl_->stripes[stripe].mutex);
      walk_stripe(table->stripes[stripe].get(), order, stripe, table->layout.state_offset,
                  [&](std::uint16_t position, std::uint64_t hash, std::uint32_t candidate) {
                    const std::size_t at = begin + position;
                    std::byte* row = table->find(stripe, hash, block[position], candidate);
                    std::byte* to = out + at * writer.row_bytes();
                    if (row != nullptr) {
                      writer.write_stored(RowRef(row).weights(), to);
                    } else {
                      writer.write_initial(block[position], to);
                    }
                    if (extras.versions != nullptr) extras.versions[at] = row != nullptr ? RowRef(row).version() : 0;
                    if (extras.found != nullptr) extras.found[at] = row != nullptr ? 1 : 0;
                  });
    }
  }
  return Status::ok();
}

// A cursor is stripe << 32 | row id, the place to go on from. Rows keep their ids for life and are visited in
// order of ids, so growth of the index, births and erasures do not disturb it.
Result<ScanPage> Store::scan(std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                             bool with_state) const {
  const std::shared_ptr<Table> table = impl_->table(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (max_rows == 0) return Status(Code::kInvalidArgument, "scan: max_rows: 0 is not allowed; allowed: >= 1");
  if (cursor >> 32 >= kStripes) {
    return Status(Code::kInvalidArgument, "scan: cursor: not one that a scan returned; start again with 0");
  }
  ScanPage page;
  auto row = static_cast<std::uint32_t>(cursor);
  for (auto stripe = static_cast<std::uint32_t>(cursor >> 32); stripe < kStripes; ++stripe, row = 0) {
    const std::shared_lock lock(impl_->stripes[stripe].mutex);
    const TableStripe* held = table->stripes[stripe].get();
    if (held == nullptr) continue;
    const std::uint32_t next = scan_stripe(*table, *held, row, max_rows, with_state, page);
    if (next != RowSlab::kNone) {
      page.next_cursor = static_cast<std::uint64_t>(stripe) << 32 | next;
      return page;
    }
  }
  return page;
}

}  // namespace sparserow
