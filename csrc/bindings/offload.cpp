// Python face of steps of states that are not on the device.
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

#include "bindings/py_engine.h"

namespace py = pybind11;

namespace zerocore {

void register_offload(py::class_<PyEngine>& engine) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  engine
      .def(
          "is_updated_on_host",
          [](PyEngine& self, UnitId unit, int param) {
            return self.engine->offload().updates(unit, param);
          })
      .def(
          "update_on_host",
          [](PyEngine& self, HostUpdate update) {
            self.engine->offload().update(std::move(update));
          },
          no_gil)
      .def(
          "send_weights",
          [](PyEngine& self, UnitId unit) { self.engine->offload().send(unit); },
          no_gil)
      .def(
          "known_squares",
          [](PyEngine& self, UnitId unit, int param) {
            return self.engine->offload().known_squares(unit, param);
          },
          no_gil)
      .def(
          "arrived_gradient",
          [](PyEngine& self, UnitId unit, int param) {
            return self.engine->offload().arrived_gradient(unit, param);
          },
          no_gil)
      .def(
          "synchronize", [](PyEngine& self) { self.engine->offload().synchronize(); }, no_gil)
      .def_property_readonly(
          "lands_gradients",
          [](const PyEngine& self) { return self.engine->offload().lands_gradients(); })
      .def_property_readonly(
          "host_bytes", [](const PyEngine& self) { return self.engine->offload().host_bytes(); })
      .def(
          "map_host_memory",
          [](PyEngine& self) { self.engine->offload().map_host_memory(); },
          no_gil)
      .def_property_readonly(
          "host_memory_nbytes",
          [](const PyEngine& self) {
            const HostStates* host = self.engine->offload().host_states();
            return host == nullptr ? 0 : host->layout().nbytes();
          })
      .def_property_readonly(
          "host_memory",
          [](const PyEngine& self) {
            const HostStates* host = self.engine->offload().host_states();
            return host == nullptr ? nullptr : host->mapped();
          })
      .def(
          "open_disk",
          [](PyEngine& self, std::string folder, std::string name) {
            self.engine->offload().open_disk({std::move(folder), std::move(name)});
          },
          py::arg("folder"),
          py::arg("name"),
          no_gil)
      .def(
          "make_moments",
          [](PyEngine& self, UnitId unit, int param) {
            return self.engine->offload().make_moments(unit, param);
          },
          no_gil);
}

} // namespace zerocore
