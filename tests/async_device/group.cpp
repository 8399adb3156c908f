// Carries out collectives as tasks that read and write as late as they may.
#include "group.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

#include "allocator.h"
#include "device.h"
#include "operators.h"
#include "registration.h"

namespace async_device {

namespace {

// Makes the current stream wait for the collective; the host does not wait.
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

// Launches that are noted for tests.
struct Noted {
  std::mutex mutex;
  int num_communicators = 0;
  bool active = false;
  std::vector<Launch> issued, finished;
};

Noted& noted() {
  static auto& instance = *new Noted();
  return instance;
}

void note(std::vector<Launch> Noted::* list, const Launch& launch) {
  const std::lock_guard lock(noted().mutex);
  if (noted().active) {
    (noted().*list).push_back(launch);
  }
}

using Tensors = std::vector<at::Tensor>;

std::vector<at::Tensor> all_on_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& tensor : tensors) {
    aliases.push_back(on_cpu(tensor));
  }
  return aliases;
}

// Throws if memory that is both read and written is not this rank's slice of the whole, as NCCL
// demands.
void check_in_place(const at::Tensor& full, const at::Tensor& own, int rank) {
  const auto begin = reinterpret_cast<uintptr_t>(full.const_data_ptr());
  const auto at = reinterpret_cast<uintptr_t>(own.const_data_ptr());
  const bool overlaps = at + own.nbytes() > begin && at < begin + full.nbytes();
  TORCH_CHECK(
      own.nbytes() == 0 || !overlaps || at == begin + static_cast<size_t>(rank) * own.nbytes(),
      "in place, but not in this rank's slice");
}

bool overlaps(const at::Tensor& a, const at::Tensor& b) {
  const auto begin = [](const at::Tensor& t) {
    return static_cast<const char*>(t.const_data_ptr());
  };
  return begin(a) < begin(b) + b.nbytes() && begin(b) < begin(a) + a.nbytes();
}

// Reads inputs late, and leaves outputs poisoned until the end. `transfer` sends copies of the
// inputs to the ranks and returns the results.
template <typename Transfer>
void carry_out(const Tensors& outputs, Tensors& inputs, const Transfer& transfer) {
  for (const at::Tensor& output : outputs) {
    const bool in_place = std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& input) {
      return overlaps(output, input);
    });
    if (!in_place) {
      std::memset(output.mutable_data_ptr(), kPoison, output.nbytes());
    }
  }
  working_queue().pause();
  Tensors copies;
  for (const at::Tensor& input : inputs) {
    copies.push_back(input.clone());
  }
  const Tensors results = transfer(copies);
  for (const at::Tensor& output : outputs) {
    std::memset(output.mutable_data_ptr(), kPoison, output.nbytes());
  }
  working_queue().pause();
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].copy_(results[i].view(outputs[i].sizes()));
  }
}

} // namespace

void begin_launches() {
  const std::lock_guard lock(noted().mutex);
  noted().active = true;
  noted().issued.clear();
  noted().finished.clear();
}

std::vector<Launch> issued_launches() {
  const std::lock_guard lock(noted().mutex);
  return noted().issued;
}

std::vector<Launch> finished_launches() {
  const std::lock_guard lock(noted().mutex);
  return noted().finished;
}

AsyncGroup::AsyncGroup(c10::intrusive_ptr<c10d::Backend> wire)
    : Backend(wire->getRank(), wire->getSize()),
      wire_(std::move(wire)),
      stream_(next_stream()),
      number_(noted().num_communicators++) {}

AsyncGroup::WorkPtr AsyncGroup::work(
    c10d::OpType op,
    int stream,
    const PointPtr& done,
    Tensors tensors) const {
  const c10::StreamGuard guard(
      c10::Stream(c10::Stream::UNSAFE, kDevice, stream)); // for the future's events
  return c10::make_intrusive<AsyncWork>(rank_, op, done, std::move(tensors));
}

AsyncGroup::WorkPtr AsyncGroup::issue(c10d::OpType op, bool async, Tensors tensors, Task task) {
  const std::lock_guard lock(mutex_);
  if (!coalesced_) {
    return launch({op, c10d::opTypeToString(op), async, std::move(tensors), {std::move(task)}});
  }
  Collective& all = *coalesced_;
  all.what += (all.what.empty() ? "" : " + ") + c10d::opTypeToString(op);
  all.async = all.async || async;
  all.tensors.insert(all.tensors.end(), tensors.begin(), tensors.end());
  all.tasks.push_back(std::move(task));
  return nullptr;
}

AsyncGroup::WorkPtr AsyncGroup::launch(Collective collective) {
  const int stream = collective.async ? stream_ : current_stream();
  if (stream != current_stream()) {
    queue(stream).wait_for(queue(current_stream()).record());
  }
  if (last_ != nullptr) {
    queue(stream).wait_for(last_);
  }
  const bool is_registered = std::ranges::all_of(collective.tensors, [&](const at::Tensor& each) {
    return each.nbytes() == 0 || async_device::is_registered(number_, each);
  });
  const Launch noted_as{number_, collective.what, is_registered};
  note(&Noted::issued, noted_as);
  queue(stream).push(
      [tasks = std::move(collective.tasks), noted_as] {
        for (const Task& task : tasks) {
          task();
        }
        note(&Noted::finished, noted_as);
      },
      /*delayed=*/false); // carry_out() pauses
  last_ = queue(stream).record();
  return collective.async ? work(collective.op, stream, last_, std::move(collective.tensors))
                          : nullptr;
}

at::Tensor AsyncGroup::allocateTensor(
    long size, // NOLINT(*-runtime-int)
    at::TensorOptions options) {
  return allocate_registered(number_, size, options);
}

void AsyncGroup::startCoalescing() {
  const std::lock_guard lock(mutex_);
  coalesced_ = Collective{c10d::OpType::COALESCED, "", false, {}, {}};
}

AsyncGroup::WorkPtr AsyncGroup::endCoalescing() {
  const std::lock_guard lock(mutex_);
  Collective all = std::exchange(coalesced_, std::nullopt).value();
  return all.tasks.empty() ? nullptr : launch(std::move(all));
}

AsyncGroup::WorkPtr AsyncGroup::in_one_launch(const std::function<void()>& calls) {
  if (coalesced_) { // within an outer launch
    calls();
    return nullptr;
  }
  startCoalescing();
  calls();
  return endCoalescing();
}

AsyncGroup::WorkPtr AsyncGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue(
      c10d::OpType::ALLREDUCE,
      options.asyncOp,
      tensors,
      [wire = wire_, own = all_on_cpu(tensors), op = options.reduceOp]() mutable {
        carry_out(own, own, [&](Tensors& values) {
          c10d::AllreduceOptions same;
          same.reduceOp = op;
          wire->allreduce(values, same)->wait();
          return values;
        });
      });
}

AsyncGroup::WorkPtr AsyncGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return issue(
      c10d::OpType::BROADCAST,
      options.asyncOp,
      tensors,
      [wire = wire_, own = all_on_cpu(tensors), options]() mutable {
        carry_out(own, own, [&](Tensors& values) {
          wire->broadcast(values, options)->wait();
          return values;
        });
      });
}

AsyncGroup::WorkPtr AsyncGroup::allgather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  Tensors tensors = outputs.at(0);
  tensors.push_back(inputs.at(0));
  return issue(
      c10d::OpType::ALLGATHER,
      options.asyncOp,
      tensors,
      [wire = wire_, to = all_on_cpu(outputs[0]), from = all_on_cpu(inputs)]() mutable {
        carry_out(to, from, [&](Tensors& values) {
          std::vector<Tensors> received(1);
          for (const at::Tensor& each : to) {
            received[0].push_back(at::empty_like(each));
          }
          wire->allgather(received, values, {})->wait();
          return received[0];
        });
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
      [wire = wire_,
       to = on_cpu(full),
       from = Tensors{on_cpu(own)},
       n = size_,
       rank = rank_]() mutable {
        // Leaves this rank's slice alone if it is in its place, as NCCL does.
        const auto written = [&, kept = overlaps(to, from[0])](const at::Tensor& full) {
          Tensors slices = full.view(-1).chunk(n);
          if (kept) {
            slices.erase(slices.begin() + rank);
          }
          return slices;
        };
        carry_out(written(to), from, [&](Tensors& values) {
          at::Tensor received = at::empty_like(to);
          wire->_allgather_base(received, values[0], {})->wait();
          return written(received);
        });
      });
}

// Sums in the order of the ranks.
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
      [wire = wire_, to = Tensors{on_cpu(own)}, from = Tensors{on_cpu(full)}, n = size_]() mutable {
        carry_out(to, from, [&](Tensors& values) {
          at::Tensor received = at::empty_like(values[0]);
          std::vector<int64_t> even;
          wire->alltoall_base(received, values[0], even, even, {})->wait();
          const Tensors parts = received.reshape(-1).chunk(n);
          at::Tensor sum = parts[0];
          for (size_t rank = 1; rank < parts.size(); ++rank) {
            sum = sum + parts[rank];
          }
          return Tensors{sum};
        });
      });
}

AsyncGroup::WorkPtr AsyncGroup::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  return in_one_launch([&] {
    for (size_t i = 0; i < outputs.size(); ++i) {
      _allgather_base(outputs[i], inputs[i], options);
    }
  });
}

AsyncGroup::WorkPtr AsyncGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  return in_one_launch([&] {
    for (size_t i = 0; i < outputs.size(); ++i) {
      _reduce_scatter_base(outputs[i], inputs[i], options);
    }
  });
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
       to = Tensors{on_cpu(output)},
       from = Tensors{on_cpu(input)},
       to_splits = output_splits,
       from_splits = input_splits]() mutable {
        carry_out(to, from, [&](Tensors& values) {
          at::Tensor received = at::empty_like(to[0]);
          wire->alltoall_base(received, values[0], to_splits, from_splits, {})->wait();
          return Tensors{received};
        });
      });
}

AsyncGroup::WorkPtr AsyncGroup::barrier(const c10d::BarrierOptions& /*options*/) {
  return issue(
      c10d::OpType::BARRIER, /*async=*/true, {}, [wire = wire_] { wire->barrier({})->wait(); });
}

} // namespace async_device
