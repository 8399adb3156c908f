// The extension module zerocore._C.
#include <torch/version.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ runtime of zerocore.";
  module.attr("build") = "compiler " __VERSION__ ", torch " TORCH_VERSION;
  zerocore::register_plan(module);
  zerocore::register_kernels(module);
  zerocore::register_runtime(module);
  zerocore::register_emulated(module);
  zerocore::register_engine(module);
}
