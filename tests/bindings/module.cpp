// The extension module _C_testing; types that zerocore._C has are the same here.
#include "testing.h"

PYBIND11_MODULE(_C_testing, module) {
  pybind11::module_::import("zerocore._C");
  zerocore::register_bucket_pool(module);
  zerocore::register_dissemination(module);
  zerocore::register_kernels(module);
  zerocore::register_reduction(module);
  zerocore::register_roll_call(module);
  zerocore::register_schedule(module);
}
