// C++ hooks on the autograd graph; nothing of Python runs in them.
//
// Note [The thread of a model's backward]
// Autograd has a thread for each device; nodes whose gradients are on the CPU run on the thread
// that called backward, at the same time. The hooks of a model take no lock: all of them run on the
// thread of the model's device. A unit whose output is on another device has its hook where the
// backward comes back to the model's. That also keeps their order: autograd orders the nodes of one
// thread alone, so a hook on the CPU could run before the gradients of the unit after it are there.
// A lock would make such a hook safe and leave its order, hence that of collectives, to chance.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace zerocore {

// `leaf.grad`, without asking autograd whether the tensor is a leaf.
inline const at::Tensor& gradient_of(const at::Tensor& leaf) {
  return leaf.unsafeGetTensorImpl()->grad();
}

// Whether the backward this thread is inside of leaves gradients of some leaves alone
// (`backward(inputs=...)`, `torch.autograd.grad`).
bool backward_is_selective();
// Whether it adds to the gradient of `leaf`.
bool accumulates_into(const at::Tensor& leaf);
// Hooks on the node that adds to the gradient of `from` become hooks on that of `to`. Returns the
// latter, which lives as long as the caller holds it; null if there is none.
std::shared_ptr<void> take_node_hooks(const at::Tensor& from, const at::Tensor& to);
// Runs the hooks that were registered to run after a gradient was accumulated into the leaf.
void run_accumulated_hooks(const at::Tensor& leaf);

// The caller's view of a backward before it begins: the number that the thread's next node will
// have, and how far behind it the tensors lie that the backward begins with, as one number.
struct BackwardCall {
  uint64_t next_node = 0;
  uint64_t roots = 0;
};

// Say that this thread calls a backward and that it has ended, whatever model it goes through.
void note_backward_call(const std::vector<at::Tensor>& roots);
void forget_backward_call();
// None if several are under way: of another thread, or within each other.
std::optional<BackwardCall> backward_call();

// A node of autograd by its number, of those that were made on one thread.
struct GraphNode {
  uint64_t number = 0;
  uint64_t thread = 0; // RecordFunction's name for it

  bool operator==(const GraphNode& other) const = default;
};

// The node that this thread runs in a backward.
std::optional<GraphNode> current_node();
// Whether the node that this thread runs, if any, is one of the device, hence of its thread.
bool runs_node_of(c10::Device device);
// The number that the next node of this thread's graph will have.
uint64_t next_node();
// Those of `outputs` that were computed since next_node() was `first`; all of them if none was. A
// unit that hands a tensor on has no part in its backward.
std::vector<at::Tensor> computed_since(uint64_t first, const std::vector<at::Tensor>& outputs);

// Calls `run` each time the backward reaches one of `outputs` (those with a grad_fn), before the
// node that produced it runs; of an output on another device, before the first nodes on `device`
// that it was computed by since next_node() was `first`.
void on_backward_of(
    const std::vector<at::Tensor>& outputs,
    c10::Device device,
    uint64_t first,
    const std::function<void()>& run);

// Calls `run` after a gradient was accumulated into the leaf.
void on_grad_accumulated(const at::Tensor& leaf, std::function<void()> run);

// A number for the backward that this thread is inside of, -1 outside. A backward within another
// one (reentrant checkpointing) has its own.
int64_t current_backward();
inline bool in_backward() {
  return current_backward() != -1;
}

// Calls `run` when the backward this thread is inside of has ended without an exception.
void on_backward_end(std::function<void()> run);

} // namespace zerocore
