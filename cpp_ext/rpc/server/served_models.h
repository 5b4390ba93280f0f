// What a serving process answers lookups from: stores by handle, replaced while it serves.
//
// A handle is id_of_name("MODEL@VERSION") or id_of_name("MODEL@ALIAS"). An alias may have a canary: a share of routing
// keys, chosen by their hash, is answered from another version. A lookup sees one version whole, since it keeps the
// store alive that it found.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>

#include "store/store.h"
#include "util/fair_mutex.h"

namespace sparserow::rpc {

struct ServedVersion {
  std::shared_ptr<Store> store;
  std::uint64_t number = 0;  // of the model's version; goes into every reply
};

struct ServedModel {
  ServedVersion main;
  ServedVersion canary;       // store null: none
  double canary_share = 0.0;  // of routing keys, [0, 1]
};

// Whether a routing key, which is not 0, belongs to the share [0, 1] that a canary answers.
[[nodiscard]] bool routes_to_canary(std::uint64_t routing_key, double share) noexcept;

class ServedModels {
 public:
  void set(std::uint32_t handle, ServedModel model);
  void remove(std::uint32_t handle);
  // routing_key 0: never the canary. store null: there is no such model.
  [[nodiscard]] ServedVersion find(std::uint32_t handle, std::uint64_t routing_key) const;

 private:
  mutable FairMutex mutex_;
  std::map<std::uint32_t, ServedModel> models_;  // guarded by mutex_
};

}  // namespace sparserow::rpc
