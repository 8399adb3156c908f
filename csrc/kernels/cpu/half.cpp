// Loops over float16 with the processor's own casts.
#include "kernels/cpu/vectors.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define ZEROCORE_F16C __attribute__((target("avx2,f16c")))
#endif

namespace zerocore::kernels::cpu {

namespace {

#ifdef ZEROCORE_F16C

constexpr int64_t kLanes = 8;
// Elements between two prefetches, and the number of parallel sums.
constexpr int64_t kGroup = 4 * kLanes;

bool has_casts() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}

ZEROCORE_F16C inline __m256 load(const float* src) {
  return _mm256_loadu_ps(src);
}

ZEROCORE_F16C inline __m256 load(const c10::Half* src) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
}

ZEROCORE_F16C inline void store(float* dst, __m256 values) {
  _mm256_storeu_ps(dst, values);
}

ZEROCORE_F16C inline void store(c10::Half* dst, __m256 values) {
  const __m128i halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), halves);
}

template <typename Dst, typename Src>
ZEROCORE_F16C int64_t
scale_vectors(Dst* dst, const Src* src, int64_t numel, float factor, bool add) {
  const int64_t even = numel - numel % kGroup;
  const __m256 factors = _mm256_set1_ps(factor);
  for (int64_t begin = 0; begin < even; begin += kGroup) {
    fetch_ahead<kGroup>(src + begin);
    for (int64_t i = begin; i < begin + kGroup; i += kLanes) {
      const __m256 values = _mm256_mul_ps(load(src + i), factors);
      store(dst + i, add ? _mm256_add_ps(load(dst + i), values) : values);
    }
  }
  return even;
}

ZEROCORE_F16C int64_t square_vectors(const c10::Half* src, int64_t numel, double& sum) {
  const int64_t even = numel - numel % kGroup;
  float sums[kGroup] = {};
  for (int64_t begin = 0; begin < even; begin += kGroup) {
    fetch_ahead<kGroup>(src + begin);
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const __m256 values = load(src + begin + i);
      store(sums + i, _mm256_add_ps(load(sums + i), _mm256_mul_ps(values, values)));
    }
  }
  for (const float lane : sums) {
    sum += static_cast<double>(lane);
  }
  return even;
}

#else

bool has_casts() {
  return false;
}

template <typename Dst, typename Src>
int64_t scale_vectors(Dst*, const Src*, int64_t, float, bool) {
  return 0;
}

int64_t square_vectors(const c10::Half*, int64_t, double&) {
  return 0;
}

#endif

const bool kHasCasts = has_casts();

} // namespace

template <typename Dst, typename Src>
int64_t scale_halves(Dst* dst, const Src* src, int64_t numel, float factor, bool add) {
  return kHasCasts ? scale_vectors(dst, src, numel, factor, add) : 0;
}
template int64_t scale_halves(c10::Half*, const c10::Half*, int64_t, float, bool);
template int64_t scale_halves(c10::Half*, const float*, int64_t, float, bool);
template int64_t scale_halves(float*, const c10::Half*, int64_t, float, bool);

int64_t square_halves(const c10::Half* src, int64_t numel, double& sum) {
  return kHasCasts ? square_vectors(src, numel, sum) : 0;
}

} // namespace zerocore::kernels::cpu
