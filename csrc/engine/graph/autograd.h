// C++ hooks on the autograd graph. They run no Python.
//
// Note [The thread of a model's backward]
// Autograd has one thread for each device. Nodes with gradients on the CPU run concurrently, on the
// thread that called backward. The hooks of a model take no lock, because all of them run on the
// thread of the model's device. If a unit's output is on another device, its hook sits on the first
// nodes at which the backward returns to the model's device. A lock would not suffice: autograd
// orders only the nodes of one thread, so a hook on the CPU could run before the gradients of a
// later unit exist, and the order of collectives would be random.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace zerocore {

// Returns `leaf.grad`, without autograd's check that the tensor is a leaf.
inline const at::Tensor& gradient_of(const at::Tensor& leaf) {
  return leaf.unsafeGetTensorImpl()->grad();
}

// Returns whether the backward on this thread computes only some gradients (`backward(inputs=...)`,
// `torch.autograd.grad`).
bool backward_is_selective();
// Returns whether that backward accumulates a gradient into `leaf`.
bool accumulates_into(const at::Tensor& leaf);
// Moves hooks from the AccumulateGrad node of `from` to the node of `to`. Returns the node of `to`,
// which the caller must keep alive; null if there are no hooks, or `to` does not require grad.
std::shared_ptr<void> take_node_hooks(const at::Tensor& from, const at::Tensor& to);
// Runs the leaf's post-accumulate-grad hooks.
void run_accumulated_hooks(const at::Tensor& leaf);
// Moves these hooks from one leaf to another.
void move_accumulated_hooks(const at::Tensor& from, const at::Tensor& to);

// A call of backward, as seen by its thread: the number of the thread's next node, and a hash of
// the roots' ages, counted in nodes.
struct BackwardCall {
  uint64_t next_node = 0;
  uint64_t roots = 0;
};

// Bracket a call of backward on this thread, through any model.
void note_backward_call(const std::vector<at::Tensor>& roots);
void forget_backward_call();
// Returns the running call of backward; nullopt if several run, nested or on other threads.
std::optional<BackwardCall> backward_call();

// A node of autograd. Each thread numbers the nodes that it creates.
struct GraphNode {
  uint64_t number = 0;
  uint64_t thread = 0; // RecordFunction's id of the thread that created the node

  bool operator==(const GraphNode& other) const = default;
};

// Returns the node that this thread runs in a backward.
std::optional<GraphNode> current_node();
// Returns whether this thread's running node takes a gradient on the device. True without a node,
// and for the CPU.
bool runs_node_of(c10::Device device);
// Returns the number of this thread's next node.
uint64_t next_node();
// Returns the outputs computed since next_node() was `first`: a unit that only passes a tensor on
// has no part in its backward. Returns all outputs if none was computed since then.
std::vector<at::Tensor> computed_since(uint64_t first, const std::vector<at::Tensor>& outputs);

// Calls `run` whenever the backward reaches one of `outputs` that has a grad_fn, before that node
// runs. For an output on another device it calls `run` before the first nodes on `device` that were
// created since next_node() was `first`.
void on_backward_of(
    const std::vector<at::Tensor>& outputs,
    c10::Device device,
    uint64_t first,
    const std::function<void()>& run);

// Calls `before` and `after` around each accumulation of a gradient into the leaf. Returns the
// accumulating node, which the caller must keep alive.
std::shared_ptr<void> on_grad_accumulated(
    const at::Tensor& leaf,
    std::function<void()> before,
    std::function<void()> after);

// Returns the id of the backward on this thread, or -1. A nested backward (reentrant checkpointing)
// has its own id.
int64_t current_backward();
inline bool in_backward() {
  return current_backward() != -1;
}

// Calls `run` when the backward on this thread ends without an exception.
void on_backward_end(std::function<void()> run);

} // namespace zerocore
