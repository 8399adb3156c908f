// Reads of another process's memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "io/process_memory.h"
#include "testing.h"

namespace py = pybind11;

namespace zerocore {

void register_process_memory(py::module_& module) {
  // `pieces`: addresses and bytes. What is read, or the errno.
  module.def(
      "read_process",
      [](int64_t process,
         const std::vector<std::pair<uint64_t, size_t>>& pieces) -> std::variant<py::bytes, int> {
        size_t nbytes = 0;
        for (const auto& piece : pieces) {
          nbytes += piece.second;
        }
        std::string found(nbytes, '\0');
        std::vector<io::ForeignBytes> wanted;
        size_t end = 0;
        for (const auto& [address, count] : pieces) {
          wanted.push_back({address, found.data() + end, count});
          end += count;
        }
        try {
          io::read_process(process, wanted);
        } catch (const std::system_error& error) {
          return error.code().value();
        }
        return py::bytes(found);
      },
      py::arg("process"),
      py::arg("pieces"));
}

} // namespace zerocore
