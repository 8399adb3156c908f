// Copies with cast and scale, and sums of chunks, beside plain loops.
#include "buffers.h"
#include "kernels/cuda/loops.h"

namespace checks {

namespace {

using zerocore::kernels::SegmentList;
namespace kernels = zerocore::kernels;

enum class Way { Zero, Set, Add };

// `value * factor`, and that added to `old`: rounded to Wide at each operation, at last to Dst.
template <typename Dst, typename Src>
Dst expected(Way way, Dst old, Src value, double factor) {
  if (way == Way::Zero) {
    return Dst(0);
  }
  if constexpr (std::is_same_v<Dst, uint8_t>) {
    return value;
  } else {
    using W = Wide<Dst>;
    // The product of two floats is exact in double, and a sum of two is rounded to float alike.
    const W product = static_cast<W>(double(W(value)) * double(W(factor)));
    return way == Way::Set ? Dst(product) : Dst(static_cast<W>(double(W(old)) + double(product)));
  }
}

template <typename Dst>
Way some_way() {
  const int number = pick(0, 9);
  if (number == 0) {
    return Way::Zero;
  }
  return number < 4 && !std::is_same_v<Dst, uint8_t> ? Way::Add : Way::Set;
}

template <typename Dst, typename Src>
void check_copy(int count, double factor) {
  SegmentList list;
  Buffers<Dst> outs;
  Buffers<Src> ins;
  std::vector<Way> ways;
  std::vector<std::vector<Dst>> olds;
  for (int i = 0; i < count; ++i) {
    const int numel = some_numel(i);
    ways.push_back(some_way<Dst>());
    outs.push_back(std::make_unique<Buffer<Dst>>(numel, some_past()));
    ins.push_back(std::make_unique<Buffer<Src>>(numel, some_past()));
    olds.push_back(outs[i]->copy());
    const void* source = ways[i] == Way::Zero ? nullptr : ins[i]->data();
    list.push(outs[i]->data(), source, numel, ways[i] == Way::Add);
  }
  const c10::Device device(c10::DeviceType::CPU);
  kernels::cuda::copy({device, {element_of<Dst>(), element_of<Src>()}, list, factor});
  for (int i = 0; i < count; ++i) {
    Buffer<Dst>& out = *outs[i];
    bool same = true;
    for (int64_t k = 0; k < out.numel(); ++k) {
      const Dst wanted = expected<Dst, Src>(ways[i], olds[i][k], (*ins[i])[k], factor);
      same = same && same_bits(&wanted, &out[k], sizeof(Dst));
    }
    expect(same, "copy: another value", i, out.numel());
    expect(out.intact(), "copy: wrote outside", i, out.numel());
    expect(ins[i]->intact(), "copy: wrote to its source", i, out.numel());
  }
}

template <typename Dst, typename Src>
void check_sum(int num_chunks, int numel, int past, bool add) {
  constexpr double kFactor = 0.7;
  using W = Wide<Dst>;
  Buffer<Dst> out(numel, some_past());
  Buffer<Src> chunks(int64_t(numel) * num_chunks, past);
  const std::vector<Dst> old = out.copy();
  const c10::Device device(c10::DeviceType::CPU);
  kernels::cuda::accumulate(
      {device,
       {element_of<Dst>(), element_of<Src>()},
       out.data(),
       chunks.data(),
       numel,
       num_chunks,
       kFactor,
       add});
  bool same = true;
  for (int i = 0; i < numel; ++i) {
    W sum = 0;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      sum = static_cast<W>(double(sum) + double(W(chunks[int64_t(chunk) * numel + i])));
    }
    const Dst wanted = expected<Dst, W>(add ? Way::Add : Way::Set, old[i], sum, kFactor);
    same = same && same_bits(&wanted, &out[i], sizeof(Dst));
  }
  expect(same, "sum: another value", num_chunks, numel);
  expect(out.intact(), "sum: wrote outside", num_chunks, numel);
}

template <typename Dst, typename Src>
void check_sums_of() {
  for (const int num_chunks : {2, 5, 8}) {
    for (const int numel : {1, 8, 1000, 1031, 8208}) {
      for (const int past : {0, 1}) {
        check_sum<Dst, Src>(num_chunks, numel, past, num_chunks == 5);
      }
    }
  }
}

template <typename Dst, typename Src>
void check_copies_of() {
  for (const int count : {1, 13, 129}) {
    check_copy<Dst, Src>(count, count % 2 == 0 ? 1.0 : 0.3);
  }
}

// Calls f.operator()<Dst, Src>() for all pairs that can be cast.
template <typename F>
void for_pairs(F f) {
  const auto with = [&]<typename Dst>() {
    f.template operator()<Dst, float>();
    f.template operator()<Dst, c10::Half>();
    f.template operator()<Dst, c10::BFloat16>();
  };
  with.template operator()<float>();
  with.template operator()<c10::Half>();
  with.template operator()<c10::BFloat16>();
  f.template operator()<double, double>();
}

} // namespace

void check_copies() {
  for_pairs([]<typename Dst, typename Src>() { check_copies_of<Dst, Src>(); });
  check_copies_of<uint8_t, uint8_t>();
  check_copy<float, float>(1100, 0.3); // more than one table
}

void check_sums() {
  for_pairs([]<typename Dst, typename Src>() { check_sums_of<Dst, Src>(); });
}

} // namespace checks
