// The kernels as torch operators: schemas, and the implementation for each device.
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <optional>

#include "kernels/checks.h"
#include "kernels/ops.h"
#include "kernels/optimizer_ops.h"

namespace zerocore::kernels {

namespace {

using MaybeTensors = c10::List<std::optional<at::Tensor>>;

// Packs gradient i, numels[i] long, at offsets[i] of the bucket; zeroes gaps and missing gradients.
// If add[i], the gradient is added to the bucket's values, and a missing one does not change them.
void pack_gradients(
    const at::Tensor& bucket,
    const MaybeTensors& grads,
    at::IntArrayRef offsets,
    at::IntArrayRef numels,
    const std::optional<c10::List<bool>>& add,
    double scale) {
  check_count("pack", "offsets", offsets.size(), "gradients", grads.size());
  check_count("pack", "numels", numels.size(), "gradients", grads.size());
  check_count("pack", "add flags", add ? add->size() : grads.size(), "gradients", grads.size());
  std::vector<at::Tensor> sources(grads.size());
  std::vector<PackSegment> segments;
  int64_t end = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    TORCH_CHECK_VALUE(
        offsets[i] >= end && numels[i] >= 0,
        "pack: gradient ",
        i,
        " begins at ",
        offsets[i],
        ", expected at least ",
        end,
        ", where the one before ends");
    segments.push_back({nullptr, 0, end, offsets[i] - end, false});
    sources[i] = grads.get(i).value_or(at::Tensor());
    const at::Tensor* source = sources[i].defined() ? &sources[i] : nullptr;
    segments.push_back({source, 0, offsets[i], numels[i], add && add->get(i)});
    end = offsets[i] + numels[i];
  }
  segments.push_back({nullptr, 0, end, std::max<int64_t>(bucket.numel() - end, 0), false});
  pack(bucket, segments, scale);
}

void decode_all(
    const at::Tensor& to,
    const at::Tensor& blocks,
    at::ScalarType format,
    int64_t first) {
  decode(to, blocks, {{first, 0, to.numel()}}, format);
}

void sum_of_known_squares(
    const at::Tensor& out,
    at::TensorList shards,
    const std::optional<c10::List<std::optional<at::Tensor>>>& known) {
  std::vector<at::Tensor> squares;
  for (size_t i = 0; known && i < known->size(); ++i) {
    squares.push_back(known->get(i).value_or(at::Tensor()));
  }
  sum_of_squares(out, shards, squares);
}

void adamw_lists(
    at::TensorList weights,
    at::TensorList grads,
    at::TensorList exp_avgs,
    at::TensorList exp_avg_sqs,
    at::TensorList steps,
    at::TensorList model_weights,
    double lr,
    double beta1,
    double beta2,
    double eps,
    double weight_decay,
    bool maximize,
    const std::optional<at::Tensor>& lr_tensor,
    const std::optional<at::Tensor>& grad_scale,
    const std::optional<at::Tensor>& found_inf) {
  AdamWUpdate(
      {weights, grads, exp_avgs, exp_avg_sqs, steps, model_weights},
      {lr, beta1, beta2, eps, weight_decay, maximize},
      {lr_tensor, grad_scale, found_inf})
      .run();
}

// -- for tracing with symbolic sizes: nothing to check, nothing to compute -----------------------

bool is_symbolic(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_symbolic(at::TensorList tensors) {
  return std::any_of(
      tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return is_symbolic(tensor); });
}

bool is_symbolic(const MaybeTensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const std::optional<at::Tensor>& tensor) {
    return tensor && is_symbolic(*tensor);
  });
}

template <typename T>
bool is_symbolic(const T& /*no tensor*/) {
  return false;
}

template <auto function>
struct OnMeta;
template <typename... Args, void (*function)(Args...)>
struct OnMeta<function> {
  static void call(Args... args) {
    if (!(is_symbolic(args) || ...)) {
      function(args...);
    }
  }
};

void implement(torch::Library& library) {
  library.impl("pack", &pack_gradients);
  library.impl("accumulate", &accumulate);
  library.impl("cast", &cast);
  library.impl("encode", &encode);
  library.impl("decode", &decode_all);
  library.impl("sum_of_squares", &sum_of_known_squares);
  library.impl("adamw", &adamw_lists);
}

} // namespace

TORCH_LIBRARY(zerocore, library) {
  library.def(
      "pack(Tensor(a!) bucket, Tensor?[] grads, int[] offsets, int[] numels, *, "
      "bool[]? add=None, float scale=1.0) -> ()");
  library.def(
      "accumulate(Tensor(a!) out, Tensor chunks, int num_chunks=1, *, bool add=False, "
      "float scale=1.0) -> ()");
  library.def("encode(Tensor(a!) blocks, Tensor source, ScalarType format) -> ()");
  library.def("decode(Tensor(a!) to, Tensor blocks, ScalarType format, int first=0) -> ()");
  library.def("cast(Tensor(a!) bucket, Tensor[] sources, int[] offsets) -> ()");
  library.def("sum_of_squares(Tensor(a!) out, Tensor[] shards, *, Tensor?[]? known=None) -> ()");
  library.def(
      "adamw(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, Tensor(e!)[] model_weights, *, float lr, "
      "float beta1=0.9, float beta2=0.999, float eps=1e-8, float weight_decay=0.01, "
      "bool maximize=False, Tensor? lr_tensor=None, Tensor? grad_scale=None, "
      "Tensor? found_inf=None) -> ()");
}

TORCH_LIBRARY_IMPL(zerocore, CPU, library) {
  implement(library);
}

// They find the loops of the tensors' device, or throw if this build has none.
TORCH_LIBRARY_IMPL(zerocore, CUDA, library) {
  implement(library);
}

TORCH_LIBRARY_IMPL(zerocore, Meta, library) {
  library.impl("pack", &OnMeta<&pack_gradients>::call);
  library.impl("accumulate", &OnMeta<&accumulate>::call);
  library.impl("cast", &OnMeta<&cast>::call);
  library.impl("encode", &OnMeta<&encode>::call);
  library.impl("decode", &OnMeta<&decode_all>::call);
  library.impl("sum_of_squares", &OnMeta<&sum_of_known_squares>::call);
  library.impl("adamw", &OnMeta<&adamw_lists>::call);
}

} // namespace zerocore::kernels
