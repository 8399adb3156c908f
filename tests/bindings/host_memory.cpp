// Memory of the host that prefers a NUMA node.
#include "runtime/host_memory.h"

#include <pybind11/pybind11.h>

#include "runtime/numa_node.h"
#include "testing.h"

namespace py = pybind11;

namespace zerocore {

void register_host_memory(py::module_& module) {
  module.def("numa_node_of", &numa_node_of, py::arg("pci_bus_id"), py::arg("devices"));
  module.def(
      "prefer_numa_node",
      [](HostMemory& memory, int node) {
        return prefer_numa_node(memory.data(), static_cast<size_t>(memory.nbytes()), node);
      },
      py::arg("memory"),
      py::arg("node"));
  module.def(
      "map_host_memory",
      [](int64_t nbytes, int numa_node) {
        return HostMemory::map({.nbytes = nbytes, .numa_node = numa_node});
      },
      py::arg("nbytes"),
      py::kw_only(),
      py::arg("numa_node"));
}

} // namespace zerocore
