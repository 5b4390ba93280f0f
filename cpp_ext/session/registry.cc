#include <map>

#include "session/binding.h"
#include "util/mutex.h"

namespace sparserow {
namespace {

struct Registry {
  Mutex mutex;
  std::map<std::string, std::shared_ptr<Binding>, std::less<>> bindings SR_GUARDED_BY(mutex);
};

// Never destroyed: an op may still run while static objects of the process are being destroyed.
Registry& registry() {
  static auto& instance = *std::make_unique<Registry>().release();
  return instance;
}

}  // namespace

Result<std::shared_ptr<Binding>> find_binding(std::string_view name) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  const auto found = all.bindings.find(name);
  if (found == all.bindings.end()) {
    return Status(Code::kFailedPrecondition,
                  "table '" + std::string(name) +
                      "' is not bound in this process: connect a session and distribute the model (or bind the "
                      "table) before running it");
  }
  return found->second;
}

Status register_binding(const std::shared_ptr<Binding>& binding) {
  Registry& all = registry();
  const MutexLock lock(all.mutex);
  if (all.bindings.emplace(binding->spec().name, binding).second) return Status::ok();
  return {Code::kFailedPrecondition, "table '" + binding->spec().name +
                                         "' is already bound in this process: close the session that holds it, or "
                                         "use another namespace"};
}

void unregister_binding(const Binding& binding) noexcept {
  Registry& all = registry();
  std::shared_ptr<Binding> last;  // destroyed outside of the lock
  const MutexLock lock(all.mutex);
  const auto found = all.bindings.find(binding.spec().name);
  if (found == all.bindings.end() || found->second.get() != &binding) return;
  last = std::move(found->second);
  all.bindings.erase(found);
}

}  // namespace sparserow
