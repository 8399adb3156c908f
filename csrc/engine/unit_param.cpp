// One parameter of a unit.
#include "engine/unit_param.h"

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

} // namespace zerocore
