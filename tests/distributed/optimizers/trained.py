"""Trains a small net with a public optimizer, as a program of the suite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.distributed.optimizers.listed import (
    SGD,
    Listed,
    grouped,
    matrices,
    matrices_alike,
    optimizer_named,
    others,
)
from tests.distributed.programs.registry import Program
from tests.distributed.programs.run import Run

STEPS = 8
# After the name of an optimizer: its program loads the state half-way; and it computes in float64.
AGAIN, DOUBLE = " loaded", " in float64"
VOCABULARY, WIDTH, CHANNELS, HIDDEN = 11, 9, 37, 7
LEAST_CHANGE = 1e-4  # of one parameter, so that a wrong update shows

Optimizers = list[Optimizer]


class Net(nn.Module):
    """Layers of several kinds; two ranks cut the parameters of each one unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.conv = nn.Conv1d(WIDTH, CHANNELS, 3, padding=1)
        self.norm = nn.LayerNorm(CHANNELS, bias=False)
        self.mix = nn.Linear(CHANNELS, HIDDEN)
        self.deep = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        x = self.mix(self.norm(x))
        for layer in self.deep:
            x = x + layer(torch.tanh(x))
        return self.head(x)


UNITS = (nn.Embedding, nn.Conv1d, nn.LayerNorm, nn.Linear)


def plainly(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """One optimizer of all parameters."""
    return [run.optimizer(of.cls, list(model.parameters()), of.options)]


def beside_sgd(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """The matrices alone; SGD trains the rest."""
    return [run.optimizer(of.cls, matrices(model), of.options), SGD(others(model))]


def alike_beside_sgd(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """Matrices of one shape, which ranks can all-gather; SGD trains the rest."""
    alike, rest = matrices_alike(model)
    return [run.optimizer(of.cls, alike, of.options), SGD(rest)]


def alike_in_groups(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """Groups with and without `use_muon`, the first of matrices of one shape."""
    alike, rest = matrices_alike(model)
    groups = [{"params": alike, "use_muon": True}, {"params": rest, "use_muon": False}]
    return [run.optimizer(of.cls, groups, of.options)]


def in_groups(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """Groups with and without `use_muon`."""
    return [run.optimizer(of.cls, grouped(model), of.options)]


def around_sgd(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """A wrapper of an optimizer."""
    make: Any = of.cls
    return [make(SGD(model.parameters()), **of.options)]


def with_base(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """A wrapper that takes a class."""
    make: Any = of.cls
    first = (model,) if of.cls.__name__ == "WSAM" else ()
    base = torch.optim.SGD
    return [make(*first, model.parameters(), base_optimizer=base, lr=0.05, **of.options)]


def two_lists(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """The matrices, and all parameters."""
    make: Any = of.cls
    return [make(matrices(model), list(model.parameters()), **of.options)]


def of_names(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """Takes names with parameters."""
    make: Any = of.cls
    return [make(model.named_parameters(), **of.options)]


def of_model(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """Takes the model."""
    make: Any = of.cls
    return [make(model, **of.options)]


def of_parts(run: Run, of: Listed, model: nn.Module) -> Optimizers:
    """Takes a class for each group."""
    import heavyball

    make: Any = of.cls
    first = {"params": matrices(model), "optimizer": heavyball.Muon, "lr": 0.01}
    return [make([first, {"params": others(model), "optimizer": heavyball.AdamW, "lr": 0.01}])]


MAKERS: dict[Callable[[Run, Listed, nn.Module], Optimizers], str] = {
    beside_sgd: """
        torch.optim.Muon pytorch_optimizer.SpectralSphere torch_optimizer.Adafactor
        muon.SingleDeviceMuon
    """,
    alike_beside_sgd: "muon.Muon",
    alike_in_groups: "pytorch_optimizer.DistributedMuon muon.MuonWithAuxAdam",
    in_groups: """
        pytorch_optimizer.AdaGO pytorch_optimizer.AdaMuon pytorch_optimizer.Muon
        pytorch_optimizer.MuonClip pytorch_optimizer.NorMuon muon.SingleDeviceMuonWithAuxAdam
    """,
    around_sgd: """
        pytorch_optimizer.Lookahead pytorch_optimizer.OrthoGrad pytorch_optimizer.TRAC
        pytorch_optimizer.ScheduleFreeWrapper torch_optimizer.Lookahead
    """,
    with_base: """
        pytorch_optimizer.SAM pytorch_optimizer.FriendlySAM pytorch_optimizer.LookSAM
        pytorch_optimizer.WSAM
    """,
    two_lists: "adam_atan2_pytorch.MuonAdamAtan2 adam_atan2_pytorch.PolarAdamAtan2",
    of_names: "adam_mini.Adam_mini",
    of_model: "pytorch_optimizer.AdamMini",
    of_parts: "heavyball.SplitOpt",
}
MADE_BY_THE_RUN = (plainly, beside_sgd, alike_beside_sgd, in_groups, alike_in_groups)
BY_NAME = {name: maker for maker, names in MAKERS.items() for name in names.split()}
# Steps that call a closure for the first gradients too, and steps that call it again for others.
CALLS_CLOSURE = {
    "torch.optim.LBFGS",
    "pytorch_optimizer.LBFGS",
    "heavyball.SAMWrapper",
    "schedulefree.AdamWScheduleFreeClosure",
    "schedulefree.RAdamScheduleFreeClosure",
    "schedulefree.SGDScheduleFreeClosure",
}
CALLS_AGAIN = {
    *(f"pytorch_optimizer.{name}" for name in ("SAM", "FriendlySAM", "LookSAM", "WSAM", "BSAM")),
    "heavyball.MSAMLaProp",
}
READS_LOSS = {"pytorch_optimizer.AliG"}


def program_of(name: str) -> Program:
    """The program of an optimizer's name, with or without AGAIN and DOUBLE behind it."""
    is_double, inner = name.endswith(DOUBLE), name.removesuffix(DOUBLE)
    again, short = inner.endswith(AGAIN), inner.removesuffix(AGAIN)
    function = partial(in_float64 if is_double else train, short, again)
    return Program(name, short, function, None, False)


def can_be_owned(name: str) -> bool:
    """Whether `owned` can make the optimizer: it takes parameters, and wraps no other one."""
    return BY_NAME.get(name.removesuffix(AGAIN), plainly) in MADE_BY_THE_RUN


def programs_of(names: Iterable[str]) -> dict[str, Program]:
    """The programs that the suite does not know by itself."""
    return {name: program_of(name) for name in names if "." in name}


def in_float64(name: str, again: bool, run: Run) -> None:
    """Trains in float64, in which rounding is far below a wrong number."""
    torch.set_default_dtype(torch.float64)
    try:
        train(name, again, run)
    finally:
        torch.set_default_dtype(torch.float32)


def train(name: str, again: bool, run: Run) -> None:
    """Trains; ``again`` loads the optimizer's full state into a new one half-way."""
    of = optimizer_named(name)
    torch.manual_seed(run.seed)
    model = run.shard(Net(), UNITS)
    before = {key: value.clone() for key, value in run.full_state(model).items()}
    make = BY_NAME.get(name, plainly)
    optimizers = make(run, of, model)
    torch.manual_seed(run.seed)  # the optimizer's own draws are alike on all ranks
    for step in range(STEPS):
        if again and step == STEPS // 2:
            states = [run.optimizer_state(optimizer) for optimizer in optimizers]
            optimizers = make(run, of, model)
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        take_step(run, name, model, optimizers, step)
    switch(name, optimizers[0], "eval")
    changes = [(v - before[key]).abs().max().item() for key, v in run.full_state(model).items()]
    if max(changes) < LEAST_CHANGE:
        raise AssertionError(f"{name} changes nothing in {STEPS} steps")


def take_step(run: Run, name: str, model: nn.Module, optimizers: Optimizers, step: int) -> None:
    """One step as the optimizer's manual writes it."""
    tokens = run.tokens(VOCABULARY, 3, 13, key=step)

    def closure() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        run.average(model)
        mean = loss.detach().clone()  # the loss of all ranks, as a closure must return it
        dist.all_reduce(mean)
        return mean / run.world_size

    switch(name, optimizers[0], "train")
    if name in CALLS_CLOSURE:
        stepped: Any = optimizers[0]
        loss: Any = stepped.step(closure)
    else:
        loss = closure()
        first, *rest = optimizers
        for optimizer in rest:
            optimizer.step()
        if name in CALLS_AGAIN:
            first.step(closure)
        elif name in READS_LOSS:
            first.step(lambda: loss.item())
        else:
            first.step()
    if not torch.isfinite(torch.as_tensor(loss)):
        raise AssertionError(f"{name} diverges")
    run.record(float(loss))


def switch(name: str, optimizer: Any, mode: str) -> None:
    """Calls `train` or `eval` of a schedule-free optimizer."""
    is_free = any(part in name for part in ("ScheduleFree", "SFAdamW"))
    if is_free and hasattr(optimizer_named(name).cls, mode):
        getattr(optimizer, mode)()
