"""A training that ends in the middle of something, and goes on in its next life."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.network_faults import before
from zerocore.checkpoint.commit import folder as folders
from zerocore.recovery import peers

NUM_STEPS, SAVE_EVERY, LAST = 8, 2, 5  # in step LAST, or in the save before it, a rank is lost
POINTS = ("forward", "backward", "reduce", "step", "copy", "commit", "load")


class Stream:
    """Batches by position, of each rank its own, or the same for all."""

    def __init__(self, is_same: bool) -> None:
        self.position, self._is_same = 0, is_same

    def next(self) -> Tensor:
        self.position += 1
        rank = 0 if self._is_same else dist.get_rank()
        data = torch.Generator().manual_seed(100 * self.position + rank)
        return torch.randn(4, 6, generator=data)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def train(
    folder: Path,
    point: str,
    lose: Callable[..., Any],
    is_same: bool = False,
    saved: Callable[[], None] = lambda: None,
    make: Callable[..., zerocore.Checkpoints] = zerocore.recovery.PeerCheckpoints,
    took: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[int, list[float]]:
    """The step that it began behind, and the losses.

    Args:
        folder: of checkpoints that ``make`` makes.
        lose: called at the point.
        is_same: losses do not depend on the number of ranks.
        saved, took: called behind saves, and behind steps with number and loss.
    """
    torch.manual_seed(0)
    dropout = nn.Dropout(0.0 if is_same else 0.3)
    model = nn.Sequential(nn.Linear(6, 9), dropout, nn.Linear(9, 5), nn.Linear(5, 1))
    zerocore.shard(model)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    stream = Stream(is_same)
    checkpoints = make(folder, model, optimizer, stateful={"schedule": schedule, "stream": stream})
    if point == "load":
        peers.PeerLoad._bring = before(peers.PeerLoad._bring, lose)  # type: ignore[method-assign]
    begin = checkpoints.load() or 0
    losses = []
    for step in range(begin + 1, NUM_STEPS + 1):
        if step == LAST - 1 and point in ("copy", "commit"):
            checkpoints.wait()
            place, name = (peers, "carry_out") if point == "copy" else (folders, "complete")
            setattr(place, name, before(getattr(place, name), lose))
        if step == LAST:
            arm(point, model, optimizer, lose)
        loss = model(stream.next()).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        took(step, loss.item())
        if step % SAVE_EVERY == 0:
            checkpoints.save(step)
            saved()
    checkpoints.wait()
    return begin, losses


def arm(point: str, model: Any, optimizer: torch.optim.Optimizer, lose: Callable[..., Any]) -> None:
    if point == "forward":
        model[2].register_forward_pre_hook(lose)
    if point == "backward":
        model[2].register_full_backward_hook(lose)
    if point == "reduce":
        model[2].weight.register_post_accumulate_grad_hook(lose)
    if point == "step":
        optimizer.register_step_post_hook(lose)


def undisturbed(folder: Path, is_same: bool) -> list[float]:
    """Losses of a life in which nobody is lost."""
    return train(folder / f"whole{dist.get_rank()}", "", print, is_same)[1]
