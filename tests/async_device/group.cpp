// A c10d backend of the device with NCCL's order of things.
#include "group.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>

#include "device.h"
#include "operators.h"

namespace async_device {

namespace {

// The current stream goes on behind it; the host does not wait.
class AsyncWork final : public c10d::Work {
 public:
  AsyncWork(int rank, c10d::OpType op, PointPtr done, std::vector<at::Tensor> tensors)
      : Work(rank, op),
        done_(std::move(done)),
        tensors_(std::move(tensors)),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(
                c10::ListType::create(c10::TensorType::get()),
                std::vector<c10::Device>{kDevice})) {
    future_->markCompleted(tensors_);
  }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    queue(current_stream()).wait_for(done_);
    tensors_.clear();
  }
  bool isCompleted() override {
    return done_->is_reached();
  }
  bool isSuccess() const override {
    return done_->is_reached();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  std::vector<at::Tensor> result() override {
    return tensors_;
  }

 private:
  PointPtr done_;
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::vector<at::Tensor> all_on_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& tensor : tensors) {
    aliases.push_back(on_cpu(tensor));
  }
  return aliases;
}

// As NCCL demands: memory that is both read and written is this rank's slice of the whole.
void check_in_place(const at::Tensor& full, const at::Tensor& own, int rank) {
  const auto begin = reinterpret_cast<uintptr_t>(full.const_data_ptr());
  const auto at = reinterpret_cast<uintptr_t>(own.const_data_ptr());
  const bool overlaps = at + own.nbytes() > begin && at < begin + full.nbytes();
  TORCH_CHECK(
      own.nbytes() == 0 || !overlaps || at == begin + static_cast<size_t>(rank) * own.nbytes(),
      "in place, but not in this rank's slice");
}

} // namespace

AsyncGroup::AsyncGroup(c10::intrusive_ptr<c10d::Backend> wire)
    : Backend(wire->getRank(), wire->getSize()), wire_(std::move(wire)), stream_(next_stream()) {}

AsyncGroup::WorkPtr AsyncGroup::work(
    c10d::OpType op,
    int stream,
    const PointPtr& done,
    Tensors tensors) const {
  const c10::StreamGuard guard(
      c10::Stream(c10::Stream::UNSAFE, kDevice, stream)); // the future's events
  return c10::make_intrusive<AsyncWork>(rank_, op, done, std::move(tensors));
}

AsyncGroup::WorkPtr AsyncGroup::issue(c10d::OpType op, bool async, Tensors tensors, Task task) {
  const std::lock_guard lock(mutex_);
  const int stream = async || coalesces_ ? stream_ : current_stream();
  if (stream != current_stream()) {
    queue(stream).wait_for(queue(current_stream()).record());
  }
  if (last_ != nullptr) {
    queue(stream).wait_for(last_);
  }
  queue(stream).push(std::move(task));
  last_ = queue(stream).record();
  if (coalesces_) {
    coalesced_.insert(coalesced_.end(), tensors.begin(), tensors.end());
    return nullptr;
  }
  return async ? work(op, stream, last_, std::move(tensors)) : nullptr;
}

void AsyncGroup::startCoalescing() {
  coalesces_ = true;
}

AsyncGroup::WorkPtr AsyncGroup::endCoalescing() {
  coalesces_ = false;
  if (last_ == nullptr) {
    return nullptr;
  }
  return work(c10d::OpType::COALESCED, stream_, last_, std::exchange(coalesced_, {}));
}

AsyncGroup::WorkPtr AsyncGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue(
      c10d::OpType::ALLREDUCE,
      options.asyncOp,
      tensors,
      [wire = wire_, on_wire = all_on_cpu(tensors), op = options.reduceOp]() mutable {
        c10d::AllreduceOptions same;
        same.reduceOp = op;
        wire->allreduce(on_wire, same)->wait();
      });
}

AsyncGroup::WorkPtr AsyncGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return issue(
      c10d::OpType::BROADCAST,
      options.asyncOp,
      tensors,
      [wire = wire_, on_wire = all_on_cpu(tensors), options]() mutable {
        wire->broadcast(on_wire, options)->wait();
      });
}

AsyncGroup::WorkPtr AsyncGroup::allgather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  std::vector<Tensors> to;
  Tensors tensors = inputs;
  for (const Tensors& each : outputs) {
    to.push_back(all_on_cpu(each));
    tensors.insert(tensors.end(), each.begin(), each.end());
  }
  return issue(
      c10d::OpType::ALLGATHER,
      options.asyncOp,
      tensors,
      [wire = wire_, to, from = all_on_cpu(inputs)]() mutable {
        wire->allgather(to, from, {})->wait();
      });
}

AsyncGroup::WorkPtr AsyncGroup::_allgather_base(
    at::Tensor& full,
    at::Tensor& own,
    const c10d::AllgatherOptions& options) {
  check_in_place(full, own, rank_);
  return issue(
      c10d::OpType::_ALLGATHER_BASE,
      options.asyncOp,
      {full, own},
      [wire = wire_, to = on_cpu(full), from = on_cpu(own)]() mutable {
        at::Tensor copy = from.clone();
        wire->_allgather_base(to, copy, {})->wait();
      });
}

AsyncGroup::WorkPtr AsyncGroup::_reduce_scatter_base(
    at::Tensor& own,
    at::Tensor& full,
    const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "only sums are scattered");
  check_in_place(full, own, rank_);
  return issue(
      c10d::OpType::_REDUCE_SCATTER_BASE,
      options.asyncOp,
      {own, full},
      [wire = wire_, to = on_cpu(own), from = on_cpu(full), size = size_]() mutable {
        at::Tensor received = at::empty_like(from);
        std::vector<int64_t> even;
        wire->alltoall_base(received, from, even, even, {})->wait();
        const std::vector<at::Tensor> parts = received.reshape(-1).chunk(size);
        at::Tensor sum = parts[0];
        for (size_t rank = 1; rank < parts.size(); ++rank) {
          sum = sum + parts[rank];
        }
        to.copy_(sum.view(to.sizes()));
      });
}

AsyncGroup::WorkPtr AsyncGroup::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  WorkPtr last;
  for (size_t i = 0; i < outputs.size(); ++i) {
    last = _allgather_base(outputs[i], inputs[i], options);
  }
  return last;
}

AsyncGroup::WorkPtr AsyncGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  WorkPtr last;
  for (size_t i = 0; i < outputs.size(); ++i) {
    last = _reduce_scatter_base(outputs[i], inputs[i], options);
  }
  return last;
}

AsyncGroup::WorkPtr AsyncGroup::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  return issue(
      c10d::OpType::ALLTOALL_BASE,
      options.asyncOp,
      {output, input},
      [wire = wire_,
       to = on_cpu(output),
       from = on_cpu(input),
       to_splits = output_splits,
       from_splits = input_splits]() mutable {
        wire->alltoall_base(to, from, to_splits, from_splits, {})->wait();
      });
}

AsyncGroup::WorkPtr AsyncGroup::barrier(const c10d::BarrierOptions& /*options*/) {
  return issue(
      c10d::OpType::BARRIER, /*async=*/true, {}, [wire = wire_] { wire->barrier({})->wait(); });
}

} // namespace async_device
