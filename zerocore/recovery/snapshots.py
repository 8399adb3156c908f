"""Snapshots of a rank's state between steps, from which another process recovers the rank."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.checkpoint.training_state import check_stateful, optimizers_of
from zerocore.common.agreement import checksum
from zerocore.common.eager import eager
from zerocore.model.extensions import check_plain
from zerocore.model.state import ShardState, ready_state_of
from zerocore.recovery.copies import Large, Small
from zerocore.tensor.rows import own_elements


class Snapshot:
    """See :func:`snapshot`."""

    def __init__(
        self, state: ShardState, model: nn.Module, optimizers: Sequence[Optimizer], objects: Any
    ) -> None:
        self._state, self._optimizers = state, optimizers
        self._large = Large({param.fqn: param.object for param in state.params()}, optimizers)
        self._small = Small(model, optimizers, objects)
        self._changed = threading.Condition()
        self._num_reads = 0
        self._changes: list[Optimizer | None] = []  # optimizers whose step has begun
        self._at_forward: dict[str, Any] | None = None  # copies of state that a forward may change
        begin, end = _weakly(self._begin), _weakly(self._end)
        hooks = [model.register_forward_pre_hook(_weakly(self._begin_forward))]
        for opt in optimizers:
            hooks += [opt.register_step_pre_hook(begin), opt.register_step_post_hook(end)]
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Marks a block that changes state outside of a step, such as a load or an EMA's update.

        If the block raises, the state is inconsistent until a step or another block ends.
        """
        self._begin(None)
        yield
        self._end(None)

    @torch.no_grad()
    def state_dict(self, timeout: float = 60.0) -> dict[str, Any]:
        """Copies this rank's state to the CPU, with checksums; any thread may call it.

        It waits for the end of a running step, and the next step waits for the copies. Buffers,
        options, random generators and objects come from before the first forward since
        ``zero_grad`` that records gradients.

        Raises:
            TimeoutError: a step has not ended in ``timeout`` seconds, or has raised.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._changes, timeout):
                raise TimeoutError(
                    f"a step of an optimizer has not ended in {timeout:g} s, or has raised; the "
                    "state is inconsistent until the next step ends: call state_dict() after it"
                )
            self._num_reads += 1
        try:
            copies = {
                "rank": (self._state.rank, self._state.world_size),
                "small": self._at_forward or self._small.copy(),
                **self._large.copy(torch.device("cpu")),
            }
        finally:
            with self._changed:
                self._num_reads -= 1
                self._changed.notify_all()
        return {**copies, "sums": _sums(copies)}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads a result of :meth:`state_dict` of a rank with the same shards, between steps.

        Communicates nothing. All ranks of the model must load, each its own rank's snapshot.

        Raises:
            ValueError: the snapshot is of another rank or model, or a checksum differs; names the
                parameter. Nothing has changed then.
        """
        self._check(saved)
        with self.changing():
            self._state.finish_reads()
            self._large.restore(saved)
            self._small.restore(saved["small"])

    def _check(self, saved: Mapping[str, Any]) -> None:
        this_rank = (self._state.rank, self._state.world_size)
        if tuple(saved["rank"]) != this_rank:
            ranks = "rank {} of {}"
            raise ValueError(
                f"this is {ranks.format(*this_rank)}, but the snapshot is of "
                f"{ranks.format(*saved['rank'])}; use zerocore.recovery.PeerCheckpoints"
            )
        own_kinds = {name: _kind(own_elements(p)) for name, p in self._large.params.items()}
        kinds = {name: _kind(value) for name, value in saved["weights"].items()}
        for name in {**own_kinds, **kinds}:
            if kinds.get(name) != own_kinds.get(name):
                raise ValueError(
                    f"'{name}': the snapshot has {kinds.get(name)}, expected {own_kinds.get(name)}"
                )
        if len(saved["states"]) != len(self._optimizers):
            raise ValueError(
                f"the snapshot has the states of {len(saved['states'])} optimizers, expected "
                f"{len(self._optimizers)}"
            )
        for name, number in _sums(saved).items():
            if saved["sums"].get(name) != number:
                raise ValueError(
                    f"{name} in the snapshot is damaged: its checksum differs. Nothing was loaded; "
                    "send the snapshot again"
                )

    def _begin(self, optimizer: Optimizer | None, *_: Any) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_reads == 0)
            self._changes.append(optimizer)

    def _end(self, optimizer: Optimizer | None, *_: Any) -> None:
        """Ends a change. Before all optimizers have stepped, readers wait for the next forward."""
        with self._changed:
            if optimizer is None or {*self._optimizers} <= {*self._changes}:
                self._changes.clear()
            self._at_forward = None
            self._changed.notify_all()

    @eager
    def _begin_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation; a schedule may step after it
        with self._changed:
            self._changes.clear()
            if self._at_forward is None or self._has_no_gradients():
                self._at_forward = self._small.copy()
            self._changed.notify_all()

    def _has_no_gradients(self) -> bool:
        """Whether this is a step's first micro-batch, even if the last step was skipped."""
        grads = (param.grad for param in self._large.params.values())
        return not self._state.engine.holds_back and all(grad is None for grad in grads)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls the method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (method := reference()) is not None:
            method(*args)

    return call


def snapshot(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **stateful: Any
) -> Snapshot:
    """Makes a snapshot of this rank's training state, from which another process recovers.

    Make it once, before the first step. Any thread may call its ``state_dict()`` at any time, also
    while the model runs; all values are from the same step. ``load_state_dict`` on a rank with the
    same shards continues from there, bit for bit, as in replica groups of torchft:
    ``Manager(state_dict=snap.state_dict, load_state_dict=snap.load_state_dict, ...)``.

    Args:
        model: a sharded model.
        optimizer: the optimizer of its parameters, or several.
        stateful: other objects of the program, by name, as for :class:`Checkpoints`.

    Raises:
        ValueError, TypeError: as :class:`Checkpoints`, or the model keeps states on disk.
        NotImplementedError: a frozen parameter consists of several tensors.
    """
    check_stateful(stateful)
    state = ready_state_of(model)
    check_plain(state, "a snapshot")
    if state.config.place_of("states") == "disk":
        raise ValueError("snapshot: Offload(states='disk') is not supported; use states='cpu'")
    return Snapshot(state, model, optimizers_of(optimizer), stateful)


def _kind(value: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(value.shape), value.dtype


def _sums(saved: Mapping[str, Any]) -> dict[str, int]:
    """Returns the checksum of each tensor, by name."""
    tensors = {f"'{name}'": value for name, value in saved["weights"].items()}
    for states in saved["states"]:
        for name, values in states.items():
            tensors |= {f"'{name}': {key}": value for key, value in values.items()}
    tensors |= {f"buffer '{name}'": value for name, value in saved["small"]["buffers"].items()}
    return {name: int(checksum(v)) for name, v in tensors.items() if isinstance(v, Tensor)}
