// What the native core was built with.
#include <pybind11/pybind11.h>

#include "rpc/transport/tls.h"
#include "store/ssd/rocksdb_tier.h"
#include "util/cpu.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "AVX-512";
    case Isa::kAvx2:
      return "AVX2";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

py::dict build() {
  py::dict found;
#ifdef __clang__
  found["compiler"] = __VERSION__;
#else
  found["compiler"] = "GCC " __VERSION__;
#endif
  found["kernels"] = name_of(best_isa());
  found["rocksdb"] = rocksdb_version();
  found["openssl"] = rpc::openssl_version();
  return found;
}

}  // namespace

void bind_build(py::module_& module) { module.def("build", &build); }

}  // namespace sparserow::bindings
