// Counts the changes of a unit's parameters.
#include "engine/param_versions.h"

#include <utility>

namespace zerocore {

int64_t ParamVersions::of_param(size_t param) const {
  const auto count = [](const at::Tensor& tensor) {
    return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
  };
  const UnitParam& counted = params_[param];
  // What changes a DTensor may count in either.
  const int64_t local = counted.local.defined() ? count(counted.local) : 0;
  return changes_[param] + count(counted.shard) + local;
}

int64_t ParamVersions::of_region(int region) const {
  int64_t version = 0;
  for (const int param : layout_.regions()[region].params) {
    version += of_param(static_cast<size_t>(param));
  }
  return version;
}

int64_t ParamVersions::of_unit() const {
  int64_t version = 0;
  for (size_t param = 0; param < params_.size(); ++param) {
    version += of_param(param);
  }
  return version;
}

void ParamVersions::mark_changed() {
  for (int64_t& changes : changes_) {
    ++changes;
  }
}

void ParamVersions::mark_updated() {
  for (size_t param = 0; param < params_.size(); ++param) {
    changes_[param] += params_[param].shard.requires_grad() ? 1 : 0;
  }
}

void ParamVersions::mark_updated(const std::vector<int>& params) {
  for (const int param : params) {
    ++changes_.at(param);
  }
}

void ParamVersions::remember() {
  Snapshot& oldest = snapshots_[next_snapshot_];
  next_snapshot_ = (next_snapshot_ + 1) % snapshots_.size();
  oldest.unit = of_unit();
  oldest.params.resize(params_.size());
  for (size_t param = 0; param < params_.size(); ++param) {
    oldest.params[param] = of_param(param);
  }
}

std::optional<std::vector<int>> ParamVersions::changed_since(int64_t version) const {
  for (const Snapshot& snapshot : snapshots_) {
    if (snapshot.unit == version && snapshot.params.size() == params_.size()) {
      std::vector<int> changed;
      for (size_t param = 0; param < params_.size(); ++param) {
        if (snapshot.params[param] != of_param(param)) {
          changed.push_back(static_cast<int>(param));
        }
      }
      return changed;
    }
  }
  return std::nullopt;
}

bool ParamVersions::take_writes() {
  int64_t version = 0;
  for (const UnitParam& param : params_) {
    version += param.full.unsafeGetTensorImpl()->version_counter().current_version();
  }
  return std::exchange(full_version_, version) != version;
}

} // namespace zerocore
