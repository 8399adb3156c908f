// Throws if a second thread, or a forked process, uses an engine, which follows one call at a time.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace zerocore {

// Remembers which thread runs forward and which one runs backward. Thread-safe.
class ThreadCheck {
 public:
  // `backward_threads`: autograd runs hooks on its own threads, as it does for devices. A hook's
  // thread then does not tell which thread called backward.
  explicit ThreadCheck(bool backward_threads) : backward_threads_(backward_threads) {}

  // Begins a forward call outside of a backward pass. Throws if another thread runs forward.
  void enter_forward() {
    check_process();
    std::thread::id owner;
    const std::thread::id self = std::this_thread::get_id();
    TORCH_CHECK(
        forward_.compare_exchange_strong(owner, self) || owner == self,
        "this model runs forward in another thread. ",
        kAdvice);
  }
  // Ends the outermost forward call, or abandons the forward.
  void leave_forward() {
    forward_.store({});
  }
  // Throws if any thread runs backward. A failed backward pass may still be unwinding on autograd's
  // thread when its caller gets the exception, so this waits for the end of the unwinding.
  void check_no_backward() const {
    const auto has_none = [this] { return backwards_->count == 0; };
    std::unique_lock lock(backwards_->mutex);
    if (backward_threads_) {
      backwards_->ended.wait_for(lock, kPatience, has_none);
    }
    TORCH_CHECK(has_none(), "this model runs backward in another thread. ", kAdvice);
  }

  // Throws if a hook of a backward pass runs while another thread uses the model.
  void check_hook() const {
    if (backward_threads_) {
      return;
    }
    const std::thread::id self = std::this_thread::get_id();
    const std::thread::id owner = forward_.load();
    TORCH_CHECK(
        owner == std::thread::id() || owner == self,
        "backward through a model that runs forward in another thread. ",
        kAdvice);
    TORCH_CHECK(
        backwards_->count == 0 || backward_.load() == self,
        "backward through a model that runs backward in another thread. ",
        kAdvice);
  }
  // Begins a backward pass, which lasts as long as the returned object. Let autograd own the
  // object, because a failed backward pass calls no hook.
  std::shared_ptr<void> begin_backward() {
    backward_.store(std::this_thread::get_id());
    backwards_->add(1);
    return {nullptr, [backwards = backwards_](void*) { backwards->add(-1); }};
  }

  // For the child of a fork, which lacks the process group's threads.
  void mark_forked() {
    forked_ = true;
  }
  bool is_forked() const {
    return forked_;
  }
  void check_process() const {
    TORCH_CHECK(
        !forked_,
        "this process was forked from one that had sharded the model: its collectives would wait "
        "for ever. Use the model in the process that sharded it, and pass plain tensors to others, "
        "such "
        "as those of zerocore.full_state_dict(model)");
  }

 private:
  // Counts the running backward passes, which may outlive the engine.
  struct Backwards {
    void add(int change) {
      {
        const std::lock_guard lock(mutex);
        count += change;
      }
      ended.notify_all();
    }

    std::atomic<int> count = 0; // changes under the mutex
    std::mutex mutex;
    std::condition_variable ended;
  };

  static constexpr std::chrono::seconds kPatience{1};
  static constexpr const char* kAdvice =
      "Use a sharded model in one thread at a time, in one order on all ranks: let one thread "
      "do all steps, or hold a lock from the forward to the end of the backward. "
      "zerocore.reset(model) forgets a thread that has died";

  bool backward_threads_;
  std::atomic<bool> forked_ = false;
  std::atomic<std::thread::id> forward_ = std::thread::id();
  std::atomic<std::thread::id> backward_ = std::thread::id();
  std::shared_ptr<Backwards> backwards_ = std::make_shared<Backwards>();
};

} // namespace zerocore
