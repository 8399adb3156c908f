// The NUMA node of a PCI device, and memory that prefers a node.
#pragma once

#include <cstddef>
#include <string>

namespace zerocore {

// The node of a device by its bus id, as CUDA writes it ("0000:3B:00.0"); -1 if the system does not
// say. `devices` holds a folder for each device.
int numa_node_of(std::string pci_bus_id, const std::string& devices = "/sys/bus/pci/devices");

// Pages of the memory that are first touched after this come from the node as long as it has any.
// Returns the error number of a system that refuses, as containers do, or has no such node; else 0.
int prefer_numa_node(void* data, size_t nbytes, int node);

} // namespace zerocore
