// How namespaces share the memory of a store with a budget. A namespace has a part of the budget: a share that was set
// for it, or an equal part of an eighth, which all those without a share and with tables have together.
//
// A namespace beyond its part may take what is left when the parts of all others stay free, as far as these have not
// filled them. So one that is alone takes all, and one that fills the memory up is refused before the others are.
//
// Thread-safe; the mutex is a leaf. What tables take is counted by atomics, a chunk of rows at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "util/mutex.h"

namespace sparserow {

// What the tables of one namespace take, and batches for them were promised, in bytes. Tables and batches own it.
struct NamespaceMemory {
  explicit NamespaceMemory(std::string namespace_name) : name(std::move(namespace_name)) {}
  [[nodiscard]] std::uint64_t taken() const noexcept {
    return used.load(std::memory_order_relaxed) + promised.load(std::memory_order_relaxed);
  }

  const std::string name;
  std::atomic<std::uint64_t> used{0};  // runs of rows and indexes, and admission filters
  std::atomic<std::uint64_t> promised{0};
};

class MemoryShares {
 public:
  explicit MemoryShares(std::uint64_t limit_bytes) : limit_(limit_bytes) {}

  // The memory of the namespace of a table, "namespace/name".
  [[nodiscard]] std::shared_ptr<NamespaceMemory> of_table(const std::string& full_name);
  // Replaces the shares of the limit, by namespace, in (0, 7/8]; the caller has checked them.
  void set(std::map<std::string, double> shares);

  // What others than `one` have not taken of their parts yet, when `one` is beyond its own with `bytes` more; else 0.
  [[nodiscard]] std::uint64_t bytes_for_others(const NamespaceMemory& one, std::uint64_t bytes) const;
  // Whether the namespace has taken no more than its part.
  [[nodiscard]] bool is_within_part(const NamespaceMemory& one) const;
  // The sum of the parts of others is at most this.
  [[nodiscard]] std::uint64_t most_parts() const noexcept { return most_parts_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t kCommonShare = 8;  // of the limit: an eighth

  [[nodiscard]] std::uint64_t part_of(const std::string& name) const SR_REQUIRES(mutex_);
  void recount() SR_REQUIRES(mutex_);

  const std::uint64_t limit_;
  std::atomic<std::uint64_t> most_parts_{0};
  mutable Mutex mutex_;
  std::map<std::string, double> shares_ SR_GUARDED_BY(mutex_);
  std::map<std::string, std::weak_ptr<NamespaceMemory>> namespaces_
      SR_GUARDED_BY(mutex_);                             // with tables, or promises for some
  std::uint64_t common_part_ SR_GUARDED_BY(mutex_) = 0;  // of each namespace without a share
};

}  // namespace sparserow
