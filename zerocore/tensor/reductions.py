"""Norms and other full reductions of sharded tensors.

Each rank reduces its elements to one or a few numbers, in float64 or int64. The ranks all-gather
these numbers and combine them in rank order, which gives the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore._C import check_not_capturing
from zerocore.common.alarm import waiting
from zerocore.layout.place import Place
from zerocore.tensor.elementwise import NotLocal, fit, source_of
from zerocore.tensor.functions import Args, Function, Kwargs
from zerocore.tensor.placed import Placed, local_of

_SUMS = ("sum", "mean", "prod", "nansum", "nanmean")
_COUNTS = ("any", "all", "count_nonzero")
_EXTREMES = {"max": torch.amax, "amax": torch.amax, "min": torch.amin, "amin": torch.amin}
_SPREADS = ("var", "std")
_HALF = (torch.bfloat16, torch.float16)
_PRODUCTS = ("dot", "vdot", "inner", "matmul")


def reduce(func: Function, base: str, args: Args, kwargs: Kwargs) -> Any:
    """Reduces all elements of all ranks; collective.

    Returns NotImplemented if the arguments ask for anything but a full reduction.
    """
    if base in _PRODUCTS or base in ("equal", "allclose"):
        return _compare_or_multiply(func, base, args, kwargs)
    shard = args[0] if args else kwargs.get("input")
    if not isinstance(shard, Placed):
        return NotImplemented
    if base in ("item", "tolist"):
        # The whole tensor has one element, on some rank.
        whole = shard.global_shape.numel() == 1
        return func(shard.full_tensor()) if whole else NotImplemented
    options = _options(base, args[1:], kwargs)
    if options is None or shard.global_shape.numel() == 0:
        return NotImplemented
    local = local_of(shard)
    if local.is_complex():
        return NotImplemented
    like = func(torch.ones(2, dtype=local.dtype, device=local.device), **options)
    shard.place.check_whole()
    return _combine(base, shard.place, local, like.dtype, options).to(like.dtype)


def _options(base: str, args: Args, kwargs: Kwargs) -> dict[str, Any] | None:
    """Returns the arguments that change the number; None if they ask for more than one number."""
    neutral = {"dim": None, "axis": None, "keepdim": False, "out": None}
    options = {
        name: value
        for name, value in kwargs.items()
        if name != "input" and (name not in neutral or value is not neutral[name])
    }
    if base in _SPREADS and args and isinstance(args[0], bool):
        options["unbiased"] = args[0]
        args = args[1:]
    allowed = {"dtype"} if base in _SUMS else {"correction", "unbiased"}
    allowed = allowed if base in _SUMS + _SPREADS else set()
    if any(value is not None for value in args) or not set(options) <= allowed:
        return None
    return options


def _combine(
    base: str, place: Place, local: Tensor, dtype: torch.dtype, options: dict[str, Any]
) -> Tensor:
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    if base in _COUNTS:
        count = across(place, local.count_nonzero()).sum()
        numel = place.global_shape.numel()
        return {"any": count > 0, "all": count == numel}.get(base, count)
    if base in _EXTREMES:
        reducer = _EXTREMES[base]
        values = local.to(wide)
        part = reducer(values) if local.numel() > 0 else _neutral(wide, reducer, local.device)
        return reducer(across(place, part))
    if base in _SPREADS:
        return _spread(base, place, local.double(), options)
    if base == "prod":
        return across(place, local.prod(dtype=wide)).prod()
    kept = torch.nansum if base.startswith("nan") else torch.sum
    total = across(place, kept(local, dtype=wide)).sum()
    if base == "mean":
        return total / place.global_shape.numel()
    if base == "nanmean":
        return total / across(place, local.isnan().logical_not().sum()).sum()
    return total


def _neutral(wide: torch.dtype, reducer: Any, device: torch.device) -> Tensor:
    """Returns the neutral element, the number of a rank without elements."""
    info = torch.iinfo(wide) if wide == torch.int64 else None
    low, high = (info.min, info.max) if info else (float("-inf"), float("inf"))
    return torch.tensor(low if reducer is torch.amax else high, dtype=wide, device=device)


def _spread(base: str, place: Place, local: Tensor, options: dict[str, Any]) -> Tensor:
    correction = options.get("correction", 1 if options.get("unbiased", True) else 0)
    count = local.numel()
    mean = local.mean() if count > 0 else local.new_zeros(())
    part = torch.stack([local.new_tensor(count), mean, (local - mean).square().sum()])
    counts, means, squares = across(place, part).unbind(1)
    total_mean = (counts * means).sum() / counts.sum()
    total = squares.sum() + (counts * (means - total_mean).square()).sum()
    variance = total / max(0.0, place.global_shape.numel() - float(correction or 0))
    return variance.sqrt() if base == "std" else variance


def _compare_or_multiply(func: Function, base: str, args: Args, kwargs: Kwargs) -> Any:
    if len(args) < 2 or not all(isinstance(arg, Tensor) for arg in args[:2]):
        return NotImplemented
    source = source_of(args[:2])
    place = source.place
    place.check_whole()
    if not _are_full(base, args[:2], source):
        return NotImplemented
    try:
        one, other = fit(list(args[:2]), False)
    except NotLocal:
        return NotImplemented
    if base in ("equal", "allclose"):
        same = one.new_tensor(int(func(one, other, *args[2:], **kwargs)), dtype=torch.int64)
        return bool(across(place, same).all())
    if base in ("inner", "matmul") and len(place.global_shape) != 1:
        return NotImplemented  # a product of matrices
    if one.shape != other.shape or kwargs or one.is_complex():
        return NotImplemented
    wide = torch.float64 if one.dtype.is_floating_point else torch.int64
    return across(place, (one.to(wide) * other.to(wide)).sum()).sum().to(one.dtype)


def _are_full(base: str, tensors: Sequence[Tensor], source: Placed) -> bool:
    """Whether the plain tensors have the full shape on all ranks. If one rank owns all of a vector,
    its local shape equals the full shape, so the ranks vote; RuntimeError if one rank's differs."""
    place = source.place
    plain = [tensor for tensor in tensors if not isinstance(tensor, Placed)]
    are_full = all(tensor.shape == place.global_shape for tensor in plain)
    if not any(tensor.dim() == len(place.global_shape) == 1 for tensor in plain):
        return are_full
    told = torch.tensor(int(are_full), device=local_of(source).device)
    if across(place, told).all():
        return True
    raise RuntimeError(  # Python drops a TypeError of an operator, and tries the reflected one
        f"{base}() of {source.what} '{source.fqn}' takes plain tensors of shape "
        f"{tuple(place.global_shape)}, but some rank gave another shape; here "
        f"{[tuple(tensor.shape) for tensor in plain]}. Give the full tensor on all ranks, or use "
        ".local() of the shard for this rank's elements"
    )


def across(place: Place, part: Tensor) -> Tensor:
    """All-gathers every rank's numbers, in rank order, along a new first dimension."""
    if place.group is None:
        return part.unsqueeze(0)
    parts = [torch.empty_like(part) for _ in range(place.group.size())]
    with waiting(place.group, f"a reduction of '{place.fqn}'"):
        dist.all_gather(parts, part.contiguous(), group=place.group)
    return torch.stack(parts)


# -- norms --------------------------------------------------------------------------------------


def norm(func: Function, base: str, args: Args, kwargs: Kwargs) -> Any:
    """Computes the norm of all elements; NotImplemented for a norm along a dimension or of a
    matrix."""
    names = ("input", "p", "dim", "keepdim", "out", "dtype")
    named = dict(zip(names, args, strict=False)) | kwargs
    shard: Any = named.get("input", named.get("A", named.get("x", named.get("self"))))
    p = named.get("ord", named.get("p"))
    dims = (None, 0, -1, (0,), [0]) if len(shard.global_shape) == 1 else (None,)
    if named.get("out") is not None or named.get("keepdim") or named.get("dim") not in dims:
        return NotImplemented
    if base == "linalg_norm" and len(shard.global_shape) != 1 and p not in (None, "fro"):
        return NotImplemented  # a norm of a matrix
    if (isinstance(p, str) and p != "fro") or _parse_p(p) <= 0:
        return NotImplemented
    return global_norms([shard], _parse_p(p), named.get("dtype"))[0]


def foreach_norm(args: Args, kwargs: Kwargs) -> Any:
    """Computes ``torch._foreach_norm`` of the full tensors, with one all-reduce per group;
    NotImplemented for a norm of order 0 or less."""
    named = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    if _parse_p(named.get("ord")) <= 0:
        return NotImplemented
    return global_norms(list(named["self"]), _parse_p(named.get("ord")), named.get("dtype"))


def unscale(func: Any, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscales for torch.amp.GradScaler: grads *= inv_scale, found_inf = 1 if one is not finite.

    The ranks must agree, or only some would take the step; a rank without elements takes part.
    """
    check_not_capturing(found_inf.device, "GradScaler unscaled gradients of a sharded model")
    func(grads, found_inf, inv_scale)
    torch.autograd.graph.increment_version(list(grads))  # torch's kernel does not
    places = [grad.place for grad in grads if isinstance(grad, Placed)]
    for group in dict.fromkeys(group for place in places for group in place.groups):
        with waiting(group, "GradScaler.unscale_"):
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


def global_norms(
    shards: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Computes norms of full tensors from local shards, in their dtypes; one all-reduce per group.

    ``|x|_p = (sum over ranks of |x_r|_p^p)^(1/p)``, and the maximum for p = inf.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, shard in enumerate(shards):
        if isinstance(shard, Placed):
            shard.place.check_whole()
        groups = shard.place.groups if isinstance(shard, Placed) else ()
        by_groups.setdefault(groups, []).append(number)
    local = torch.stack(local_norms(shards, norm_type, dtype))
    norms = list(local.unbind())
    for groups, numbers in by_groups.items():
        alike = local if len(by_groups) == 1 else local[numbers]
        for group in groups:
            alike = reduce_norms(alike, norm_type, group, _norms_of(shards, numbers))
        for number, norm in zip(numbers, alike.unbind(), strict=True):
            norms[number] = norm
    return [norm.to((dtype or s.dtype).to_real()) for norm, s in zip(norms, shards, strict=True)]


def local_norms(
    shards: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Returns the norm of each tensor's local elements; 0 without elements, also for p = inf.
    Norms of half precision stay in float32, so that the full norm is rounded once, as torch's."""
    kinds: dict[torch.dtype | None, list[int]] = {}
    with torch._C.DisableTorchFunctionSubclass():  # functions see the local elements
        for number, shard in enumerate(shards):
            wide = dtype or (torch.float32 if shard.dtype in _HALF else None)
            kinds.setdefault(wide, []).append(number)
        norms = [shard.new_zeros((), dtype=(dtype or shard.dtype).to_real()) for shard in shards]
        for wide, numbers in kinds.items():
            filled = [number for number in numbers if shards[number].numel() > 0]
            tensors = [shards[number] for number in filled]
            found = torch._foreach_norm(tensors, norm_type, wide) if filled else ()
            for number, value in zip(filled, found, strict=True):
                norms[number] = value
        return norms


def _norms_of(shards: Sequence[Any], numbers: Sequence[int]) -> str:
    first, count = shards[numbers[0]], len(numbers)
    return f"the norm of {first.what} '{first.fqn}'" + f" and {count - 1} more" * (count > 1)


def reduce_norms(
    norms: Tensor, norm_type: float, group: dist.ProcessGroup | None, what: str = "a norm"
) -> Tensor:
    """Combines the ranks' norms of disjoint parts, elementwise, into norms of the whole."""
    if group is None:
        return norms
    check_not_capturing(norms.device, "a norm over several ranks was taken")
    if norm_type <= 0:
        raise ValueError(f"the norm of a sharded tensor needs p > 0 or inf, got {norm_type}")
    wide = norms.double()
    if norm_type == float("inf"):
        # The bits of numbers from 0 to inf have the numbers' order, and NaN comes last. A maximum
        # of floats may lose a NaN: on gloo, max(1, NaN) is 1, and max(NaN, 1) is NaN.
        bits = wide.abs().view(torch.int64)
        with waiting(group, what):
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
        return bits.view(torch.float64).to(norms.dtype)
    powers = wide.pow(norm_type)
    with waiting(group, what):
        dist.all_reduce(powers, group=group)
    return powers.pow(1.0 / norm_type).to(norms.dtype)


def _parse_p(p: Any) -> float:
    return 2.0 if p is None or p == "fro" else float(p)
