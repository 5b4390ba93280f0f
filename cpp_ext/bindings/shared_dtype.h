// Dtypes by their names in Python.
#pragma once

#include <string>

#include "bindings/shared_errors.h"
#include "util/dtype.h"
#include "util/not_allowed.h"

namespace sparserow::bindings {

// The dtype of a name; raises InvalidArgument, which names `field`.
inline Dtype dtype_of(const std::string& field, const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBFloat16;
  if (name == "float16") return Dtype::kFloat16;
  raise_error(not_allowed(field, name, "float32, bfloat16, float16"));
}

}  // namespace sparserow::bindings
