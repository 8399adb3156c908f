// One parameter of a unit.
#include "engine/unit/unit_param.h"

#include <algorithm>

namespace zerocore {

std::vector<ParamSpec> specs_of(const std::vector<UnitParam>& params) {
  std::vector<ParamSpec> result;
  result.reserve(params.size());
  for (const UnitParam& param : params) {
    result.push_back(param.spec);
  }
  return result;
}

const UnitParam* find_moved(const std::vector<UnitParam>& params) {
  const auto moved = std::find_if(params.begin(), params.end(), [](const UnitParam& param) {
    return memory_of(param).storage().unsafeGetStorageImpl() != param.home;
  });
  return moved == params.end() ? nullptr : &*moved;
}

void check_data(const UnitParam& param, const at::Tensor& given, const at::Tensor& home) {
  TORCH_CHECK_VALUE(
      given.sizes() == home.sizes() && given.dtype() == home.dtype(),
      "parameter '",
      param.spec.fqn,
      "' is sharded: its data cannot become ",
      given.dtype(),
      " of shape ",
      given.sizes(),
      " from ",
      home.dtype(),
      " of shape ",
      home.sizes(),
      "; change it before zerocore.shard.");
}

} // namespace zerocore
