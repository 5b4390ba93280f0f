#include "rpc/observe/hot_keys.h"

#include <algorithm>
#include <utility>

#include "util/random.h"

namespace sparserow::rpc {

HotKeys::Sampler::Sampler(std::uint64_t seed) noexcept : state_(seed), skip_(0) { skip_ = gap() - 1; }

std::uint32_t HotKeys::Sampler::gap() noexcept {
  state_ += 0x9e3779b97f4a7c15ull;
  return 1 + static_cast<std::uint32_t>(mix_bits(state_) % (2 * kStride - 1));
}

void HotKeys::look_at(Sampler& sampler, std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  if (sampler.skip_ >= keys.size()) {
    sampler.skip_ -= keys.size();
    return;
  }
  if (mutex_.try_lock()) {
    const MutexLock lock(mutex_, std::adopt_lock);
    for (; sampler.skip_ < keys.size(); sampler.skip_ += sampler.gap()) count(table_id, keys[sampler.skip_]);
  } else {
    while (sampler.skip_ < keys.size()) sampler.skip_ += sampler.gap();
  }
  sampler.skip_ -= keys.size();
}

void HotKeys::add(std::uint32_t table_id, std::uint64_t key) {
  const MutexLock lock(mutex_);
  count(table_id, key);
}

void HotKeys::count(std::uint32_t table_id, std::uint64_t key) {
  if (++samples_ > kWindow) {  // halving keeps the order of the heap
    samples_ /= 2;
    for (HotKey& entry : heap_) {
      entry.count /= 2;
      entry.error /= 2;
    }
  }
  const auto known = places_.find({key, table_id});
  if (known != places_.end()) {
    ++heap_[known->second].count;
    sink(known->second);
    return;
  }
  if (heap_.size() < kCounters) {
    heap_.emplace_back();
    std::size_t at = heap_.size() - 1;
    for (; at > 0 && heap_[(at - 1) / 2].count > 1; at = (at - 1) / 2) place(at, heap_[(at - 1) / 2]);
    place(at, {.table_id = table_id, .key = key, .count = 1, .error = 0});
    return;
  }
  const HotKey smallest = heap_.front();
  places_.erase({smallest.key, smallest.table_id});
  place(0, {.table_id = table_id, .key = key, .count = smallest.count + 1, .error = smallest.count});
  sink(0);
}

void HotKeys::sink(std::size_t at) {
  const HotKey entry = heap_[at];
  while (true) {
    std::size_t child = 2 * at + 1;
    if (child >= heap_.size()) break;
    if (child + 1 < heap_.size() && heap_[child + 1].count < heap_[child].count) ++child;
    if (heap_[child].count >= entry.count) break;
    place(at, heap_[child]);
    at = child;
  }
  place(at, entry);
}

void HotKeys::place(std::size_t at, const HotKey& entry) {
  heap_[at] = entry;
  places_[{entry.key, entry.table_id}] = at;
}

HotKeys::Report HotKeys::report(std::size_t most) const {
  Report report;
  {
    const MutexLock lock(mutex_);
    report.samples = samples_;
    report.keys = heap_;
  }
  std::ranges::sort(report.keys, [](const HotKey& a, const HotKey& b) {
    return std::pair(b.count - b.error, a.key) < std::pair(a.count - a.error, b.key);
  });
  report.keys.resize(std::min(most, report.keys.size()));
  return report;
}

std::size_t HotKeys::NameHash::operator()(const Name& name) const noexcept {
  return static_cast<std::size_t>(mix_bits(name.key + name.table_id * 0x9e3779b97f4a7c15ull));
}

}  // namespace sparserow::rpc
