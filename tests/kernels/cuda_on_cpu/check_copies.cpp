// Copies with cast and scale, and sums of chunks, beside plain loops.
#include <array>

#include "buffers.h"
#include "kernels/cuda/loops.h"

namespace checks {

namespace {

using zerocore::kernels::SegmentList;
namespace kernels = zerocore::kernels;

// As the operators choose it.
template <typename T>
constexpr int64_t kChunk =
    std::is_same_v<T, uint8_t> ? kernels::kByteChunkNumel : kernels::kChunkNumel;

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
  SegmentList list(kChunk<Dst>);
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
    list.push({outs[i]->data(), source, numel, ways[i] == Way::Add});
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

// As many rows of `run` elements as `numel` has, the last one maybe shorter: from a dense source
// to every `stride`, or back.
template <typename T>
void check_runs(int numel, int run, int stride, bool spreads, bool zeroes) {
  const int64_t apart = int64_t((numel - 1) / run + 1) * stride;
  Buffer<T> dense(numel, some_past());
  Buffer<T> wide(apart, some_past());
  Buffer<T>& out = spreads ? wide : dense;
  Buffer<T>& in = spreads ? dense : wide;
  std::vector<T> wanted = out.copy();
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t place = i / run * stride + i % run;
    wanted[spreads ? place : i] = zeroes ? T(0) : in[spreads ? i : place];
  }
  const auto near = static_cast<int64_t>(run * sizeof(T));
  const auto far = static_cast<int64_t>(stride * sizeof(T));
  SegmentList list(kChunk<T>);
  list.push(
      {out.data(),
       zeroes ? nullptr : in.data(),
       numel,
       false,
       run,
       spreads ? far : near,
       spreads ? near : far});
  const c10::Device device(c10::DeviceType::CPU);
  kernels::cuda::copy({device, {element_of<T>(), element_of<T>()}, list, 1.0});
  expect(same_bits(wanted.data(), out.data(), out.numel() * sizeof(T)), "runs: value", numel, run);
  expect(out.intact() && in.intact(), "runs: wrote outside", numel, run);
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
  for (const bool spreads : {false, true}) {
    for (const auto& [numel, run, stride] :
         {std::array{1, 1, 1},
          {1000, 7, 9},
          {1000, 250, 250},
          {30'000, 9'000, 9'100},
          {70'000, 33'000, 33'100}}) {
      check_runs<float>(numel, run, stride, spreads, false);
      check_runs<uint8_t>(numel, run, stride, spreads, false);
      check_runs<c10::BFloat16>(numel, run, stride, spreads, true);
    }
  }
}

void check_sums() {
  for_pairs([]<typename Dst, typename Src>() { check_sums_of<Dst, Src>(); });
}

} // namespace checks
