#include "engine/order_consensus.h"

#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <exception>
#include <string>
#include <utility>

#include "common/math.h"
#include "watch/issue_guard.h"

namespace zerocore {

void OrderConsensus::note_gathers(const std::vector<UnitId>& again) {
  for (const UnitId id : again) {
    first_gathered_ = gathered_ == 0 ? id : first_gathered_;
    gathered_ = mix(gathered_, static_cast<uint64_t>(id) + 1);
  }
}

void OrderConsensus::say(ControlChannel::Answer own) const {
  own.reads = schedule_.reads_more();
  own.gathered = static_cast<int64_t>(gathered_ >> 1);
  own.written = written_;
  own.needs = schedule_.order().needs();
  own.open = schedule_.open_calls();
  context_.control->say(own);
}

ControlChannel::Answer OrderConsensus::wait() {
  const ControlChannel::Answer answer = context_.control->wait();
  TORCH_CHECK_VALUE(
      !answer.gathers_differ,
      first_gathered_ < 0 ? "weights have changed on another rank only, since they were gathered"
                          : "unit '" + units_[first_gathered_]->name() +
              "': its weights have changed on this rank since they were gathered, and not on all",
      ". The ranks have issued different collectives, so training must restart from a "
      "checkpoint. Change weights on all ranks alike, or inside `with "
      "zerocore.unsharded(model, write_back=True):`.");
  return answer;
}

bool OrderConsensus::is_alone() const {
  return context_.control == nullptr || !schedule_.follows_order();
}

void OrderConsensus::ask_in_forward(UnitId id) {
  if (is_alone() || !schedule_.in_root_forward() || schedule_.order().find(id)) {
    return;
  }
  lifecycle_.run([&](Actions& out) { schedule_.finish_order(out); });
  if (schedule_.residency().gathers()) {
    ask_for(id);
  }
}

void OrderConsensus::ask_for(UnitId id) {
  // A backward inside a call adds no call to the order, on any rank.
  const bool adds_calls = schedule_.in_root_forward() && !lifecycle_.in_backward_pass();
  for (;;) {
    say({.wanted = id});
    const ControlChannel::Answer answer = wait();
    const std::optional<UnitId> next = answer.wanted;
    TORCH_INTERNAL_ASSERT(next, "a rank needs a unit, but no unit is served");
    if (adds_calls) {
      schedule_.hear_open_calls(answer.open);
    }
    if (*next == id) {
      return;
    }
    serve(*next, adds_calls);
  }
}

void OrderConsensus::serve(UnitId id, bool in_pass) {
  lifecycle_.run([&](Actions& out) {
    in_pass ? schedule_.serve(id, out) : schedule_.residency().serve(id, out);
  });
}

// The program may have resharded the unit too early for this rank (see Note [Untracked backward]).
// Ranks that did not make the call do not know, so this rank asks them to gather the unit again.
void OrderConsensus::ask_in_backward(const CallHandle& call) {
  if (ranks_differ_ && schedule_.is_out_of_turn(call)) {
    lifecycle_.run([&](Actions& out) { schedule_.abandon_program(out); });
    if (!schedule_.is_resident(call.unit)) {
      ask_for(call.unit);
      lifecycle_.run([&](Actions& out) { schedule_.serve_and_keep(call.unit, out); });
    }
  }
}

// Other ranks may still ask for units of the pass that this rank leaves.
void OrderConsensus::go_to_pass(int64_t pass) {
  const bool may_ask = ranks_differ_ && schedule_.residency().gathers();
  if (may_ask && schedule_.abandons_program(pass)) {
    lifecycle_.run([&](Actions& out) { schedule_.finish_program(out); });
    serve_others();
  }
}

void OrderConsensus::serve_others() {
  if (!ranks_differ_) {
    return;
  }
  for (;;) {
    say({});
    const std::optional<UnitId> next = wait().wanted;
    if (!next) {
      return;
    }
    serve(*next, /*in_pass=*/false);
  }
}

void OrderConsensus::leave_pass() {
  lifecycle_.writes().add_rest();
  if (is_alone()) {
    lifecycle_.run([&](Actions& out) { schedule_.end_pass(out); });
    return;
  }
  lifecycle_.run([&](Actions& out) { schedule_.leave_pass(out); });
  written_ = lifecycle_.writes().sum();
  const CallOrder& order = schedule_.order();
  if (context_.control->is_static() && written_ == 0 && !order.changed()) {
    // A static graph promises that all ranks skip the same calls.
    conclude_pass(/*agreed=*/true, {}, schedule_.reads_more());
    return;
  }
  say({.calls = order.hash(), .failed = failed_});
  leaving_ = true;
  // If another rank may still ask for a unit, answers now: the user's code may run a collective
  // next, such as a sum of losses. Ranks ask only if units are gathered.
  const bool may_ask = order.changed() || order.skipped() || calls_differ_;
  const bool differs = schedule_.residency().gathers() && may_ask;
  if (differs || lifecycle_.writes().is_urgent() || !c10::GradMode::is_enabled()) {
    finish_pass();
  }
}

void OrderConsensus::fail_pass() {
  if (!is_alone()) {
    failed_ = context_.control->rank();
    try {
      leave_pass();
      finish_pass();
    } catch (const std::exception&) {
      // The user must see the error of the call itself; the next use raises the alarm.
    }
  }
}

void OrderConsensus::finish_pass() {
  if (!std::exchange(leaving_, false)) {
    return;
  }
  ControlChannel::Answer answer = wait();
  schedule_.hear_open_calls(answer.open);
  while (answer.wanted) {
    serve(*answer.wanted, /*in_pass=*/true);
    say({.calls = schedule_.order().hash(), .failed = failed_});
    answer = wait();
    schedule_.hear_open_calls(answer.open);
  }
  failed_ = answer.failed;
  compare_writes(answer.writes_differ);
  if (!failed_) {
    calls_differ_ = answer.calls_differ;
    ranks_differ_ = ranks_differ_ || calls_differ_;
  }
  conclude_pass(!answer.calls_differ, answer.needs, answer.reads);
}

// Not in a failed pass: the ranks' calls differ, so their writes may differ.
void OrderConsensus::compare_writes(bool differ) {
  written_ = 0;
  const auto forget = c10::make_scope_exit([this] { lifecycle_.writes().forget(); });
  const std::string* first = differ && !failed_ ? lifecycle_.writes().find_differing() : nullptr;
  if (first != nullptr) {
    failed_ = 0; // makes conclude_pass drop the pass, on all ranks
    lifecycle_.writes().drop();
    conclude_pass(/*agreed=*/false, {}, /*reads_all=*/false);
    InPlaceWrites::fail(*first);
  }
}

void OrderConsensus::conclude_pass(bool agreed, const std::vector<bool>& needs, bool reads_all) {
  gathered_ = 0;
  first_gathered_ = -1;
  lifecycle_.writes().finish();
  failed_ ? schedule_.drop_pass() : schedule_.finish_pass(agreed, needs, reads_all);
}

Agreed OrderConsensus::agreed(size_t num_backward_shapes) const {
  Agreed result;
  result.num_calls = schedule_.order().num_calls();
  result.num_shapes = num_backward_shapes;
  result.num_messages = context_.control == nullptr ? 0 : context_.control->num_messages();
  for (Collectives* each : collectives_of(units_)) {
    if (each->watch().guard() != nullptr) {
      result.num_points += each->watch().guard()->num_points();
      result.num_compared += each->watch().guard()->num_compared();
    }
  }
  return result;
}

} // namespace zerocore
