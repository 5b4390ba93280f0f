// Compiled instead of ssd_tier.cc where RocksDB is not installed.
#include "store/ssd/ssd_tier.h"

namespace sparserow {

struct SsdImages::Impl {};
struct SsdBatch::Impl {};
struct SsdTier::Impl {};

namespace {
Status not_built() {
  return {Code::kFailedPrecondition,
          "ssd_path: this build has no SSD tier; install librocksdb-dev and build again, or leave ssd_path out"};
}
}  // namespace

SsdKey ssd_key(std::uint32_t /*slot*/, std::uint32_t /*table_id*/, std::uint64_t /*key*/) noexcept { return {}; }
SsdImages::SsdImages() = default;
SsdImages::~SsdImages() = default;
std::span<const std::byte> SsdImages::at(std::size_t /*index*/) const noexcept { return {}; }
SsdBatch::SsdBatch() = default;
SsdBatch::~SsdBatch() = default;
void SsdBatch::put(const SsdKey& /*key*/, std::span<const std::byte> /*image*/) {}
void SsdBatch::erase(const SsdKey& /*key*/) {}
void SsdBatch::clear() {}
std::size_t SsdBatch::bytes() const noexcept { return 0; }

bool SsdTier::is_built() noexcept { return false; }
Result<std::unique_ptr<SsdTier>> SsdTier::open(const SsdOptions& /*options*/) { return not_built(); }
SsdTier::SsdTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SsdTier::~SsdTier() = default;
Status SsdTier::read(std::span<const SsdKey> /*keys*/, SsdImages& /*out*/) { return not_built(); }
Status SsdTier::write(SsdBatch& /*batch*/) { return not_built(); }
Status SsdTier::erase_table(std::uint32_t /*table_id*/, std::uint32_t /*slot_count*/) { return not_built(); }
Status SsdTier::visit_slot(std::uint32_t /*slot*/, std::uint32_t /*table_id*/,
                           const std::function<Status(std::uint64_t, std::span<const std::byte>)>& /*visit*/) {
  return not_built();
}
Status SsdTier::flush() { return not_built(); }
SsdStats SsdTier::stats() const { return {}; }

}  // namespace sparserow
