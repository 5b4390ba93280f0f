// The extension module `_server`: the store and the shard server, for a parameter-server process.
#include <pybind11/pybind11.h>

#include "shared_errors.h"

namespace sparserow::bindings {

void bind_store(pybind11::module_& module);     // server_store.cc
void bind_shard(pybind11::module_& module);     // server_shard.cc
void bind_changes(pybind11::module_& module);   // server_changes.cc
void bind_files(pybind11::module_& module);     // server_files.cc
void bind_snapshot(pybind11::module_& module);  // server_snapshot.cc

}  // namespace sparserow::bindings

PYBIND11_MODULE(_server, module) {
  module.doc() = "Row store and data-plane server of one shard.";
  sparserow::bindings::bind_errors(module);
  sparserow::bindings::bind_store(module);
  sparserow::bindings::bind_changes(module);
  sparserow::bindings::bind_shard(module);
  sparserow::bindings::bind_files(module);
  sparserow::bindings::bind_snapshot(module);
}
