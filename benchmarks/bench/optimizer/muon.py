"""Measures, on each rank, steps of Muon by several systems in turn, and losses of a GPT."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import _muon

from bench.lib.models import GPT, GPT_SIZES, GPTBlock
from bench.lib.steps import MicroBatch
from bench.lib.systems import apply_fsdp2, import_zerocore

OWN = "zerocore.matrices.Muon"
FSDP2 = "FSDP2, torch.optim.Muon"
GATHER = "FSDP2, gathered and computed on every rank"
SIZE = GPT_SIZES["10m"]
LR, ADAMW_LR = 0.02, 1e-3
NOT_MUON = ("tokens.*", "positions.*", "head.*")
Step = Callable[[], object]


@dataclass(frozen=True)
class MuonRun:
    """Figures of one rank: seconds of a step by system and round, and zerocore's own figures.

    `errors` has the largest difference of a parameter from torch.optim.Muon in one process after
    the first step; `waited_s` is the time in which zerocore's step waited for its exchange.
    """

    seconds: dict[str, list[float]]
    errors: dict[str, float]
    sent_nbytes: int
    planned_nbytes: int
    waited_s: float
    work: tuple[float, ...]


class GatheredMuon(torch.optim.Optimizer):
    """Muon as usually written for DTensors: each rank gathers updates and computes all matrices."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Takes one step with the defaults of torch.optim.Muon."""
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            grad: Any = param.grad
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(grad))
            buffer.lerp_(grad, 0.05)
            update = grad.lerp(buffer, 0.95).bfloat16().full_tensor()
            update = _muon._zeropower_via_newtonschulz(update, *_COEFFICIENTS)
            ratio = _muon._adjust_lr(1.0, None, param.shape)
            # FSDP2 shards by rows.
            rows = update.chunk(dist.get_world_size())[dist.get_rank()]
            param.mul_(1 - LR * 0.1)
            param.to_local().add_(rows, alpha=-LR * ratio)


_COEFFICIENTS = ((_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), 5, 1e-7)


def measure_muon(rounds: int) -> MuonRun:
    """Times steps on the same gradients, in turn, from one barrier to the next."""
    models: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    torch.manual_seed(0)
    own = own_step(GPT(SIZE))
    models[OWN], steps[OWN] = own.model, own.step
    for name, make in ((FSDP2, _fsdp2), (GATHER, _gathered)):
        torch.manual_seed(0)
        models[name], steps[name] = make(GPT(SIZE))
    errors = {}
    expected = _one_process()
    for name, step in steps.items():
        step()
        found = {n: p.detach().full_tensor() for n, p in models[name].named_parameters()}
        errors[name] = max(float((found[n] - expected[n]).abs().max()) for n in expected)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_seconds(steps[name]))
    zerocore = import_zerocore()
    with zerocore.reporting.record_events(models[OWN]) as events:
        steps[OWN]()
    sent = sum(event.nbytes for event in events if event.op == "all_to_all")
    waited = sum(event.wait_ns for event in events if event.op == "all_to_all") / 1e9
    planned, work = own.choice.sent_nbytes, own.choice.work
    return MuonRun(seconds, errors, sent, planned, waited, work)


def _seconds(step: Step) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


@dataclass(frozen=True)
class OwnStep:
    """A model with gradients, zerocore's step of it, and its owners of matrices."""

    model: nn.Module
    step: Step
    choice: Any


def own_step(model: nn.Module) -> OwnStep:
    """Makes a step of zerocore.matrices.Muon at stage 3."""
    zerocore = import_zerocore()
    model = zerocore.shard(model, stage=3, units=[GPTBlock])
    for name, param in model.named_parameters():
        param.grad = gradient(name, param)
    optimizer = _make_own(model, LR)
    return OwnStep(model, optimizer.step, optimizer.describe())


def _make_own(model: nn.Module, lr: float) -> Any:
    zerocore = import_zerocore()
    return zerocore.matrices.Muon(
        model.named_parameters(), lr=lr, adamw={"lr": ADAMW_LR}, adamw_names=NOT_MUON
    )


def gradient(name: str, param: Tensor) -> Tensor:
    """Returns a gradient of the full shape, the same on every rank."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(param.shape, generator=draw) * 0.01


def _fsdp2(model: Any) -> tuple[nn.Module, Step]:
    matrices, rest = _on_fsdp2(model)
    return model, _both(torch.optim.Muon(matrices, lr=LR), rest)


def _gathered(model: Any) -> tuple[nn.Module, Step]:
    matrices, rest = _on_fsdp2(model)
    return model, _both(GatheredMuon(matrices), rest)


def _on_fsdp2(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    apply_fsdp2(
        model, model.blocks, reshard=True, mesh=init_device_mesh("cpu", (dist.get_world_size(),))
    )
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        param.grad = distribute_tensor(gradient(name, param), param.device_mesh, param.placements)
    return _divided(model)


def _divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(model.named_parameters())
    matrices = [p for n, p in named if n.startswith("blocks") and p.ndim == 2]
    chosen = {id(param) for param in matrices}
    return matrices, [p for _, p in named if id(p) not in chosen]


def _both(muon: torch.optim.Optimizer, rest: list[nn.Parameter]) -> Step:
    adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, fused=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def _one_process() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = GPT(SIZE)
    for name, param in model.named_parameters():
        param.grad = gradient(name, param)
    matrices, rest = _divided(model)
    _both(torch.optim.Muon(matrices, lr=LR), rest)()
    return {name: param.detach() for name, param in model.named_parameters()}


def train(optimizer: str, num_steps: int, global_batch: int, text: Tensor) -> list[float]:
    """Returns the losses of a GPT in nats per byte, means over the ranks, which divide a batch."""
    zerocore = import_zerocore()
    torch.manual_seed(0)
    model = zerocore.shard(GPT(SIZE), stage=3, units=[GPTBlock])
    if optimizer == "Muon":
        chosen = _make_own(model, LR)
    else:
        chosen = zerocore.optim.AdamW(model.parameters(), lr=ADAMW_LR)
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(num_steps):
        loss = model(*_own_part(text, global_batch, draw))
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def _own_part(text: Tensor, global_batch: int, draw: torch.Generator) -> MicroBatch:
    starts = torch.randint(len(text) - SIZE.sequence, (global_batch, 1), generator=draw)
    windows = text[starts + torch.arange(SIZE.sequence + 1)].long()
    own = windows.chunk(dist.get_world_size())[dist.get_rank()]
    return own[:, :-1], own[:, 1:]
