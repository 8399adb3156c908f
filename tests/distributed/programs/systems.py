"""Each system by its name: the peers, and zerocore at each stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import zerocore
from tests.distributed.programs.peers import DdpRun, Fsdp2Run
from tests.distributed.programs.run import MUON_REST, ParallelRun, Run, State, Units

OFFLOADED = {"states": 0, "gradients": 2, "parameters": 3}  # the first stage that offers it


class ZerocoreRun(ParallelRun):
    """zerocore.shard at one stage."""

    def __init__(self, seed: int, unused: bool, stage: int) -> None:
        super().__init__(seed, unused)
        # Buffers stay each rank's own, as with the peers.
        self.options: dict[str, Any] = {
            "stage": stage,
            "communication": zerocore.Communication(sync_buffers=False),
        }

    def wrap(self, model: nn.Module, units: Units | None) -> nn.Module:
        return zerocore.shard(model, units=units, **self.options)

    def shard_experts(self, model: nn.Module, units: Units | None = None) -> Any:
        mesh = self.other_mesh("ep")
        self.options["groups"] = {"*.experts.*": zerocore.ParameterMesh(mesh["dp"], of=mesh["ep"])}
        return self.shard(model, units)

    def shard_shared(self, model: nn.Module, units: Units | None = None) -> Any:
        own = self.options["communication"]
        self.options["communication"] = replace(own, gradient_divide_factor=1)
        return self.shard(model, units)

    def shard_cut(self, cut: Callable[[Any], nn.Module], whole: nn.Module) -> Any:
        mesh = self.other_mesh("tp")
        self.options["group"] = mesh["dp"]
        return self.shard(cut(mesh["tp"]))

    def average(self, *models: nn.Module) -> None:
        pass

    def average_one(self, parameter: nn.Parameter) -> None:
        pass

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return zerocore.no_sync(model)

    def unsharded(self, model: nn.Module) -> AbstractContextManager[Any]:
        return zerocore.unsharded(model)

    def full_state(self, model: nn.Module) -> State:
        return zerocore.full_state_dict(model, rank0_only=False)

    def exported(self, model: nn.Module) -> State:
        buckets = zerocore.export(model, max_bytes=1000)
        return {name: value.clone() for bucket in buckets for name, value in bucket.items()}

    def parked(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        return zerocore.parked(model, optimizer)

    def load(self, model: nn.Module, state: State) -> None:
        zerocore.load_full_state_dict(model, state)

    def checkpoints(self, folder: str, model: nn.Module, optimizer: Optimizer) -> Any:
        return zerocore.Checkpoints(folder, model, optimizer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)

    def method(self, model: nn.Module, name: str) -> None:
        zerocore.register_forward_method(model, name)

    def muon(self, model: nn.Module, lr: float) -> list[Optimizer]:
        return [
            zerocore.matrices.Muon(
                model.named_parameters(), lr=lr, adamw=MUON_REST, adamw_names=["inp.*", "out.*"]
            )
        ]


class OffloadRun(ZerocoreRun):
    """The same with all that can leave the device on the host, and AdamW by zerocore's thread."""

    def __init__(self, seed: int, unused: bool, stage: int) -> None:
        super().__init__(seed, unused, stage)
        # A program asks for torch's, which updates before step() returns. A job plays one system.
        torch.optim.AdamW = zerocore.optim.AdamW  # type: ignore[misc]
        parts = {name: "cpu" for name, least in OFFLOADED.items() if stage >= least}
        self.options["offload"] = zerocore.Offload(**parts)


class StatesRun(ZerocoreRun):
    """Stage 3 with the program's own optimizer, which updates states on the host."""

    def __init__(self, seed: int, unused: bool) -> None:
        super().__init__(seed, unused, stage=3)
        self.options["offload"] = zerocore.Offload(states="cpu")


class OwnedRun(ZerocoreRun):
    """Stage 3 with optimizers that get whole parameters, each on one rank."""

    def __init__(self, seed: int, unused: bool) -> None:
        super().__init__(seed, unused, stage=3)

    def optimizer(
        self, cls: type[Optimizer], params: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        return zerocore.matrices.owned(cls, params, **options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()


PEERS = ("plain", "ddp", "fsdp2")
SYSTEMS: dict[str, Callable[[int, bool], Run]] = {
    "plain": Run,
    "ddp": DdpRun,
    "fsdp2": Fsdp2Run,
    **{f"stage{stage}": partial(ZerocoreRun, stage=stage) for stage in range(4)},
    **{f"offload{stage}": partial(OffloadRun, stage=stage) for stage in (0, 3)},
}
# Systems of the table of optimizers.
FOR_OPTIMIZERS: dict[str, Callable[[int, bool], Run]] = {
    "plain": Run,
    **{f"stage{stage}": partial(ZerocoreRun, stage=stage) for stage in range(4)},
    "states3": StatesRun,
    "owned3": OwnedRun,
}
