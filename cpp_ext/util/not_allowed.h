// The two texts of a refused argument: every error of this kind names the field and what is allowed.
#pragma once

#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

#include "util/status.h"

namespace sparserow {

// InvalidArgument "FIELD: VALUE is not allowed; allowed: ALLOWED". Text is shown in single quotes, numbers as they are.
template <class T>
[[nodiscard]] Status not_allowed(std::string_view field, const T& value, std::string_view allowed) {
  std::ostringstream text;
  text << field << ": ";
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    text << '\'' << std::string_view(value) << '\'';
  } else {
    text << +value;
  }
  text << " is not allowed; allowed: " << allowed;
  return {Code::kInvalidArgument, text.str()};
}

// InvalidArgument "FIELD: allowed: ALLOWED", where the value is an array or bytes and is not shown.
[[nodiscard]] inline Status must_be(std::string_view field, std::string_view allowed) {
  return {Code::kInvalidArgument, std::string(field) + ": allowed: " + std::string(allowed)};
}

// "[LOW, HIGH]": both ends are allowed.
template <class Low, class High>
[[nodiscard]] std::string range_text(Low low, High high) {
  std::ostringstream text;
  text << '[' << +low << ", " << +high << ']';
  return text.str();
}

// "[0, END)": the end is not allowed.
template <class End>
[[nodiscard]] std::string below_text(End end) {
  std::ostringstream text;
  text << "[0, " << +end << ')';
  return text.str();
}

}  // namespace sparserow
