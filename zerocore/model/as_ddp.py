"""Gives sharded models the behaviour of DistributedDataParallel: ``no_sync``, rank 0's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor, nn

from zerocore.common.eager import eager
from zerocore.model.buffers import BufferSync
from zerocore.model.state import ShardState, ready_state_of

_SYNCS = "require_backward_grad_sync"  # DDP's attribute of the same name


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without communication if the stage holds full gradients.

    Stages 0 and 1, stages 2 and 3 with ``accumulate="full"``, and models of :mod:`zerocore.fsdp`
    reduce gradients in the first backward outside. Stages 2 and 3 with ``accumulate="sharded"``
    reduce in every backward. ``model.no_sync()`` and ``model.require_backward_grad_sync = False``
    before a forward do the same; a model of ``fsdp`` has neither.

    After a backward inside, ``p.grad`` is this rank's own sum at stages 0 and 1. Reads of it at
    stages 2 and 3, and steps with it at stages 1 to 3, raise RuntimeError until a backward outside.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: this process was forked from the one that sharded it.
    """
    state = ready_state_of(model)
    root = vars(state.model())
    before = root.get(_SYNCS, True), state.engine.sync
    root[_SYNCS] = state.engine.sync = False
    try:
        yield
    finally:
        root[_SYNCS], state.engine.sync = before


def behave_as_ddp(model: nn.Module, state: ShardState) -> Callable[[], None]:
    """Gives ``model`` DDP's methods. Returns a function that all ranks run before each forward."""
    root, is_due = ref(model), True
    vars(model).setdefault(_SYNCS, True)
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = lambda: no_sync(_alive(root))
    # Like DDP: if the model has no buffer now, its forwards do not look for one.
    synced = state.config.communication.sync_buffers and any(True for _ in model.buffers())
    sync_buffers = BufferSync(state.meshes[0], state.device) if synced else None

    @eager
    def before_call() -> None:
        nonlocal is_due
        model = _alive(root)
        state.engine.sync = bool(vars(model)[_SYNCS])
        if sync_buffers is not None:
            if is_due:
                state.engine.check_process()
                sync_buffers(model, _buffers(model, state))
            is_due = torch.is_grad_enabled() and state.engine.sync

    return before_call


def _buffers(model: nn.Module, state: ShardState) -> list[Tensor]:
    """Returns the buffers that DistributedDataParallel would broadcast."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    sent: dict[int, Tensor] = {}
    for module, prefix in state.modules.items():
        for name, buffer in module._buffers.items():
            is_sent = not ignored or f"{prefix}.{name}".lstrip(".") not in ignored
            if buffer is not None and is_sent:
                sent[id(buffer)] = buffer
    return list(sent.values())


def _alive(root: Callable[[], nn.Module | None]) -> nn.Module:
    model = root()
    assert model is not None
    return model
