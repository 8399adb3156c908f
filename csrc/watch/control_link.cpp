// Exchanges messages by the point-to-point calls of a c10d backend.
#include "watch/control_link.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <utility>

namespace zerocore {

// Note [Gloo's loop]: one gloo thread serves the sockets of a group. It skips a connection to which
// another thread writes (Pair::handleEvents only tries its lock), and then epoll_wait returns at
// once. So it spins until the writer runs again, which may have lost its core to the thread that it
// woke. On two ranks, sends and receives took 0.12 to 0.20 ms a round in some runs and 0.6 to 6.2
// ms in others, so two ranks use an all-reduce. Only fewer messages helped.

namespace {

// Tags have 31 bits, and programs use small ones. One tag for heads and one for rests suffice,
// because two ranks share the same hop in every round.
constexpr int kHeadTag = 0x5b000000;
constexpr int kRestTag = 0x5b000001;
constexpr int kConnectTag = 0x5b000002;
// A head has a fixed number of words: kind, user, width, length and the message's first words.
constexpr int64_t kHeader = 4;
constexpr int64_t kHeadWords = 16;
constexpr int64_t kInline = kHeadWords - kHeader;

void write_head(const at::Tensor& head, const ControlMessage& message) {
  const auto length = static_cast<int64_t>(message.words.size());
  auto* words = head.mutable_data_ptr<int64_t>();
  *words++ = static_cast<int64_t>(message.kind);
  *words++ = message.user;
  *words++ = message.width;
  *words++ = length;
  std::copy_n(message.words.begin(), std::min(length, kInline), words);
}

} // namespace

ControlLink::ControlLink(const c10::intrusive_ptr<c10d::Backend>& backend, bool is_alone)
    : backend_(backend),
      rank_(backend->getRank()),
      size_(backend->getSize()),
      sums_(is_alone && size_ == 2) {}

namespace {

// The links of the process, by backend. Never destroyed, because threads use them until the end.
struct Links {
  std::mutex mutex;
  std::map<const c10d::Backend*, std::shared_ptr<ControlLink>> of;
};

Links& all_links() {
  static auto& links = *new Links();
  return links;
}

} // namespace

std::shared_ptr<ControlLink> ControlLink::of(
    const c10::intrusive_ptr<c10d::Backend>& backend,
    bool is_alone) {
  Links& links = all_links();
  const std::lock_guard lock(links.mutex);
  std::erase_if(links.of, [](const auto& entry) { return entry.second->backend_.expired(); });
  std::shared_ptr<ControlLink>& link = links.of[backend.get()];
  if (link == nullptr) {
    link.reset(new ControlLink(backend, is_alone));
  }
  return link;
}

std::shared_ptr<ControlLink> ControlLink::find(const c10d::Backend& backend) {
  Links& links = all_links();
  const std::lock_guard lock(links.mutex);
  const auto found = links.of.find(&backend);
  return found == links.of.end() || found->second->backend_.expired() ? nullptr : found->second;
}

c10::intrusive_ptr<c10d::Backend> ControlLink::backend() const {
  auto backend = backend_.lock();
  TORCH_CHECK_WITH(DistBackendError, backend != nullptr, "the process group was destroyed");
  return backend;
}

void ControlLink::begin_backward(const std::shared_ptr<void>& running) {
  const std::thread::id self = std::this_thread::get_id();
  const std::lock_guard lock(mutex_);
  std::erase_if(backwards_, [](const auto& backward) { return backward.second.expired(); });
  TORCH_CHECK(
      std::ranges::all_of(backwards_, [&](const auto& backward) { return backward.first == self; }),
      "two sharded models run backward at a time, in two threads: their collectives would have "
      "no order that all ranks share. Autograd runs a device's nodes in a thread of its own and "
      "CPU nodes in the caller's. Run a backward for each model, one after the other, in "
      "one thread, or keep the models on one device.");
  backwards_.emplace_back(self, running);
}

ControlLink::Ticket ControlLink::begin(ControlMessage own) {
  auto round = std::make_shared<Round>(Dissemination(rank_, size_, std::move(own)));
  const auto backend = this->backend();
  if (!std::exchange(connected_, true)) {
    connect(*backend);
  }
  post_heads(*backend, *round);
  send(*backend, *round);
  const std::lock_guard lock(mutex_);
  rounds_.push_back(round);
  if (Dissemination::num_hops(size_) > 1) {
    if (!std::exchange(has_thread_, true)) {
      std::thread([self = shared_from_this()] { self->run(); }).detach();
    }
    changed_.notify_all();
  }
  return round;
}

ControlMessage ControlLink::wait(const Ticket& round) {
  std::unique_lock lock(mutex_);
  while (!has_thread_ && !round->done) {
    const Ticket next = rounds_.front();
    rounds_.pop_front();
    lock.unlock();
    carry_out(*next);
    lock.lock();
    next->done = true;
  }
  changed_.wait(lock, [&] { return round->done; });
  if (round->error != nullptr) {
    std::rethrow_exception(round->error);
  }
  TORCH_CHECK_WITH(
      DistBackendError,
      round->hops.heard().kind != MessageKind::Different,
      "the ranks sent control messages of different kinds or sizes");
  return round->hops.heard();
}

// Returns when the group is gone.
void ControlLink::run() {
  constexpr std::chrono::seconds kLook(10);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait_for(lock, kLook, [this] { return !rounds_.empty(); });
    if (rounds_.empty()) {
      if (backend_.expired()) {
        return;
      }
      continue;
    }
    const Ticket next = rounds_.front();
    lock.unlock();
    carry_out(*next);
    lock.lock();
    next->done = true;
    rounds_.pop_front();
    changed_.notify_all();
  }
}

void ControlLink::carry_out(Round& round) const {
  try {
    const auto backend = this->backend();
    while (!round.hops.is_done()) {
      round.hops.hear(receive(*backend, round));
      send(*backend, round);
    }
    for (const auto& work : round.sending) {
      work->wait();
    }
  } catch (...) {
    round.error = std::current_exception();
  }
}

// See Dissemination::connections: gloo connects two ranks only while both try to connect.
void ControlLink::connect(c10d::Backend& backend) const {
  const Dissemination hops(rank_, size_, {});
  for (const auto& [hop, sends] : Dissemination::connections(rank_, size_)) {
    std::vector<at::Tensor> nothing = {at::zeros({1}, at::kLong)};
    const auto peer = static_cast<int>(sends ? hops.to(hop) : hops.from(hop));
    const auto work =
        sends ? backend.send(nothing, peer, kConnectTag) : backend.recv(nothing, peer, kConnectTag);
    work->wait();
  }
}

// Posts all receives at once, because a sender waits for its receiver.
void ControlLink::post_heads(c10d::Backend& backend, Round& round) const {
  if (sums_) {
    const at::Tensor both = at::zeros({2, kHeadWords}, at::kLong);
    write_head(both[rank_], round.hops.heard());
    std::vector<at::Tensor> tensors = {both};
    c10d::AllreduceOptions options;
    options.asyncOp = true;
    round.heads = {both[round.hops.from(0)]};
    round.receiving = {backend.allreduce(tensors, options)};
    return;
  }
  for (int hop = 0; hop < Dissemination::num_hops(size_); ++hop) {
    round.heads.push_back(at::empty({kHeadWords}, at::kLong));
    std::vector<at::Tensor> tensors = {round.heads.back()};
    const auto from = static_cast<int>(round.hops.from(hop));
    round.receiving.push_back(backend.recv(tensors, from, kHeadTag));
  }
}

// Sends the message of the next hop, if there is one.
void ControlLink::send(c10d::Backend& backend, Round& round) const {
  if (round.hops.is_done()) {
    return;
  }
  const std::vector<int64_t>& words = round.hops.heard().words;
  const auto send_words = [&](const at::Tensor& sent, int tag) {
    std::vector<at::Tensor> tensors = {sent};
    const auto to = static_cast<int>(round.hops.to(round.hops.hop()));
    round.sending.push_back(backend.send(tensors, to, tag));
  };
  if (!sums_) {
    const at::Tensor head = at::zeros({kHeadWords}, at::kLong);
    write_head(head, round.hops.heard());
    send_words(head, kHeadTag);
  }
  if (const auto length = static_cast<int64_t>(words.size()); length > kInline) {
    const at::Tensor rest = at::empty({length - kInline}, at::kLong);
    std::copy(words.begin() + kInline, words.end(), rest.mutable_data_ptr<int64_t>());
    send_words(rest, kRestTag);
  }
}

ControlMessage ControlLink::receive(c10d::Backend& backend, Round& round) {
  const int hop = round.hops.hop();
  round.receiving[hop]->wait();
  const auto* head = round.heads[hop].const_data_ptr<int64_t>();
  ControlMessage message{static_cast<MessageKind>(head[0]), head[1], head[2], {}};
  const int64_t length = head[3];
  message.words.assign(head + kHeader, head + kHeader + std::min(length, kInline));
  if (length > kInline) {
    const at::Tensor rest = at::empty({length - kInline}, at::kLong);
    std::vector<at::Tensor> tensors = {rest};
    backend.recv(tensors, static_cast<int>(round.hops.from(hop)), kRestTag)->wait();
    const auto* words = rest.const_data_ptr<int64_t>();
    message.words.insert(message.words.end(), words, words + rest.numel());
  }
  return message;
}

} // namespace zerocore
