// Forward, resets and the stack of running calls; model_backward.cpp has the backward pass.
#include "engine/model_calls.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "engine/graph/autograd.h"

namespace zerocore {

namespace {

// Returns whether a backward pass can reach one of the tensors. It never reaches a leaf, such as
// the output of a frozen module on which a hook has called requires_grad_().
bool any_recorded(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.requires_grad() && !tensor.is_leaf();
  });
}

} // namespace

ModelCalls::ModelCalls(
    const Units& units,
    const UnitContext& context,
    Schedule& schedule,
    Reducer& reducer,
    UnitLifecycle& lifecycle,
    OrderConsensus& consensus)
    : units_(units),
      context_(context),
      schedule_(schedule),
      reducer_(reducer),
      lifecycle_(lifecycle),
      consensus_(consensus),
      thread_check_(/*backward_threads=*/!context.streams->device().is_cpu()),
      untracked_(
          context.streams->device(),
          [this](const RecordedCall& recorded) { enter_untracked(recorded); },
          [this](const CallHandle& call) {
            return schedule_.is_resident(call.unit) || !schedule_.passes().reads(call);
          }) {
  for (const auto& unit : units) {
    progress_.push_back({0, -1, std::vector<uint8_t>(unit->params().size(), 0)});
  }
}

// If `run` throws, drops the call and all calls inside it.
template <typename Run>
void ModelCalls::run_in(size_t call, const Run& run) {
  const size_t depth = calls_[call].depth;
  try {
    run();
  } catch (...) {
    abandon(call, depth);
    throw;
  }
}

// -- a unit's call --------------------------------------------------------------------------

void ModelCalls::enter(UnitId id) {
  recover("a unit of a sharded model was called");
  const bool recomputing = in_backward();
  if (recomputing) {
    begin_recompute(id); // throws before this thread touches another thread's calls
  }
  run_in(push_call({recomputing, next_node(), c10::GradMode::is_enabled()}), [&] {
    recomputing ? recompute(id) : enter_forward(id); // starts all-gathers
    lifecycle_.regather_changed(id);
    lifecycle_.use(id); // waits for the unit's all-gather
  });
}

// Starts the all-gathers of the unit and of the units of the next calls.
void ModelCalls::enter_forward(UnitId id) {
  if (!schedule_.in_root_forward()) {
    lifecycle_.refresh(id);
  }
  consensus_.ask_in_forward(id);
  const bool grad = c10::GradMode::is_enabled();
  lifecycle_.run([&](Actions& out) { schedule_.enter(id, grad, out); });
}

void ModelCalls::adopt(UnitId id) {
  TORCH_INTERNAL_ASSERT(has_calls(), "adopt outside of a call");
  const bool held = schedule_.is_entered(id) || schedule_.is_held_unsharded(id);
  if (!held || in_backward()) { // a backward may reshard the unit before this call ends
    enter(id);
    calls_.back().adopted = id;
  }
}

void ModelCalls::exit(UnitId id, const std::vector<at::Tensor>& outputs, bool keep, bool reads) {
  const auto own = innermost();
  if (!own) {
    return;
  }
  run_in(*own, [&] {
    leave_adopted(outputs);
    leave(id, outputs, keep, reads);
  });
  if (calls_.empty()) {
    untracked_.expect_backward();
  }
  if (const auto refused = std::exchange(refused_, nullptr)) {
    std::rethrow_exception(refused);
  }
}

void ModelCalls::leave_adopted(const std::vector<at::Tensor>& outputs) {
  while (calls_.back().adopted >= 0) {
    leave(calls_.back().adopted, outputs, /*keep=*/false, /*reads=*/true);
  }
}

void ModelCalls::leave(UnitId id, const std::vector<at::Tensor>& outputs, bool keep, bool reads) {
  const Call entered = pop_call();
  if (entered.dropped) {
    return;
  }
  const bool has_output = any_recorded(outputs);
  RecordedCall recorded{
      entered.again, entered.first_node, next_node(), at::RecordFunction::currentThreadId()};
  recorded.call.unit = id;
  if (!entered.recomputing) {
    leave_forward(recorded, has_output, reads, keep);
  }
  const int64_t number = note_call(recorded, entered);
  if (has_output) {
    on_backward(computed_since(recorded.first, outputs), recorded.first, [this, recorded, number] {
      pre_backward(recorded, number);
    });
  }
}

// Exits the call in the schedule, which returns its handle.
void ModelCalls::leave_forward(RecordedCall& recorded, bool has_output, bool reads, bool keep) {
  const UnitId id = recorded.call.unit;
  // Tensors may escape from the call other than as outputs, see Note [Untracked backward]. Without
  // grad mode this may be a reentrant checkpoint, whose backward recomputes the call.
  const bool wanted = c10::GradMode::is_enabled() ? recorded.last > recorded.first
                                                  : lifecycle_.trainable().count(id) > 0;
  try {
    lifecycle_.writes().save(id);
  } catch (...) {
    refused_ = std::current_exception(); // the call must end first; see exit()
  }
  units_[id]->note_use();
  lifecycle_.run([&](Actions& out) {
    recorded.call = schedule_.exit(id, has_output || wanted, reads, out, keep);
  });
  lifecycle_.update_registration(id);
}

// Records the call's range of autograd nodes. Returns its number in UntrackedBackward, or -1.
int64_t ModelCalls::note_call(const RecordedCall& recorded, const Call& entered) {
  if (recorded.call.pass >= 0 && schedule_.passes().records(recorded.call.pass)) {
    recomputed_calls_.add(recorded, entered.has_graph, entered.recomputing);
  }
  const bool is_tracked = recorded.last > recorded.first && recorded.call.pass >= 0;
  return entered.recomputing || is_tracked ? untracked_.add(recorded, entered.recomputing) : -1;
}

// -- the model's call -----------------------------------------------------------------------

void ModelCalls::begin_pass() {
  recover("a sharded model was called");
  if (schedule_.in_root_forward() || in_backward()) {
    push_call({true}); // nested: the outer pass continues
    return;
  }
  run_in(push_call({false, next_node()}), [this] { start_pass(); });
}

void ModelCalls::start_pass() {
  untracked_.forget(schedule_.passes().oldest());
  recomputed_calls_.forget(schedule_.passes().oldest());
  consensus_.note_gathers(lifecycle_.refresh_all());
  lifecycle_.run([&](Actions& out) { schedule_.begin_pass(c10::GradMode::is_enabled(), out); });
}

void ModelCalls::end_pass(const std::vector<at::Tensor>& outputs) {
  const auto own = innermost();
  if (!own) {
    return;
  }
  run_in(*own, [&] { leave_adopted(outputs); });
  if (const auto refused = refused_) {
    fail_pass();
    std::rethrow_exception(refused);
  }
  const Call call = pop_call();
  if (call.recomputing || call.dropped) {
    return; // the call was nested, or a reset has dropped the pass
  }
  consensus_.leave_pass();
  for (const auto& unit : units_) {
    unit->wait_for_unshard(); // the optimizer must not write a skipped unit during its gather
  }
  if (any_recorded(outputs)) {
    on_backward(outputs, call.first_node, [this] { begin_backward(); });
  } else {
    lifecycle_.hide_unused();
  }
  untracked_.expect_backward();
}

// Other ranks may fail elsewhere or not at all; see OrderConsensus::fail_pass.
void ModelCalls::fail_pass() {
  const auto own = innermost();
  if (!own) {
    return;
  }
  const Call call = calls_[*own];
  try {
    leave_adopted({});
  } catch (const std::exception&) {
    // The user must see the error of the call itself.
  }
  abandon(*own, call.depth);
  if (!call.recomputing && !call.dropped) { // else the call was nested, or the pass was dropped
    consensus_.fail_pass();
    reset();
  }
}

// -- around calls ---------------------------------------------------------------------------

void ModelCalls::check_not_parked() const {
  TORCH_CHECK(
      !parked_,
      "this model is parked: its memory is not on the device. Leave `with zerocore.parked(...)` "
      "first; zerocore.export takes weights from a parked model.");
}

// Prepares a use of units: resets the model if the last backward pass or another rank's forward
// failed, and finishes the last pass. A failed backward pass never reached end_backward(). Throws
// while a CUDA graph is captured; `what` begins that error.
void ModelCalls::recover(const char* what, bool may_be_parked) {
  check_not_capturing(context_.streams->device(), what);
  if (!may_be_parked) {
    check_not_parked();
  }
  TORCH_CHECK_TYPE(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      "torch.func transforms (grad, vmap, jacrev, ...) do not work with a sharded model, because "
      "they replace the tensors that autograd sees. Use torch.autograd.grad, or transform a plain "
      "model that has loaded zerocore.full_state_dict(model).");
  if (context_.alarm != nullptr) {
    context_.alarm->check();
  }
  if (in_backward()) {
    return;
  }
  thread_check_.check_process(); // a fork cannot exchange messages
  if (lifecycle_.in_backward_pass()) {
    thread_check_.check_no_backward();
    reset();
  }
  consensus_.finish_pass();
  if (consensus_.failed()) {
    reset(); // the rank whose forward raised has reset, too
  }
  thread_check_.enter_forward();
}

void ModelCalls::reset() {
  drop_calls();
  consensus_.reset(); // the other ranks wait for this rank's message
  lifecycle_.set_in_backward_pass(false);
  untracked_error_ = nullptr;
  rest_by_shape_.clear();
  untracked_.reset();
  differentiated_.clear();
  recomputed_calls_.reset();
  lifecycle_.reset();
  reducer_.reset();
  if (context_.streams->has_streams()) { // the caller may free memory that all-gathers still write
    std::ranges::for_each(units_, [](const auto& unit) { unit->wait_for_unshard(); });
  }
  forget_progress();
}

void ModelCalls::fail_backward() {
  if (lifecycle_.in_backward_pass() && !in_backward()) { // a nested one fails with the outer one
    thread_check_.check_no_backward();
    reset();
  }
}

void ModelCalls::leave_if_outside() {
  if (calls_.empty()) {
    thread_check_.leave_forward();
  }
}

// -- the stack of calls ---------------------------------------------------------------------

size_t ModelCalls::push_call(Call call) {
  call.depth = schedule_.num_entered();
  calls_.push_back(call);
  return calls_.size() - 1;
}

// Returns the index of the innermost call that is not an adopted unit. Returns nullopt if the call
// belongs to another thread, or if another thread has reset the model and no call remains.
std::optional<size_t> ModelCalls::innermost() const {
  for (size_t call = calls_.size(); call-- > 0;) {
    if (calls_[call].adopted < 0) {
      return calls_[call].thread == std::this_thread::get_id() ? std::optional(call) : std::nullopt;
    }
  }
  return std::nullopt;
}

void ModelCalls::abandon(size_t call, size_t depth) {
  schedule_.cancel_calls(depth);
  end_calls(std::min(call, calls_.size()));
}

// Removes all but the first `num` calls, and the optimizer steps that failed inside the others.
void ModelCalls::end_calls(size_t num) {
  calls_.resize(num);
  std::erase_if(steps_, [num](size_t depth) { return depth > num; });
  if (calls_.empty()) {
    thread_check_.leave_forward();
  }
}

// See Note [Calls and resets]. Removes calls of another thread, which must have died.
void ModelCalls::drop_calls() {
  std::erase_if(calls_, [](const Call& call) { return call.thread != std::this_thread::get_id(); });
  end_calls(calls_.size());
  for (Call& call : calls_) {
    call.dropped = true;
    call.depth = 0;
  }
  refused_ = nullptr;
  thread_check_.leave_forward();
}

ModelCalls::Call ModelCalls::pop_call() {
  const Call call = calls_.back();
  end_calls(calls_.size() - 1);
  return call;
}

} // namespace zerocore
