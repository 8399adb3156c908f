"""Undoes a block of training on all ranks if it fails on one."""

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
from zerocore.common.agreement import gather_objects, real_groups
from zerocore.common.alarm import operation, waiting
from zerocore.hooks.optimizer_states import params_of
from zerocore.model.state import ShardState, ready_state_of
from zerocore.recovery.copies import Large, Small
from zerocore.tensor.rows import own_elements

_NUM_LOSSES, _FEWEST_LOSSES = 100, 10  # most and fewest losses that define a spike


class _Undo(Exception):
    """Raised to end a block that has failed on some rank."""


@dataclass
class _History:
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_LOSSES))
    num_failed: int = 0  # blocks that have failed in a row


class Attempt:
    """The outcome of a block; see :func:`retryable`.

    Attributes:
        reason: why the block was undone, the same text on all ranks; None if it was not.
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
        """Gives a loss of this rank to the check before the optimizer's step, or at the end of a
        block without a step."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def agree(self, error: BaseException | None = None) -> None:
        """Raises on all ranks if one has failed; collective."""
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
        """Raises if ``loss``, the mean over all ranks, is a spike."""
        known = self._history.losses
        size = sum(map(abs, known)) / max(len(known), 1)  # the signed mean may be near zero
        if self._spike and len(known) >= _FEWEST_LOSSES and loss > self._spike * size:
            raise _Undo(f"the loss is {loss:.4g}, the mean of the last {len(known)} is {size:.4g}")
        known.append(loss)

    def _sum(self, numbers: list[float]) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64, device=self._state.device)
        for group in real_groups(self._state.ranks.groups):
            with waiting(group, "a retryable block"):
                dist.all_reduce(total, group=group)
        return list(total.tolist())

    def note(self, reason: str | None, most: int) -> None:
        """Records the block's end; raises RuntimeError if ``most`` blocks in a row have failed."""
        self.reason = reason
        self._history.num_failed = 0 if reason is None else self._history.num_failed + 1
        if self._history.num_failed >= most:
            raise RuntimeError(f"{most} retryable blocks in a row have failed, the last: {reason}")


class _Before:
    """A copy of the state that a block may change."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], objects: Any) -> None:
        params = dict.fromkeys(param for optimizer in optimizers for param in params_of(optimizer))
        self._grads = [(p, None if p.grad is None else p.grad.clone()) for p in params]
        self._small = Small(model, optimizers, dict(enumerate(objects)))
        self._small_before = self._small.copy()
        self._large = Large({str(number): p for number, p in enumerate(params)}, optimizers)
        self._large_before: dict[str, Any] | None = None

    def keep_weights(self) -> None:
        """Also copies the state that an optimizer's step changes."""
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
    """Undoes a block of training on all ranks if it fails on one; collective.

    The block fails if it raises, or if a loss given to ``attempt.check`` is a spike or not finite.
    The ranks agree on this before the optimizer's step, or at the end of a block without a step.
    After a failure the step is not taken. Gradients, buffers, optimizer options, random generators
    and ``objects`` are restored, and the program continues after the block with
    ``attempt.failed``. A block around each micro-batch keeps the gradients of good micro-batches; a
    block around a step drops the step.

    A rank may raise in the model's forward, or after the last backward. In a backward, and outside
    of the model, all ranks must raise alike, as the others would wait for it (see docs/faults.md).

    Args:
        model: a sharded model.
        optimizer: the optimizer of its parameters, or several.
        objects: other objects to restore, with ``state_dict`` and ``load_state_dict``.
        spike: a factor. The block fails if the mean loss of all ranks exceeds so many times the
            mean absolute loss of the last 100 good blocks; the first 10 are never spikes.
        copies: copy weights and optimizer states before each step, to undo failures in the step and
            after it, too; otherwise these raise. Takes as much memory as the state, and the ranks
            also agree at the end of the block.
        most: the number of failed blocks in a row after which RuntimeError is raised.

    Raises:
        ValueError, TypeError: the model is not sharded, or an optimizer is not its own; gradients
            were accumulated before the block without being reduced (``no_sync``).
        RuntimeError: ``most`` blocks in a row have failed.
    """
    state, optimizers = ready_state_of(model), optimizers_of(optimizer)
    if state.engine.holds_back:
        raise ValueError(
            "a retryable block cannot begin with gradients that were not reduced (no_sync, or "
            "set_requires_gradient_sync), as it cannot restore them: reduce in each backward, or "
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
            for opt in optimizers:
                hooks.callback(opt.register_step_pre_hook(begin_step).remove)
            try:
                yield attempt
            except (_Undo, dist.DistBackendError):
                raise  # after an alarm the ranks cannot communicate
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
