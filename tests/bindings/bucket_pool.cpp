// The bucket pool on the CPU.
#include "memory/bucket_pool.h"

#include <pybind11/pybind11.h>

#include "testing.h"

namespace py = pybind11;

namespace zerocore {

namespace {

// A pool on the CPU together with the streams it needs.
struct CpuPool {
  CpuPool() : streams(c10::Device(c10::DeviceType::CPU)), pool(streams) {}

  Streams streams;
  BucketPool pool;
};

} // namespace

void register_bucket_pool(py::module_& module) {
  py::class_<Slot>(module, "Slot")
      .def_readonly("nbytes", &Slot::nbytes)
      .def_property_readonly(
          "address", [](const Slot& slot) { return reinterpret_cast<uintptr_t>(slot.data); });
  py::class_<CpuPool>(module, "CpuBucketPool")
      .def(py::init<>())
      .def(
          "acquire",
          [](CpuPool& self, UnitId unit, int64_t nbytes) {
            return self.pool.acquire({unit}, nbytes, StreamRole::Compute);
          },
          py::arg("unit"),
          py::arg("nbytes"))
      .def("set_apart", [](CpuPool& self, bool apart) { self.pool.set_apart(apart); })
      .def("release", [](CpuPool& self, Slot& slot) { self.pool.release(slot); })
      .def("forget_recent_peak", [](CpuPool& self) { self.pool.forget_recent_peak(); })
      .def_property_readonly("stats", [](const CpuPool& self) { return self.pool.stats(); });
}

} // namespace zerocore
