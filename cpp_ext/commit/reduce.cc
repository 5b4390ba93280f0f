#include "commit/reduce.h"

#include <algorithm>
#include <array>

#include "util/partition.h"

namespace sparserow {
namespace {

constexpr std::array<std::uint16_t, 2> kOneShard{0, 0};
constexpr std::size_t kRowsAPiece = std::size_t{1} << 15;

// Where each key occurs: occurrences of unique key u are row_of[begin[u] .. begin[u + 1]), in rank order.
struct Occurrence {
  const float* grad;
  double scale;
};
struct Index {
  std::vector<std::uint32_t> begin;  // (u + 1)
  std::vector<Occurrence> rows;      // (n)
};

Index index_rows(std::uint32_t dim, std::span<const ReduceInput> inputs, const Partition& partition) {
  Index index;
  index.begin.assign(partition.keys.size() + 1, 0);
  for (const std::uint32_t unique : partition.inverse) ++index.begin[unique + 1];
  for (std::size_t u = 0; u < partition.keys.size(); ++u) index.begin[u + 1] += index.begin[u];
  std::vector<std::uint32_t> next(index.begin.begin(), index.begin.end() - 1);
  index.rows.resize(partition.inverse.size());
  std::size_t at = 0;
  for (const ReduceInput& input : inputs) {
    for (std::size_t i = 0; i < input.block->keys.size(); ++i, ++at) {
      index.rows[next[partition.inverse[at]]++] = {input.block->grads + i * dim, input.scale};
    }
  }
  return index;
}

void sum_rows(std::uint32_t dim, const Index& index, std::size_t begin, std::size_t end, float* out) {
  std::vector<double> sum(dim);
  for (std::size_t u = begin; u < end; ++u) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (std::uint32_t row = index.begin[u]; row < index.begin[u + 1]; ++row) {
      const Occurrence& occurrence = index.rows[row];
      for (std::uint32_t d = 0; d < dim; ++d) sum[d] += occurrence.scale * static_cast<double>(occurrence.grad[d]);
    }
    for (std::uint32_t d = 0; d < dim; ++d) out[u * dim + d] = static_cast<float>(sum[d]);
  }
}

}  // namespace

void reduce(std::uint32_t table_id, std::uint32_t dim, std::span<const ReduceInput> inputs, std::uint32_t parts,
            const ParallelFor& parallel_for, Reduced& out) {
  std::vector<std::uint64_t> ids;
  for (const ReduceInput& input : inputs) ids.insert(ids.end(), input.block->keys.begin(), input.block->keys.end());
  Partition partition;
  Partitioner(kOneShard, 1).partition(table_id, ids, partition);
  const Index index = index_rows(dim, inputs, partition);

  // Uniques stand in first-seen order, so those that an input brings first are a range.
  out.first_in.assign(1, 0);
  std::size_t at = 0;
  for (const ReduceInput& input : inputs) {
    std::size_t end = out.first_in.back();
    for (std::size_t i = 0; i < input.block->keys.size(); ++i, ++at) {
      end = std::max<std::size_t>(end, partition.inverse[at] + std::size_t{1});
    }
    out.first_in.push_back(end);
  }
  out.keys = std::move(partition.keys);
  out.grads.resize(out.keys.size() * dim);
  const std::size_t uniques = out.keys.size();
  // Pieces are short, because an I/O thread that helps with one has other connections to serve.
  const auto pieces = std::max(parts, static_cast<std::uint32_t>(uniques / kRowsAPiece));
  const auto work = [&](std::uint32_t piece) {
    sum_rows(dim, index, uniques * piece / pieces, uniques * (piece + 1) / pieces, out.grads.data());
  };
  if (parallel_for && parts > 1) {
    parallel_for(pieces, work);
  } else {
    for (std::uint32_t piece = 0; piece < pieces; ++piece) work(piece);
  }
}

}  // namespace sparserow
