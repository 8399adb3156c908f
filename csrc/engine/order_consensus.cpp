// Tells the other ranks of this one's calls, and serves them.
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
  own.num_added = schedule_.order().num_added();
  context_.control->say(own);
}

ControlChannel::Answer OrderConsensus::wait() {
  const ControlChannel::Answer answer = context_.control->wait();
  TORCH_CHECK_VALUE(
      !answer.gathers_differ,
      first_gathered_ < 0 ? "weights have changed on another rank only, since they were gathered"
                          : "unit '" + units_[first_gathered_]->name() +
              "': its weights have changed on this rank since they were gathered, and not on all",
      ". The ranks have issued different collectives, so this process has to begin again, from a "
      "checkpoint. Change weights on all ranks alike, or inside of `with "
      "zerocore.unsharded(model, write_back=True):`.");
  return answer;
}

bool OrderConsensus::is_alone() const {
  return context_.control == nullptr || !schedule_.follows_order();
}

void OrderConsensus::ask_for(UnitId id) {
  for (;;) {
    say({id, /*changed=*/true, /*skipped=*/true, std::nullopt});
    const std::optional<UnitId> next = wait().wanted;
    TORCH_INTERNAL_ASSERT(next, "ranks that need a unit get none");
    if (*next == id) {
      return;
    }
    serve(*next, schedule_.in_rooted_pass());
  }
}

void OrderConsensus::serve(UnitId id, bool in_pass) {
  lifecycle_.run([&](Actions& out) {
    in_pass ? schedule_.serve(id, out) : schedule_.residency().serve(id, out);
  });
}

// A unit that was released too early (see Note [Untracked backward]) is gathered once more, which
// ranks that did not make the call do not know.
void OrderConsensus::ask_in_backward(const CallHandle& call) {
  if (ranks_differ_ && schedule_.walk().is_out_of_turn(call)) {
    lifecycle_.run([&](Actions& out) { schedule_.walk().leave_order(out); });
    if (!schedule_.is_resident(call.unit)) {
      ask_for(call.unit);
      lifecycle_.run([&](Actions& out) { schedule_.take_one(call.unit, out); });
    }
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
  lifecycle_.write_check().add_rest();
  if (is_alone()) {
    lifecycle_.run([&](Actions& out) { schedule_.end_pass(out); });
    return;
  }
  lifecycle_.run([&](Actions& out) { schedule_.close_pass(out); });
  written_ = lifecycle_.write_check().sum();
  const CallOrder& order = schedule_.order();
  const bool is_known = has_order_ && written_ == 0 && (!order.changed() || failed_);
  if (context_.control->is_static() && is_known) {
    finish_pass({}, schedule_.reads_more()); // a call that this rank skips is skipped by all
    return;
  }
  say({std::nullopt, order.changed(), order.skipped(), failed_});
  leaving_ = true;
  // Where no unit is gathered the backward is the first to need an answer: ranks may sum their
  // losses before it.
  const bool differs = schedule_.residency().gathers() && (order.changed() || order.skipped());
  if (differs || lifecycle_.write_check().is_urgent() || !c10::GradMode::is_enabled()) {
    settle_pass();
  }
}

void OrderConsensus::fail_pass() {
  if (!is_alone()) {
    failed_ = context_.control->rank();
    try {
      leave_pass();
      settle_pass();
    } catch (const std::exception&) {
      // The user must see the error of the call itself; the next use raises the alarm.
    }
  }
}

void OrderConsensus::settle_pass() {
  if (!std::exchange(leaving_, false)) {
    return;
  }
  ControlChannel::Answer answer = wait();
  while (answer.wanted) {
    serve(*answer.wanted, /*in_pass=*/true);
    say({std::nullopt, true, true, failed_});
    answer = wait();
  }
  failed_ = answer.failed;
  compare_writes(answer.writes_differ);
  RankCalls calls;
  if (answer.changed && !failed_) {
    schedule_.make_slots(answer.num_added);
    const CallOrder& order = schedule_.order();
    calls = context_.control->gather(order.calls(), order.num_slots(), answer.num_added);
    has_order_ = true;
    calls_differ_ = calls.lists.size() > 1;
  }
  ranks_differ_ = ranks_differ_ || ((answer.skipped || calls_differ_) && !failed_);
  finish_pass(calls, answer.reads);
}

// Those of a pass that has failed differ as the ranks' ways through it do.
void OrderConsensus::compare_writes(bool differ) {
  written_ = 0;
  const auto forget = c10::make_scope_exit([this] { lifecycle_.write_check().forget(); });
  const std::string* first =
      differ && !failed_ ? lifecycle_.write_check().find_differing() : nullptr;
  if (first != nullptr) {
    failed_ = 0; // the pass is dropped, on all ranks
    lifecycle_.drop_writes();
    finish_pass({}, /*reads_all=*/false);
    WriteCheck::fail(*first);
  }
}

void OrderConsensus::finish_pass(const RankCalls& calls, bool reads_all) {
  gathered_ = 0;
  first_gathered_ = -1;
  lifecycle_.finish_writes();
  failed_ ? schedule_.drop_pass() : schedule_.settle_pass(calls.lists, calls.own, reads_all);
}

Agreed OrderConsensus::agreed(size_t num_backward_shapes) const {
  Agreed result;
  result.num_calls = schedule_.order().calls().size();
  result.num_shapes = num_backward_shapes;
  result.num_messages = context_.control == nullptr ? 0 : context_.control->num_messages();
  for (const Collectives* each : collectives_of(units_)) {
    if (each->guard() != nullptr) {
      result.num_points += each->guard()->num_points();
      result.num_compared += each->guard()->num_compared();
    }
  }
  return result;
}

} // namespace zerocore
