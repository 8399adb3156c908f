"""A training that ends in the middle of something, and goes on in its next life."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

import zerocore
from zerocore.checkpoint.commit import folder as folders
from zerocore.recovery import peers

NUM_STEPS, SAVE_EVERY, LAST = 8, 2, 5  # in step LAST, or in the save before it, a rank is killed


class Stream:
    """Batches by position, of each rank its own."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Tensor:
        self.position += 1
        data = torch.Generator().manual_seed(100 * self.position + int(os.environ["RANK"]))
        return torch.randn(4, 6, generator=data)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, point: str) -> None:
    """Prints where it began, and the losses; is killed at the point, if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 5), nn.Linear(5, 1))
    zerocore.shard(model)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    stream = Stream()
    checkpoints = zerocore.PeerCheckpoints(
        f"{folder}/node{os.environ['RANK']}", model, optimizer, schedule=schedule, stream=stream
    )
    if point == "load":
        peers.PeerLoad._bring = die  # type: ignore[method-assign]
    begin = checkpoints.load() or 0
    losses = []
    for step in range(begin + 1, NUM_STEPS + 1):
        if step == LAST - 1 and point in ("copy", "commit"):
            checkpoints.wait()
            place = (peers, "carry_out") if point == "copy" else (folders, "complete")
            setattr(*place, die)
        if step == LAST and point == "forward":
            model[2].register_forward_pre_hook(die)
        if step == LAST and point == "backward":
            model[2].register_full_backward_hook(die)
        loss = model(stream.next()).square().mean()
        losses.append(loss.item().hex())
        loss.backward()
        if step == LAST and point == "step":
            optimizer.register_step_post_hook(die)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            checkpoints.save(step)
    checkpoints.wait()
    print(begin, *losses)
