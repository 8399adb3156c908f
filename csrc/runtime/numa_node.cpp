// Asks Linux by its files and its own call: libnuma would be a dependency for one line of it.
#include "runtime/numa_node.h"

#ifdef __linux__
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <climits>
#include <fstream>

namespace zerocore {

int numa_node_of(std::string pci_bus_id, const std::string& devices) {
  std::ranges::transform(pci_bus_id, pci_bus_id.begin(), [](unsigned char letter) {
    return std::tolower(letter); // CUDA's are upper case, the folders are not
  });
  std::ifstream file(devices + "/" + pci_bus_id + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

int prefer_numa_node(
    [[maybe_unused]] void* data,
    [[maybe_unused]] size_t nbytes,
    [[maybe_unused]] int node) {
#ifdef __linux__
  constexpr int kWordBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, 16> nodes{}; // the most that Linux is built for is 1024
  constexpr auto kNumNodes = static_cast<int>(nodes.size()) * kWordBits;
  if (node < 0 || node >= kNumNodes) {
    return EINVAL;
  }
  nodes.at(node / kWordBits) = 1UL << (node % kWordBits);
  // Of the count that it is told, the call reads one bit less.
  const long failed =
      ::syscall(SYS_mbind, data, nbytes, MPOL_PREFERRED, nodes.data(), kNumNodes + 1, 0);
  return failed == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}

} // namespace zerocore
