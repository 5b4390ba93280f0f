// Lookups of a served model for Python: several tables in one call, and what each shard made of it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "client_transport.h"
#include "rpc/client/client.h"
#include "rpc/client/lookup_shards.h"
#include "session/cached_lookups.h"
#include "shared_errors.h"
#include "shared_tls.h"
#include "util/not_allowed.h"
#include "util/partition.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

// id, schema version, dim, keys (n) uint64
using TableLookup = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, py::array>;

std::span<const std::uint64_t> lookup_keys(const py::array& keys) {
  if (!py::isinstance<py::array_t<std::uint64_t, py::array::c_style>>(keys) || keys.ndim() != 1) {
    raise_if_error(must_be("keys", "a one-dimensional contiguous uint64 array"));
  }
  return {static_cast<const std::uint64_t*>(keys.data()), static_cast<std::size_t>(keys.size())};
}

// One table of a call: what is asked of the shards, unique and grouped, and where it goes.
struct LookupPart {
  std::uint32_t dim = 0;
  std::span<const std::uint64_t> keys;
  Partition partition;
  std::shared_ptr<RowMemory> rows;
  std::vector<std::uint64_t> versions;
  std::vector<std::uint8_t> found;
  float* out_rows = nullptr;
  std::uint64_t* out_versions = nullptr;
  bool* out_found = nullptr;
  bool* out_answered = nullptr;

  void deliver(std::span<const rpc::ShardAnswer> answers) const {
    std::vector<std::uint8_t> answered(partition.keys.size(), 0);
    for (std::size_t shard = 0; shard < answers.size(); ++shard) {
      if (!answers[shard].status.is_ok()) continue;
      std::fill(answered.begin() + partition.shard_begin[shard], answered.begin() + partition.shard_begin[shard + 1],
                std::uint8_t{1});
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t from = partition.inverse[i];
      out_answered[i] = answered[from] != 0;
      if (out_answered[i]) {
        std::memcpy(out_rows + i * dim, rows->data() + from * dim, dim * sizeof(float));
      } else {
        std::fill_n(out_rows + i * dim, dim, 0.0f);
      }
      out_versions[i] = out_answered[i] ? versions[from] : 0;
      out_found[i] = out_answered[i] && found[from] != 0;
    }
  }
};

class LookupClient {
 public:
  explicit LookupClient(rpc::ClientOptions options) : client_(value_or_raise(rpc::Client::connect(options))) {}

  [[nodiscard]] std::shared_ptr<rpc::LookupShards> shards(std::uint32_t model) const {
    return std::make_shared<rpc::LookupShards>(client_, model);
  }

  py::tuple lookup(std::uint32_t model, const std::vector<TableLookup>& tables, std::int64_t deadline_ms,
                   std::uint64_t routing_key) const {
    if (deadline_ms < 1) {
      raise_if_error(not_allowed("deadline_ms", deadline_ms, ">= 1"));
    }
    std::vector<LookupPart> parts(tables.size());
    py::list out;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      const auto& [id, schema_version, dim, keys] = tables[t];
      if (dim < 1 || dim > kMaxDim) raise_if_error(not_allowed("dim", dim, range_text(1, kMaxDim)));
      LookupPart& part = parts[t];
      part.dim = dim;
      part.keys = lookup_keys(keys);
      const auto n = static_cast<py::ssize_t>(part.keys.size());
      py::array_t<float> rows({n, static_cast<py::ssize_t>(dim)});
      py::array_t<std::uint64_t> versions(n);
      py::array_t<bool> found(n);
      py::array_t<bool> answered(n);
      part.out_rows = rows.mutable_data();
      part.out_versions = versions.mutable_data();
      part.out_found = found.mutable_data();
      part.out_answered = answered.mutable_data();
      out.append(py::make_tuple(rows, versions, found, answered));
    }
    std::vector<rpc::ShardAnswer> answers;
    Status status;
    {
      const py::gil_scoped_release released;
      status = ask(tables, parts, {model, routing_key, std::chrono::milliseconds(deadline_ms)}, answers);
    }
    raise_if_error(status);
    py::list results;
    for (const rpc::ShardAnswer& answer : answers) {
      if (!answer.is_asked) {
        results.append(py::none());
      } else {
        results.append(py::make_tuple(answer.version, static_cast<int>(answer.status.code()), answer.status.message()));
      }
    }
    return py::make_tuple(out, results);
  }

 private:
  Status ask(const std::vector<TableLookup>& tables, std::vector<LookupPart>& parts, const rpc::LookupOptions& options,
             std::vector<rpc::ShardAnswer>& answers) const {
    std::vector<TablePull> pulls;
    Partitioner partitioner(client_->slot_owner(), client_->shard_count());
    for (std::size_t t = 0; t < parts.size(); ++t) {
      LookupPart& part = parts[t];
      partitioner.partition(std::get<0>(tables[t]), part.keys, part.partition);
      const std::size_t uniques = part.partition.keys.size();
      part.rows = client_->make_rows(uniques * part.dim);
      part.versions.resize(uniques);
      part.found.resize(uniques);
      pulls.push_back({.table_id = std::get<0>(tables[t]),
                       .schema_version = std::get<1>(tables[t]),
                       .dim = part.dim,
                       .keys = part.partition.keys,
                       .shard_begin = part.partition.shard_begin,
                       .rows = {part.rows->data(), uniques * part.dim},
                       .versions = part.versions,
                       .found = part.found,
                       .memory = part.rows});
    }
    SR_RETURN_IF_ERROR(client_->lookup(pulls, options, answers));
    for (const LookupPart& part : parts) part.deliver(answers);
    return Status::ok();
  }

  std::shared_ptr<rpc::Client> client_;
};

std::unique_ptr<LookupClient> make_lookup_client(const std::vector<std::pair<std::string, std::uint16_t>>& shards,
                                                 const py::array& slot_owner, std::uint32_t route_epoch,
                                                 std::uint64_t cluster_id, std::uint32_t connect_timeout_ms,
                                                 const TlsTuple& tls, std::string token, const std::string& transport) {
  using Owners = py::array_t<std::uint16_t, py::array::c_style>;
  if (!py::isinstance<Owners>(slot_owner) || slot_owner.ndim() != 1) {
    raise_if_error(must_be("slot_owner", "a one-dimensional contiguous uint16 array"));
  }
  rpc::ClientOptions options;
  options.transport = transport_of(transport);
  for (const auto& [host, port] : shards) options.shards.push_back({host, port});
  const auto* owners = static_cast<const std::uint16_t*>(slot_owner.data());
  options.slot_owner.assign(owners, owners + slot_owner.size());
  options.route_epoch = route_epoch;
  options.cluster_id = cluster_id;
  options.connect_timeout_ms = connect_timeout_ms;
  options.is_lazy = true;
  options.tls = tls_of<rpc::TlsContext::for_client>(tls);
  options.token = std::move(token);
  return std::make_unique<LookupClient>(std::move(options));
}

}  // namespace

void bind_lookup(py::module_& module) {
  py::class_<rpc::LookupShards, RowReader, std::shared_ptr<rpc::LookupShards>>(module, "LookupShards");
  py::class_<CachedLookups, RowReader, std::shared_ptr<CachedLookups>>(module, "CachedLookups")
      .def(py::init([](std::shared_ptr<rpc::LookupShards> shards,
                       const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables, std::uint64_t capacity_bytes,
                       std::int64_t ttl_ms) {
             std::vector<CachedTable> cached;
             for (const auto& [id, dim] : tables) cached.push_back({id, dim});
             CachedLookupsOptions options;
             options.capacity_bytes = capacity_bytes;
             options.ttl = std::chrono::milliseconds(ttl_ms);
             return value_or_raise(CachedLookups::create(std::move(shards), cached, options));
           }),
           py::arg("shards"), py::arg("tables"), py::kw_only(), py::arg("capacity_bytes"), py::arg("ttl_ms"))
      .def("stats", [](const CachedLookups& self) {
        py::dict out;
        out["hits"] = self.stats().hits;
        out["misses"] = self.stats().misses;
        out["hit_age_ms"] = self.stats().hit_age_ms;
        return out;
      });
  py::class_<LookupClient>(module, "LookupClient")
      .def(py::init(&make_lookup_client), py::kw_only(), py::arg("shards"), py::arg("slot_owner"),
           py::arg("route_epoch"), py::arg("cluster_id") = 0, py::arg("connect_timeout_ms") = 5'000,
           py::arg("tls") = TlsTuple(), py::arg("token") = "", py::arg("transport") = "auto")
      .def("shards", &LookupClient::shards, py::arg("model"))
      .def("lookup", &LookupClient::lookup, py::arg("model"), py::arg("tables"), py::kw_only(), py::arg("deadline_ms"),
           py::arg("routing_key") = 0);
}

}  // namespace sparserow::bindings
