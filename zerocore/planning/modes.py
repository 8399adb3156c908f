"""Modes that run a model on fake tensors, count its work and use fused attention."""

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
    """A tracker of every storage, from the operator that makes it until it is freed.

    It does not count the tensors in ``known``. ``live`` has the bytes alive now, ``highest`` the
    most in each moment, ``work`` each moment's ``flops`` and the fields of :class:`Work`.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self.moment = 0
        self.live = 0
        self.highest: defaultdict[int, int] = defaultdict(int)
        self.work: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._ignored = [tensor.untyped_storage() for tensor in known]  # keeps their ids from reuse
        self._seen: dict[int, Any] = {id(storage): None for storage in self._ignored}

    def at(self, moment: int) -> None:
        """Begins a later moment, to which the next operators belong."""
        self.moment = max(self.moment, moment)
        self._note()

    def is_ignored(self, tensor: Tensor) -> bool:
        """Whether the tensor is in ``known``, or a view of such a tensor."""
        key = id(tensor.untyped_storage())
        return key in self._seen and self._seen[key] is None

    def add(self, out: Any, work: dict[str, int]) -> None:
        """Adds an operator's results and its work."""
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
    """The description of a tensor that fills a storage of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _NotRepeatable(Exception):
    """Raised for an argument with which a FakeTensorMode must run the operator every time."""


class RepeatingFakeMode(FakeTensorMode):
    """A FakeTensorMode that is fast for models whose blocks repeat.

    FakeTensorMode takes a fraction of a millisecond for an operator, even on a hit of its cache.
    This class makes views with the operator's own kernel. For other operators it keeps the results
    by the shapes of the arguments, and makes new tensors like them. FakeTensorMode runs operators
    that write, and those with arguments that are not fake or have a known value, every time.

    Attributes:
        tracker: gets the results and the work of outermost operators.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tracker: StorageTracker | None = None
        self._is_inside = False  # an outer operator runs, and is tracked itself
        self._kinds: dict[Any, str] = {}
        self._results: dict[Any, Any] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler traces this, so torch need not wrap every operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the most frequent operator by far
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
        """Runs an operator; returns its results and its work, see :class:`StorageTracker`."""
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
        """Returns the key of a call: everything on which the shapes of its results depend."""
        if type(value) is FakeTensor:
            if value.fake_mode is not self or value.constant is not None:
                raise _NotRepeatable
            return value.shape, value.stride(), value.dtype, value.fake_device
        if isinstance(value, list | tuple):
            return tuple(map(self._key, value))
        if not isinstance(value, _PLAIN):
            raise _NotRepeatable
        return type(value), value  # the type tells 1, 1.0 and True apart

    def _view(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        self._key(args[0])
        device = args[0].fake_device
        with in_kernel_invocation_manager(self):
            out = func(*args, **options)
        if isinstance(out, Tensor):
            return self._fake(out, device)
        return type(out)(self._fake(view, device) for view in out)

    def _make(self, result: Any) -> Any:
        """Makes new tensors from their descriptions."""
        if not isinstance(result, _NewTensor):
            return tree_map_only(_NewTensor, self._make, result)
        with torch._C._DisableTorchDispatch():
            plain = torch.empty_strided(
                result.shape, result.stride, dtype=result.dtype, device="meta"
            )
        return self._fake(plain, result.device)

    def _fake(self, plain: Tensor, device: torch.device) -> FakeTensor:
        """Makes a FakeTensor of a tensor on the meta device. It copies the dozen attributes that
        all tensors on a device share, which is faster than the constructor."""
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
        return _OTHER  # a decomposition calls its own operators
    if func.is_view or func is torch.ops.aten._unsafe_view.default:
        return _VIEW
    values = (*func._schema.arguments, *func._schema.returns)
    return _NEW if all(value.alias_info is None for value in values) else _OTHER


def _are_new(out: Any, args: Any) -> bool:
    """Whether the results are new tensors that their descriptions suffice to make again."""
    taken = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
    return all(_is_new(tensor, taken) for tensor in tree_leaves(out) if isinstance(tensor, Tensor))


def _is_new(tensor: Tensor, taken: set[int]) -> bool:
    """Whether the tensor is new and its description suffices; adds its storage to ``taken``."""
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
    """Copies ``model`` with fake parameters and buffers; no data is read or copied. ``dtype``, if
    given, is the dtype of its floating-point parameters."""
    # deepcopy uses the memo's entry for an object instead of a copy.
    memo: dict[int, Any] = {}
    with mode:
        for param in model.parameters():
            fake = nn.Parameter(fake_like(param, dtype), requires_grad=param.requires_grad)
            memo[id(param)] = fake
        for buffer in model.buffers():
            memo.setdefault(id(buffer), fake_like(buffer))
        return copy.deepcopy(model, memo)


def fake_like(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Makes a tensor of the same shape and strides on the CPU; returns other values unchanged.

    Needs an active FakeTensorMode. ``dtype``, if given, is the dtype of floating-point tensors.
    """
    if not isinstance(value, Tensor):
        return value
    cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=cast, device="cpu")


_WITHOUT_KERNEL = {"aten::_unsafe_view", "aten::empty", "aten::empty_like", "aten::detach"}


class FusedAttention(TorchFunctionMode):
    """A mode that runs attention as a GPU does, by a fused kernel: it saves inputs, output and one
    number a row. On the CPU the dispatcher would choose another kernel."""

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
    """Whether fused kernels support the call: no learned bias, one head size."""
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
    """Returns the operations of a matrix product, a convolution or attention; 0 for others."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*_with_all_heads(packet, args), **kwargs, out_val=out)
    if packet is torch.ops.aten._grouped_mm:  # experts: (tokens, k) by (experts, k, n)
        return 2 * args[0].numel() * args[1].shape[-1]
    return 0


def _work(func: Any, args: Any, options: dict[str, Any], out: Any) -> dict[str, int]:
    """Returns the operations and the work of a kernel; views and allocations have none."""
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
    """Whether a fused attention, or its backward, skips later tokens."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "is_causal":
            return bool(value)
    return False


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, tuple | list) else 0


def _with_all_heads(packet: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Expands keys and values of grouped-query attention to as many heads as queries have. Kernels
    broadcast them, but torch 2.11's formula for operations requires equal shapes."""
    if "scaled_dot_product" not in str(packet):
        return args
    heads = max(a.shape[1] for a in args if isinstance(a, Tensor) and a.dim() == 4)
    return tuple(
        a[:, :1].expand(-1, heads, -1, -1) if isinstance(a, Tensor) and a.dim() == 4 else a
        for a in args
    )
