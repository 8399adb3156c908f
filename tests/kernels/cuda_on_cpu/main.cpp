// Runs the CUDA kernels on the CPU and compares them with plain loops.
//
// Usage: checks copies|sums|norms|scaled|adamw|sectors
#include <cstdio>
#include <string>

#include "buffers.h"
#include "cuda_on_cpu.h"
#include "kernels/loops.h"

// The kernels register themselves for their device; here they are called directly.
namespace zerocore::kernels {
bool register_loops(c10::DeviceType /*device*/, const Loops& /*loops*/) {
  return true;
}
} // namespace zerocore::kernels

int main(int argc, char** argv) {
  using cuda_on_cpu::Order;
  const std::string what = argc == 2 ? argv[1] : "";
  for (const Order order : {Order::Ascending, Order::Descending, Order::Shuffled}) {
    cuda_on_cpu::set_order(order, 1);
    if (what == "copies") {
      checks::check_copies();
    } else if (what == "sums") {
      checks::check_sums();
    } else if (what == "norms") {
      checks::check_norms();
    } else if (what == "scaled") {
      checks::check_scaled();
    } else if (what == "adamw") {
      checks::check_adamw();
    } else if (what == "sectors") {
      checks::check_sectors();
    } else {
      std::fprintf(stderr, "usage: checks copies|sums|norms|scaled|adamw|sectors\n");
      return 2;
    }
  }
  const auto counts = cuda_on_cpu::counts();
  std::printf(
      "%ld checks, %ld launches, %ld blocks\n", checks::num_checks, counts.launches, counts.blocks);
  return 0;
}
