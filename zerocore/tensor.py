"""The sharded parameter and its gradient: 1-D local shards that know their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils


@dataclass(frozen=True)
class Place:
    """Where a local shard lies in its parameter.

    Attributes:
        fqn: name of the parameter.
        global_shape: shape of the full parameter.
        shard_range: ``(start, end)`` of this rank's elements; for a parameter that is not
            C-contiguous (channels_last) elements count in the order of its memory.
        group: the ranks that share the parameter; None where every rank holds all of it.
    """

    fqn: str
    global_shape: torch.Size
    shard_range: tuple[int, int]
    group: dist.ProcessGroup | None = None


class _Placed:
    """Attributes common to all tensors that are a shard of something."""

    place: Place

    @property
    def fqn(self) -> str:
        """Name of the parameter."""
        return self.place.fqn

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return self.place.global_shape

    @property
    def shard_range(self) -> tuple[int, int]:
        """This rank's elements of the flattened parameter, ``(start, end)``."""
        return self.place.shard_range


class LocalShard(_Placed, Tensor):
    """What ``state_dict`` holds of a sharded parameter: 1-D, this rank's elements."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class ShardedParameter(_Placed, nn.Parameter):
    """This rank's elements of a parameter, 1-D, possibly none; what the optimizer updates."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    unit: int  # index of the unit it belongs to
    state_ref: Callable[[], Any]  # weak: the state of the model it belongs to
    # The same elements as layers compute with; None where they compute with this parameter.
    model_weight: Tensor | None = None

    @staticmethod
    def make(
        data: Tensor, place: Place, requires_grad: bool, unit: int, state_ref: Callable[[], Any]
    ) -> ShardedParameter:
        """Wraps ``data`` (1-D) without copying."""
        param = torch.Tensor._make_subclass(ShardedParameter, data, requires_grad)
        param.place = place
        param.unit = unit
        param.state_ref = state_ref
        return param

    def detach(self) -> Tensor:
        """A :class:`LocalShard` on the same memory."""
        shard = super().detach().as_subclass(LocalShard)
        shard.place = self.place
        return shard

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        raise TypeError(
            f"parameter '{self.fqn}' is sharded and cannot be deep-copied; copy the model before "
            "zerocore.shard, or use zerocore.full_state_dict(model)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, end = self.shard_range
        return (
            f"ShardedParameter('{self.fqn}', global_shape={tuple(self.global_shape)}, "
            f"elements {start}:{end}, dtype={self.dtype})"
        )


class ShardedGrad(_Placed, Tensor):
    """This rank's elements of an averaged gradient.

    Elementwise functions work on the local elements. Norms are those of the full gradient, equal
    on all ranks (so ``torch.nn.utils.clip_grad_norm_`` is right unchanged). Other reductions
    would silently be local and raise TypeError.
    """

    @staticmethod
    def make(data: Tensor, place: Place) -> ShardedGrad:
        """Wraps ``data`` (1-D) without copying."""
        grad = torch.Tensor._make_subclass(ShardedGrad, data, False)
        grad.place = place
        return grad

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if handler is not None:
                return handler(func, *args, **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
            first = args[0] if args else None
            if type(result) is Tensor and isinstance(first, ShardedGrad):
                return _keep_place(result, first)
            return result

    def local(self) -> Tensor:
        """The local elements as a plain tensor on the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _keep_place(result: Tensor, source: ShardedGrad) -> Tensor:
    # A changed copy of the gradient is as local as the gradient.
    if result.shape != source.shape:
        return result
    placed = result.as_subclass(ShardedGrad)
    placed.place = source.place
    return placed


def _groups_of(grads: Sequence[Tensor]) -> list[dist.ProcessGroup]:
    """The groups that these gradients are split over, each once, in order."""
    groups = (grad.place.group for grad in grads if isinstance(grad, ShardedGrad))
    return list(dict.fromkeys(group for group in groups if group is not None))


def global_norms(
    grads: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Norms of full gradients from local shards, each in its gradient's dtype; one all-reduce.

    ``|x|_p = (sum over ranks of |x_r|_p^p)^(1/p)``, and the maximum for p = inf.
    """
    groups = _groups_of(grads)
    if len(groups) > 1:
        raise ValueError(
            "gradients of several process groups have no common norm; take that of each model"
        )
    group = groups[0] if groups else None
    norms = reduce_norms(torch.stack(local_norms(grads, norm_type, dtype)), norm_type, group)
    return [norm.to(dtype or g.dtype) for norm, g in zip(norms.unbind(), grads, strict=True)]


def local_norms(
    grads: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """The norm of each tensor's local elements; that of none is 0, also for p = inf."""
    filled = [grad.as_subclass(Tensor) for grad in grads if grad.numel() > 0]
    norms = iter(torch._foreach_norm(filled, norm_type, dtype) if filled else ())
    return [
        next(norms) if grad.numel() > 0 else grad.new_zeros((), dtype=dtype or grad.dtype)
        for grad in grads
    ]


def reduce_norms(norms: Tensor, norm_type: float, group: dist.ProcessGroup | None) -> Tensor:
    """Combines the ranks' norms of disjoint parts, elementwise, into those of the whole."""
    if group is None:
        return norms
    if norm_type <= 0:
        raise ValueError(f"the norm of a sharded gradient needs p > 0 or inf, got {norm_type}")
    wide = norms.double()
    if norm_type == float("inf"):
        # The bits of numbers from 0 to inf order as these do, and NaN comes behind them. A maximum
        # of floats may lose a NaN: max(1, NaN) is 1 on gloo, and NaN the other way around.
        bits = wide.abs().view(torch.int64)
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
        return bits.view(torch.float64).to(norms.dtype)
    powers = wide.pow(norm_type)
    dist.all_reduce(powers, group=group)
    return powers.pow(1.0 / norm_type).to(norms.dtype)


def _parse_p(p: Any) -> float:
    return 2.0 if p is None or p == "fro" else float(p)


def _norm(
    func: Any,
    grad: Tensor,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    out: Any = None,
) -> Tensor:
    if out is not None or keepdim or (dim not in (None, 0, -1, (0,), [0])):
        raise TypeError("the norm of a sharded gradient takes no dim, keepdim or out")
    return global_norms([grad], _parse_p(p), dtype)[0]


def _foreach_norm(
    func: Any, grads: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return global_norms(list(grads), _parse_p(ord), dtype)


def _unscale(func: Any, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    # What torch.amp.GradScaler calls: grads *= inv_scale, found_inf = 1 if one is not finite. The
    # ranks must agree, or only some would make the step; one that owns no elements takes part.
    func(grads, found_inf, inv_scale)
    for group in _groups_of(grads):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


def _refuse(func: Any, grad: Any, *args: Any, **kwargs: Any) -> Any:
    sharded = next((a for a in (grad, *args) if isinstance(a, ShardedGrad)), None)
    if sharded is None or sharded.place.group is None:
        return func(grad, *args, **kwargs)
    name = getattr(func, "__name__", str(func))
    raise TypeError(
        f"{name}() of the gradient of '{sharded.fqn}' would only see this rank's elements. Norms "
        "(torch.linalg.vector_norm) are global; take grad.local() to reduce the local elements, "
        "or all-reduce what you need"
    )


_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm)
_REDUCTIONS = [
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "sum", "mean", "prod", "max", "min", "amax", "amin", "aminmax", "std", "var", "any",
        "all", "argmax", "argmin", "median", "quantile", "dot", "nansum", "nanmean", "logsumexp",
        "count_nonzero", "cumsum", "sort", "topk",
    )
]  # fmt: skip
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_REDUCTIONS, _refuse),
    **dict.fromkeys(_NORMS, _norm),
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}

# Without this, optimizers fall back to their for-loop without a word.
_SUBCLASSES: list[Any] = [ShardedParameter, ShardedGrad]
_optimizer._foreach_supported_types.extend(_SUBCLASSES)
_foreach_utils._foreach_supported_types.extend(_SUBCLASSES)
