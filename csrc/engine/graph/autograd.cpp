// C++ hooks on the autograd graph.
#include "engine/graph/autograd.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "common/math.h"

namespace zerocore {

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

struct BackwardHook final : torch::autograd::FunctionPreHook {
  explicit BackwardHook(std::function<void()> run) : run_(std::move(run)) {}

  variable_list operator()(const variable_list& grads) override {
    run_();
    return grads;
  }

  std::function<void()> run_;
};

struct AccumulatedHook final : torch::autograd::PostAccumulateGradHook {
  explicit AccumulatedHook(std::function<void()> run) : run_(std::move(run)) {}

  void operator()(const at::Tensor& /*leaf*/) override {
    run_();
  }

  std::function<void()> run_;
};

// Autograd runs a device's nodes on threads of its own.
std::mutex call_mutex;
std::optional<BackwardCall> call;

} // namespace

bool backward_is_selective() {
  const auto* needed = torch::autograd::get_current_graph_task_exec_info();
  return needed != nullptr && !needed->empty();
}

bool accumulates_into(const at::Tensor& leaf) {
  if (!backward_is_selective()) {
    return true;
  }
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  const auto* needed = torch::autograd::get_current_graph_task_exec_info();
  const auto found = node ? needed->find(node.get()) : needed->end();
  return found != needed->end() && found->second.needed_;
}

void run_accumulated_hooks(const at::Tensor& leaf) {
  const auto& hooks = torch::autograd::impl::post_acc_grad_hooks(leaf);
  if (hooks) {
    (*hooks)(leaf);
  }
}

void note_backward_call(const std::vector<at::Tensor>& roots) {
  const uint64_t next = next_node();
  uint64_t distances = roots.size();
  for (const at::Tensor& root : roots) {
    const auto& node = root.grad_fn();
    distances = mix(distances, node == nullptr ? 0 : next - node->sequence_nr());
  }
  const std::lock_guard<std::mutex> lock(call_mutex);
  call = {next, distances};
}

void forget_backward_call() {
  const std::lock_guard<std::mutex> lock(call_mutex);
  call.reset();
}

std::optional<BackwardCall> backward_call() {
  const std::lock_guard<std::mutex> lock(call_mutex);
  return call;
}

std::optional<GraphNode> current_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return std::nullopt;
  }
  return GraphNode{node->sequence_nr(), node->thread_id()};
}

uint64_t next_node() {
  return at::sequence_number::peek();
}

std::vector<at::Tensor> computed_since(uint64_t first, const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> computed;
  for (const at::Tensor& output : outputs) {
    const auto& node = output.grad_fn();
    if (node != nullptr && node->sequence_nr() >= first) {
      computed.push_back(output);
    }
  }
  return computed.empty() ? outputs : computed;
}

void on_backward_of(const std::vector<at::Tensor>& outputs, const std::function<void()>& run) {
  std::vector<Node*> hooked;
  for (const at::Tensor& output : outputs) {
    Node* node = output.grad_fn().get();
    if (node != nullptr && std::find(hooked.begin(), hooked.end(), node) == hooked.end()) {
      // In front: a unit that returns its input has its hook on the node of the unit before it,
      // and backward meets the later unit first.
      auto& hooks = node->tensor_pre_hooks();
      hooks.insert(hooks.begin(), std::make_unique<BackwardHook>(run));
      hooked.push_back(node);
    }
  }
}

void on_grad_accumulated(const at::Tensor& leaf, std::function<void()> run) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, std::make_unique<AccumulatedHook>(std::move(run)));
}

int64_t current_backward() {
  return torch::autograd::get_current_graph_task_id();
}

void on_backward_end(std::function<void()> run) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(run));
}

} // namespace zerocore
