"""Modes in which a model runs without data: on fake tensors, watched, with fused attention."""

from __future__ import annotations

import copy
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_VIEW, _NEW, _OTHER = "view of the first argument", "new tensors", "other"


class StorageTracker:
    """Follows every storage from the operator that makes it until it is freed.

    ``known`` are not counted. ``live`` is in bytes; ``highest`` and ``work`` are by moment: the
    latter has ``flops``, and what each kind of kernel does, under the names of :class:`Work`.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self.moment = 0
        self.live = 0
        self.highest: defaultdict[int, int] = defaultdict(int)
        self.work: defaultdict[int, Counter[str]] = defaultdict(Counter)
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

    def add(self, out: Any, work: dict[str, int]) -> None:
        """An operator's results, and what it did."""
        counted = self.work[self.moment]
        for name, amount in work.items():
            counted[name] += amount
        for leaf in out if isinstance(out, tuple | list) else (out,):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._seen:
            return
        nbytes = storage.nbytes()

        def freed(_: object) -> None:
            del self._seen[key]
            self.live -= nbytes

        self._seen[key] = weakref.ref(storage, freed)
        self.live += nbytes
        self._note()

    def _note(self) -> None:
        self.highest[self.moment] = max(self.highest[self.moment], self.live)


@dataclass(frozen=True)
class _NewTensor:
    """A tensor with a storage of its own, as large as it needs."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _NotRepeatable(Exception):
    """An operator, argument or result that a FakeTensorMode must see every time."""


class RepeatingFakeMode(FakeTensorMode):
    """A FakeTensorMode for models whose blocks repeat each other.

    A FakeTensorMode takes a fraction of a millisecond for an operator, also where its own cache
    has it. Here the operator's own kernel makes views, and other results are new tensors like
    those that the FakeTensorMode made of arguments of the same shapes. The FakeTensorMode is asked
    every time about operators that write, and about tensors that are not fake or have a value.

    Attributes:
        tracker: sees the results of all operators but those that others decompose into.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tracker: StorageTracker | None = None
        self._is_inside = False  # of an operator that is tracked
        self._kinds: dict[Any, str] = {}
        self._results: dict[Any, Any] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler traces this: torch need not guard every operator against it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked for more often than all others together
            return args[0].fake_device
        was_inside, self._is_inside = self._is_inside, True
        try:
            out, work = self._run(func, types, args, kwargs or {})
        finally:
            self._is_inside = was_inside
        if self.tracker is not None and not was_inside:
            self.tracker.add(out, work)
        return out

    def _run(self, func: Any, types: Any, args: Any, options: Any) -> tuple[Any, dict[str, int]]:
        """An operator's results and work: see :attr:`StorageTracker.work`."""
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _kind_of(func))
        try:
            if kind is _VIEW:
                return self._view(func, args, options), {}
            shapes = self._key((args, *options.items()))
            key = (func, torch.get_default_dtype(), shapes) if kind is _NEW else None
        except _NotRepeatable:
            key = None
        if key in self._results:
            result, work = self._results[key]
            return self._make(result), work
        out = super().__torch_dispatch__(func, types, args, options)
        work = _work(func, args, options, out)
        if key is not None and _are_new(out, args):
            self._results[key] = tree_map_only(FakeTensor, _describe, out), work
        return out, work

    def _key(self, value: Any) -> Any:
        """The key of a call: arguments on which the shapes of its results depend."""
        if type(value) is FakeTensor:
            if value.fake_mode is not self or value.constant is not None:
                raise _NotRepeatable
            return value.shape, value.stride(), value.dtype, value.fake_device
        if isinstance(value, list | tuple):
            return tuple(map(self._key, value))
        if not isinstance(value, _PLAIN):
            raise _NotRepeatable
        return type(value), value  # 1, 1.0 and True are equal

    def _view(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        self._key(args[0])
        device = args[0].fake_device
        with in_kernel_invocation_manager(self):
            out = func(*args, **options)
        if isinstance(out, Tensor):
            return self._fake(out, device)
        return type(out)(self._fake(view, device) for view in out)

    def _make(self, result: Any) -> Any:
        """New tensors as described."""
        if not isinstance(result, _NewTensor):
            return tree_map_only(_NewTensor, self._make, result)
        with torch._C._DisableTorchDispatch():
            plain = torch.empty_strided(
                result.shape, result.stride, dtype=result.dtype, device="meta"
            )
        return self._fake(plain, result.device)

    def _fake(self, plain: Tensor, device: torch.device) -> FakeTensor:
        """A FakeTensor around a tensor on the meta device. Its class sets a dozen attributes one by
        one, which are the same for all on a device."""
        attributes = self._attributes.get(device)
        if attributes is None:
            fake = FakeTensor(self, plain, device)
            self._attributes[device] = dict(vars(fake))
            return fake
        fake = Tensor._make_subclass(
            FakeTensor, plain, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake


def _kind_of(func: Any) -> str:
    if not isinstance(func, torch._ops.OpOverload) or func._can_decompose():
        return _OTHER  # a decomposition asks for its own operators
    if func.is_view or func is torch.ops.aten._unsafe_view.default:
        return _VIEW
    values = (*func._schema.arguments, *func._schema.returns)
    return _NEW if all(value.alias_info is None for value in values) else _OTHER


def _are_new(out: Any, args: Any) -> bool:
    """Whether a new call could return other tensors with the same descriptions."""
    taken = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
    return all(_is_new(each, taken) for each in tree_leaves(out) if isinstance(each, Tensor))


def _is_new(tensor: Tensor, taken: set[int]) -> bool:
    """Whether nothing but its description matters; its storage is one of the taken then."""
    if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
        return False
    if tensor.layout is not torch.strided or tensor.storage_offset() != 0:
        return False
    storage = tensor.untyped_storage()
    is_taken = storage._cdata in taken
    taken.add(storage._cdata)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return not is_taken and storage.nbytes() == nbytes


def _describe(tensor: FakeTensor) -> _NewTensor:
    return _NewTensor(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device)


def fake_copy(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are fake; no data is read or copied.
    Floating-point parameters take ``dtype`` where it is given."""
    # deepcopy takes what the memo has for an object instead of copying it.
    memo: dict[int, Any] = {}
    with mode:
        for param in model.parameters():
            fake = nn.Parameter(fake_like(param, dtype), requires_grad=param.requires_grad)
            memo[id(param)] = fake
        for buffer in model.buffers():
            memo.setdefault(id(buffer), fake_like(buffer))
        return copy.deepcopy(model, memo)


def fake_like(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A tensor of the same shape and strides on the CPU; what is no tensor comes back as it is.

    Needs an active FakeTensorMode. Floating-point tensors take ``dtype`` where it is given.
    """
    if not isinstance(value, Tensor):
        return value
    cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=cast, device="cpu")


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


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Operations of a matrix product, a convolution or attention; 0 of all else."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*_with_all_heads(packet, args), **kwargs, out_val=out)
    if packet is torch.ops.aten._grouped_mm:  # experts: (tokens, k) by (experts, k, n)
        return 2 * args[0].numel() * args[1].shape[-1]
    return 0


def _work(func: Any, args: Any, options: dict[str, Any], out: Any) -> dict[str, int]:
    """Operations, and the work of a kernel; views and allocations have none."""
    flops = _flops(func, args, options, out)
    if flops and "scaled_dot_product" in func._schema.name:
        return {"flops": flops, "attention": flops // 2 if _is_causal(func, args) else flops}
    if flops:
        return {
            "flops": flops,
            "products" if args[0].element_size() < 4 else "products_fp32": flops,
        }
    if func.is_view or func._schema.name in _WITHOUT_KERNEL:
        return {}
    return {"moved_nbytes": sum(_nbytes(value) for value in (*args, out))}


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
    """The arguments of grouped-query attention with as many key and value heads as query heads. The
    kernels broadcast them; the formula of torch 2.11 asks for equal shapes."""
    if "scaled_dot_product" not in str(packet):
        return args
    heads = max(a.shape[1] for a in args if isinstance(a, Tensor) and a.dim() == 4)
    return tuple(
        a[:, :1].expand(-1, heads, -1, -1) if isinstance(a, Tensor) and a.dim() == 4 else a
        for a in args
    )
