// An online service in C++: a published model, compiled by AOTInductor, with rows from the serving processes. No
// Python.
//
//   online_inference PACKAGE HOST:PORT SLOTS MODEL@VERSION NAMESPACE/TABLE=DIM...
//
// HOST:PORT is the data plane of the one serving process (`sparserow serve --shard 0/1`); SLOTS is the
// cluster's slot count. The model takes ids (n, k) int64: each line of the standard input has the k ids of one sample.
// Prints the output, one value a line. docs/serving.md says how the package is made and this file is built.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <iostream>
#include <sstream>

#include "rpc/client/lookup_shards.h"
#include "session/session.h"
#include "util/hash.h"

namespace {

using sparserow::rpc::Endpoint;

void check(const sparserow::Status& status) {
  if (!status.is_ok())
    throw std::runtime_error(std::string(sparserow::code_name(status.code())) + ": " + status.message());
}

[[noreturn]] void refuse(const std::string& what, const std::string& allowed) {
  throw std::runtime_error("InvalidArgument: " + what + "; allowed: " + allowed);
}

Endpoint endpoint_of(const std::string& address) {
  const auto colon = address.rfind(':');
  if (colon == std::string::npos) refuse("address '" + address + "'", "HOST:PORT");
  return {address.substr(0, colon), static_cast<std::uint16_t>(std::stoul(address.substr(colon + 1)))};
}

sparserow::BindingSpec table_of(const std::string& argument) {
  const auto equals = argument.rfind('=');
  if (equals == std::string::npos) refuse("table '" + argument + "'", "NAMESPACE/TABLE=DIM");
  sparserow::BindingSpec spec;
  spec.name = argument.substr(0, equals);
  spec.table_id = sparserow::id_of_name(spec.name);
  spec.dim = static_cast<std::uint32_t>(std::stoul(argument.substr(equals + 1)));
  return spec;
}

torch::Tensor read_ids() {
  std::vector<std::int64_t> ids;
  std::int64_t samples = 0;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    for (std::int64_t id = 0; words >> id;) ids.push_back(id);
    if (!words.eof()) refuse("line '" + line + "'", "integers");
    ++samples;
  }
  if (samples == 0 || ids.size() % static_cast<std::size_t>(samples) != 0) {
    refuse("standard input", "one or more lines of equally many ids");
  }
  return torch::tensor(ids, torch::kLong).reshape({samples, -1});
}

void run(int argc, char** argv) {
  if (argc < 6) refuse("arguments", "PACKAGE HOST:PORT SLOTS MODEL@VERSION NAMESPACE/TABLE=DIM...");
  const c10::InferenceMode inference;
  sparserow::rpc::ClientOptions options;
  options.shards = {endpoint_of(argv[2])};
  options.slot_owner.assign(std::stoul(argv[3]), 0);
  options.route_epoch = 1;  // of one shard
  auto client = sparserow::rpc::Client::connect(options);
  check(client.status());
  const auto shards = std::make_shared<sparserow::rpc::LookupShards>(client.value(), sparserow::id_of_name(argv[4]));
  auto session = sparserow::Session::create(shards, {});
  check(session.status());
  for (int i = 5; i < argc; ++i) check(session.value()->bind(table_of(argv[i])));
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const at::Tensor scores = model.run({read_ids()})[0].contiguous();
  for (std::int64_t i = 0; i < scores.numel(); ++i) std::cout << scores.const_data_ptr<float>()[i] << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "online_inference: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
