// C++ hooks on the autograd graph. They run no Python.
//
// Note [The thread of a model's backward]
// Autograd has one thread for each device. Nodes whose gradients are on the CPU run concurrently,
// on the thread that called backward. The hooks of a model take no lock, because all of them run on
// the thread of the model's device. If a unit's output is on another device, its hook goes on the
// first nodes at which the backward returns to the model's device. A lock would not be enough:
// autograd orders only the nodes of one thread, so a hook on the CPU could run before the gradients
// of a later unit exist, and the order of collectives would be left to chance.
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

// Returns whether the backward that runs on this thread computes only some gradients
// (`backward(inputs=...)`, `torch.autograd.grad`).
bool backward_is_selective();
// Returns whether that backward accumulates a gradient into `leaf`.
bool accumulates_into(const at::Tensor& leaf);
// Moves hooks from the AccumulateGrad node of `from` to the one of `to`. Returns the latter, which
// the caller must keep alive; null if there is nothing to move, or `to` does not require grad.
std::shared_ptr<void> take_node_hooks(const at::Tensor& from, const at::Tensor& to);
// Runs the leaf's post-accumulate-grad hooks.
void run_accumulated_hooks(const at::Tensor& leaf);
// Moves these hooks from a leaf to another.
void move_accumulated_hooks(const at::Tensor& from, const at::Tensor& to);

// A call of backward, as its thread sees it: the number of the thread's next node, and a hash of
// how many nodes before that the roots of the backward were made.
struct BackwardCall {
  uint64_t next_node = 0;
  uint64_t roots = 0;
};

// Bracket a call of backward on this thread, through any model.
void note_backward_call(const std::vector<at::Tensor>& roots);
void forget_backward_call();
// Returns the running call of backward; nullopt if there are several, nested or on other threads.
std::optional<BackwardCall> backward_call();

// A node of autograd. Each thread numbers the nodes that it makes.
struct GraphNode {
  uint64_t number = 0;
  uint64_t thread = 0; // RecordFunction's id of the thread that made the node

  bool operator==(const GraphNode& other) const = default;
};

// Returns the node that this thread runs in a backward.
std::optional<GraphNode> current_node();
// Returns whether the node that this thread runs takes a gradient on the device. True without a
// node, and for the CPU.
bool runs_node_of(c10::Device device);
// Returns the number that this thread's next node will have.
uint64_t next_node();
// Returns the outputs that were computed since next_node() was `first`, because a unit that only
// passes a tensor on has no part in its backward. Returns all if none was computed since then.
std::vector<at::Tensor> computed_since(uint64_t first, const std::vector<at::Tensor>& outputs);

// Calls `run` each time the backward reaches one of `outputs` that has a grad_fn, before that node
// runs. For an output on another device it calls `run` before the first nodes on `device` that were
// made since next_node() was `first`.
void on_backward_of(
    const std::vector<at::Tensor>& outputs,
    c10::Device device,
    uint64_t first,
    const std::function<void()>& run);

// Calls `before` and `after` around each accumulation of a gradient into the leaf. Returns the node
// that accumulates, which the caller must keep alive.
std::shared_ptr<void> on_grad_accumulated(
    const at::Tensor& leaf,
    std::function<void()> before,
    std::function<void()> after);

// Returns the id of the backward that runs on this thread, or -1. A nested backward (reentrant
// checkpointing) has its own.
int64_t current_backward();
inline bool in_backward() {
  return current_backward() != -1;
}

// Calls `run` when the backward that runs on this thread ends without an exception.
void on_backward_end(std::function<void()> run);

} // namespace zerocore
