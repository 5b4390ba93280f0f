// What an exception means to the peer whose request it ends.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "util/status.h"

namespace sparserow {

// The status of the exception under way; for catch blocks alone. `what` names the work that threw.
[[nodiscard]] inline Status caught_status(const std::string& what) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return {Code::kResourceExhausted, "the system refuses memory for " + what};
  } catch (const std::exception& error) {
    return {Code::kInternal, what + " failed: " + error.what()};
  } catch (...) {
    return {Code::kInternal, what + " failed"};
  }
}

}  // namespace sparserow
