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
          "synchronize", [](PyEngine& self) { self.engine->offload().synchronize(); }, no_gil)
      .def_property_readonly(
          "host_nbytes", [](const PyEngine& self) { return self.engine->offload().host_nbytes(); })
      .def(
          "open_disk",
          [](PyEngine& self, std::string folder, std::string name) {
            DiskStates* disk = self.engine->offload().disk();
            TORCH_CHECK_VALUE(disk != nullptr, "nothing of this model is on disk");
            disk->open({std::move(folder), std::move(name)});
          },
          py::arg("folder"),
          py::arg("name"),
          no_gil)
      .def(
          "make_moments",
          [](PyEngine& self, UnitId unit, int param) {
            DiskStates* disk = self.engine->offload().disk();
            if (disk == nullptr) {
              return std::vector<at::Tensor>();
            }
            if (disk->had_moments(unit, param)) {
              self.engine->offload().wait_updates(); // they are set to zero
            }
            return disk->make_moments(unit, param);
          },
          no_gil)
      .def_property_readonly("disk_nbytes", [](const PyEngine& self) {
        const DiskStates* disk = self.engine->offload().disk();
        return disk == nullptr ? std::pair<int64_t, int64_t>()
                               : std::pair(disk->file_nbytes(), disk->buffers_nbytes());
      });
}

} // namespace zerocore
