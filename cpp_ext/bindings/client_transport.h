// How a shard is reached, by the name that Python has for it (proto/transport.py).
#pragma once

#include <string>

#include "rpc/client/client.h"
#include "shared_errors.h"
#include "util/not_allowed.h"

namespace sparserow::bindings {

inline rpc::Transport transport_of(const std::string& name) {
  if (name == "auto") return rpc::Transport::kAuto;
  if (name == "tcp") return rpc::Transport::kTcp;
  if (name == "shm") return rpc::Transport::kSharedMemory;
  raise_error(not_allowed("transport", name, "auto, tcp, shm"));
}

}  // namespace sparserow::bindings
