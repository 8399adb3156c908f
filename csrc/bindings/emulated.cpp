// Python bindings of the emulated link.
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "bindings/bindings.h"
#include "bindings/keyword_type.h"
#include "emulation/device_timer.h"
#include "emulation/emulated_group.h"
#include "emulation/emulated_work.h"

namespace py = pybind11;

namespace zerocore {

namespace {

// Callbacks of futures may need the GIL, so a thread must not hold it while it waits for the link's
// thread.
void without_gil(const std::function<void()>& call) {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const py::gil_scoped_release no_gil;
    call();
  } else {
    call();
  }
}

// All groups, which the end of the interpreter shuts down; guarded by the GIL.
std::vector<c10::weak_intrusive_ptr<EmulatedGroup>>& made_groups() {
  static std::vector<c10::weak_intrusive_ptr<EmulatedGroup>> groups;
  return groups;
}

c10::intrusive_ptr<EmulatedGroup> noted(c10::intrusive_ptr<EmulatedGroup> group) {
  std::erase_if(made_groups(), [](const auto& made) { return made.expired(); });
  made_groups().emplace_back(group);
  return group;
}

c10::intrusive_ptr<EmulatedGroup> make_group(
    int rank,
    int size,
    const LinkModel& link,
    double timeout) {
  const auto limit = std::chrono::milliseconds(std::llround(timeout * 1e3));
  return noted(c10::make_intrusive<EmulatedGroup>(rank, size, link, limit, &without_gil));
}

void shut_down_all() {
  const auto groups = made_groups();
  for (const auto& made : groups) {
    if (const auto group = made.lock()) {
      group->shutdown();
    }
  }
}

void register_link(py::module_& module) {
  py::enum_<Traffic>(module, "Traffic")
      .value("ALL_GATHER", Traffic::AllGather)
      .value("REDUCE_SCATTER", Traffic::ReduceScatter)
      .value("ALL_REDUCE", Traffic::AllReduce)
      .value("ALL_TO_ALL", Traffic::AllToAll)
      .value("GATHER", Traffic::Gather)
      .value("SCATTER", Traffic::Scatter)
      .value("BROADCAST", Traffic::Broadcast)
      .value("REDUCE", Traffic::Reduce)
      .value("BARRIER", Traffic::Barrier);
  const auto validated = [](const LinkModel& link) {
    link.validate();
    return link;
  };
  KeywordType<LinkModel>(module, "LinkModel", validated)
      .needs("bandwidth", &LinkModel::bandwidth)
      .needs("latency", &LinkModel::latency)
      .needs("sms", &LinkModel::sms)
      .def(
          "duration_ns",
          [](const LinkModel& self, Traffic traffic, int64_t nbytes, int64_t world_size) {
            return duration_ns(self, transfer_ns(self, traffic, nbytes, world_size));
          },
          py::arg("traffic"),
          py::arg("nbytes"),
          py::arg("world_size"));
}

} // namespace

void register_emulated(py::module_& module) {
  register_link(module);
  py::module_::import("torch.distributed"); // registers the base class
  py::class_<EmulatedGroup, c10::intrusive_ptr<EmulatedGroup>, c10d::Backend>(
      module, "EmulatedGroup")
      .def(
          py::init(&make_group),
          py::arg("rank"),
          py::arg("size"),
          py::arg("link"),
          py::arg("timeout"))
      .def("beside", [](const EmulatedGroup& self) { return noted(self.beside()); })
      .def_property("link", &EmulatedGroup::link, &EmulatedGroup::set_link)
      .def("shutdown", &EmulatedGroup::shutdown)
      .def_static("waited_ns", &EmulatedWork::waited_ns)
      .def_static("shut_down_all", &shut_down_all);
  // A device that was added to torch passes its timer as a capsule.
  module.def("set_device_timer", [](const py::capsule& timer) {
    device_timer() = timer.get_pointer<const DeviceTimer>();
  });
}

} // namespace zerocore
