#include "rpc/server/served_models.h"

#include <mutex>
#include <utility>

#include "util/random.h"

namespace sparserow::rpc {

bool routes_to_canary(std::uint64_t routing_key, double share) noexcept {
  return static_cast<double>(mix_bits(routing_key) >> 11) * 0x1p-53 < share;
}

void ServedModels::set(std::uint32_t handle, ServedModel model) {
  const std::unique_lock lock(mutex_);
  std::swap(models_[handle], model);  // what was there is destroyed after the lock
}

void ServedModels::remove(std::uint32_t handle) {
  ServedModel last;
  const std::unique_lock lock(mutex_);
  const auto found = models_.find(handle);
  if (found == models_.end()) return;
  last = std::move(found->second);
  models_.erase(found);
}

ServedVersion ServedModels::find(std::uint32_t handle, std::uint64_t routing_key) const {
  const std::shared_lock lock(mutex_);
  const auto found = models_.find(handle);
  if (found == models_.end()) return {};
  const ServedModel& model = found->second;
  const bool is_canary =
      routing_key != 0 && model.canary.store != nullptr && routes_to_canary(routing_key, model.canary_share);
  return is_canary ? model.canary : model.main;
}

}  // namespace sparserow::rpc
