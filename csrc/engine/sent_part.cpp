// Compares what was sent of a unit with its shard.
#include "engine/sent_part.h"

#include <ATen/ops/argmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace zerocore {

bool SentPart::begin(const Bucket& gathered, const Bucket& shards) {
  armed_ = false;
  const bool is_expected = std::exchange(expected_, false);
  gathered_ = is_expected ? &gathered : nullptr;
  shards_ = is_expected ? &shards : nullptr;
  return is_expected;
}

void SentPart::copy(int region) const {
  const Streams& streams = *context_.streams;
  {
    const auto guard = streams.use(StreamRole::AllGather);
    gathered_->own_bytes(region).copy_(shards_->full_bytes(region), /*non_blocking=*/true);
  }
  streams.note_read(StreamRole::AllGather, shards_->full(region), "is copied", unit_);
  streams.note_write(StreamRole::AllGather, gathered_->own(region), "is copied", unit_);
}

void SentPart::compare() {
  if (!std::exchange(armed_, false)) {
    return;
  }
  const Streams& streams = *context_.streams;
  for (const int region : gathered_->regions()) {
    streams.note_read(StreamRole::Compute, shards_->full(region), "is compared", unit_);
    streams.note_read(StreamRole::Compute, gathered_->own(region), "is compared", unit_);
  }
  if (context_.peers == nullptr) {
    take_anew();
  } else if (streams.device().is_cpu()) {
    compare_on_host();
  } else {
    compare_on_device();
  }
  gathered_ = shards_ = nullptr;
}

void SentPart::take_anew() const {
  for (const int region : gathered_->regions()) {
    gathered_->own_bytes(region).copy_(shards_->full_bytes(region));
    context_.streams->note_write(
        StreamRole::Compute, gathered_->own(region), "is taken anew", unit_);
  }
}

void SentPart::compare_on_host() {
  const std::vector<int>& regions = gathered_->regions();
  words_ = at::full({static_cast<int64_t>(regions.size())}, -1, at::kLong);
  auto* found = words_.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < regions.size(); ++i) {
    const at::Tensor& shard = shards_->full_bytes(regions[i]);
    const auto* held = static_cast<const int64_t*>(shard.const_data_ptr());
    const auto* sent =
        static_cast<const int64_t*>(gathered_->own_bytes(regions[i]).const_data_ptr());
    const auto* end = held + shard.numel() / static_cast<int64_t>(sizeof(int64_t));
    if (const auto* first = std::mismatch(held, end, sent).first; first != end) {
      found[i] = first - held;
    }
  }
}

// On the compute stream.
void SentPart::compare_on_device() {
  std::vector<at::Tensor> words;
  for (const int region : gathered_->regions()) {
    const at::Tensor sent = gathered_->own_bytes(region).view(at::kLong);
    const at::Tensor held =
        shards_->full_bytes(region).to(sent.device(), /*non_blocking=*/true).view(at::kLong);
    const at::Tensor differs = held.ne(sent);
    words.push_back(at::where(differs.any(), at::argmax(differs.to(at::kByte)), -1));
  }
  const auto options =
      at::TensorOptions(at::kLong).pinned_memory(context_.streams->device().is_cuda());
  words_ = at::full({static_cast<int64_t>(words.size())}, -1, options);
  words_.copy_(at::stack(words), /*non_blocking=*/true);
  compared_ = context_.streams->record(StreamRole::Compute);
}

std::optional<ChangedWord> SentPart::take_changed() {
  const at::Tensor words = std::exchange(words_, at::Tensor());
  if (const StreamEvent compared = std::exchange(compared_, nullptr); compared != nullptr) {
    Streams::synchronize(compared);
  }
  if (words.defined()) {
    const auto* found = words.const_data_ptr<int64_t>();
    const auto* end = found + words.numel();
    const auto* first = std::find_if(found, end, [](int64_t word) { return word >= 0; });
    if (first != end) {
      return ChangedWord{static_cast<int>(first - found), *first};
    }
  }
  return std::nullopt;
}

} // namespace zerocore
