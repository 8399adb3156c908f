// Python bindings of block files and checksums. Calls keep the tensors whose memory they use alive,
// and release the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "io/crc32.h"
#include "io/file_stream.h"
#include "io/file_writer.h"

namespace py = pybind11;

namespace zerocore {
namespace {

struct Memory {
  char* data;
  int64_t nbytes;
};

// Returns a tensor's memory. Throws std::invalid_argument unless it is contiguous and on the CPU.
Memory memory_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    const std::string strides =
        tensor.layout() == at::kStrided ? c10::str(", strides ", tensor.strides()) : "";
    throw std::invalid_argument(
        c10::str(
            "expected a contiguous tensor on the CPU, got ",
            tensor.layout(),
            " ",
            tensor.scalar_type(),
            " of shape ",
            tensor.sizes(),
            strides,
            " on ",
            tensor.device()));
  }
  return {static_cast<char*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}

using Released = py::call_guard<py::gil_scoped_release>;

// Converts the error of a system call to an OSError with its errno, like Python's own functions.
void translate_os_error(std::exception_ptr caught) {
  try {
    std::rethrow_exception(std::move(caught));
  } catch (const std::system_error& error) {
    const auto said = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, said.ptr());
  }
}

using PythonRun = std::pair<int64_t, at::Tensor>; // offset, and the tensor to fill from there

std::vector<uint32_t> read_runs(io::FileStream& stream, const std::vector<PythonRun>& given) {
  std::vector<io::Run> runs;
  runs.reserve(given.size());
  for (const auto& [offset, tensor] : given) {
    const auto [data, nbytes] = memory_of(tensor);
    runs.push_back({offset, nbytes, data});
  }
  return stream.read(std::move(runs));
}

void register_file_stream(py::module_& module) {
  using io::FileStream;
  py::enum_<io::StreamWay>(module, "StreamWay")
      .value("ANY", io::StreamWay::Any)
      .value("CACHED", io::StreamWay::Cached)
      .value("DIRECT", io::StreamWay::Direct);
  py::class_<FileStream>(module, "FileStream")
      .def(
          py::init<std::string, int64_t, size_t, io::StreamWay, int64_t, int64_t>(),
          py::arg("path"),
          py::arg("ahead_nbytes") = 0,
          py::arg("num_threads") = 2,
          py::arg("way") = io::StreamWay::Any,
          py::arg("first_block") = 0,
          py::arg("end_block") = std::numeric_limits<int64_t>::max(),
          Released())
      .def("read", &read_runs, py::arg("runs") = std::vector<PythonRun>(), Released())
      .def_property_readonly("is_direct", &FileStream::is_direct);
}

void register_file_writer(py::module_& module) {
  using io::FileWriter;
  py::class_<FileWriter>(module, "FileWriter")
      .def(
          py::init<int, int64_t, io::StreamWay>(),
          py::arg("file"),
          py::arg("nbytes"),
          py::arg("way") = io::StreamWay::Any,
          Released())
      .def(
          "write",
          [](FileWriter& self, const at::Tensor& tensor, int64_t offset, uint32_t crc) {
            const auto [data, nbytes] = memory_of(tensor);
            return self.write(data, nbytes, offset, crc);
          },
          py::arg("tensor"),
          py::arg("offset"),
          py::arg("crc") = 0,
          Released())
      .def("finish", &FileWriter::finish, Released())
      .def("sums", &FileWriter::sums)
      .def_property_readonly("is_direct", &FileWriter::is_direct)
      .attr("RING_NBYTES") = FileWriter::kRingNbytes;
}

} // namespace

void register_io(py::module_& module) {
  py::register_local_exception_translator(&translate_os_error);
  module.attr("BLOCK_NBYTES") = io::kBlockNbytes;
  register_file_stream(module);
  register_file_writer(module);
  module.def(
      "crc32",
      [](const at::Tensor& tensor, uint32_t crc) {
        const auto [data, nbytes] = memory_of(tensor);
        return io::crc32(crc, data, nbytes);
      },
      py::arg("tensor"),
      py::arg("crc") = 0,
      Released());
  module.def("reserve", &io::reserve, py::arg("file"), py::arg("nbytes"), Released());
}

} // namespace zerocore
