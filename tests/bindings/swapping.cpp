// Files to swap with, and units in them.
#include <ATen/ops/from_blob.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "common/pages.h"
#include "io/disk_file.h"
#include "plan/swap_ring.h"
#include "runtime/swapped_units.h"
#include "testing.h"

namespace py = pybind11;

namespace zerocore {

namespace {

using io::DiskFile;
using Released = py::call_guard<py::gil_scoped_release>;

void translate_os_error(std::exception_ptr caught) {
  try {
    std::rethrow_exception(std::move(caught));
  } catch (const std::system_error& error) {
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
  }
}

void register_disk_file(py::module_& module) {
  module.attr("DISK_ALIGNMENT") = kDiskAlignment;
  py::class_<DiskFile>(module, "DiskFile")
      .def(
          py::init<const std::string&, const std::string&, int64_t>(),
          py::arg("folder"),
          py::arg("name"),
          py::arg("nbytes"),
          Released())
      .def(
          "read",
          [](DiskFile& self, int64_t offset, const at::Tensor& tensor, std::string label) {
            const auto nbytes = static_cast<int64_t>(tensor.nbytes());
            return self.read(offset, tensor.data_ptr(), nbytes, std::move(label));
          },
          Released())
      .def(
          "write",
          [](DiskFile& self, int64_t offset, const at::Tensor& tensor, std::string label) {
            const auto nbytes = static_cast<int64_t>(tensor.nbytes());
            return self.write(offset, tensor.data_ptr(), nbytes, std::move(label));
          },
          Released())
      .def("wait", &DiskFile::wait, py::arg("ticket"), Released())
      .def_property_readonly("nbytes", &DiskFile::nbytes)
      .def_property_readonly("path", &DiskFile::path)
      .def_property_readonly("is_direct", &DiskFile::is_direct)
      .def_property_readonly("descriptor", &DiskFile::descriptor);
}

std::unique_ptr<SwappedUnits> make_units(
    std::string folder,
    std::string name,
    std::vector<std::string> unit_names,
    std::vector<int64_t> unit_nbytes,
    int num_buffers) {
  const SwapRing packed(unit_nbytes, 1, page_nbytes());
  SwapOptions options{std::move(folder), std::move(name), std::move(unit_names)};
  for (size_t unit = 0; unit < unit_nbytes.size(); ++unit) {
    options.ranges.push_back(packed.range(static_cast<UnitId>(unit)));
  }
  options.file_nbytes = packed.file_nbytes();
  options.num_buffers = num_buffers;
  return std::make_unique<SwappedUnits>(options);
}

at::Tensor acquire(SwappedUnits& self, UnitId unit, int64_t numel, at::ScalarType dtype) {
  auto keep = [memory = self.memory()](void*) {};
  return at::from_blob(
      self.acquire(unit), {numel}, std::move(keep), at::TensorOptions().dtype(dtype));
}

} // namespace

void register_swapping(py::module_& module) {
  py::register_local_exception_translator(&translate_os_error);
  register_disk_file(module);
  py::class_<SwappedUnits>(module, "SwappedUnits")
      .def(
          py::init(&make_units),
          py::arg("folder"),
          py::arg("name"),
          py::arg("unit_names"),
          py::arg("unit_nbytes"),
          py::arg("num_buffers") = 3,
          Released())
      .def("expect", &SwappedUnits::expect, py::arg("order"), Released())
      .def("acquire", &acquire, py::arg("unit"), py::arg("numel"), py::arg("dtype"), Released())
      .def("release", &SwappedUnits::release, py::arg("unit"), py::arg("changed"), Released())
      .def("finish", &SwappedUnits::finish, Released())
      .def_property_readonly("file_nbytes", [](SwappedUnits& self) { return self.file().nbytes(); })
      .def_property_readonly(
          "descriptor", [](SwappedUnits& self) { return self.file().descriptor(); });
}

} // namespace zerocore
