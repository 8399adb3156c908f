"""Measures the activations of a forward and backward by running both on fake tensors.

It counts storages, each once: a tensor and its views share one. Parameters, buffers and inputs do
not count. Saved-tensor hooks see the tensors that autograd saves. To find all bytes alive at a
moment, it follows each storage from the operator that makes it until it is freed: saved and
temporary tensors, gradients of activations, and a unit's full gradients until all have fired.
Workspaces inside kernels are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from zerocore._C import CallEvent
from zerocore.common.nodes import Work
from zerocore.model.units import Unit, backward_reads, units_by_module
from zerocore.planning.modes import (
    FusedAttention,
    RepeatingFakeMode,
    StorageTracker,
    fake_copy,
    fake_like,
)

Loss = Callable[[nn.Module, Any], Tensor]


def mirrored(order: Sequence[CallEvent]) -> list[CallEvent]:
    """Returns a forward's calls, then the same in reverse for the backward: one for each moment
    but the last."""
    return [*order, *(CallEvent(not call.enter, call.unit) for call in reversed(order))]


@dataclass(frozen=True)
class Activations:
    """Figures of one forward and backward of one micro-batch on one rank.

    Attributes:
        order: units entered and left in the forward, in order.
        backward: events of the backward, in order: (False, index of an exit in ``order``) when an
            output of that call gets a gradient, (True, unit) when a unit's gradients are complete.
        saved_nbytes: bytes that autograd has saved when the forward ends.
        live_nbytes: highest bytes alive in each moment. Event i of ``order`` begins moment i; its
            mirror in the backward begins moment 2n - 1 - i. Moment 2n is the backward's end.
        flops: floating-point operations by moment: matrix products, convolutions, attention.
        unused: by unit, the indices of trainable parameters that got no gradient.
        work: the work of kernels by moment.
    """

    order: tuple[CallEvent, ...]
    backward: tuple[tuple[bool, int], ...]
    saved_nbytes: int
    live_nbytes: tuple[int, ...]
    flops: tuple[int, ...]
    unused: tuple[tuple[int, ...], ...]
    work: tuple[Work, ...] = ()

    @property
    def peak_nbytes(self) -> int:
        """Highest bytes alive at any time."""
        return max(self.live_nbytes)

    @property
    def peak_moment(self) -> int:
        """The first moment at which the peak is reached."""
        return self.live_nbytes.index(self.peak_nbytes)

    @property
    def total_flops(self) -> int:
        """Operations of the forward and backward, and those that checkpointing repeats."""
        return sum(self.flops)

    @property
    def model_flops(self) -> int:
        """Operations for MFU, of a run without checkpointing. The backward counts as twice the
        forward: fused attention, which recomputes its scores, makes 7 products for 6 counted."""
        products = sum(work.products + work.products_fp32 for work in self.work)
        return products + (self.total_flops - products) * 6 // 7


def record(
    model: nn.Module,
    planned: list[Unit],
    inputs: Any,
    loss: Loss,
    *,
    checkpointing: bool = False,
    dtype: torch.dtype | None = None,
) -> Activations:
    """Runs ``loss(model, inputs)`` and its backward on a fake copy; ``model`` does not change.

    Args:
        model: any module; its parameters and ``inputs`` are read for shapes only.
        planned: its units, as :func:`zerocore.model.units.choose_units` returns them.
        checkpointing: recompute each block in the backward.
        dtype: floating-point dtype of parameters and inputs; None keeps their own.
    """
    names = {id(module): name for name, module in model.named_modules()}
    units = units_by_module(unit.modules for unit in planned)
    entries = {names[key]: value for key, value in units.items()}
    blocks = [names[id(module)] for unit in planned if unit.is_block for module in unit.modules]
    fqns = [[param.fqn for param in unit.params] for unit in planned]
    with RepeatingFakeMode() as mode:
        copy = fake_copy(model, mode, dtype)
        batch = tree_map(partial(fake_like, dtype=dtype), inputs)
        if checkpointing:
            _checkpoint_blocks(copy, blocks)
        recorder = _Recorder(copy, entries, fqns, mode)
        with recorder.recording(tree_leaves(batch)):
            value = loss(copy, batch)
            recorder.saved_nbytes = sum(recorder.saved.values())
            value.backward()
            del value
    return recorder.result()


def default_loss(model: nn.Module, inputs: Any) -> Tensor:
    """Calls the model with ``inputs``; returns the output's ``loss``, or the sum of all outputs."""
    if isinstance(inputs, dict):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.sum() for leaf in leaves if leaf.requires_grad]).sum()


def _checkpoint_blocks(model: nn.Module, blocks: list[str]) -> None:
    for name in blocks:
        if any(name.startswith(f"{outer}.") for outer in blocks):
            continue
        block = model.get_submodule(name)
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            # The backward runs without the function modes that were entered around it.
            context_fn=lambda: (nullcontext(), FusedAttention()),
        )


def _next_node() -> int:
    """Returns the sequence number of the next autograd node of this thread."""
    with torch.enable_grad():
        node = torch.ones((), requires_grad=True, device="cpu").view(()).grad_fn
    assert node is not None
    return node._sequence_nr() + 1


@dataclass
class _Recorder:
    """The hooks of one run, which record calls of units, gradients and saved tensors."""

    model: nn.Module
    entries: dict[str, tuple[int, ...]]
    fqns: list[list[str]]  # names of each unit's parameters
    mode: RepeatingFakeMode
    events: list[CallEvent] = field(default_factory=list)
    exits: dict[Any, list[int]] = field(default_factory=dict)  # exits by node of the graph
    first_nodes: list[int] = field(default_factory=list)  # first nodes of the calls that still run
    backward: list[tuple[bool, int]] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # nbytes by id of the storage
    saved_nbytes: int = 0  # at the end of the forward

    def __post_init__(self) -> None:
        params = dict(self.model.named_parameters(remove_duplicate=False))
        self.params = [[params[fqn] for fqn in unit] for unit in self.fqns]
        self.waiting = [{p for p in unit if p.requires_grad} for unit in self.params]
        self.used: set[Tensor] = set()

    @contextmanager
    def recording(self, inputs: list[Any]) -> Iterator[None]:
        known = [*self.model.parameters(), *self.model.buffers()]
        known += [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        self.tracker = self.mode.tracker = StorageTracker(known)
        for name, units in self.entries.items():
            module = self.model.get_submodule(name)
            module.register_forward_pre_hook(partial(self._enter, units))
            module.register_forward_hook(partial(self._exit, units[::-1]))
        for index, unit in enumerate(self.params):
            for param in unit:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(partial(self._fired, index))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        with FusedAttention(), hooks:
            yield
        self.mode.tracker = None
        self.tracker.at(2 * len(self.events))

    def _add(self, enter: bool, unit: int, needs_backward: bool = True, reads: bool = True) -> None:
        self.tracker.at(len(self.events))
        self.events.append(CallEvent(enter, unit, needs_backward, reads))

    def _enter(self, units: tuple[int, ...], _module: nn.Module, _args: Any) -> None:
        self.first_nodes += [_next_node()] * len(units)
        for unit in units:
            self._add(True, unit)

    def _exit(self, units: tuple[int, ...], module: nn.Module, _args: Any, output: Any) -> None:
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for unit in units:
            index = len(self.events)
            self._add(False, unit, bool(outputs), backward_reads(module))
            nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
            first = self.first_nodes.pop()
            # As in the runtime, a tensor that the unit only passes through is not its output.
            computed = {node for node in nodes if node._sequence_nr() >= first}
            for node in computed or nodes:
                if node not in self.exits:
                    node.register_prehook(partial(self._backward, node))
                # As in the runtime, the last of several units that return one tensor comes first.
                self.exits.setdefault(node, []).insert(0, index)

    def _backward(self, node: torch.autograd.graph.Node, _grads: Any) -> None:
        for index in self.exits[node]:
            self.backward.append((False, index))
            self.tracker.at(2 * len(self.events) - 1 - index)

    def _fired(self, unit: int, param: Tensor) -> None:
        self.used.add(param)
        self.waiting[unit].discard(param)
        if not self.waiting[unit]:  # the runtime packs and frees them now
            self.backward.append((True, unit))
            for other in self.params[unit]:
                other.grad = None
            first = next(i for i, e in enumerate(self.events) if e.enter and e.unit == unit)
            self.tracker.at(2 * len(self.events) - 1 - first)

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self.tracker.is_ignored(tensor):
            storage = tensor.untyped_storage()
            self.saved[id(storage)] = storage.nbytes()
        return tensor

    def result(self) -> Activations:
        """Returns the figures by moment."""
        moments = range(2 * len(self.events) + 1)
        unused = [
            tuple(i for i, p in enumerate(unit) if p.requires_grad and p not in self.used)
            for unit in self.params
        ]
        work = [self.tracker.work[moment] for moment in moments]
        return Activations(
            tuple(self.events),
            tuple(self.backward),
            self.saved_nbytes,
            tuple(self.tracker.highest[moment] for moment in moments),
            tuple(figures.pop("flops", 0) for figures in work),
            tuple(unused),
            tuple(Work(**figures) for figures in work),
        )
