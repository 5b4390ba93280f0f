// The extension module `_client`: the data-plane client, and what a worker builds on it.
#include <pybind11/pybind11.h>

#include "bindings/client_cache.h"
#include "bindings/client_flat.h"
#include "bindings/client_local.h"
#include "bindings/client_pack.h"
#include "bindings/client_session.h"
#include "bindings/client_texts.h"
#include "bindings/shared_errors.h"

namespace sparserow::bindings {

void bind_shards(pybind11::module_& module);  // client_shards.cc: RowReader, Client
void bind_lookup(pybind11::module_& module);  // client_lookup.cc: LookupClient
void bind_build(pybind11::module_& module);   // client_build.cc

}  // namespace sparserow::bindings

PYBIND11_MODULE(_client, module) {
  module.doc() = "Data-plane client and session of a worker.";
  sparserow::bindings::bind_errors(module);
  sparserow::bindings::bind_shards(module);
  sparserow::bindings::bind_lookup(module);
  sparserow::bindings::bind_local_shards(module);
  sparserow::bindings::bind_flat_rows(module);
  sparserow::bindings::bind_pack(module);
  sparserow::bindings::bind_texts(module);
  sparserow::bindings::bind_session(module);
  sparserow::bindings::bind_cache(module);
  sparserow::bindings::bind_build(module);
}
