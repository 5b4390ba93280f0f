// The one error taxonomy of Sparserow (docs/errors.md lists it for users).
//
// Inside C++ every fallible call returns Status or Result<T>; it becomes a frame at the data plane's
// edge and a Python exception at the binding's edge, each converted exactly once. Bytes from a peer
// never abort a process: they become kInvalidArgument or kDataLoss.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace sparserow {

// Values are part of the wire contract: never renumber, only append.
enum class Code : std::uint16_t {
  kOk = 0,
  kInvalidArgument = 1,     // the request can never succeed as written
  kNotFound = 2,            // no such table, job or namespace
  kFailedPrecondition = 3,  // the state of the system forbids it now (differing schema, lost prepare)
  kStaleRoute = 4,          // the caller's route epoch is not the shard's; refresh and retry
  kFenced = 5,              // the worker's epoch is over; it must register anew
  kUnavailable = 6,         // connection lost or server draining; retry with back-off
  kDeadlineExceeded = 7,    // the deadline passed; whether the effect happened is unknown
  kResourceExhausted = 8,   // memory, disk or in-flight budget reached; nothing was applied
  kDataLoss = 9,            // a checksum failed
  kInternal = 10,           // a bug of ours
  kOutsideQuorum = 11,      // the step has its quorum without this worker; go on with a later step
  kPermissionDenied = 12,   // the token is missing or unknown, or does not allow this; nothing was applied
};

// Returns the stable name used in messages and metrics ("ResourceExhausted").
[[nodiscard]] constexpr std::string_view code_name(Code code) noexcept {
  constexpr std::string_view kNames[] = {
      "Ok",       "InvalidArgument", "NotFound",         "FailedPrecondition", "StaleRoute",
      "Fenced",   "Unavailable",     "DeadlineExceeded", "ResourceExhausted",  "DataLoss",
      "Internal", "OutsideQuorum",   "PermissionDenied"};
  const auto index = static_cast<std::size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "Unknown";
}

// True when the same request may succeed later without a change by the caller.
[[nodiscard]] constexpr bool is_retryable(Code code) noexcept {
  return code == Code::kUnavailable || code == Code::kStaleRoute || code == Code::kResourceExhausted;
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] static Status ok() { return {}; }
  [[nodiscard]] bool is_ok() const noexcept { return code_ == Code::kOk; }
  [[nodiscard]] Code code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::move(value)) {}         // NOLINT: implicit by design
  Result(Status status) : content_(std::move(status)) {}  // NOLINT: implicit by design

  [[nodiscard]] bool is_ok() const noexcept { return std::holds_alternative<T>(content_); }
  [[nodiscard]] Status status() const { return is_ok() ? Status::ok() : std::get<Status>(content_); }
  [[nodiscard]] T& value() & { return std::get<T>(content_); }
  [[nodiscard]] const T& value() const& { return std::get<T>(content_); }
  [[nodiscard]] T&& value() && { return std::get<T>(std::move(content_)); }

 private:
  std::variant<Status, T> content_;
};

}  // namespace sparserow

// Returns early with the status of a failed expression.
#define SR_RETURN_IF_ERROR(expression)                                                      \
  do {                                                                                      \
    if (::sparserow::Status sr_status = (expression); !sr_status.is_ok()) return sr_status; \
  } while (false)
