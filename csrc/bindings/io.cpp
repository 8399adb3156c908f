// Bytes of files and their checksums; memory is given by its address, and Python runs meanwhile.
#include <pybind11/pybind11.h>

#include <cerrno>
#include <system_error>

#include "bindings/bindings.h"
#include "io/crc32.h"
#include "io/file_bytes.h"

namespace py = pybind11;

namespace zerocore {
namespace {

const void* as_memory(uintptr_t address) {
  return reinterpret_cast<const void*>(address); // NOLINT(performance-no-int-to-ptr)
}

// What the system refuses is an OSError with its errno, as of Python's own functions.
template <typename Action>
uint32_t with_os_errors(Action action) {
  try {
    const py::gil_scoped_release released;
    return action();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

} // namespace

void register_io(py::module_& module) {
  module.def(
      "crc32",
      [](uintptr_t address, size_t nbytes, uint32_t crc, bool by_tables) {
        const py::gil_scoped_release released;
        return by_tables ? io::crc32_by_tables(crc, as_memory(address), nbytes)
                         : io::crc32(crc, as_memory(address), nbytes);
      },
      py::arg("address"),
      py::arg("nbytes"),
      py::arg("crc") = 0,
      py::arg("by_tables") = false);
  module.def(
      "crc32_joined",
      &io::crc32_joined,
      py::arg("first"),
      py::arg("second"),
      py::arg("second_nbytes"));
  module.def(
      "write_at",
      [](int file, uintptr_t address, size_t nbytes, int64_t offset, uint32_t crc) {
        return with_os_errors(
            [&] { return io::write_at(file, as_memory(address), nbytes, offset, crc); });
      },
      py::arg("file"),
      py::arg("address"),
      py::arg("nbytes"),
      py::arg("offset"),
      py::arg("crc") = 0);
  module.def(
      "crc32_at",
      [](int file, int64_t offset, size_t nbytes) {
        return with_os_errors([&] { return io::crc32_at(file, offset, nbytes); });
      },
      py::arg("file"),
      py::arg("offset"),
      py::arg("nbytes"));
  module.def(
      "read_at",
      [](int file, uintptr_t address, int64_t offset, size_t nbytes) {
        void* memory = reinterpret_cast<void*>(address); // NOLINT(performance-no-int-to-ptr)
        return with_os_errors([&] { return io::read_at(file, memory, offset, nbytes); });
      },
      py::arg("file"),
      py::arg("address"),
      py::arg("offset"),
      py::arg("nbytes"));
}

} // namespace zerocore
