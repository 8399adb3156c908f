#include "engine/unit/unit_param.h"

#include <c10/core/InferenceMode.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace zerocore {

namespace {

// Returns the counter's address, which a tensor shares with its views.
const void* identity_of(const c10::VariableVersion& version) {
  static_assert(sizeof(version) == sizeof(void*), "a version is a pointer to its counter");
  const void* counter = nullptr;
  std::memcpy(&counter, &version, sizeof(counter));
  return counter;
}

// The data counters of counted tensors, by the address of their version counters.
struct DataCounters {
  std::mutex mutex; // any thread may free a tensor
  std::unordered_map<const void*, c10::VariableVersion> by_version;
};

DataCounters& data_counters() {
  static auto* const counters = new DataCounters; // leaked: tensors may outlive static objects
  return *counters;
}

class CountedTensor : public c10::TensorImpl {
 public:
  CountedTensor(
      const at::Tensor& tensor,
      const c10::VariableVersion& version,
      const c10::VariableVersion& counter)
      : TensorImpl(c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype()),
        counter_(counter) {
    copy_tensor_metadata(tensor.unsafeGetTensorImpl(), this, version, /*allow_change=*/true);
  }

  using TensorImpl::shallow_copy_and_detach;
  // `.data` asks for a copy with a new version counter, and gets the data counter instead.
  // `detach()` and saved tensors use the other overload and share the version counter.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& /*version_counter*/,
      bool allow_tensor_metadata_change) const override {
    return TensorImpl::shallow_copy_and_detach(
        c10::VariableVersion(counter_), allow_tensor_metadata_change);
  }

  const c10::VariableVersion& counter() const {
    return counter_;
  }

 private:
  c10::VariableVersion counter_;
};

// A counted tensor that registers its counters, so that `.data` of its views finds them.
class CountedLeaf final : public CountedTensor {
 public:
  CountedLeaf(
      const at::Tensor& tensor,
      const c10::VariableVersion& version,
      const c10::VariableVersion& counter)
      : CountedTensor(tensor, version, counter), version_(version) {
    DataCounters& known = data_counters();
    const std::lock_guard lock(known.mutex);
    for (const auto& each : {version, counter}) {
      known.by_version.emplace(identity_of(each), counter);
    }
  }
  CountedLeaf(const CountedLeaf&) = delete;
  CountedLeaf& operator=(const CountedLeaf&) = delete;
  CountedLeaf(CountedLeaf&&) = delete;
  CountedLeaf& operator=(CountedLeaf&&) = delete;
  ~CountedLeaf() override {
    DataCounters& known = data_counters();
    const std::lock_guard lock(known.mutex);
    for (const auto& each : {version_, counter()}) {
      known.by_version.erase(identity_of(each));
    }
  }

 private:
  c10::VariableVersion version_; // kept alive, so that no other counter gets its address
};

} // namespace

at::Tensor counted(const at::Tensor& tensor) {
  const c10::InferenceMode normal(false);
  return at::Tensor(
      c10::make_intrusive<CountedLeaf>(tensor, c10::VariableVersion(0), c10::VariableVersion(0)));
}

at::Tensor counted_view(const at::Tensor& leaf, const at::Tensor& view) {
  const c10::InferenceMode normal(false);
  const c10::VariableVersion& version = leaf.unsafeGetTensorImpl()->version_counter();
  return at::Tensor(c10::make_intrusive<CountedTensor>(view, version, data_counter(leaf)));
}

c10::VariableVersion data_counter(const at::Tensor& tensor) {
  const auto* counting = dynamic_cast<const CountedTensor*>(tensor.unsafeGetTensorImpl());
  return counting == nullptr ? c10::VariableVersion() : counting->counter();
}

void count_as_data(const at::Tensor& tensor, const at::Tensor& alias) {
  c10::VariableVersion counter = data_counter(tensor);
  if (!counter.enabled()) {
    return;
  }
  if (c10::InferenceMode::is_enabled()) {
    counter.bump(); // torch may not count writes in inference mode: assume that one follows
  }
  if (!alias.is_inference()) {
    alias.unsafeGetTensorImpl()->set_version_counter(counter);
  }
}

void count_view_as_data(const at::Tensor& view, const at::Tensor& alias) {
  const c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
  if (view.is_inference() || alias.is_inference() ||
      dynamic_cast<const CountedTensor*>(impl) != nullptr) {
    return; // inference tensors have no counters; a counted tensor's own copy gets the data counter
  }
  DataCounters& known = data_counters();
  const std::lock_guard lock(known.mutex);
  const auto found = known.by_version.find(identity_of(impl->version_counter()));
  if (found != known.by_version.end()) {
    alias.unsafeGetTensorImpl()->set_version_counter(found->second);
  }
}

namespace {

int64_t count_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Returns the number of writes to the full parameter, including writes through `.data`.
int64_t all_writes(const UnitParam& param) {
  return count_of(param.full) + num_writes(param.full_writes);
}

} // namespace

int64_t ParamVersions::told_of(size_t param) const {
  const UnitParam& counted = params_[param];
  if (counted.is_whole) {
    return count_of(counted.full);
  }
  // torch may count a change of a DTensor in the DTensor or in its local tensor.
  const int64_t local = counted.local.defined() ? count_of(counted.local) : 0;
  return changes_[param] + count_of(counted.shard) + local;
}

int64_t ParamVersions::of_param(size_t param) const {
  const UnitParam& counted = params_[param];
  const auto& writes = counted.is_whole ? counted.full_writes : counted.shard_writes;
  return told_of(param) + num_writes(writes) + written_[param];
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
  for (size_t param = 0; param < params_.size(); ++param) {
    mark_changed(param);
  }
}

void ParamVersions::mark_changed(size_t param) {
  const UnitParam& changed = params_.at(param);
  if (changed.is_whole) {
    changed.full.unsafeGetTensorImpl()->bump_version();
  } else {
    ++changes_[param];
  }
}

void ParamVersions::mark_updated(const std::optional<std::vector<int>>& params) {
  if (params) {
    for (const int param : *params) {
      mark_changed(param);
      updated_[param] = true;
    }
    return;
  }
  for (size_t param = 0; param < params_.size(); ++param) {
    if (params_[param].shard.requires_grad()) {
      mark_changed(param);
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
    if (!params_[param].is_whole && full_versions_[param] != all_writes(params_[param])) {
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
  for (size_t param = 0; param < params_.size(); ++param) {
    if (params_[param].is_whole) {
      told_[param] = told_of(param); // autograd has counted the call's writes
    }
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
      if (!params_[param].is_whole) {
        params_[param].full.unsafeGetTensorImpl()->bump_version();
        ++full_versions_[param];
      }
      any_trained = any_trained || params_[param].shard.requires_grad();
    }
  }
  return any_trained;
}

} // namespace zerocore
