// _client: lookups packed for a device, as cpp_ext/device_pack.py uses them. Addresses are of memory on the host.
#include "bindings/client_pack.h"

#include <pybind11/stl.h>

#include <array>
#include <cstring>

#include "bindings/shared_errors.h"
#include "session/lookup_pack.h"

namespace sparserow::bindings {
namespace {

namespace py = pybind11;

// The ids of a lookup as Python names them: the address that the op sees, the address of the same ids on the host as
// contiguous int64, and the sizes, strides and bytes of an item of the tensor that the op sees.
using NamedIds =
    std::tuple<std::uintptr_t, std::uintptr_t, std::vector<std::int64_t>, std::vector<std::int64_t>, std::uint32_t>;

IdsRef ids_of(const NamedIds& named) {
  const auto& [seen, host, sizes, strides, item_bytes] = named;
  std::size_t n = 1;
  for (const std::int64_t size : sizes) n *= static_cast<std::size_t>(size);
  return {{reinterpret_cast<const std::int64_t*>(host), n},
          {reinterpret_cast<const void*>(seen), sizes, strides, item_bytes}};
}

std::unique_ptr<LookupPack> look_up(const std::vector<std::pair<std::string, NamedIds>>& lookups, bool train,
                                    bool with_gradient) {
  const NoGradScope scope(!with_gradient);
  std::vector<BoundIds> wanted;
  for (const auto& [name, ids] : lookups) wanted.push_back({value_or_raise(find_binding(name)), ids_of(ids)});
  return value_or_raise(LookupPack::look_up(wanted, train));
}

std::size_t aligned(std::size_t bytes) {
  return (bytes + LookupPack::kAlign - 1) / LookupPack::kAlign * LookupPack::kAlign;
}

// (group, first byte of the places, first byte of the rows, number of rows) of each group that has fresh rows, and the
// bytes of all.
std::pair<std::vector<std::array<std::size_t, 4>>, std::size_t> fresh_layout(LookupPack& pack) {
  std::vector<std::array<std::size_t, 4>> out;
  std::size_t at = 0;
  for (const LookupPack::Fresh& fresh : pack.fresh()) {
    const std::size_t places = at;
    const std::size_t rows = places + aligned(fresh.places.size() * sizeof(std::int32_t));
    out.push_back({fresh.group, places, rows, fresh.places.size()});
    at = rows + aligned(fresh.rows.size() * sizeof(float));
  }
  return {std::move(out), at};
}

void write_fresh(LookupPack& pack, std::byte* to) {
  const auto layout = fresh_layout(pack).first;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const LookupPack::Fresh& fresh = pack.fresh()[i];
    std::memcpy(to + layout[i][1], fresh.places.data(), fresh.places.size() * sizeof(std::int32_t));
    std::memcpy(to + layout[i][2], fresh.rows.data(), fresh.rows.size() * sizeof(float));
  }
}

}  // namespace

void bind_pack(py::module_& module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<LookupPack>(module, "LookupPack")
      .def(py::init(&look_up), Unlocked(), py::arg("lookups"), py::kw_only(), py::arg("train"),
           py::arg("with_gradient") = true)
      .def_property_readonly("bytes", &LookupPack::bytes)
      .def_property_readonly("floats_of_sums", &LookupPack::floats_of_sums)
      .def("plan", &LookupPack::plan, Unlocked())
      .def_property_readonly(
          "plans",
          [](const LookupPack& pack) {
            std::vector<std::optional<std::array<std::size_t, 5>>> out;
            for (const LookupPack::Group& group : pack.groups()) {
              const auto& plan = group.plan;
              if (!plan) {
                out.emplace_back(std::nullopt);
              } else {
                out.push_back(std::array<std::size_t, 5>{plan->sent.size(), plan->kept.size(), plan->put.size(),
                                                         static_cast<std::size_t>(plan->dtype), plan->generation});
              }
            }
            return out;
          })
      .def_property_readonly("groups",
                             [](const LookupPack& pack) {
                               std::vector<std::tuple<std::string, std::size_t, std::uint32_t, std::size_t>> out;
                               for (const LookupPack::Group& group : pack.groups()) {
                                 const BindingSpec& spec = group.binding->spec();
                                 out.emplace_back(spec.name, group.keys.size(), spec.dim, group.begin);
                               }
                               return out;
                             })
      .def_property_readonly("parts",
                             [](const LookupPack& pack) {
                               std::vector<std::array<std::size_t, 3>> out;
                               for (const LookupPack::Part& part : pack.parts()) {
                                 out.push_back({part.group, part.positions.size(), part.begin});
                               }
                               return out;
                             })
      .def(
          "write", [](LookupPack& pack, std::uintptr_t to) { pack.write(reinterpret_cast<std::byte*>(to)); },
          Unlocked(), py::arg("to"))
      .def(
          "find",
          [](const LookupPack& pack, const std::string& name, const NamedIds& named) {
            const auto binding = value_or_raise(find_binding(name));
            const IdsRef ids = ids_of(named);
            const auto part = pack.find(*binding, ids.ids);
            if (!part) return std::int64_t{-1};
            binding->trace(ids);
            return static_cast<std::int64_t>(*part);
          },
          Unlocked(), py::arg("name"), py::arg("ids"))
      .def("position_of", &LookupPack::position_of, py::arg("part"), py::arg("id"))
      .def_property_readonly("fresh", &fresh_layout)
      .def(
          "write_fresh",
          [](LookupPack& pack, std::uintptr_t to) { write_fresh(pack, reinterpret_cast<std::byte*>(to)); }, Unlocked(),
          py::arg("to"))
      .def(
          "stage",
          [](const LookupPack& pack, const std::vector<std::pair<std::size_t, std::int64_t>>& parts,
             std::uintptr_t sums) {
            std::vector<LookupPack::StagedPart> staged;
            for (const auto& [part, padding] : parts) staged.push_back({part, padding});
            raise_if_error(pack.stage(staged, {reinterpret_cast<const float*>(sums), pack.floats_of_sums()}));
          },
          Unlocked(), py::arg("parts"), py::arg("sums"));
}

}  // namespace sparserow::bindings
