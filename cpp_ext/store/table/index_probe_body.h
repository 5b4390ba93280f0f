// The body of index_probe.h. Include it with SPARSEROW_ISA defined; no include guard, but one inclusion per source.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "store/table/index_probe.h"

namespace sparserow::SPARSEROW_ISA {
namespace {

// One bit per entry of the bucket that has the suffix; no more than one is set, as no suffix is there twice.
[[gnu::always_inline]] inline std::uint32_t matches_in(const IndexBucket& bucket, std::uint64_t suffix) noexcept {
#if defined(__AVX512F__)
  const __m512i line = _mm512_load_si512(&bucket);
  return _mm512_cmpeq_epi64_mask(line, _mm512_set1_epi64(static_cast<long long>(suffix))) & 0b11111u;
#elif defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi64x(static_cast<long long>(suffix));
  const __m256i equal = _mm256_cmpeq_epi64(_mm256_load_si256(reinterpret_cast<const __m256i*>(&bucket)), wanted);
  return static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) |
         static_cast<std::uint32_t>(bucket.suffixes[4] == suffix) << 4;
#else
  std::uint32_t matches = 0;
  for (std::uint32_t entry = 0; entry < IndexBucket::kEntries; ++entry) {
    matches |= static_cast<std::uint32_t>(bucket.suffixes[entry] == suffix) << entry;
  }
  return matches;
#endif
}

// The row of the entry that matches. Without one it reads what follows the rows, and the caller drops it.
[[gnu::always_inline]] inline std::uint32_t row_of(const IndexBucket& bucket, std::uint32_t matches) noexcept {
  const auto entry = static_cast<std::uint32_t>(__builtin_ctz(matches | 1u << IndexBucket::kEntries));
  std::uint32_t row = 0;
  __builtin_memcpy(&row, reinterpret_cast<const std::byte*>(&bucket) + offsetof(IndexBucket, rows) + entry * sizeof row,
                   sizeof row);
  return row;
}

// The bucket after one of the suffix's segment.
[[gnu::always_inline]] inline const IndexBucket* after(const IndexBucket* bucket, IndexSegment segment) noexcept {
  const IndexBucket* const first = segment.buckets();
  return ++bucket == first + segment.count() ? first : bucket;
}

// Compares suffixes with their buckets, of which at(j) is the j-th. `left` gets those that may be in a later bucket; it
// may be what `at` reads, as it is written no further than that was read.
template <class At>
[[gnu::always_inline]] inline std::size_t compare_each(const IndexBucket* const* buckets, const std::uint64_t* suffixes,
                                                       std::size_t count, At at, std::uint32_t* rows,
                                                       std::uint16_t* left) noexcept {
  std::size_t left_count = 0;
  for (std::size_t j = 0; j < count; ++j) {
    const std::size_t i = at(j);
    const IndexBucket& bucket = *buckets[i];
    const std::uint32_t matches = matches_in(bucket, suffixes[i]);
    const std::uint32_t row = row_of(bucket, matches);
    rows[i] = matches != 0 ? row : IndexBucket::kNoRow;
    left[left_count] = static_cast<std::uint16_t>(i);
    left_count += static_cast<std::size_t>((matches == 0) & (bucket.passed_over != 0));
  }
  return left_count;
}

void locate(const IndexTop& given, const std::uint64_t* suffixes, std::size_t count,
            const IndexBucket** buckets) noexcept {
  const IndexTop top = given;  // because a write to `buckets` could change what is read of it each time
  for (std::size_t i = 0; i < count; ++i) {
    const IndexSegment segment = top.segment_of(suffixes[i]);
    buckets[i] = segment.buckets() + segment.home(suffixes[i]);
    __builtin_prefetch(buckets[i]);
  }
}

std::size_t compare(const IndexTop& given, const std::uint64_t* suffixes, std::size_t count, std::uint32_t* rows,
                    const IndexBucket** buckets, std::uint16_t* left) noexcept {
  const IndexTop top = given;
  const std::size_t left_count = compare_each(
      buckets, suffixes, count, [](std::size_t j) __attribute__((always_inline)) { return j; }, rows, left);
  for (std::size_t j = 0; j < left_count; ++j) {
    const std::size_t i = left[j];
    const IndexSegment segment = top.segment_of(suffixes[i]);
    buckets[i] = after(buckets[i], segment);
    __builtin_prefetch(buckets[i]);
    __builtin_prefetch(after(buckets[i], segment));
  }
  return left_count;
}

void finish(const IndexTop& given, const std::uint64_t* suffixes, std::uint32_t* rows, const IndexBucket** buckets,
            const std::uint16_t* left_before, std::size_t count) noexcept {
  const IndexTop top = given;
  std::uint16_t left[kMostProbed];
  __builtin_memcpy(left, left_before, count * sizeof *left);
  for (std::uint32_t distance = 2; count != 0; ++distance) {
    const std::size_t unknown = compare_each(
        buckets, suffixes, count,
        [&left](std::size_t j) __attribute__((always_inline)) -> std::size_t { return left[j]; }, rows, left);
    count = 0;
    for (std::size_t j = 0; j < unknown; ++j) {
      const std::size_t i = left[j];
      const IndexSegment segment = top.segment_of(suffixes[i]);
      if (distance >= segment.count()) continue;  // every bucket was passed over, and none has it
      buckets[i] = after(buckets[i], segment);
      __builtin_prefetch(after(buckets[i], segment));
      left[count++] = static_cast<std::uint16_t>(i);
    }
  }
}

}  // namespace

extern const IndexProbeTable kIndexProbes;
const IndexProbeTable kIndexProbes = {locate, compare, finish};

}  // namespace sparserow::SPARSEROW_ISA
