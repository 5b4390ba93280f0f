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

// Outputs beyond this are streamed past the caches: rows are written in scattered order, and fetching each
// output line only to overwrite it costs a third of a pull's memory traffic.
constexpr std::size_t kStreamBytes = std::size_t{4} << 20;

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

// Makes streamed rows visible to the next reader of the buffer, on another thread too.
void finish_streaming() noexcept {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Writes rows of one table as `out_dtype` into `out`; keeps the scratch that conversions need.
class RowWriter {
 public:
  RowWriter(const Table& table, Dtype out_dtype, const std::byte* out, std::size_t rows) noexcept
      : table_(table), out_dtype_(out_dtype), row_bytes_(table.schema.dim * size_of(out_dtype)) {
    is_streaming_ =
        rows * row_bytes_ >= kStreamBytes && row_bytes_ % 16 == 0 && reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  }
  RowWriter(const RowWriter&) = delete;
  RowWriter& operator=(const RowWriter&) = delete;
  ~RowWriter() {
    if (is_streaming_) finish_streaming();
  }

  [[nodiscard]] std::size_t row_bytes() const noexcept { return row_bytes_; }

  [[gnu::always_inline]] void write_stored(const std::byte* weights, std::byte* out) {
    if (table_.schema.dtype != out_dtype_) {
      write_converted(weights, out);
    } else if (is_streaming_) {
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
  bool is_streaming_ = false;
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
  RowWriter writer(*table, out_dtype, out, keys.size());
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
    for (std::uint32_t stripe = 0, end = 0; stripe < kStripes; stripe = end) {
      end = order.run_from(stripe, kMostProbed);
      const Impl::ReadLocks locks(*impl_, order, stripe, end);
      if (extras.versions.empty()) {
        walk_stripes<Fetch::kWeights>(*table, order, stripe, end, visit);
      } else {
        walk_stripes<Fetch::kWeightsAndHead>(*table, order, stripe, end, visit);
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
