// The element types of the loops, and the choice among them at run time.
#pragma once

#include <c10/core/ScalarType.h>

#include <type_traits>
#include <utility>

namespace zerocore::kernels {

// A dtype that kernels compute with, or Byte for any other dtype, which is moved as bytes.
using Element = c10::ScalarType;

// The dtypes in which values are written and read.
struct Pair {
  Element dst;
  Element src;
};

template <typename DstType, typename SrcType = DstType>
struct Types {
  using Dst = DstType;
  using Src = SrcType;
};

constexpr bool is_narrow(Element element) {
  return element == Element::Half || element == Element::BFloat16 || element == Element::Float;
}
constexpr bool can_compute(Element element) {
  return is_narrow(element) || element == Element::Double;
}

// Returns whether values can be cast: among types of up to 32 bits, and from float64 to itself.
constexpr bool can_cast(Pair pair) {
  const bool are_wide = pair.dst == Element::Double && pair.src == Element::Double;
  return are_wide || (is_narrow(pair.dst) && is_narrow(pair.src));
}

// Calls f(Types<T>()) for the float, half or bfloat16 that `element` stands for.
template <typename F>
void visit_narrow(Element element, F&& f) {
  if (element == Element::Half) {
    f(Types<c10::Half>());
  } else if (element == Element::BFloat16) {
    f(Types<c10::BFloat16>());
  } else {
    f(Types<float>());
  }
}

// Calls f(Types<T>()) for a floating element type.
template <typename F>
void visit(Element element, F&& f) {
  if (element == Element::Double) {
    f(Types<double>());
  } else {
    visit_narrow(element, std::forward<F>(f));
  }
}

// Calls f(Types<Dst, Src>()) for a pair of floating types that can_cast().
template <typename F>
void visit(Pair pair, F&& f) {
  if (pair.dst == Element::Double) {
    f(Types<double>());
    return;
  }
  visit_narrow(pair.dst, [&](auto dst) {
    visit_narrow(pair.src, [&](auto src) {
      f(Types<typename decltype(dst)::Dst, typename decltype(src)::Dst>());
    });
  });
}

// The element types of one call of AdamW. Model is Weight if there are no model weights.
template <typename WeightType, typename GradType, typename ModelType>
struct AdamWElements {
  using Weight = WeightType;
  using Grad = GradType;
  using Model = ModelType;
};

struct AdamWTypes {
  Element weight;
  Element grad;
  Element model;
};

// Returns whether AdamW supports these dtypes. Float64 weights need float64 gradients, and only
// float32 weights can have model weights, of a half type.
constexpr bool can_update(AdamWTypes types) {
  const bool casts = types.model != types.weight;
  return can_cast({types.weight, types.grad}) &&
      (!casts || (types.weight == Element::Float && can_cast({types.model, types.weight})));
}

// Calls f(AdamWElements<Weight, Grad, Model>()) for types that can_update().
template <typename F>
void visit(AdamWTypes types, F&& f) {
  visit(Pair{types.weight, types.grad}, [&](auto pair) {
    using Weight = typename decltype(pair)::Dst;
    using Grad = typename decltype(pair)::Src;
    if constexpr (std::is_same_v<Weight, float>) {
      visit_narrow(types.model, [&](auto model) {
        f(AdamWElements<Weight, Grad, typename decltype(model)::Dst>());
      });
    } else {
      f(AdamWElements<Weight, Grad, Weight>());
    }
  });
}

} // namespace zerocore::kernels
