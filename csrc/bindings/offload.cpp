// Python face of steps of states that are not on the device.
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

#include "bindings/py_engine.h"

namespace py = pybind11;

namespace zerocore {

void register_offload(py::class_<PyEngine>& engine) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  engine.def("is_updated_on_host", method(&Offload::updates))
      .def("update_on_host", method(&Offload::update), no_gil)
      .def("send_weights", method(&Offload::send), no_gil)
      .def("known_squares", method(&Offload::known_squares), no_gil)
      .def("arrived_gradient", method(&Offload::arrived_gradient), no_gil)
      .def("synchronize", method(&Offload::synchronize), no_gil)
      .def("make_moments", method(&Offload::make_moments), no_gil)
      .def_property_readonly("lands_gradients", method(&Offload::lands_gradients))
      .def_property_readonly("host_bytes", method(&Offload::host_bytes))
      .def("map_host_memory", method(&Offload::map_host_memory), no_gil)
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
          no_gil);
}

} // namespace zerocore
