// The device's operators: the current stream's thread runs the CPU's kernels.
//
// A boxed fallback takes every operator that torch does not make of others. The meta device gives
// the sizes of its results, the host allocates them, and the stream writes them. Operators whose
// result the host must see, or that have no meta kernel, make the host wait.
#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "allocator.h"
#include "device.h"
#include "generator.h"
#include "queue.h"

namespace async_device {

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

void keep_number(const at::Tensor& from, const at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor; // numbers stay on the CPU
  }
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// Returns the tensor that a task uses. A task must see the host's memory as it was when the host
// issued the task.
at::Tensor for_task(const at::Tensor& tensor) {
  if (is_ours(tensor)) {
    return on_cpu(tensor);
  }
  if (!tensor.defined()) {
    return tensor;
  }
  at::Tensor copy = tensor.clone();
  keep_number(tensor, copy);
  return copy;
}

// Returns the argument with its tensors and devices replaced.
template <typename Replace>
IValue replaced(const IValue& value, c10::DeviceType device, const Replace& replace) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) {
      list.push_back(replace(each));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each ? std::make_optional(replace(*each)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) {
    return c10::Device(device);
  }
  return value;
}

template <typename Replace>
Stack replaced(const Stack& args, c10::DeviceType device, const Replace& replace) {
  Stack result;
  for (const IValue& arg : args) {
    result.push_back(replaced(arg, device, replace));
  }
  return result;
}

bool is_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

Stack arguments_for_task(const c10::OperatorHandle& op, const Stack& args) {
  Stack result = replaced(args, c10::DeviceType::CPU, &for_task);
  for (size_t i = 0; i < result.size(); ++i) {
    if (is_generator(op.schema().arguments()[i])) {
      const at::Generator chosen =
          result[i].isGenerator() ? result[i].toGenerator() : default_generator();
      result[i] = chosen.get<DeviceGenerator>()->on_cpu;
    }
  }
  return result;
}

// Returns the argument that the operator writes to and returns as this output; null for a new
// result.
const IValue* written_argument(const c10::OperatorHandle& op, const Stack& args, size_t output) {
  const c10::FunctionSchema& schema = op.schema();
  const c10::AliasInfo* wanted = schema.returns()[output].alias_info();
  for (size_t i = 0; wanted != nullptr && i < args.size(); ++i) {
    const c10::AliasInfo* found = schema.arguments()[i].alias_info();
    if (found != nullptr && found->isWrite() && found->beforeSets() == wanted->beforeSets()) {
      return &args[i];
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(wanted == nullptr, op.schema().name(), " returns a view");
  return nullptr;
}

bool only_writes(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  return std::all_of(returns.begin(), returns.end(), [](const c10::Argument& output) {
    return output.alias_info() != nullptr && output.alias_info()->isWrite();
  });
}

// Returns the operator's results on the meta device; nullopt if it has no meta kernel.
std::optional<Stack> on_meta_device(const c10::OperatorHandle& op, const Stack& args) {
  Stack stack = replaced(args, c10::DeviceType::Meta, &on_meta);
  for (size_t i = 0; i < stack.size(); ++i) {
    if (stack[i].isGenerator()) {
      stack[i] = IValue();
    }
  }
  try {
    op.callBoxed(&stack);
    return stack;
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
}

// Allocates the operator's results; nullopt if only its kernel knows their sizes.
std::optional<Stack> infer_outputs(const c10::OperatorHandle& op, const Stack& args) {
  const auto known = [](const IValue& value) { return value.isTensor() || value.isTensorList(); };
  const std::optional<Stack> metas = on_meta_device(op, args);
  if (!metas || !std::all_of(metas->begin(), metas->end(), known)) {
    return std::nullopt;
  }
  return replaced(*metas, kType, [](const at::Tensor& meta) {
    return meta.defined()
        ? at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(kDevice))
        : meta;
  });
}

void resize(const at::Tensor& tensor, const at::Tensor& like) {
  const size_t nbytes = at::detail::computeStorageNbytes(
      like.sizes(), like.strides(), tensor.itemsize(), tensor.storage_offset());
  if (nbytes > tensor.storage().nbytes()) {
    tensor.storage().set_data_ptr_noswap(allocator().allocate(nbytes));
    tensor.storage().set_nbytes(nbytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
}

// Resizes empty tensors that the operator writes to.
void resize_outputs(const c10::OperatorHandle& op, const Stack& args) {
  const auto is_empty = [&](size_t i) {
    return op.schema().arguments()[i].is_out() && args[i].isTensor() &&
        args[i].toTensor().numel() == 0;
  };
  size_t next = 0;
  std::optional<Stack> metas;
  for (size_t i = 0; i < args.size(); ++i) {
    if (is_empty(i) && !metas) {
      metas = on_meta_device(op, args);
    }
    if (is_empty(i) && metas) {
      resize(args[i].toTensor(), metas->at(next).toTensor());
    }
    next += op.schema().arguments()[i].is_out() ? 1 : 0;
  }
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  return value.isTensor() ? std::vector<at::Tensor>{value.toTensor()} : value.toTensorVector();
}

void run(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(&stack);
}

// Issues the operator as a task that copies its results to `outputs`.
void enqueue(const c10::OperatorHandle& op, const Stack& args, const Stack& outputs) {
  Stack inputs = arguments_for_task(op, args);
  std::vector<at::Tensor> targets;
  for (const IValue& output : outputs) {
    for (const at::Tensor& tensor : tensors_of(output)) {
      targets.push_back(tensor.defined() ? on_cpu(tensor) : tensor);
    }
  }
  launch([op, inputs = std::move(inputs), targets]() mutable {
    run(op, inputs);
    size_t next = 0;
    for (const IValue& output : targets.empty() ? Stack() : inputs) {
      for (const at::Tensor& tensor : tensors_of(output)) {
        if (targets[next].defined()) {
          targets[next].copy_(tensor);
        }
        ++next;
      }
    }
  });
}

at::Tensor to_device(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  const auto options = tensor.options().device(kDevice);
  const at::Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  launch([to = on_cpu(result), tensor] { to.copy_(tensor); });
  return result;
}

// Waits for the stream, then runs the operator on the host.
Stack run_on_host(const c10::OperatorHandle& op, const Stack& args) {
  note_host_wait(op.schema().name().c_str());
  wait_for_stream(current_stream());
  Stack stack = arguments_for_task(op, args);
  run(op, stack);
  return replaced(stack, kType, &to_device);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const Stack args(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  Stack outputs;
  if (only_writes(op)) {
    resize_outputs(op, args);
    enqueue(op, args, {});
    outputs.resize(op.schema().returns().size());
  } else if (std::optional<Stack> inferred = infer_outputs(op, args)) {
    outputs = std::move(*inferred);
    enqueue(op, args, outputs);
  } else {
    outputs = run_on_host(op, args);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (const IValue* written = written_argument(op, args, i)) {
      outputs[i] = *written;
    }
  }
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), outputs.begin(), outputs.end());
}

// -- memory and views -----------------------------------------------------------------------------

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> /*layout*/,
    std::optional<c10::Device> /*device*/,
    std::optional<bool> /*pin*/,
    std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size,
      &allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> /*layout*/,
    std::optional<c10::Device> /*device*/,
    std::optional<bool> /*pin*/) {
  return at::detail::empty_strided_generic(
      size,
      stride,
      &allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor& set_storage(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

void record_stream_of(at::Tensor& self, at::Stream stream) {
  record_stream(self.storage().data_ptr(), static_cast<int>(stream.id()));
}

// -- between the device and the host --------------------------------------------------------------

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (is_ours(dst)) {
    if (!is_ours(self) && !non_blocking) {
      note_host_wait("copy from the host");
    }
    // The host's memory counts as pinned: the stream reads it when it gets there.
    const bool reads_later = non_blocking && !is_ours(self);
    const at::Tensor source = reads_later ? self.detach() : for_task(self);
    launch([to = on_cpu(dst), source] { to.copy_(source); });
  } else if (non_blocking) {
    launch([to = dst, from = on_cpu(self)] { to.copy_(from); });
  } else {
    note_host_wait("copy to the host");
    wait_for_stream(current_stream());
    dst.copy_(on_cpu(self));
  }
  return dst;
}

c10::Scalar item(const at::Tensor& self) {
  note_host_wait("item");
  wait_for_stream(current_stream());
  return at::_local_scalar_dense(on_cpu(self));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("record_stream", &record_stream_of);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &item);
}

} // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
  // An empty tensor may have no memory at all; a tensor whose memory was taken away raises its
  // error.
  void* data = tensor.numel() == 0 ? nullptr : const_cast<void*>(tensor.const_data_ptr());
  const auto options = at::TensorOptions().dtype(tensor.scalar_type());
  at::Tensor alias = at::for_blob(data, tensor.sizes())
                         .strides(tensor.strides())
                         .options(options)
                         .target_device(c10::Device(c10::kCPU))
                         .make_tensor();
  keep_number(tensor, alias);
  return alias;
}

} // namespace async_device
