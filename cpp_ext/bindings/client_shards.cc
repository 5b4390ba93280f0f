// The data-plane client for Python, on numpy arrays, with ids as a caller has them (client_keyed.h). Every call that
// waits or copies rows runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client_keyed.h"
#include "client_transport.h"
#include "rpc/client/client.h"
#include "rpc/wire/trace_context.h"
#include "shared_dtype.h"
#include "shared_errors.h"
#include "shared_proof.h"
#include "shared_tls.h"
#include "util/finite.h"
#include "util/not_allowed.h"
#include "util/partition.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

using Keys = py::array_t<std::uint64_t, py::array::c_style>;
using SignedKeys = py::array_t<std::int64_t, py::array::c_style>;
using Rows = py::array_t<float, py::array::c_style>;
using Slots = py::array_t<std::uint16_t, py::array::c_style>;

[[noreturn]] void refuse(const Status& status) { raise_error(status); }

// (n) int64 or uint64; int64 must not be negative, for a key is what a torch id is.
std::span<const std::uint64_t> keys_of(const py::array& keys) {
  const bool is_signed = py::isinstance<SignedKeys>(keys);
  if ((!is_signed && !py::isinstance<Keys>(keys)) || keys.ndim() != 1) {
    refuse(must_be("keys", "a one-dimensional contiguous array of int64 or uint64"));
  }
  const std::span all(static_cast<const std::uint64_t*>(keys.data()), static_cast<std::size_t>(keys.size()));
  if (!is_signed) return all;
  constexpr std::uint64_t kSign = std::uint64_t{1} << 63;
  std::uint64_t bits = 0;  // of all keys: a loop without a branch takes several at once
  for (const std::uint64_t key : all) bits |= key;
  if ((bits & kSign) == 0) return all;
  const auto negative = std::find_if(all.begin(), all.end(), [](std::uint64_t key) { return (key & kSign) != 0; });
  refuse(not_allowed("keys[" + std::to_string(negative - all.begin()) + "]", static_cast<std::int64_t>(*negative),
                     ">= 0"));
}

const float* matrix_of(const py::array& matrix, const char* name, std::size_t rows, std::uint32_t dim) {
  if (!py::isinstance<Rows>(matrix) || matrix.ndim() != 2 || static_cast<std::size_t>(matrix.shape(0)) != rows ||
      matrix.shape(1) != static_cast<py::ssize_t>(dim)) {
    refuse(must_be(name,
                   "a contiguous float32 array of shape (" + std::to_string(rows) + ", " + std::to_string(dim) + ")"));
  }
  return static_cast<const float*>(matrix.data());
}

void check_dim(std::uint32_t dim) {
  if (dim == 0 || dim > kMaxDim) {
    refuse(not_allowed("dim", dim, range_text(1, kMaxDim)));
  }
}

Status check_finite(std::span<const std::uint64_t> keys, const float* grads, std::uint32_t dim) {
  if (all_finite(grads, keys.size() * dim)) return Status::ok();
  std::size_t count = 0;
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!all_finite(grads + i * dim, dim) && count++ == 0) first = keys[i];
  }
  return Status(Code::kInvalidArgument, "grads: " + std::to_string(count) + " of " + std::to_string(keys.size()) +
                                            " gradients are not finite, the first is key " + std::to_string(first) +
                                            "'s; nothing was sent");
}

std::shared_ptr<KeyedClient> connect(const std::vector<std::pair<std::string, std::uint16_t>>& shards,
                                     const py::array& slot_owner, rpc::ClientOptions options) {
  if (!py::isinstance<Slots>(slot_owner) || slot_owner.ndim() != 1) {
    refuse(must_be("slot_owner", "a one-dimensional contiguous uint16 array"));
  }
  for (const auto& [host, port] : shards) options.shards.push_back({host, port});
  const auto* owners = static_cast<const std::uint16_t*>(slot_owner.data());
  options.slot_owner.assign(owners, owners + slot_owner.size());
  auto client = [&] {
    const py::gil_scoped_release unlocked;
    return rpc::Client::connect(options);
  }();
  return std::make_shared<KeyedClient>(value_or_raise(std::move(client)));
}

CallOptions call_options(std::int64_t step, std::int64_t deadline_ms) {
  if (deadline_ms < 1) refuse(not_allowed("deadline_ms", deadline_ms, ">= 1"));
  return {.deadline = std::chrono::milliseconds(deadline_ms), .step = step};
}

CommitOptions commit_options(std::uint64_t sequence, std::int64_t step, bool grad_sum, std::int64_t deadline_ms) {
  const auto call = call_options(step, deadline_ms);
  return {.deadline = call.deadline, .sequence = sequence, .step = step, .grad_sum = grad_sum};
}

py::tuple pull(KeyedClient& client, std::uint32_t table_id, const py::array& keys, std::uint32_t dim,
               std::uint32_t schema_version, std::int64_t step, std::int64_t deadline_ms, bool versions, bool found) {
  check_dim(dim);
  const auto ids = keys_of(keys);
  const auto options = call_options(step, deadline_ms);
  const auto n = static_cast<py::ssize_t>(ids.size());
  Rows rows({n, static_cast<py::ssize_t>(dim)});
  py::object version_array = py::none();
  py::object found_array = py::none();
  std::uint64_t* version_data = nullptr;
  std::uint8_t* found_data = nullptr;
  if (versions) {
    py::array_t<std::uint64_t> array(n);
    version_data = array.mutable_data();
    version_array = std::move(array);
  }
  if (found) {
    py::array_t<bool> array(n);
    found_data = reinterpret_cast<std::uint8_t*>(array.mutable_data());
    found_array = std::move(array);
  }
  float* row_data = rows.mutable_data();
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = client.pull({table_id, schema_version, dim}, ids, row_data, version_data, found_data, options);
  }
  raise_if_error(status);
  return py::make_tuple(std::move(rows), std::move(version_array), std::move(found_array));
}

bool refuses_nonfinite(const std::string& on_nonfinite) {
  if (on_nonfinite == "raise") return true;
  if (on_nonfinite == "send") return false;
  refuse(not_allowed("on_nonfinite", on_nonfinite, "raise, send"));
}

template <Status (rpc::Client::*kSend)(std::span<const TablePush>, const CommitOptions&)>
void push(KeyedClient& client, std::uint32_t table_id, const py::array& keys, const py::array& grads, std::uint32_t dim,
          float lr, std::uint64_t sequence, std::uint32_t schema_version, std::int64_t step, bool grad_sum,
          std::int64_t deadline_ms, const std::string& on_nonfinite) {
  check_dim(dim);
  const auto ids = keys_of(keys);
  const float* values = matrix_of(grads, "grads", ids.size(), dim);
  const auto options = commit_options(sequence, step, grad_sum, deadline_ms);
  const bool checks = refuses_nonfinite(on_nonfinite);
  Status status;
  {
    const py::gil_scoped_release unlocked;
    if (checks) status = check_finite(ids, values, dim);
    if (status.is_ok()) {
      status = client.push({table_id, schema_version, dim}, ids, values, lr, true, [&](const TablePush& push) {
        return ((*client.shards()).*kSend)(std::span(&push, 1), options);
      });
    }
  }
  raise_if_error(status);
}

template <Status (rpc::Client::*kSignal)(const CommitOptions&)>
void signal(KeyedClient& client, std::uint64_t sequence, std::int64_t step, bool grad_sum, std::int64_t deadline_ms) {
  const auto options = commit_options(sequence, step, grad_sum, deadline_ms);
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = ((*client.shards()).*kSignal)(options);
  }
  raise_if_error(status);
}

void assign(KeyedClient& client, std::uint32_t table_id, const py::array& keys, const py::array& rows,
            std::uint32_t dim, std::uint32_t schema_version, std::uint64_t sequence, std::int64_t deadline_ms) {
  check_dim(dim);
  const auto ids = keys_of(keys);
  const float* values = matrix_of(rows, "rows", ids.size(), dim);
  auto options = call_options(kNoStep, deadline_ms);
  options.sequence = sequence;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = client.push({table_id, schema_version, dim}, ids, values, 0.0f, false,
                         [&](const TablePush& push) { return client.shards()->assign(std::span(&push, 1), options); });
  }
  raise_if_error(status);
}

std::uint64_t erase(KeyedClient& client, std::uint32_t table_id, const py::array& keys, std::uint64_t sequence,
                    std::int64_t deadline_ms) {
  const auto ids = keys_of(keys);
  auto options = call_options(kNoStep, deadline_ms);
  options.sequence = sequence;
  Result<std::uint64_t> erased = std::uint64_t{0};
  {
    const py::gil_scoped_release unlocked;
    Partition partition;
    Partitioner(client.shards()->slot_owner(), client.shards()->shard_count()).partition(table_id, ids, partition);
    erased = client.shards()->erase(table_id, partition.keys, partition.shard_begin, options);
  }
  return value_or_raise(std::move(erased));
}

// Walks one shard's rows of a table page by page.
class Scan {
 public:
  Scan(std::shared_ptr<KeyedClient> client, std::uint32_t table_id, std::uint32_t shard, std::uint32_t max_rows,
       bool with_state, CallOptions options)
      : client_(std::move(client)),
        table_id_(table_id),
        shard_(shard),
        max_rows_(max_rows),
        with_state_(with_state),
        options_(options) {}

  py::tuple next() {
    while (!ended_) {
      auto result = [&] {
        const py::gil_scoped_release unlocked;
        return client_->shards()->scan(shard_, table_id_, cursor_, max_rows_, with_state_, options_);
      }();
      const ScanPage page = value_or_raise(std::move(result));
      cursor_ = page.next_cursor;
      ended_ = cursor_ == 0;
      if (page.keys.empty()) continue;
      const auto n = static_cast<py::ssize_t>(page.keys.size());
      const auto columns = [n](const std::vector<float>& values) {
        return static_cast<py::ssize_t>(values.size()) / n;
      };
      return py::make_tuple(Keys(n, page.keys.data()), Keys(n, page.versions.data()),
                            py::array_t<std::uint32_t>(n, page.update_counts.data()),
                            Rows({n, columns(page.rows)}, page.rows.data()),
                            Rows({n, columns(page.state)}, page.state.data()));
    }
    throw py::stop_iteration();
  }

 private:
  std::shared_ptr<KeyedClient> client_;
  std::uint32_t table_id_;
  std::uint32_t shard_;
  std::uint32_t max_rows_;
  bool with_state_;
  CallOptions options_;
  std::uint64_t cursor_ = 0;
  bool ended_ = false;
};

py::dict stats(const KeyedClient& client) {
  const rpc::ClientStats stats = client.shards()->stats();
  py::dict out;
  out["frames_sent"] = stats.frames_sent;
  out["bytes_sent"] = stats.bytes_sent;
  out["bytes_received"] = stats.bytes_received;
  out["reconnects"] = stats.reconnects;
  out["retries"] = stats.retries;
  out["commits_replayed"] = stats.commits_replayed;
  out["lane_replies"] = stats.lane_replies;
  out["lane_full"] = stats.lane_full;
  return out;
}

// Sets the trace of the calling thread's requests; empty ids end it.
void set_trace(const py::bytes& trace_id, const py::bytes& span_id) {
  rpc::TraceContext context;
  const auto trace = static_cast<std::string_view>(trace_id);
  const auto span = static_cast<std::string_view>(span_id);
  if (!trace.empty() || !span.empty()) {
    if (trace.size() != context.trace_id.size() || span.size() != context.span_id.size()) {
      raise_error(must_be("trace_id, span_id", "16 and 8 bytes, or none"));
    }
    std::memcpy(context.trace_id.data(), trace.data(), trace.size());
    std::memcpy(context.span_id.data(), span.data(), span.size());
  }
  rpc::set_trace_context(context);
}

}  // namespace

void bind_shards(py::module_& module) {
  module.def("set_trace", &set_trace, py::arg("trace_id") = py::bytes(), py::arg("span_id") = py::bytes());
  py::class_<RowReader, std::shared_ptr<RowReader>>(module, "RowReader")
      .def_property_readonly("shard_count", &RowReader::shard_count);
  py::class_<rpc::Client, RowReader, std::shared_ptr<rpc::Client>>(module, "ClientShards");
  py::class_<Scan>(module, "Scan").def("__iter__", [](py::object self) { return self; }).def("__next__", &Scan::next);
  constexpr std::int64_t kDeadline = 30'000;
  py::class_<KeyedClient, std::shared_ptr<KeyedClient>>(module, "Client")
      .def(py::init([](const std::vector<std::pair<std::string, std::uint16_t>>& shards, const py::array& slot_owner,
                       std::uint32_t route_epoch, std::uint64_t cluster_id, std::uint32_t namespace_id,
                       std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t worker_epoch,
                       const std::string& wire_dtype, bool frame_crc, std::uint32_t connect_timeout_ms,
                       std::uint64_t replay_bytes, const TlsTuple& tls, std::string token,
                       const py::bytes& worker_proof, bool has_quorum, const std::string& transport) {
             rpc::ClientOptions options;
             options.transport = transport_of(transport);
             options.has_quorum = has_quorum;
             options.tls = tls_of<rpc::TlsContext::for_client>(tls);
             options.token = std::move(token);
             options.worker_proof = bytes_of_proof<16>(std::string(worker_proof));
             options.route_epoch = route_epoch;
             options.cluster_id = cluster_id;
             options.namespace_id = namespace_id;
             options.job_id = job_id;
             options.worker_id = worker_id;
             options.worker_epoch = worker_epoch;
             options.wire_dtype = dtype_of("wire_dtype", wire_dtype);
             options.frame_crc = frame_crc;
             options.connect_timeout_ms = connect_timeout_ms;
             options.replay_bytes = replay_bytes;
             return connect(shards, slot_owner, std::move(options));
           }),
           py::kw_only(), py::arg("shards"), py::arg("slot_owner"), py::arg("route_epoch"), py::arg("cluster_id") = 0,
           py::arg("namespace_id") = 0, py::arg("job_id") = 0, py::arg("worker_id") = 0, py::arg("worker_epoch") = 0,
           py::arg("wire_dtype") = "float32", py::arg("frame_crc") = false, py::arg("connect_timeout_ms") = 5'000,
           py::arg("replay_bytes") = 0, py::arg("tls") = TlsTuple(), py::arg("token") = "",
           py::arg("worker_proof") = py::bytes(), py::arg("has_quorum") = false, py::arg("transport") = "auto")
      .def_property_readonly("shards", &KeyedClient::shards)
      .def(
          "extend",
          [](KeyedClient& client, std::int64_t grace_ms) {
            client.shards()->extend(std::chrono::milliseconds(grace_ms));
          },
          py::arg("grace_ms"))
      .def("transports", [](KeyedClient& client) { return client.shards()->transports(); })
      .def("acknowledged_commits", [](KeyedClient& client) { return client.shards()->acknowledged_commits(); })
      .def(
          "touch",
          [](KeyedClient& client, std::int64_t deadline_ms) {
            Status status;
            {
              const py::gil_scoped_release unlocked;
              status = client.shards()->touch(std::chrono::milliseconds(deadline_ms));
            }
            raise_if_error(status);
          },
          py::kw_only(), py::arg("deadline_ms"))
      .def(
          "move",
          [](KeyedClient& client, std::uint32_t shard, std::string host, std::uint16_t port) {
            raise_if_error(client.shards()->move(shard, {std::move(host), port}));
          },
          py::arg("shard"), py::arg("host"), py::arg("port"))
      .def(
          "show",
          [](KeyedClient& client, const TlsTuple& tls, std::string token) {
            client.shards()->show(tls_of<rpc::TlsContext::for_client>(tls), std::move(token));
          },
          py::kw_only(), py::arg("tls"), py::arg("token"))
      .def(
          "end",
          [](KeyedClient& client, std::string reason) {
            const py::gil_scoped_release unlocked;
            client.shards()->end(std::move(reason));
          },
          py::arg("reason"))
      .def("pull", &pull, py::arg("table_id"), py::arg("keys"), py::kw_only(), py::arg("dim"),
           py::arg("schema_version") = 1, py::arg("step") = kNoStep, py::arg("deadline_ms") = kDeadline,
           py::arg("versions") = false, py::arg("found") = false)
      .def("push", &push<&rpc::Client::commit>, py::arg("table_id"), py::arg("keys"), py::arg("grads"), py::kw_only(),
           py::arg("dim"), py::arg("lr"), py::arg("sequence"), py::arg("schema_version") = 1, py::arg("step") = kNoStep,
           py::arg("grad_sum") = false, py::arg("deadline_ms") = kDeadline, py::arg("on_nonfinite") = "raise")
      .def("prepare", &push<&rpc::Client::prepare>, py::arg("table_id"), py::arg("keys"), py::arg("grads"),
           py::kw_only(), py::arg("dim"), py::arg("lr"), py::arg("sequence"), py::arg("schema_version") = 1,
           py::arg("step") = kNoStep, py::arg("grad_sum") = false, py::arg("deadline_ms") = kDeadline,
           py::arg("on_nonfinite") = "raise")
      .def("commit_prepared", &signal<&rpc::Client::commit_prepared>, py::kw_only(), py::arg("sequence"),
           py::arg("step") = kNoStep, py::arg("grad_sum") = false, py::arg("deadline_ms") = kDeadline)
      .def("abort", &signal<&rpc::Client::abort>, py::kw_only(), py::arg("sequence"), py::arg("step") = kNoStep,
           py::arg("grad_sum") = false, py::arg("deadline_ms") = kDeadline)
      .def("assign", &assign, py::arg("table_id"), py::arg("keys"), py::arg("rows"), py::kw_only(), py::arg("dim"),
           py::arg("schema_version") = 1, py::arg("sequence") = 0, py::arg("deadline_ms") = kDeadline)
      .def("erase", &erase, py::arg("table_id"), py::arg("keys"), py::kw_only(), py::arg("sequence") = 0,
           py::arg("deadline_ms") = kDeadline)
      .def(
          "scan",
          [](std::shared_ptr<KeyedClient> client, std::uint32_t table_id, std::uint32_t shard, std::uint32_t max_rows,
             bool with_state, std::int64_t deadline_ms) {
            return Scan(std::move(client), table_id, shard, max_rows, with_state, call_options(kNoStep, deadline_ms));
          },
          py::arg("table_id"), py::kw_only(), py::arg("shard"), py::arg("max_rows") = 65'536,
          py::arg("with_state") = false, py::arg("deadline_ms") = kDeadline)
      .def("stats", &stats);
}

}  // namespace sparserow::bindings
