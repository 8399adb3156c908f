// See Note [Gathers that nobody reads].
#include "engine/graph/saved_values.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

namespace zerocore {

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
namespace nodes = torch::autograd::generated;

constexpr uint64_t kMostNodes = 8; // a call that records more computes more than it looks up
constexpr std::array<std::string_view, 6> kSaveNothing = {
    "AddBackward0",
    "CloneBackward0",
    "SqueezeBackward1",
    "ToCopyBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0"};

// None for a node of another kind.
std::optional<std::vector<const SavedVariable*>> saved_by(const Node& node) {
  using Saved = std::vector<const SavedVariable*>;
  if (const auto* lookup = dynamic_cast<const nodes::EmbeddingBackward0*>(&node)) {
    return Saved{&lookup->indices_};
  }
  if (const auto* product = dynamic_cast<const nodes::MulBackward0*>(&node)) {
    return Saved{&product->self_, &product->other_};
  }
  if (const auto* dropout = dynamic_cast<const nodes::NativeDropoutBackward0*>(&node)) {
    return Saved{&dropout->result1_};
  }
  const bool saves_nothing =
      std::find(kSaveNothing.begin(), kSaveNothing.end(), node.name()) != kSaveNothing.end();
  return saves_nothing ? std::make_optional(Saved{}) : std::nullopt;
}

bool may_read(const SavedVariable& saved, const c10::StorageImpl* memory) {
  const std::optional<at::Tensor> data = saved.get_raw_data(); // none with hooks
  return !data ||
      (data->defined() &&
       (!data->has_storage() || data->storage().unsafeGetStorageImpl() == memory));
}

bool may_read(Node& node, const c10::StorageImpl* memory) {
  const auto saved = saved_by(node);
  const bool has_hooks =
      !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() || !node.post_hooks().empty();
  return !saved || has_hooks ||
      std::any_of(saved->begin(), saved->end(), [&](const SavedVariable* each) {
        return may_read(*each, memory);
      });
}

// Those that can be reached from `outputs`, by their numbers.
std::vector<Node*> nodes_of(const std::vector<at::Tensor>& outputs, const RecordedCall& recorded) {
  std::vector<Node*> found;
  const auto add = [&](Node* node) {
    if (node != nullptr && node->sequence_nr() >= recorded.first &&
        node->sequence_nr() < recorded.last && node->thread_id() == recorded.thread &&
        std::find(found.begin(), found.end(), node) == found.end()) {
      found.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    add(output.grad_fn().get());
  }
  for (size_t i = 0; i < found.size(); ++i) {
    for (const auto& edge : found[i]->next_edges()) {
      add(edge.function.get());
    }
  }
  return found;
}

} // namespace

bool may_read(
    const std::vector<at::Tensor>& outputs,
    const RecordedCall& recorded,
    const Unit& unit) {
  const bool stays = !unit.context().mesh.shards_parameters;
  const uint64_t num_nodes = recorded.last - recorded.first;
  if (stays || num_nodes == 0 || num_nodes > kMostNodes) {
    return true;
  }
  const std::vector<Node*> found = nodes_of(outputs, recorded);
  const c10::StorageImpl* memory = unit.params().front().full.storage().unsafeGetStorageImpl();
  return found.size() != num_nodes ||
      std::any_of(found.begin(), found.end(), [&](Node* node) { return may_read(*node, memory); });
}

} // namespace zerocore
