// Reads of another process's memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "io/process_memory.h"
#include "testing.h"

namespace py = pybind11;

namespace zerocore {

void register_process_memory(py::module_& module) {
  // The bytes of `pieces` (addresses and sizes), or the errno.
  module.def(
      "read_process",
      [](int64_t process,
         const std::vector<std::pair<int64_t, int64_t>>& pieces) -> std::variant<py::bytes, int> {
        std::vector<io::ProcessBytes> wanted;
        int64_t end = 0;
        for (const auto& [address, nbytes] : pieces) {
          wanted.push_back({address, end, nbytes});
          end += nbytes;
        }
        std::string found(end, '\0');
        if (const int error = io::read_process(process, 0, found.data(), wanted)) {
          return error;
        }
        return py::bytes(found);
      },
      py::arg("process"),
      py::arg("pieces"));
}

} // namespace zerocore
