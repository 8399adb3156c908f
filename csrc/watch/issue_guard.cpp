// See Note [Known sequences]. Ranks compare by messages from each to each: collectives of their own
// would take the numbers by which gloo matches those of ranks that do not compare.
#include "watch/issue_guard.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <vector>

namespace zerocore {

namespace {

// Tags are 31 bits, and users take small ones.
constexpr int kFirstTag = 0x5b000000;
constexpr uint64_t kNumTags = 1 << 23;
constexpr uint64_t kBase = 0x9e3779b97f4a7c15; // odd, so that powers keep all bits

constexpr uint64_t power(uint64_t base, size_t exponent) {
  uint64_t result = 1;
  for (size_t i = 0; i < exponent; ++i) {
    result *= base;
  }
  return result;
}

} // namespace

bool KnownSequence::advance(uint64_t collective) {
  if (successors_.size() >= kMaxPoints) {
    successors_.clear();
  }
  const auto [known, is_new] = successors_.try_emplace(point_, Successor{collective, true});
  known->second.only = known->second.only && known->second.collective == collective;
  const bool ask = is_new || !known->second.only;
  uint64_t& oldest = last_[next_++ % kDepth];
  // A polynomial over the last ones: what leaves is subtracted.
  point_ = (point_ - oldest * power(kBase, kDepth - 1)) * kBase + collective;
  oldest = collective;
  return ask;
}

std::shared_ptr<IssueGuard> IssueGuard::of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  static std::mutex mutex;
  static auto& guards = *new std::map<const c10d::Backend*, std::shared_ptr<IssueGuard>>();
  const std::lock_guard lock(mutex);
  std::erase_if(guards, [](const auto& entry) { return entry.second->backend_.expired(); });
  std::shared_ptr<IssueGuard>& guard = guards[backend.get()];
  if (guard == nullptr) {
    guard.reset(new IssueGuard(c10::weak_intrusive_ptr<c10d::Backend>(backend)));
  }
  return guard;
}

void IssueGuard::compare(uint64_t collective) {
  ++num_compared_;
  const auto backend = backend_.lock();
  TORCH_CHECK_WITH(DistBackendError, backend != nullptr, "the process group was destroyed");
  const int tag = kFirstTag + static_cast<int>(num_issued_ % kNumTags);
  const auto mine = static_cast<int64_t>(collective);
  std::vector<at::Tensor> answers;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<at::Tensor> question = {at::full({1}, mine, at::kLong)};
  for (int peer = 0; peer < backend->getSize(); ++peer) {
    if (peer != backend->getRank()) {
      std::vector<at::Tensor> answer = {at::full({1}, mine, at::kLong)};
      works.push_back(backend->recv(answer, peer, tag));
      works.push_back(backend->send(question, peer, tag));
      answers.push_back(answer[0]);
    }
  }
  for (const auto& work : works) {
    work->wait();
  }
  for (const at::Tensor& answer : answers) {
    TORCH_CHECK_WITH(
        DistBackendError,
        *answer.const_data_ptr<int64_t>() == mine,
        "the ranks are about to issue different collectives");
  }
}

} // namespace zerocore
