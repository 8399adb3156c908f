// Follows the forward: the calls of the model and of its units, and the stack of those under way.
#include "engine/model_calls.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "engine/graph/autograd.h"

namespace zerocore {

namespace {

// Whether a backward will come through one of them. None comes through a leaf, such as the output
// of a frozen module that a hook has made require a gradient.
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

// Ends the call, and those inside of it, where `run` has failed half-way.
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
    begin_recompute(id); // before this thread touches the calls of another one
  }
  run_in(push_call({recomputing, next_node(), c10::GradMode::is_enabled()}), [&] {
    recomputing ? recompute(id) : enter_forward(id); // gathers it, and others ahead
    lifecycle_.regather_changed(id);
    lifecycle_.use(id); // waits
  });
}

// Gathers the unit and those of the next calls.
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
  if (!held || in_backward()) { // there it may be released before this call ends
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

// Sets the call's handle.
void ModelCalls::leave_forward(RecordedCall& recorded, bool has_output, bool reads, bool keep) {
  const UnitId id = recorded.call.unit;
  // Outputs that are nowhere to be found, see Note [Untracked backward]; and without grad mode in a
  // pass that records: reentrant checkpointing, whose backward comes.
  const bool wanted = c10::GradMode::is_enabled() ? recorded.last > recorded.first
                                                  : lifecycle_.trainable().count(id) > 0;
  try {
    lifecycle_.writes().keep(id);
  } catch (...) {
    refused_ = std::current_exception(); // the call ends anyway
  }
  units_[id]->note_use();
  lifecycle_.run([&](Actions& out) {
    recorded.call = schedule_.exit(id, has_output || wanted, reads, out, keep);
  });
  lifecycle_.update_registration(id);
}

// Returns the call's number among untracked calls, -1 if it is none.
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
    push_call({true}); // nested: the outer pass goes on
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
    return; // nested, or there is no pass any more
  }
  consensus_.leave_pass();
  for (const auto& unit : units_) {
    unit->wait_for_unshard(); // of a skipped unit: must not meet the optimizer's update
  }
  if (any_recorded(outputs)) {
    on_backward(outputs, call.first_node, [this] { begin_backward(); });
  } else {
    lifecycle_.hide_unused();
  }
  untracked_.expect_backward();
}

// Ranks may raise in other places than this one, or not at all; see OrderConsensus::fail_pass.
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
  if (!call.recomputing && !call.dropped) { // else nested, or there is no pass any more
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

// Before a use of units: ends what an exception has left, and what other ranks wait for. A backward
// that ended with an exception never reached end_backward(). Throws in the capture of a graph, with
// `what` was called.
void ModelCalls::recover(const char* what, bool may_be_parked) {
  check_not_capturing(context_.streams->device(), what);
  if (!may_be_parked) {
    check_not_parked();
  }
  TORCH_CHECK_TYPE(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      "torch.func transforms (grad, vmap, jacrev, ...) do not go through a sharded model: what "
      "they compute with is not what autograd sees. Use torch.autograd.grad, or transform a plain "
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
    reset(); // as the rank that raised has done
  }
  thread_check_.enter_forward();
}

void ModelCalls::reset() {
  drop_calls();
  consensus_.reset(); // the others count on its message
  lifecycle_.set_in_backward_pass(false);
  untracked_error_ = nullptr;
  rest_by_shape_.clear();
  untracked_.reset();
  recomputed_calls_.reset();
  lifecycle_.reset();
  reducer_.reset();
  if (context_.streams->has_streams()) { // where nothing is resharded: the memory may be freed next
    std::ranges::for_each(units_, [](const auto& unit) { unit->wait_for_unshard(); });
  }
  forget_progress();
}

void ModelCalls::fail_backward() {
  if (lifecycle_.in_backward_pass() && !in_backward()) { // one within another one fails with it
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

// Returns the call's place in the stack.
size_t ModelCalls::push_call(Call call) {
  call.depth = schedule_.num_entered();
  calls_.push_back(call);
  return calls_.size() - 1;
}

// The innermost call that this thread has to end, without adopted units; none after a reset of
// another thread.
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

// All but the first `num` calls have ended, and with them steps in which an optimizer has raised.
void ModelCalls::end_calls(size_t num) {
  calls_.resize(num);
  std::erase_if(steps_, [num](size_t depth) { return depth > num; });
  if (calls_.empty()) {
    thread_check_.leave_forward();
  }
}

// See Note [Calls and resets]. Calls of another thread are those of one that has died.
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
