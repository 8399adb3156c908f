// Bytes of files and their checksums, and files to swap with; memory is given by its address, and
// Python runs meanwhile.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <limits>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "io/crc32.h"
#include "io/disk_file.h"
#include "io/file_stream.h"
#include "io/file_writer.h"

namespace py = pybind11;

namespace zerocore {
namespace {

void* as_memory(uintptr_t address) {
  return reinterpret_cast<void*>(address); // NOLINT(performance-no-int-to-ptr)
}

using Released = py::call_guard<py::gil_scoped_release>;

// A system call that fails is an OSError with its errno, as of Python's own functions.
void translate_os_error(std::exception_ptr caught) {
  try {
    std::rethrow_exception(std::move(caught));
  } catch (const std::system_error& error) {
    const auto said = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, said.ptr());
  }
}

void register_disk_file(py::module_& module) {
  using io::DiskFile;
  module.attr("DISK_ALIGNMENT") = kDiskAlignment;
  module.attr("BLOCK_NBYTES") = io::kBlockNbytes;
  py::enum_<io::DiskWay>(module, "DiskWay")
      .value("ANY", io::DiskWay::Any)
      .value("IO_URING", io::DiskWay::IoUring)
      .value("THREADS", io::DiskWay::Threads);
  py::class_<DiskFile>(module, "DiskFile")
      .def(
          py::init<const std::string&, const std::string&, int64_t, io::DiskWay>(),
          py::arg("folder"),
          py::arg("name"),
          py::arg("nbytes"),
          py::arg("way") = io::DiskWay::Any,
          Released())
      .def(
          "read",
          [](DiskFile& self, int64_t offset, uintptr_t address, int64_t nbytes, std::string label) {
            return self.read(offset, as_memory(address), nbytes, std::move(label));
          },
          py::arg("offset"),
          py::arg("address"),
          py::arg("nbytes"),
          py::arg("label"),
          Released())
      .def(
          "write",
          [](DiskFile& self, int64_t offset, uintptr_t address, int64_t nbytes, std::string label) {
            return self.write(offset, as_memory(address), nbytes, std::move(label));
          },
          py::arg("offset"),
          py::arg("address"),
          py::arg("nbytes"),
          py::arg("label"),
          Released())
      .def("wait", &DiskFile::wait, py::arg("ticket"), Released())
      .def_property_readonly("nbytes", &DiskFile::nbytes)
      .def_property_readonly("path", &DiskFile::path)
      .def_property_readonly("way", &DiskFile::way)
      .def_property_readonly("is_direct", &DiskFile::is_direct)
      .def_property_readonly("descriptor", &DiskFile::descriptor);
}

using PythonRun = std::tuple<int64_t, int64_t, uintptr_t>; // offset, bytes, address

std::vector<uint32_t> read_runs(io::FileStream& stream, const std::vector<PythonRun>& given) {
  std::vector<io::Run> runs;
  runs.reserve(given.size());
  for (const auto& [offset, nbytes, address] : given) {
    runs.push_back({offset, nbytes, static_cast<char*>(as_memory(address))});
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
          [](FileWriter& self, uintptr_t address, size_t nbytes, int64_t offset, uint32_t crc) {
            return self.write(as_memory(address), nbytes, offset, crc);
          },
          py::arg("address"),
          py::arg("nbytes"),
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
  register_disk_file(module);
  register_file_stream(module);
  register_file_writer(module);
  module.def(
      "crc32",
      [](uintptr_t address, size_t nbytes, uint32_t crc) {
        return io::crc32(crc, as_memory(address), nbytes);
      },
      py::arg("address"),
      py::arg("nbytes"),
      py::arg("crc") = 0,
      Released());
  module.def("reserve", &io::reserve, py::arg("file"), py::arg("nbytes"), Released());
}

} // namespace zerocore
