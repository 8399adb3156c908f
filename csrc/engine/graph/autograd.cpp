#include "engine/graph/autograd.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/functional.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <thread>
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

struct AccumulatedHook final : torch::autograd::FunctionPostHook {
  explicit AccumulatedHook(std::function<void()> run) : run_(std::move(run)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    run_();
    return outputs;
  }

  std::function<void()> run_;
};

// Running calls of backward, by calling thread; a device's nodes run on another thread.
std::mutex calls_mutex;
std::vector<std::pair<std::thread::id, BackwardCall>> calls;

bool takes_gradient_on(const Node& node, c10::Device device) {
  for (uint32_t input = 0; input < node.num_inputs(); ++input) {
    const c10::Device found = node.input_metadata(input).device();
    if (found == device || (found.is_cpu() && device.is_cpu())) { // "cpu:0" is the CPU, too
      return true;
    }
  }
  return false;
}

// Returns the first nodes on the device that a backward from the outputs reaches.
std::vector<Node*> first_nodes_on(
    c10::Device device,
    const std::vector<at::Tensor>& outputs,
    uint64_t first) {
  std::vector<Node*> found;
  std::vector<Node*> elsewhere;
  const auto add = [&](Node* node) {
    std::vector<Node*>& nodes = takes_gradient_on(*node, device) ? found : elsewhere;
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) {
      nodes.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    if (Node* node = output.grad_fn().get()) {
      add(node);
    }
  }
  for (size_t i = 0; i < elsewhere.size(); ++i) {
    for (const auto& edge : elsewhere[i]->next_edges()) {
      const uint64_t number = edge.is_valid() ? edge.function->sequence_nr() : 0;
      if (edge.is_valid() && first <= number && number < next_node()) { // leaves have no number
        add(edge.function.get());
      }
    }
  }
  return found;
}

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

std::shared_ptr<void> take_node_hooks(const at::Tensor& from, const at::Tensor& to) {
  const auto old = torch::autograd::impl::try_get_grad_accumulator(from);
  if (!old || !to.requires_grad()) {
    return nullptr;
  }
  const auto node = torch::autograd::impl::grad_accumulator(to);
  for (auto& hook : old->pre_hooks()) {
    node->add_pre_hook(std::move(hook));
  }
  for (auto& hook : old->post_hooks()) {
    node->add_post_hook(std::move(hook));
  }
  old->pre_hooks().clear();
  old->post_hooks().clear();
  return std::make_shared<std::remove_const_t<decltype(node)>>(node);
}

void run_accumulated_hooks(const at::Tensor& leaf) {
  const auto& hooks = torch::autograd::impl::post_acc_grad_hooks(leaf);
  if (hooks) {
    (*hooks)(leaf);
  }
}

void move_accumulated_hooks(const at::Tensor& from, const at::Tensor& to) {
  if (auto& hooks = torch::autograd::impl::post_acc_grad_hooks(from)) {
    torch::autograd::impl::set_post_acc_grad_hooks(to, std::move(hooks));
  }
}

void note_backward_call(const std::vector<at::Tensor>& roots) {
  const uint64_t next = next_node();
  uint64_t distances = roots.size();
  for (const at::Tensor& root : roots) {
    const auto& node = root.grad_fn();
    distances = mix(distances, node == nullptr ? 0 : next - node->sequence_nr());
  }
  const std::lock_guard lock(calls_mutex);
  calls.emplace_back(std::this_thread::get_id(), BackwardCall{next, distances});
}

void forget_backward_call() {
  const std::lock_guard lock(calls_mutex);
  const auto of_this_thread = [self = std::this_thread::get_id()](const auto& call) {
    return call.first == self;
  };
  const auto last = std::find_if(calls.rbegin(), calls.rend(), of_this_thread);
  if (last != calls.rend()) {
    calls.erase(std::next(last).base());
  }
}

std::optional<BackwardCall> backward_call() {
  const std::lock_guard lock(calls_mutex);
  return calls.size() == 1 ? std::make_optional(calls.front().second) : std::nullopt;
}

std::optional<GraphNode> current_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return std::nullopt;
  }
  return GraphNode{node->sequence_nr(), node->thread_id()};
}

bool runs_node_of(c10::Device device) {
  const auto node = torch::autograd::get_current_node();
  return device.is_cpu() || node == nullptr || takes_gradient_on(*node, device);
}

uint64_t next_node() {
  return at::sequence_number::peek();
}

std::vector<at::Tensor> computed_since(uint64_t first, const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> computed = c10::filter(outputs, [first](const at::Tensor& output) {
    const auto& node = output.grad_fn();
    return node != nullptr && node->sequence_nr() >= first;
  });
  return computed.empty() ? outputs : computed;
}

void on_backward_of(
    const std::vector<at::Tensor>& outputs,
    c10::Device device,
    uint64_t first,
    const std::function<void()>& run) {
  for (Node* node : first_nodes_on(device, outputs, first)) {
    // Inserts in front: if a unit returns its input, its hook sits on the previous unit's node, and
    // must run before that unit's hook.
    auto& hooks = node->tensor_pre_hooks();
    hooks.insert(hooks.begin(), std::make_unique<BackwardHook>(run));
  }
}

std::shared_ptr<void> on_grad_accumulated(
    const at::Tensor& leaf,
    std::function<void()> before,
    std::function<void()> after) {
  auto node = torch::autograd::impl::grad_accumulator(leaf);
  node->add_pre_hook(std::make_unique<BackwardHook>(std::move(before)));
  node->add_post_hook(std::make_unique<AccumulatedHook>(std::move(after)));
  return std::make_shared<std::remove_const_t<decltype(node)>>(node); // the type depends on torch
}

int64_t current_backward() {
  return torch::autograd::get_current_graph_task_id();
}

void on_backward_end(std::function<void()> run) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(run));
}

} // namespace zerocore
