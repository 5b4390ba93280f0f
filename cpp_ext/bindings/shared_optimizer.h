// The options of an optimizer from Python: a dict by name, of which any may be left out.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <type_traits>
#include <variant>

#include "schema/optimizer_spec.h"
#include "shared_errors.h"
#include "util/not_allowed.h"

namespace sparserow::bindings {

// A flag is a bool in Python and a number is a float.
inline pybind11::object option_of(const OptimizerSpec& spec, const OptimizerOption& option) {
  const bool is_number = std::holds_alternative<float OptimizerSpec::*>(option.field);
  return is_number ? pybind11::object(pybind11::float_(option.value(spec)))
                   : pybind11::object(pybind11::bool_(option.value(spec) != 0));
}

// Raises InvalidArgument where a name, "kind" apart, is no option of any optimizer. validate() checks the values.
inline OptimizerSpec optimizer_of(OptimizerKind kind, const pybind11::dict& options) {
  OptimizerSpec spec{.kind = kind};
  for (const auto& [key, value] : options) {
    const auto name = key.cast<std::string>();
    std::string names;
    bool is_known = name == "kind";
    for (const OptimizerOption& option : optimizer_options()) {
      names += (names.empty() ? "" : ", ") + std::string(option.name);
      if (option.name != name) continue;
      is_known = true;
      std::visit(
          [&spec, given = value](auto field) {
            spec.*field = given.template cast<std::remove_reference_t<decltype(spec.*field)>>();
          },
          option.field);
    }
    if (!is_known) raise_if_error(not_allowed("OptimizerSpec", name, names));
  }
  return spec;
}

}  // namespace sparserow::bindings
