// The data-plane server for Python: started on a Store, given routes and jobs, asked for counters.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "rpc/server/server.h"
#include "rpc/transport/certificates.h"
#include "shared_errors.h"
#include "shared_proof.h"
#include "shared_tls.h"
#include "util/not_allowed.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

constexpr std::array<std::string_view, 3> kRoles{"serve-read", "train", "admin"};  // in the order of rpc::Role

using Slots = py::array_t<std::uint16_t, py::array::c_style>;

std::unique_ptr<rpc::Server> start(std::shared_ptr<Store> store, const rpc::ServerOptions& options) {
  auto server = [&] {
    const py::gil_scoped_release unlocked;
    return rpc::Server::start(options, std::move(store));
  }();
  return value_or_raise(std::move(server));
}

void set_route(rpc::Server& server, std::uint32_t route_epoch, const py::array& slot_owner) {
  if (!py::isinstance<Slots>(slot_owner) || slot_owner.ndim() != 1) {
    raise_error(must_be("slot_owner", "a one-dimensional contiguous uint16 array"));
  }
  const std::span owners(static_cast<const std::uint16_t*>(slot_owner.data()),
                         static_cast<std::size_t>(slot_owner.size()));
  raise_if_error(server.set_route(route_epoch, owners));
}

void refuse_tables(rpc::Server& server, std::uint32_t code, const std::string& message,
                   const std::vector<std::uint32_t>& table_ids, std::uint32_t deadline_ms) {
  Status status;
  {
    const py::gil_scoped_release released;
    status =
        server.refuse_tables({static_cast<Code>(code), message}, table_ids, std::chrono::milliseconds(deadline_ms));
  }
  raise_if_error(status);
}

// SHA-256 of a token (32 bytes), role, namespaces.
using GrantTuple = std::tuple<py::bytes, std::string, std::vector<std::string>>;

std::optional<std::vector<rpc::Grant>> grants_of(const std::optional<std::vector<GrantTuple>>& tuples) {
  if (!tuples) return std::nullopt;
  std::vector<rpc::Grant> grants;
  for (const auto& [digest, role, namespaces] : *tuples) {
    rpc::Grant& grant = grants.emplace_back();
    const auto bytes = static_cast<std::string_view>(digest);
    const auto known = std::find(std::begin(kRoles), std::end(kRoles), role);
    if (bytes.size() != grant.digest.size() || known == std::end(kRoles)) {
      raise_error(must_be("grants", "32 bytes of SHA-256, one of serve-read, train, admin, and namespaces"));
    }
    std::memcpy(grant.digest.data(), bytes.data(), bytes.size());
    grant.role = static_cast<rpc::Role>(known - std::begin(kRoles));
    grant.namespaces = namespaces;
  }
  return grants;
}

using MemberTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;
using SpanTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::int64_t, std::optional<std::int64_t>,
                             std::uint64_t, py::bytes>;

void set_job(rpc::Server& server, std::uint32_t job_id, std::string name, std::optional<std::uint32_t> staleness,
             const std::vector<std::variant<SpanTuple, MemberTuple>>& members, std::int64_t first_step,
             std::uint32_t generation, std::uint64_t operation, std::uint32_t quorum) {
  JobSpec spec{.job_id = job_id,
               .name = std::move(name),
               .staleness = staleness,
               .members = {},
               .first_step = first_step,
               .generation = generation,
               .operation = operation,
               .quorum = quorum};
  for (const auto& member : members) {
    if (const auto* plain = std::get_if<MemberTuple>(&member)) {
      const auto& [worker_id, epoch, rank] = *plain;
      spec.members.push_back({.worker_id = worker_id, .epoch = epoch, .rank = rank});
    } else {
      const auto& [worker_id, epoch, rank, first, until, final_sequence, proof] = std::get<SpanTuple>(member);
      spec.members.push_back({worker_id, epoch, rank, first, until.value_or(kForever), final_sequence,
                              bytes_of_proof<32>(std::string(proof))});
    }
  }
  Status status;
  {
    const py::gil_scoped_release unlocked;  // steps that only waited for a member that left are applied here
    status = server.set_job(spec);
  }
  raise_if_error(status);
}

using ReportTuple =
    std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::int64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

std::vector<ReportTuple> freeze_job(rpc::Server& server, std::uint32_t job_id, std::uint64_t operation,
                                    const std::vector<WorkerKey>& fence, std::uint32_t lease_ms) {
  std::optional<std::chrono::milliseconds> lease;
  if (lease_ms != 0) lease = std::chrono::milliseconds(lease_ms);
  const auto reports = [&] {
    const py::gil_scoped_release unlocked;
    return server.freeze_job(job_id, operation, fence, lease);
  }();
  raise_if_error(reports.status());
  std::vector<ReportTuple> out;
  for (const WorkerReport& report : reports.value()) {
    out.emplace_back(report.worker_id, report.epoch, report.committed_sequence, report.committed_step,
                     report.prepared_sequence, report.steps_taken, report.writes_taken);
  }
  return out;
}

void drop_job(rpc::Server& server, std::uint32_t job_id, std::uint64_t operation) {
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = server.drop_job(job_id, operation);
  }
  raise_if_error(status);
}

void set_model(rpc::Server& server, std::uint32_t handle, std::shared_ptr<Store> store, std::uint64_t number,
               std::shared_ptr<Store> canary, std::uint64_t canary_number, double canary_share) {
  if (!(canary_share >= 0.0 && canary_share <= 1.0)) {
    raise_if_error(not_allowed("canary_share", canary_share, "[0, 1]"));
  }
  const py::gil_scoped_release unlocked;
  server.models().set(handle, {{std::move(store), number}, {std::move(canary), canary_number}, canary_share});
}

py::dict stats(const rpc::Server& server) {
  const rpc::ServerStats stats = server.stats();
  py::dict out;
  out["connections_open"] = stats.connections_open;
  out["connections_local"] = stats.connections_local;
  out["connections_total"] = stats.connections_total;
  out["frames_received"] = stats.frames_received;
  out["frames_refused"] = stats.frames_refused;
  out["access_refused"] = stats.access_refused;
  out["bytes_received"] = stats.bytes_received;
  out["bytes_sent"] = stats.bytes_sent;
  out["rows_pulled"] = stats.rows_pulled;
  out["rows_written"] = stats.rows_written;
  out["hinted_keys"] = stats.hinted_keys;
  out["hinted_keys_dropped"] = stats.hinted_keys_dropped;
  out["hinted_keys_declined"] = stats.hinted_keys_declined;
  out["inflight_bytes"] = stats.inflight_bytes;
  out["reply_bytes"] = stats.reply_bytes;
  out["connections_too_slow"] = stats.connections_too_slow;
  out["lane_bytes"] = stats.lane_bytes;
  out["lane_sent"] = stats.lane_sent;
  out["lane_received"] = stats.lane_received;
  out["requests_active"] = stats.requests_active;
  out["commits_accepted"] = stats.commits.commits_accepted;
  out["commits_duplicate"] = stats.commits.commits_duplicate;
  out["commits_refused"] = stats.commits.commits_refused;
  out["commits_outside"] = stats.commits.commits_outside;
  out["commits_fenced"] = stats.commits.commits_fenced;
  out["commits_lost"] = stats.commits.commits_lost;
  out["steps_reduced"] = stats.commits.steps_reduced;
  out["rows_applied"] = stats.commits.rows_applied;
  out["pulls_clocked"] = stats.commits.pulls_clocked;
  out["pulls_parked"] = stats.commits.pulls_parked;
  out["pulls_waiting"] = stats.commits.pulls_waiting;
  out["staleness_sum"] = stats.commits.staleness_sum;
  out["staleness_max"] = stats.commits.staleness_max;
  out["kept_bytes"] = stats.commits.kept_bytes;
  out["job_steps"] = stats.job_steps;
  py::dict staleness;
  for (const auto& [table_id, counts] : stats.staleness) {
    staleness[py::int_(table_id)] = py::make_tuple(counts.pulls, counts.sum);
  }
  out["staleness"] = staleness;
  py::dict times;
  for (std::size_t kind = 0; kind < rpc::RequestTimes::kNames.size(); ++kind) {
    const rpc::RequestTimes::Counts& counts = stats.request_times[kind];
    times[py::str(rpc::RequestTimes::kNames[kind])] =
        py::make_tuple(counts.requests, static_cast<double>(counts.sum_ns) * 1e-9);
  }
  out["request_times"] = times;
  return out;
}

// (job id, worker id, epoch, whether steps, first, last) of each range.
std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, bool, std::uint64_t, std::uint64_t>> lost_commits(
    const rpc::Server& server) {
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, bool, std::uint64_t, std::uint64_t>> out;
  for (const LostRange& range : server.lost_commits()) {
    out.emplace_back(range.job_id, range.worker_id, range.epoch, range.is_steps, range.first, range.last);
  }
  return out;
}

py::tuple take_requests(rpc::Server& server) {
  const rpc::RequestLog::Taken taken = server.request_log().take();
  py::list events;
  for (const rpc::RequestEvent& event : taken.events) {
    py::dict out;
    out["type"] = py::str(rpc::type_name(static_cast<rpc::FrameType>(event.header.type)));
    out["request"] = event.header.request_id;
    out["job"] = event.header.job_id;
    out["worker"] = event.header.worker_id;
    out["epoch"] = event.header.worker_epoch;
    out["step"] = event.header.step;
    out["peer"] = event.peer;
    out["code"] = static_cast<int>(event.status.code());
    out["message"] = event.status.message();
    out["begin_unix_ns"] = event.begin_unix_ns;
    out["end_unix_ns"] = event.end_unix_ns;
    out["trace_id"] = py::bytes(reinterpret_cast<const char*>(event.trace.trace_id.data()), 16);
    out["span_id"] = py::bytes(reinterpret_cast<const char*>(event.trace.span_id.data()), 8);
    events.append(out);
  }
  return py::make_tuple(events, taken.dropped);
}

}  // namespace

void bind_shard(py::module_& module) {
  module.def(
      "certificate_facts",
      [](const std::string& certificate) {
        const auto facts = value_or_raise(rpc::facts_of(certificate));
        return py::make_tuple(facts.begins, facts.ends, facts.subject);
      },
      py::arg("certificate"));
  module.def(
      "make_authority",
      [](const std::string& name, std::int64_t valid_sec) {
        const auto pair = value_or_raise(rpc::make_authority(name, std::chrono::seconds(valid_sec)));
        return py::make_tuple(pair.certificate, pair.key);
      },
      py::arg("name"), py::arg("valid_sec"));
  module.def(
      "sign_certificate",
      [](const std::pair<std::string, std::string>& authority, const std::string& name, const std::string& names,
         std::int64_t begins_sec, std::int64_t valid_sec) {
        const auto pair =
            value_or_raise(rpc::sign_certificate({authority.first, authority.second}, name, names,
                                                 std::chrono::seconds(begins_sec), std::chrono::seconds(valid_sec)));
        return py::make_tuple(pair.certificate, pair.key);
      },
      py::arg("authority"), py::arg("name"), py::arg("names"), py::kw_only(), py::arg("begins_sec") = -60,
      py::arg("valid_sec"));
  const rpc::ServerOptions defaults;
  module.def("routes_to_canary", &rpc::routes_to_canary, py::arg("routing_key"), py::arg("share"));
  module.attr("REQUEST_BOUNDS_US") = py::cast(rpc::RequestTimes::kBoundsUs);
  module.attr("STALENESS_BOUNDS") = py::cast(rpc::StalenessHistogram::kBounds);
  py::class_<rpc::Server>(module, "Server")
      .def(py::init([](std::shared_ptr<Store> store, std::string host, std::uint16_t port, std::uint32_t io_threads,
                       std::uint32_t max_frame_bytes, std::uint64_t inflight_budget_bytes,
                       std::uint64_t reply_budget_bytes, std::uint64_t kept_budget_bytes, std::uint32_t max_connections,
                       std::uint64_t cluster_id, std::uint16_t shard_index, std::uint32_t default_deadline_ms,
                       std::uint32_t hello_timeout_ms, std::uint32_t stall_timeout_ms, bool local,
                       std::uint32_t max_client_connections, std::uint64_t client_inflight_bytes, const TlsTuple& tls,
                       const std::optional<std::vector<GrantTuple>>& grants, bool observe) {
             return start(std::move(store), {.host = std::move(host),
                                             .port = port,
                                             .is_local = local,
                                             .io_threads = io_threads,
                                             .max_frame_bytes = max_frame_bytes,
                                             .inflight_budget_bytes = inflight_budget_bytes,
                                             .reply_budget_bytes = reply_budget_bytes,
                                             .kept_budget_bytes = kept_budget_bytes,
                                             .max_connections = max_connections,
                                             .max_client_connections = max_client_connections,
                                             .client_inflight_bytes = client_inflight_bytes,
                                             .tls = tls_of<rpc::TlsContext::for_server>(tls),
                                             .grants = grants_of(grants),
                                             .cluster_id = cluster_id,
                                             .shard_index = shard_index,
                                             .default_deadline_ms = default_deadline_ms,
                                             .hello_timeout_ms = hello_timeout_ms,
                                             .stall_timeout_ms = stall_timeout_ms,
                                             .observe = observe});
           }),
           py::arg("store"), py::kw_only(), py::arg("host") = defaults.host, py::arg("port") = defaults.port,
           py::arg("io_threads") = defaults.io_threads, py::arg("max_frame_bytes") = defaults.max_frame_bytes,
           py::arg("inflight_budget_bytes") = defaults.inflight_budget_bytes,
           py::arg("reply_budget_bytes") = defaults.reply_budget_bytes,
           py::arg("kept_budget_bytes") = defaults.kept_budget_bytes,
           py::arg("max_connections") = defaults.max_connections, py::arg("cluster_id") = defaults.cluster_id,
           py::arg("shard_index") = defaults.shard_index, py::arg("default_deadline_ms") = defaults.default_deadline_ms,
           py::arg("hello_timeout_ms") = defaults.hello_timeout_ms,
           py::arg("stall_timeout_ms") = defaults.stall_timeout_ms, py::arg("local") = defaults.is_local,
           py::arg("max_client_connections") = 0, py::arg("client_inflight_bytes") = 0, py::arg("tls") = TlsTuple(),
           py::arg("grants") = std::optional<std::vector<GrantTuple>>(), py::arg("observe") = defaults.observe)
      .def(
          "set_tls",
          [](rpc::Server& server, const TlsTuple& tls) { server.set_tls(tls_of<rpc::TlsContext::for_server>(tls)); },
          py::arg("tls"))
      .def(
          "set_grants",
          [](rpc::Server& server, const std::optional<std::vector<GrantTuple>>& grants) {
            server.access().set(grants_of(grants));
          },
          py::arg("grants"))
      .def_property_readonly("port", &rpc::Server::port)
      .def("set_route", &set_route, py::arg("route_epoch"), py::arg("slot_owner"))
      .def("refuse_tables", &refuse_tables, py::arg("code"), py::arg("message"), py::arg("table_ids"), py::kw_only(),
           py::arg("deadline_ms"))
      .def("set_job", &set_job, py::arg("job_id"), py::arg("name"), py::arg("staleness"), py::arg("members"),
           py::arg("first_step") = 0, py::arg("generation") = 0, py::arg("operation") = 0, py::arg("quorum") = 0)
      .def("freeze_job", &freeze_job, py::arg("job_id"), py::arg("operation"), py::arg("fence"),
           py::arg("lease_ms") = 0)
      .def("drop_job", &drop_job, py::arg("job_id"), py::arg("operation") = 0)
      .def("count_write", &rpc::Server::count_write, py::arg("table_id"))
      .def("set_model", &set_model, py::arg("handle"), py::arg("store"), py::arg("number"), py::kw_only(),
           py::arg("canary") = std::shared_ptr<Store>(), py::arg("canary_number") = 0, py::arg("canary_share") = 0.0)
      .def(
          "remove_model", [](rpc::Server& server, std::uint32_t handle) { server.models().remove(handle); },
          py::arg("handle"), py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats)
      .def("lost_commits", &lost_commits)
      .def(
          "keep_spans", [](rpc::Server& server, bool wanted) { server.request_log().keep_spans(wanted); },
          py::arg("wanted"))
      .def("take_requests", &take_requests)
      .def(
          "hot_keys",
          [](const rpc::Server& server, std::size_t most) {
            const rpc::HotKeys::Report report = server.hot_keys(most);
            std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t>> keys;
            for (const rpc::HotKey& key : report.keys) keys.emplace_back(key.table_id, key.key, key.count, key.error);
            return py::make_tuple(report.samples, keys);
          },
          py::arg("most"))
      .def(
          "drain",
          [](rpc::Server& server, std::uint32_t deadline_ms) { server.drain(std::chrono::milliseconds(deadline_ms)); },
          py::arg("deadline_ms"), py::call_guard<py::gil_scoped_release>())
      .def("stop", &rpc::Server::stop, py::call_guard<py::gil_scoped_release>());
}

}  // namespace sparserow::bindings
