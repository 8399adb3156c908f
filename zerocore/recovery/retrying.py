"""Blocks of training that are undone on all ranks where they fail on one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zerocore.checkpoint.training_state import optimizers_of
from zerocore.common.agreement import gather_objects, is_simulated
from zerocore.common.alarm import operation, waiting
from zerocore.hooks.optimizer_states import params_of
from zerocore.model.state import ShardState, ready_state_of
from zerocore.recovery.copies import Large, Small
from zerocore.tensor.rows import own_elements

_NUM_LOSSES, _FEWEST_LOSSES = 100, 10  # that a spike is measured by


class _Undo(Exception):
    """Ends a block that failed on some rank."""


@dataclass
class _History:
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_LOSSES))
    num_failed: int = 0  # blocks in a row


class Attempt:
    """The outcome of a block; see :func:`retryable`.

    Attributes:
        reason: why it was undone, the same text on all ranks; None where it was not.
    """

    def __init__(self, state: ShardState, spike: float | None) -> None:
        self.reason: str | None = None
        self._state, self._spike = state, spike
        self._history = state.kept.setdefault("steps to take back", _History())
        self._losses: list[Tensor | float] = []

    @property
    def failed(self) -> bool:
        return self.reason is not None

    def check(self, loss: Tensor | float) -> None:
        """Notes a loss of this rank: the ranks look at it before the optimizer's step, or at the
        end of a block without one."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def agree(self, error: BaseException | None = None) -> None:
        """Raises where some rank has failed; collective."""
        losses = [float(loss) for loss in self._losses]
        self._losses.clear()
        finite = [loss for loss in losses if math.isfinite(loss)]
        why = None if error is None else f"{type(error).__name__}: {error}"
        if why is None and len(finite) < len(losses):
            why = f"the loss is {next(loss for loss in losses if not math.isfinite(loss))}"
        num_failed, total, count = self._sum([float(why is not None), sum(finite), len(finite)])
        if num_failed:
            said = [None if why is None else f"rank {self._state.rank}: {why}"]
            texts = gather_objects(self._state.ranks.groups, said, self._state.device)
            raise _Undo("; ".join(text for text in texts if text))
        if count:
            self._look_for_spike(total / count)

    def _look_for_spike(self, loss: float) -> None:
        """``loss``: the mean of all ranks'."""
        known = self._history.losses
        size = sum(map(abs, known)) / max(len(known), 1)  # their mean may lie around zero
        if self._spike and len(known) >= _FEWEST_LOSSES and loss > self._spike * size:
            raise _Undo(f"the loss is {loss:.4g}, and was {size:.4g} in the last {len(known)}")
        known.append(loss)

    def _sum(self, numbers: list[float]) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64, device=self._state.device)
        for group in self._state.ranks.groups:
            if not is_simulated(group):
                with waiting(group, "a retryable block"):
                    dist.all_reduce(total, group=group)
        return list(total.tolist())

    def note(self, reason: str | None, most: int) -> None:
        """The block has ended; raises RuntimeError for the last of ``most`` that failed."""
        self.reason = reason
        self._history.num_failed = 0 if reason is None else self._history.num_failed + 1
        if self._history.num_failed >= most:
            raise RuntimeError(f"{most} retryable blocks in a row have failed: {reason}")


class _Before:
    """The state that a block may change, as it was before."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], objects: Any) -> None:
        params = dict.fromkeys(param for each in optimizers for param in params_of(each))
        self._grads = [(p, None if p.grad is None else p.grad.clone()) for p in params]
        self._small = Small(model, optimizers, dict(enumerate(objects)))
        self._small_before = self._small.copy()
        self._large = Large({str(number): p for number, p in enumerate(params)}, optimizers)
        self._large_before: dict[str, Any] | None = None

    def keep_weights(self) -> None:
        """Copies what an optimizer's step changes, too."""
        self._large_before = self._large.copy()

    def restore(self) -> None:
        if self._large_before is not None:
            self._large.restore(self._large_before)
        for param, grad in self._grads:
            if grad is None or param.grad is None:
                param.grad = grad
            else:
                own_elements(param.grad).copy_(own_elements(grad))
        self._small.restore(self._small_before)


@contextmanager
def retryable(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *objects: Any,
    spike: float | None = None,
    copies: bool = False,
    most: int = 10,
) -> Iterator[Attempt]:
    """A block of training that is undone, on all ranks, where it fails on one; collective.

    The block fails if it raises, or if a loss that ``attempt.check`` was given is not finite or a
    spike. The ranks tell each other before the optimizer's step, or at the end of a block that has
    none; then gradients, buffers, options of optimizers, random streams and ``objects`` are as
    before the block, no step was taken, and the program goes on behind it, with
    ``attempt.failed``. So a block around each micro-batch keeps the gradients of the good ones, and
    one around a step drops the step.

    A rank may raise in the model's forward, or behind the last backward; in a backward and outside
    of the model all ranks must raise alike, as the others would wait for it (see docs/faults.md).

    Args:
        model: sharded.
        optimizer: of its parameters, or several.
        objects: what else is restored, with ``state_dict`` and ``load_state_dict``.
        spike: fails where the mean loss of all ranks is larger than so many times the mean absolute
            loss of the last 100 blocks; from the 11th on.
        copies: of weights and optimizer states are taken before each step, so that what fails in
            the step or behind it is undone, too; else that is raised. They take as much memory as
            the state, and the ranks tell each other at the end of the block, too.
        most: an error that is raised after so many blocks in a row that failed.

    Raises:
        ValueError, TypeError: not sharded, or no such optimizer; gradients were summed without
            communication before the block (``no_sync``).
        RuntimeError: ``most`` blocks have failed.
    """
    state, optimizers = ready_state_of(model), optimizers_of(optimizer)
    if state.engine.holds_back:
        raise ValueError(
            "a retryable block begins with gradients that were not reduced (no_sync, or "
            "set_requires_gradient_sync), of which there is no copy: reduce in each backward, or "
            "put all micro-batches of a step into the block"
        )
    attempt = Attempt(state, spike)
    before = _Before(model, optimizers, objects)
    stepped: list[Optimizer] = []

    def begin_step(optimizer: Optimizer, *_: Any) -> None:
        if not stepped:
            attempt.agree()
            if copies:
                before.keep_weights()
        stepped.append(optimizer)

    reason: str | None = None
    try:
        with ExitStack() as hooks, operation("a retryable block"):
            for each in optimizers:
                hooks.callback(each.register_step_pre_hook(begin_step).remove)
            try:
                yield attempt
            except (_Undo, dist.DistBackendError):
                raise  # behind an alarm the ranks can tell each other nothing
            except Exception as error:
                if stepped and not copies:
                    raise
                attempt.agree(error)
            else:
                if not stepped or copies:
                    attempt.agree()
    except _Undo as undo:
        reason = str(undo)
        with torch.no_grad():
            state.finish_reads()
            before.restore()
    attempt.note(reason, most)
