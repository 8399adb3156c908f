// Tensors that count what a program writes through their `.data`.
#include "engine/unit/data_writes.h"

#include <c10/core/InferenceMode.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace zerocore {

namespace {

// The counter itself: those of a tensor and of its views are one.
const void* identity_of(const c10::VariableVersion& version) {
  static_assert(sizeof(version) == sizeof(void*), "a version is a pointer to its counter");
  const void* counter = nullptr;
  std::memcpy(&counter, &version, sizeof(counter));
  return counter;
}

// Counters of writes through `.data`, by the version counters whose tensors have them.
struct DataCounters {
  std::mutex mutex; // tensors may end on any thread
  std::unordered_map<const void*, c10::VariableVersion> by_version;
};

DataCounters& data_counters() {
  static auto* const counters = new DataCounters; // tensors may outlive static objects
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
  // `.data` asks for a copy with a new counter; `detach()` and saved tensors give this one's.
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

// One whose views are known by their version counter.
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
  c10::VariableVersion version_; // held, so that no other counter gets its address
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
    counter.bump(); // torch need not count what is written here, so that it may be written counts
  }
  if (!alias.is_inference()) {
    alias.unsafeGetTensorImpl()->set_version_counter(counter);
  }
}

void count_view_as_data(const at::Tensor& view, const at::Tensor& alias) {
  const c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
  if (view.is_inference() || alias.is_inference() ||
      dynamic_cast<const CountedTensor*>(impl) != nullptr) {
    return; // the latter's own does
  }
  DataCounters& known = data_counters();
  const std::lock_guard lock(known.mutex);
  const auto found = known.by_version.find(identity_of(impl->version_counter()));
  if (found != known.by_version.end()) {
    alias.unsafeGetTensorImpl()->set_version_counter(found->second);
  }
}

} // namespace zerocore
