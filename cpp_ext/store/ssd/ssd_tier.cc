#include "store/ssd/ssd_tier.h"

#include <algorithm>
#include <cstring>

#include "store/ssd/rocksdb_tier.h"

namespace sparserow {
namespace {

constexpr std::size_t kTableAt = 2;
constexpr std::size_t kHashAt = 6;

template <class T>
void put_big_endian(T value, char* out) noexcept {
  for (std::size_t i = 0; i < sizeof value; ++i) out[i] = static_cast<char>(value >> (8 * (sizeof value - 1 - i)));
}

}  // namespace

SsdKey ssd_key_of_hash(std::uint32_t slot, std::uint32_t table_id, std::uint64_t hash) noexcept {
  SsdKey out;
  put_big_endian(static_cast<std::uint16_t>(slot), out.data());
  put_big_endian(table_id, out.data() + kTableAt);
  put_big_endian(hash, out.data() + kHashAt);
  return out;
}

void SsdBatch::put(const SsdKey& key, std::span<const std::byte> image, Before before, SsdStamps stamps) {
  writes_.push_back({key, true, before, images_.size(), image.size(), stamps});
  images_.insert(images_.end(), image.begin(), image.end());
}

void SsdBatch::erase(const SsdKey& key) { writes_.push_back({key, false, Before::kImage, 0, 0, {}}); }

void SsdBatch::clear() noexcept {
  writes_.clear();
  images_.clear();
}

void SsdBatch::sort_by_key() {
  std::stable_sort(writes_.begin(), writes_.end(), [](const Write& left, const Write& right) {
    return std::memcmp(left.key.data(), right.key.data(), left.key.size()) < 0;
  });
}

Result<SsdEngine> ssd_engine_of(std::string_view word) {
  if (word == "pages") return SsdEngine::kPages;
  if (word == "rocksdb") return SsdEngine::kRocksdb;
  return Status(Code::kInvalidArgument,
                "ssd_engine: '" + std::string(word) + "' is not allowed; allowed: pages, rocksdb");
}

Status SsdTier::visit_table(std::uint32_t table_id, std::uint32_t slot_count, const WantsStamps& /*wants*/,
                            const VisitStamped& visit) {
  bool goes_on = true;
  for (std::uint32_t slot = 0; slot < slot_count && goes_on; ++slot) {
    SR_RETURN_IF_ERROR(
        visit_slot(slot, table_id, 0, [&](std::uint64_t key, std::span<const std::byte> image) -> Result<bool> {
          const auto stamps = visit(key, image);
          if (!stamps.is_ok()) return stamps.status();
          return goes_on = stamps.value().has_value();
        }));
  }
  return Status::ok();
}

bool SsdTier::has_rocksdb() noexcept { return !rocksdb_version().empty(); }

}  // namespace sparserow
