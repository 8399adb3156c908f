// Tensors that count what a program writes through their `.data`.
#include "engine/unit/data_writes.h"

#include <c10/core/InferenceMode.h>

#include <utility>

namespace zerocore {

namespace {

class CountedTensor final : public c10::TensorImpl {
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

} // namespace

at::Tensor counted(const at::Tensor& tensor) {
  const c10::InferenceMode normal(false);
  return at::Tensor(
      c10::make_intrusive<CountedTensor>(tensor, c10::VariableVersion(0), c10::VariableVersion(0)));
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

} // namespace zerocore
