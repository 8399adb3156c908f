// The calls of the model and of its units.
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

void ModelCalls::check_not_parked() const {
  TORCH_CHECK(
      !parked_,
      "this model is parked: its memory is not on the device. Leave `with zerocore.parked(...)` "
      "first; zerocore.export takes weights from a parked model.");
}

// Before a use of units. A backward that ended with an exception never reached end_backward().
void ModelCalls::recover(bool may_be_parked, const char* what) {
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
  consensus_.settle_pass();
  if (consensus_.failed()) {
    reset(); // as the rank that raised has done
  }
  thread_check_.enter_forward();
}

void ModelCalls::reset() {
  drop_calls();
  consensus_.settle_pass(); // the others count on it
  consensus_.forget_failed();
  backward_run_.reset();
  lifecycle_.settle();
  reducer_.reset();
  if (context_.streams->has_streams()) { // where nothing is resharded: the memory may be freed next
    std::ranges::for_each(units_, [](const auto& unit) { unit->wait_for_unshard(); });
  }
  backward_run_.forget_progress();
}

void ModelCalls::begin_pass() {
  recover(/*may_be_parked=*/false, "a sharded model was called");
  if (schedule_.in_rooted_pass() || in_backward()) {
    push_call({true}); // nested: the outer pass goes on
    return;
  }
  const size_t own = calls_.size();
  const size_t depth = schedule_.num_entered();
  push_call({false, next_node()});
  try {
    start_pass();
  } catch (...) {
    abandon(own, depth);
    throw;
  }
}

void ModelCalls::start_pass() {
  backward_run_.untracked().forget(schedule_.passes().oldest());
  backward_run_.recomputed_calls().forget(schedule_.passes().oldest());
  bool changed = false;
  std::vector<UnitId> again;
  for (const auto& unit : units_) {
    const UnitId id = unit->id();
    const bool was_resident = schedule_.is_resident(id);
    changed = lifecycle_.refresh(id) || changed;
    lifecycle_.trainable().note(id);
    if (was_resident && !schedule_.is_resident(id)) {
      again.push_back(id);
    }
  }
  consensus_.note_gathers(again);
  if (changed) {
    lifecycle_.order_gathers();
  }
  lifecycle_.run([&](Actions& out) { schedule_.begin_pass(c10::GradMode::is_enabled(), out); });
}

void ModelCalls::end_pass(const std::vector<at::Tensor>& outputs) {
  const auto own = innermost();
  if (!own) {
    return;
  }
  const size_t depth = calls_[*own].depth;
  try {
    leave_adopted(outputs);
  } catch (...) {
    abandon(*own, depth);
    throw;
  }
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
    backward_run_.expect(outputs, call.first_node);
  } else {
    lifecycle_.hide_unused();
  }
  backward_run_.untracked().expect_backward();
}

// Ranks may raise in other places than this one, or not at all; see OrderConsensus::fail_pass.
void ModelCalls::fail_pass() {
  const auto own = innermost();
  if (!own) {
    return;
  }
  const Call call = calls_[*own];
  const size_t depth = call.depth;
  try {
    leave_adopted({});
  } catch (const std::exception&) {
    // The user must see the error of the call itself.
  }
  abandon(*own, depth);
  if (!call.recomputing && !call.dropped) { // else nested, or there is no pass any more
    consensus_.fail_pass();
    reset();
  }
}

void ModelCalls::enter(UnitId id) {
  recover(/*may_be_parked=*/false, "a unit of a sharded model was called");
  const bool recomputing = in_backward();
  if (recomputing) {
    backward_run_.begin_recompute(id);
  }
  const size_t own = calls_.size();
  const size_t depth = schedule_.num_entered();
  push_call({recomputing, next_node(), c10::GradMode::is_enabled()});
  try {
    recomputing ? recompute(id) : enter_forward(id);
    lifecycle_.catch_up(id);
    lifecycle_.use(id);
  } catch (...) {
    abandon(own, depth);
    throw;
  }
}

void ModelCalls::enter_forward(UnitId id) {
  if (!schedule_.in_rooted_pass() && lifecycle_.refresh(id)) {
    lifecycle_.order_gathers();
  }
  if (context_.control != nullptr && schedule_.in_rooted_pass() && schedule_.follows_order() &&
      !schedule_.order().find(id).has_value()) {
    lifecycle_.run([&](Actions& out) { schedule_.finish_order(out); });
    if (schedule_.residency().gathers()) {
      consensus_.ask_for(id);
    }
  }
  const bool grad = c10::GradMode::is_enabled();
  lifecycle_.run([&](Actions& out) { schedule_.enter(id, grad, out); });
}

// See Note [Recomputed calls]. A lookup that is made again needs the unit, out of turn.
void ModelCalls::recompute(UnitId id) {
  const auto [place, made] = backward_run_.recomputed_calls().find(id);
  lifecycle_.run([&](Actions& out) { schedule_.reach(place, out); });
  const bool in_turn = schedule_.is_next(made) && schedule_.passes().reads(made);
  const CallHandle call = in_turn ? made : CallHandle{-1, -1, id};
  consensus_.ask_in_backward(call);
  calls_.back().again = made;
  lifecycle_.run([&](Actions& out) {
    if (schedule_.recompute(call, out)) {
      backward_run_.forget_fired(id);
    }
  });
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
  const size_t depth = calls_[*own].depth;
  try {
    leave_adopted(outputs);
    leave(id, outputs, keep, reads);
  } catch (...) {
    abandon(*own, depth);
    throw;
  }
  if (calls_.empty()) {
    backward_run_.untracked().expect_backward();
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
    backward_run_.expect(computed_since(recorded.first, outputs), recorded, number);
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
    lifecycle_.keep_writes(id);
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
    backward_run_.recomputed_calls().add(recorded, entered.has_graph, entered.recomputing);
  }
  const bool is_tracked = recorded.last > recorded.first && recorded.call.pass >= 0;
  return entered.recomputing || is_tracked
      ? backward_run_.untracked().add(recorded, entered.recomputing)
      : -1;
}

void ModelCalls::push_call(Call call) {
  call.depth = schedule_.num_entered();
  calls_.push_back(call);
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

// Ends the call and those inside of it where that may have failed half-way.
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

} // namespace zerocore
