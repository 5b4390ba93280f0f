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

// The fresh rows of one run: the groups' lists one after another, places first.
struct FreshRun {
  std::size_t run = 0, places = 0, rows = 0, count = 0;  // places, rows: first bytes
};

// Returns the runs that have fresh rows, and the bytes of all.
std::pair<std::vector<FreshRun>, std::size_t> fresh_layout(LookupPack& pack) {
  std::vector<FreshRun> out;
  std::size_t at = 0;
  for (std::size_t r = 0; r < pack.runs().size(); ++r) {
    FreshRun mine;
    mine.run = r;
    for (const LookupPack::Fresh& fresh : pack.fresh()) {
      if (pack.groups()[fresh.group].run == r) mine.count += fresh.places.size();
    }
    if (mine.count == 0) continue;
    mine.places = at;
    mine.rows = at + LookupPack::aligned(mine.count * sizeof(std::int32_t));
    at = mine.rows + LookupPack::aligned(mine.count * pack.runs()[r].dim * sizeof(float));
    out.push_back(mine);
  }
  return {std::move(out), at};
}

void write_fresh(LookupPack& pack, std::byte* to) {
  for (const FreshRun& run : fresh_layout(pack).first) {
    std::byte* places = to + run.places;
    std::byte* rows = to + run.rows;
    for (const LookupPack::Fresh& fresh : pack.fresh()) {
      const LookupPack::Group& group = pack.groups()[fresh.group];
      if (group.run != run.run || fresh.places.empty()) continue;
      LookupPack::write_shifted(fresh.places, group.first, places);
      places += fresh.places.size() * sizeof(std::int32_t);
      std::memcpy(rows, fresh.rows.data(), fresh.rows.size() * sizeof(float));
      rows += fresh.rows.size() * sizeof(float);
    }
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
      .def("order_ids", &LookupPack::order_ids)
      .def_property_readonly("orders",
                             [](const LookupPack& pack) {
                               std::vector<std::array<std::size_t, 3>> out;
                               for (const LookupPack::Run& run : pack.runs()) {
                                 const std::size_t begins = (run.rows + 1) * sizeof(std::int32_t);
                                 out.push_back({run.ids, run.order, run.order + LookupPack::aligned(begins)});
                               }
                               return out;
                             })
      .def_property_readonly("runs",
                             [](const LookupPack& pack) {
                               std::vector<std::array<std::size_t, 3>> out;
                               for (const LookupPack::Run& run : pack.runs()) {
                                 out.push_back({run.rows, run.dim, run.begin});
                               }
                               return out;
                             })
      .def_property_readonly("groups",
                             [](const LookupPack& pack) {
                               std::vector<std::array<std::size_t, 3>> out;
                               for (const LookupPack::Group& group : pack.groups()) {
                                 out.push_back({group.run, group.first, group.keys.size()});
                               }
                               return out;
                             })
      .def_property_readonly("tables",
                             [](const LookupPack& pack) {
                               std::vector<std::string> out;
                               for (const LookupPack::Group& group : pack.groups()) {
                                 out.push_back(group.binding->spec().name);
                               }
                               return out;
                             })
      .def_property_readonly("layout_begin", &LookupPack::layout_begin)
      .def_property_readonly("paddings",
                             [](const LookupPack& pack) {
                               std::vector<std::int64_t> out;
                               for (const LookupPack::Group& group : pack.groups()) out.push_back(group.padding);
                               return out;
                             })
      .def(
          "set_paddings",
          [](LookupPack& pack, const std::vector<std::int64_t>& of_tables) {
            if (of_tables.size() != pack.groups().size()) {
              throw py::value_error("set_paddings: " + std::to_string(of_tables.size()) +
                                    " ids; allowed: one for each table");
            }
            for (std::size_t g = 0; g < of_tables.size(); ++g) pack.mutable_groups()[g].padding = of_tables[g];
          },
          py::arg("of_tables"))
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
          [](const LookupPack& pack, const std::vector<std::pair<std::string, NamedIds>>& lookups) {
            std::vector<std::int64_t> parts;
            for (const auto& [name, named] : lookups) {
              const auto binding = value_or_raise(find_binding(name));
              const IdsRef ids = ids_of(named);
              const auto part = pack.find(*binding, ids.ids);
              if (part) binding->trace(ids);
              parts.push_back(part ? static_cast<std::int64_t>(*part) : -1);
            }
            return parts;
          },
          Unlocked(), py::arg("lookups"))
      .def("position_of", &LookupPack::position_of, py::arg("part"), py::arg("id"))
      .def_property_readonly("fresh",
                             [](LookupPack& pack) {
                               const auto [runs, bytes] = fresh_layout(pack);
                               std::vector<std::array<std::size_t, 4>> out;
                               for (const FreshRun& run : runs)
                                 out.push_back({run.run, run.places, run.rows, run.count});
                               return std::make_pair(out, bytes);
                             })
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
            raise_if_error(pack.stage(staged, {reinterpret_cast<float*>(sums), pack.floats_of_sums()}));
          },
          Unlocked(), py::arg("parts"), py::arg("sums"));
}

}  // namespace sparserow::bindings
