// The extension module zerocore._C.
#include <torch/version.h>

#include "bindings/bindings.h"
#include "kernels/loops.h"

#define QUOTE(x) #x
#define VERSION_TEXT(major, minor) QUOTE(major) "." QUOTE(minor)
#ifdef __clang__ // its __VERSION__ may contain a URL
#define COMPILER "clang " VERSION_TEXT(__clang_major__, __clang_minor__)
#else
#define COMPILER "GCC " __VERSION__
#endif
// setup.py and CMakeLists.txt define these.
#ifndef ZEROCORE_CXX_FLAGS
#define ZEROCORE_CXX_FLAGS "not known"
#endif
#ifndef ZEROCORE_CUDA_BUILD
#define ZEROCORE_CUDA_BUILD "no kernels"
#endif

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ runtime of zerocore.";
  module.attr("build") = COMPILER ", torch " TORCH_VERSION ", CUDA: " ZEROCORE_CUDA_BUILD
                                  ", C++ flags: " ZEROCORE_CXX_FLAGS;
  module.attr("CHUNK_NUMEL") = zerocore::kernels::kChunkNumel;
  module.attr("HAS_CUDA_KERNELS") = zerocore::kernels::has_loops(c10::DeviceType::CUDA);
  // A device that was added to torch passes its loops as a capsule.
  module.def("set_device_loops", [](const pybind11::capsule& loops) {
    zerocore::kernels::register_loops(
        c10::DeviceType::PrivateUse1, *loops.get_pointer<const zerocore::kernels::Loops>());
  });
  zerocore::register_plan(module);
  zerocore::register_io(module);
  zerocore::register_runtime(module);
  zerocore::register_emulated(module);
  zerocore::register_engine_types(module);
  zerocore::register_engine(module);
  zerocore::register_shards(module);
}
