// The table of loops by device type; the CPU and the meta device are built in.
#include "kernels/loops.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstddef>

#include "kernels/cpu/loops.h"

namespace zerocore::kernels {

namespace {

using Table = std::array<Loops, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)>;

template <typename Call>
void nothing(const Call& /*call*/) {}

constexpr Table make_table() {
  Table table{};
  table[static_cast<size_t>(c10::DeviceType::CPU)] = {
      &cpu::copy,
      &cpu::accumulate,
      &cpu::square,
      &cpu::total,
      &cpu::adamw,
      &cpu::encode,
      &cpu::decode};
  // On meta tensors callers only check the arguments.
  table[static_cast<size_t>(c10::DeviceType::Meta)] = {
      &nothing<CopyCall>,
      &nothing<AccumulateCall>,
      &nothing<SquareCall>,
      &nothing<TotalCall>,
      &nothing<AdamWCall>,
      &nothing<EncodeCall>,
      &nothing<DecodeCall>};
  return table;
}

// Constant-initialised, before any file's static initialisers run: their order does not matter.
constinit Table table = make_table();

const Loops& entry(c10::DeviceType device) {
  return table[static_cast<size_t>(device)];
}

} // namespace

bool register_loops(c10::DeviceType device, const Loops& loops) {
  table[static_cast<size_t>(device)] = loops;
  return true;
}

bool has_loops(c10::DeviceType device) {
  return entry(device).copy != nullptr;
}

const Loops& loops_of(c10::Device device) {
  const Loops& loops = entry(device.type());
  TORCH_CHECK_NOT_IMPLEMENTED(
      loops.copy != nullptr,
      "this build of zerocore has no kernels for device '",
      device,
      "'. For CUDA, install it where a CUDA build of torch and nvcc are found, or with "
      "ZEROCORE_CUDA=1 to see what is missing.");
  return loops;
}

} // namespace zerocore::kernels
