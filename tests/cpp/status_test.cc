#include "util/status.h"

#include <doctest/doctest.h>

#include <memory>

namespace sparserow {
namespace {

Status fail_if(bool fail) {
  SR_RETURN_IF_ERROR(fail ? Status(Code::kDataLoss, "checksum") : Status::ok());
  return {Code::kInternal, "went on"};
}

TEST_CASE("code names are stable and unknown codes have one") {
  CHECK(code_name(Code::kOk) == "Ok");
  CHECK(code_name(Code::kResourceExhausted) == "ResourceExhausted");
  CHECK(code_name(Code::kInternal) == "Internal");
  CHECK(code_name(static_cast<Code>(99)) == "Unknown");
}

TEST_CASE("retryable codes") {
  for (std::uint16_t code = 0; code <= 10; ++code) {
    CHECK(is_retryable(static_cast<Code>(code)) == (code == 4 || code == 6 || code == 8));
  }
}

TEST_CASE("a result holds a value or a status, and moves") {
  Result<std::unique_ptr<int>> value = std::make_unique<int>(3);
  CHECK(value.is_ok());
  CHECK(value.status().is_ok());
  const std::unique_ptr<int> taken = std::move(value).value();
  CHECK(*taken == 3);
  const Result<int> failed = Status(Code::kNotFound, "no table");
  CHECK_FALSE(failed.is_ok());
  CHECK(failed.status().code() == Code::kNotFound);
  CHECK(failed.status().message() == "no table");
}

TEST_CASE("SR_RETURN_IF_ERROR returns early only on failure") {
  CHECK(fail_if(true).code() == Code::kDataLoss);
  CHECK(fail_if(false).code() == Code::kInternal);
}

}  // namespace
}  // namespace sparserow
