"""Modes that watch operators run: storages that live, operations, attention as one kernel."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from zerocore.planning.fake_mode import UncompiledMode

_WITHOUT_KERNEL = {"aten::_unsafe_view", "aten::empty", "aten::empty_like", "aten::detach"}


class FusedAttention(TorchFunctionMode):
    """Attention as a GPU runs it: a fused kernel that saves its inputs, output and one number a
    row, whatever kernel the dispatcher would choose for a tensor without a device."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and _is_fused(*args, **options):
            return _attend(*args, **options)
        return func(*args, **options)


def _is_fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> bool:
    """Whether fused kernels take it: no learned bias, one head size."""
    learned = attn_mask is not None and attn_mask.requires_grad
    return not learned and query.shape[-1] == value.shape[-1]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    q, k, v = (
        t.reshape(-1, *t.shape[-3:]) if t.dim() > 2 else t[None, None] for t in (query, key, value)
    )
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, dropout_p, is_causal, scale=scale)[0].reshape(query.shape)


class StorageTracker(UncompiledMode):
    """Follows every storage from the operator that makes it until it is freed.

    ``known`` are not counted. ``live`` is in bytes; ``highest``, ``flops`` and ``kernels`` are by
    moment: the latter has what each kind of kernel does, under the names of :class:`Work`.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.moment = 0
        self.live = 0
        self.highest: defaultdict[int, int] = defaultdict(int)
        self.flops: defaultdict[int, int] = defaultdict(int)
        self.kernels: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._ignored = [tensor.untyped_storage() for tensor in known]  # keeps their ids taken
        self._seen: dict[int, Any] = {id(storage): None for storage in self._ignored}

    def at(self, moment: int) -> None:
        """From here on operators belong to a later moment."""
        self.moment = max(self.moment, moment)
        self._note()

    def is_ignored(self, tensor: Tensor) -> bool:
        """Whether the tensor is, or is a view of, one that was there before."""
        key = id(tensor.untyped_storage())
        return key in self._seen and self._seen[key] is None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked for more often than all others together
            return func(*args)
        out = func(*args, **(kwargs or {}))
        flops = _flops(func, args, kwargs or {}, out)
        self.flops[self.moment] += flops
        self.kernels[self.moment].update(_work(func, args, out, flops))
        for leaf in out if isinstance(out, tuple | list) else (out,):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def freed(_: object) -> None:
            del self._seen[key]
            self.live -= nbytes

        self._seen[key] = weakref.ref(storage, freed)
        self.live += nbytes
        self._note()

    def _note(self) -> None:
        self.highest[self.moment] = max(self.highest[self.moment], self.live)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Operations of a matrix product, a convolution or attention; 0 of all else."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*_with_all_heads(packet, args), **kwargs, out_val=out)
    if packet is torch.ops.aten._grouped_mm:  # experts: (tokens, k) by (experts, k, n)
        return 2 * args[0].numel() * args[1].shape[-1]
    return 0


def _work(func: Any, args: tuple[Any, ...], out: Any, flops: int) -> dict[str, int]:
    """The work of an operator's kernel; views and allocations have none."""
    if flops and "scaled_dot_product" in func._schema.name:
        return {"attention": flops // 2 if _is_causal(func, args) else flops}
    if flops:
        return {"products" if args[0].element_size() < 4 else "products_fp32": flops}
    if func.is_view or func._schema.name in _WITHOUT_KERNEL:
        return {}
    moved = sum(_nbytes(value) for value in (*args, out))
    return {"moved_nbytes": moved} if moved else {}


def _is_causal(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a fused attention, or its backward, skips what comes later."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "is_causal":
            return bool(value)
    return False


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, tuple | list) else 0


def _with_all_heads(packet: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of grouped-query attention with as many key and value heads as query heads.

    The kernels broadcast them; the formula of torch 2.11 asks for equal shapes.
    """
    if "scaled_dot_product" not in str(packet):
        return args
    heads = max(a.shape[1] for a in args if isinstance(a, Tensor) and a.dim() == 4)
    return tuple(
        a[:, :1].expand(-1, heads, -1, -1) if isinstance(a, Tensor) and a.dim() == 4 else a
        for a in args
    )
