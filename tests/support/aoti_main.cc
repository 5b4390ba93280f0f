// Runs an AOTInductor package that looks up distributed tables, in a process without Python.
//
//   aoti_main PACKAGE NAME...   each NAME is a table of dim 4 whose row k is (k, k + 0.25, k + 0.5, k + 0.75)
//
// Input of the model: ids [1, 5, 9] and bags [[1, 2], [3, 4], [5, 5]]. Prints the output, one value a line, then
// "python" when a Python library is mapped into the process, else "no python".
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>

#include "session/session.h"
#include "shards/local_shards.h"

namespace {

using sparserow::Status;

void check(const Status& status) {
  if (!status.is_ok()) throw std::runtime_error(status.message());
}

std::uint32_t add_table(sparserow::Store& store, const std::string& name) {
  sparserow::TableSchema schema;
  schema.id = sparserow::id_of_name(name);
  schema.name = name;
  schema.dim = 4;
  check(store.create_table(schema));
  std::vector<std::uint64_t> keys;
  std::vector<float> rows;
  for (std::uint64_t key = 0; key < 10; ++key) {
    keys.push_back(key);
    for (int c = 0; c < 4; ++c) rows.push_back(static_cast<float>(key) + 0.25f * static_cast<float>(c));
  }
  check(store.assign(schema.id, keys, rows.data()));
  return schema.id;
}

bool has_python() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("libpython") != std::string::npos || line.find("libtorch_python") != std::string::npos) return true;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const c10::InferenceMode inference;
    auto store = sparserow::Store::create({});
    check(store.status());
    const std::shared_ptr<sparserow::Store> held = std::move(store).value();
    auto shards = sparserow::rpc::LocalShards::create({held});
    check(shards.status());
    auto session = sparserow::Session::create(shards.value(), {});
    check(session.status());
    for (int i = 2; i < argc; ++i) {
      sparserow::BindingSpec spec;
      spec.name = argv[i];
      spec.table_id = add_table(*held, spec.name);
      spec.dim = 4;
      check(session.value()->bind(spec));
    }
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const auto ids = torch::tensor({1, 5, 9}, torch::kLong);
    const auto bags = torch::tensor({{1, 2}, {3, 4}, {5, 5}}, torch::kLong);
    const at::Tensor out = model.run({ids, bags})[0].contiguous();
    for (std::int64_t i = 0; i < out.numel(); ++i) std::cout << out.const_data_ptr<float>()[i] << "\n";
    std::cout << (has_python() ? "python" : "no python") << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
