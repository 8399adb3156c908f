// Counts the changes of a unit's parameters.
#include "engine/unit/param_versions.h"

#include <utility>

namespace zerocore {

namespace {

int64_t count_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Those of what is written through `.data`, too.
int64_t all_writes(const UnitParam& param) {
  return count_of(param.full) + num_writes(param.full_writes);
}

} // namespace

int64_t ParamVersions::told_of(size_t param) const {
  const UnitParam& counted = params_[param];
  // A change of a DTensor may count in either.
  const int64_t local = counted.local.defined() ? count_of(counted.local) : 0;
  return changes_[param] + count_of(counted.shard) + local;
}

int64_t ParamVersions::of_param(size_t param) const {
  return told_of(param) + num_writes(params_[param].shard_writes) + written_[param];
}

int64_t ParamVersions::of_shards() const {
  int64_t version = 0;
  for (size_t param = 0; param < params_.size(); ++param) {
    version += of_param(param) - written_[param];
  }
  return version;
}

int64_t ParamVersions::of_region(int region) const {
  int64_t version = 0;
  for (const int param : layout_.regions()[region].params) {
    version += of_param(param);
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

void ParamVersions::mark_updated(const std::optional<std::vector<int>>& params) {
  if (params) {
    for (const int param : *params) {
      ++changes_.at(param);
      updated_[param] = true;
    }
    return;
  }
  for (size_t param = 0; param < params_.size(); ++param) {
    if (params_[param].shard.requires_grad()) {
      ++changes_[param];
      updated_[param] = true;
    }
  }
}

bool ParamVersions::are_all_updated() const {
  bool any = false;
  for (size_t param = 0; param < params_.size(); ++param) {
    if (params_[param].shard.requires_grad() && !updated_[param]) {
      return false;
    }
    any = any || updated_[param];
  }
  return any;
}

std::vector<int> ParamVersions::written() const {
  std::vector<int> found;
  for (size_t param = 0; param < params_.size(); ++param) {
    if (full_versions_[param] != all_writes(params_[param])) {
      found.push_back(static_cast<int>(param));
    }
  }
  return found;
}

std::vector<int> ParamVersions::take_writes(bool keeps) {
  std::vector<int> found = written();
  for (const int param : found) {
    full_versions_[param] = all_writes(params_[param]);
    written_[param] += keeps ? 1 : 0;
  }
  return found;
}

void ParamVersions::mark_written() {
  for (size_t param = 0; param < params_.size(); ++param) {
    mark_written(param);
  }
}

void ParamVersions::mark_written(size_t param) {
  ++written_[param];
}

bool ParamVersions::tell_autograd() {
  bool any_trained = false;
  for (size_t param = 0; param < params_.size(); ++param) {
    const int64_t version = told_of(param);
    if (std::exchange(told_[param], version) != version) {
      params_[param].full.unsafeGetTensorImpl()->bump_version();
      ++full_versions_[param];
      any_trained = any_trained || params_[param].shard.requires_grad();
    }
  }
  return any_trained;
}

} // namespace zerocore
