// The extension module `_bench`: what benchmarks measure against. A wheel is without it.
#include <pybind11/pybind11.h>

#include "shared_errors.h"

namespace sparserow::bindings {

void bind_flat_adagrad(pybind11::module_& module);  // bench_flat_adagrad.cc
void bind_raw_ssd(pybind11::module_& module);       // bench_raw_ssd.cc
void bind_open_loop(pybind11::module_& module);     // bench_open_loop.cc
void bind_commit_load(pybind11::module_& module);   // bench_commit_load.cc
void bind_raw_tls(pybind11::module_& module);       // bench_raw_tls.cc
void bind_leased_rows(pybind11::module_& module);   // bench_leased_rows.cc

}  // namespace sparserow::bindings

PYBIND11_MODULE(_bench, module) {
  module.doc() = "Yardsticks and loads of the benchmarks.";
  sparserow::bindings::bind_errors(module);
  sparserow::bindings::bind_flat_adagrad(module);
  sparserow::bindings::bind_raw_ssd(module);
  sparserow::bindings::bind_open_loop(module);
  sparserow::bindings::bind_commit_load(module);
  sparserow::bindings::bind_raw_tls(module);
  sparserow::bindings::bind_leased_rows(module);
}
