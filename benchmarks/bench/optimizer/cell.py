"""Measures clipping and a step of AdamW on many small tensors, in a new process."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.lib.fresh import run_in_fresh_process
from bench.lib.models import Chain, ChainBlock
from bench.lib.systems import apply_fsdp2, import_zerocore
from bench.lib.timing import Call

MAX_NORM = 1.0
NUM_BLOCKS, PARAMS_PER_BLOCK = 32, 16
LOCAL_NUMEL = 1024  # about the elements of a parameter on one rank
PLAIN = "torch fused, plain tensors"
FSDP2 = "torch fused, FSDP2"


@dataclass(frozen=True)
class SmallCell:
    """A row of the table: a group of that many ranks, whose collectives return at once."""

    world_size: int
    device: str = "cpu"
    rounds: int = 30


def measure_in_fresh_process(cell: SmallCell) -> dict[str, list[float]]:
    """Returns the seconds of a clip and a step by system, one figure a round."""
    return run_in_fresh_process(_measure, cell)


def _measure(cell: SmallCell) -> dict[str, list[float]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=cell.world_size, store=FakeStore())
    calls = _systems(cell)
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for name in names * 3:
        calls[name]()
    gc.collect()
    gc.freeze()
    gc.disable()
    for index in range(cell.rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(_seconds(calls[name], cell.device))
        gc.collect()
    dist.destroy_process_group()
    return found


def _seconds(call: Call, device: str, repeats: int = 3) -> float:
    """Returns the seconds of the fastest of some calls, on a GPU until it is idle."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _systems(cell: SmallCell) -> dict[str, Call]:
    zerocore = import_zerocore()
    adamw = zerocore.optim.AdamW

    def folded(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adamw(params, clip_grad_norm=MAX_NORM)

    torch_clip, own_clip = nn.utils.clip_grad_norm_, zerocore.clip_grad_norm_
    return {
        PLAIN: _step(_plain_params(cell), _torch_adamw, torch_clip),
        "zerocore, plain tensors": _step(_plain_params(cell), adamw, torch_clip),
        "zerocore, plain tensors, clips in the step": _step(_plain_params(cell), folded),
        "zerocore, clips in the step": _step(_sharded_params(cell), folded),
        "zerocore, zerocore.clip_grad_norm_": _step(_sharded_params(cell), adamw, own_clip),
        "zerocore, torch's clip": _step(_sharded_params(cell), adamw, torch_clip),
        "torch fused, zerocore's shards": _step(_sharded_params(cell), _torch_adamw, torch_clip),
        FSDP2: _step(_fsdp2_params(cell), _torch_adamw, torch_clip),
    }


def _torch_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def _step(
    params: list[nn.Parameter],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    clip: Callable[[list[nn.Parameter], float], Tensor] | None = None,
) -> Call:
    optimizer = make_optimizer(params)

    def step() -> None:
        if clip is not None:
            clip(params, MAX_NORM)
        optimizer.step()

    return step


def _chain(cell: SmallCell) -> tuple[Chain, Tensor]:
    """Makes 512 matrices; a rank's part of each has about LOCAL_NUMEL elements."""
    torch.manual_seed(0)
    width = math.isqrt(LOCAL_NUMEL * cell.world_size) // cell.world_size * cell.world_size
    model = Chain(NUM_BLOCKS, PARAMS_PER_BLOCK, width).to(cell.device)
    return model, torch.randn(2, width, device=cell.device)


def _plain_params(cell: SmallCell) -> list[nn.Parameter]:
    """Makes as many plain parameters, each of the size of one rank's part."""
    model, _ = _chain(cell)
    numels = [param.numel() // cell.world_size for param in model.parameters()]
    params = [nn.Parameter(torch.randn(numel, device=cell.device)) for numel in numels]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def _sharded_params(cell: SmallCell) -> list[nn.Parameter]:
    model, inputs = _chain(cell)
    model = import_zerocore().shard(model, stage=3, units=[ChainBlock])
    return _trained(model, inputs)


def _fsdp2_params(cell: SmallCell) -> list[nn.Parameter]:
    model, inputs = _chain(cell)
    mesh = init_device_mesh(cell.device, (cell.world_size,))
    apply_fsdp2(model, model.blocks, reshard=True, mesh=mesh)
    return _trained(model, inputs)


_models: list[nn.Module] = []  # keeps models alive, and with them their shards' memory


def _trained(model: nn.Module, inputs: Tensor) -> list[nn.Parameter]:
    """Returns the parameters after a backward, with gradients of ordinary values."""
    model(inputs).sum().backward()
    _models.append(model)
    params = list(model.parameters())
    with torch.no_grad():
        for param in params:
            assert param.grad is not None
            param.grad.copy_(param * 0.1)
    return params
