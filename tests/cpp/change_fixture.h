// Two small stores, one of which follows the other.
#pragma once

#include <doctest/doctest.h>

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "store/changes/change_page.h"

namespace sparserow {

constexpr std::uint32_t kDim = 4;
constexpr std::uint32_t kSlots = 8;

inline TableSchema schema_of(std::uint32_t id, Dtype dtype = Dtype::kFloat32) {
  return {.id = id, .name = "n/t" + std::to_string(id), .dim = kDim, .dtype = dtype, .init = {}, .optimizer = {}};
}

inline std::unique_ptr<Store> make_store(StoreOptions options = {}) {
  options.slot_count = kSlots;
  auto store = Store::create(options);
  REQUIRE(store.is_ok());
  REQUIRE(store.value()->create_table(schema_of(1)).is_ok());
  REQUIRE(store.value()->create_table(schema_of(2)).is_ok());
  return std::move(store).value();
}

inline void push(Store& store, std::uint32_t table, const std::vector<std::uint64_t>& keys, float value = 1.0f) {
  const std::vector<float> grads(keys.size() * kDim, value);
  REQUIRE(store.apply(table, keys, grads.data(), {.lr = 0.5f}).is_ok());
}

inline std::vector<std::uint64_t> range(std::uint64_t begin, std::uint64_t end) {
  std::vector<std::uint64_t> keys(end - begin);
  std::iota(keys.begin(), keys.end(), begin);
  return keys;
}

// Every row of both tables, with its version.
using Rows = std::map<std::pair<std::uint32_t, std::uint64_t>, std::pair<std::uint64_t, std::vector<float>>>;
inline Rows rows_of(const Store& store) {
  Rows all;
  for (const std::uint32_t table : {1u, 2u}) {
    const auto page = store.scan(table, 0, 1u << 20, false);
    REQUIRE(page.is_ok());
    for (std::size_t i = 0; i < page.value().keys.size(); ++i) {
      const float* row = page.value().rows.data() + i * kDim;
      all[{table, page.value().keys[i]}] = {page.value().versions[i], {row, row + kDim}};
    }
  }
  return all;
}

// Takes everything that the cursor has not got to `to`; returns up to which version it has each slot then, where it
// took something. acknowledges: else the pages are read once, as if acknowledgements were lost.
inline std::map<std::uint32_t, std::uint64_t> follow(Store& from, const std::string& cursor, Store& to,
                                                     std::uint64_t max_bytes = 4096, bool acknowledges = true) {
  std::map<std::uint32_t, std::uint64_t> versions;
  for (std::uint32_t begin = 0, tries = 0;; ++tries) {
    REQUIRE(tries < 1000);
    const auto page = read_changes(from, cursor, begin, max_bytes);
    REQUIRE(page.is_ok());
    if (page.value().slots == 0) return versions;
    begin = page.value().next_begin;
    const auto applied = apply_changes(to, page.value().bytes);
    REQUIRE(applied.is_ok());
    REQUIRE(from.changes().ack(cursor, {}, {}, applied.value().part).is_ok());
    for (const AppliedSlot& slot : applied.value().slots) {
      versions[slot.slot] = slot.version;
      if (!acknowledges) continue;
      REQUIRE(from.changes().ack(cursor, std::span(&slot.slot, 1), std::span(&slot.position, 1)).is_ok());
    }
    if (!acknowledges && page.value().is_last) return versions;
  }
}

inline std::vector<std::uint64_t> nothing() { return std::vector<std::uint64_t>(kSlots, 0); }

}  // namespace sparserow
