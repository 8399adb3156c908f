"""Ranks that disagree: each one that lives gets an error that names units and ranks, soon."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import Outcome, run_ranks, run_to_end
from tests.distributed.scripts import run_program
from tests.distributed.test_random_graphs import mesh_of
from zerocore.common.alarm import STALL_SECONDS, stall_seconds

LIMIT = 2.0
PATIENCE = 5.0  # for the comparison, on top of the limit
ODD = 1  # the rank that does something else
ENDS = rf"{STALL_SECONDS}|wait for each other"  # what helps, or that nothing does


class Model(nn.Module):
    """Four units of different sizes, the last one for whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 32)
        self.c = nn.Linear(32, 8)
        self.side = nn.Linear(8, 8)
        self.fails = False

    def forward(self, x: Tensor, side: bool = False) -> Tensor:
        x = self.b(self.a(x).relu()).relu()
        if self.fails:
            raise KeyError("bad batch")
        x = self.c(x)
        return self.side(x) if side else x


def sharded(stage: int) -> Model:
    torch.manual_seed(0)
    model = Model()
    zerocore.shard(model, stage=stage, units=["Linear"])
    return model


def step(model: Model, side: bool = False) -> None:
    model(torch.randn(2, 8), side).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.1 * param.grad
    model.zero_grad()


def end(model: Model) -> None:
    os._exit(3)


def stop(model: Model) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(model: Model) -> None:
    time.sleep(LIMIT + PATIENCE)
    step(model)


def call_another_unit(model: Model) -> None:
    model.side(torch.randn(2, 8)).sum().backward()  # not inside of a call of the model


def call_once_more(model: Model) -> None:
    model(torch.randn(2, 8))
    step(model)


def skip_the_backward(model: Model) -> None:
    model(torch.randn(2, 8))


def run_the_backward_twice(model: Model) -> None:
    loss = model(torch.randn(2, 8)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    step(model)


def train_something_else(model: Model) -> None:
    """A loss that does not come from the model, whose forward has been called."""
    model(torch.randn(2, 8))
    torch.ones((), requires_grad=True).square().backward()
    step(model)


def freeze(model: Model) -> None:
    model.b.weight.requires_grad_(False)
    step(model)


def freeze_a_unit(model: Model) -> None:
    model.b.requires_grad_(False)
    step(model)


@dataclass(frozen=True)
class Case:
    """The odd rank's doing, the others' error, and whether the odd rank gets an error too."""

    act: Callable[[Model], None]
    told: str
    also_odd: bool = True
    stages: tuple[int, ...] = (0, 3)


# Where rank 1 is, as against what the others wait in.
ANY_PLACE = (
    r"rank 1 waits in (all_gather|all_reduce|reduce_scatter) of '(a|b|c|the calls of a pass)'"
)
CASES = [
    Case(end, "rank 1 did not answer within 3 s: killed, stopped, out of reach", also_odd=False),
    Case(stop, "rank 1 did not answer within 3 s: killed, stopped, out of reach", also_odd=False),
    Case(sleep, r"rank 1 has not reached it \(in no collective of this model\)"),
    Case(call_another_unit, r"rank 1 waits in all_(gather|reduce) of 'side' \(288 bytes\)"),
    Case(call_once_more, ANY_PLACE, stages=(0, 1, 2, 3)),
    Case(run_the_backward_twice, ANY_PLACE, stages=(0, 1, 2, 3)),
    Case(train_something_else, ANY_PLACE, stages=(0, 1, 2, 3)),
    Case(skip_the_backward, r"rank 1 (has not reached it|waits in all_gather)", also_odd=False),
    Case(freeze, r"'b.weight' requires grad on ranks? 0(, 2)? and not on rank 1"),
    Case(freeze_a_unit, r"'b.weight' requires grad on ranks? 0(, 2)? and not on rank 1"),
]


def disagree(case: Case, stage: int) -> tuple[str, str, float] | None:
    """The first error, that of the next use, and the seconds to the first; None for no error."""
    os.environ[STALL_SECONDS] = str(LIMIT)
    model = sharded(stage)
    for _ in range(3):
        step(model)
    odd = dist.get_rank() == ODD
    start = time.monotonic()
    try:
        if odd:
            case.act(model)
        for _ in range(3 if case.also_odd or not odd else 0):
            step(model)
    except dist.DistBackendError as error:
        seconds = time.monotonic() - start
        with pytest.raises(dist.DistBackendError) as again:
            model(torch.randn(2, 8))
        return str(error), str(again.value), seconds
    return None


def check(case: Case, stage: int, world_size: int) -> list[str]:
    """The mistakes in the outcome of a case."""
    # A stopped rank is waited for in vain.
    timeout = (2 if case.act is stop else 5) * (LIMIT + PATIENCE)
    outcomes = run_to_end(disagree, world_size, case, stage, timeout=timeout, group_timeout=600.0)
    name = f"{case.act.__name__}, stage {stage}: "
    return [
        name + problem
        for outcome in outcomes
        if outcome.rank != ODD or case.also_odd
        for problem in problems(case, outcome)
    ]


def problems(case: Case, outcome: Outcome) -> list[str]:
    if outcome.error or outcome.value is None:
        return [f"rank {outcome.rank} had no alarm: {outcome.error}"]
    first, again, seconds = outcome.value
    slept = LIMIT + PATIENCE if case.act is sleep and outcome.rank == ODD else 0.0
    found = []
    if seconds > LIMIT + PATIENCE + slept:
        found.append(f"rank {outcome.rank} waited for {seconds:.1f} s")
    for pattern in (case.told, r"^collective \d+ of the model Model: ", "They agreed up to", ENDS):
        if not re.search(pattern, first):
            found.append(f"rank {outcome.rank} was not told {pattern!r}: {first}")
    if again.split(" (Here")[0] != first.split(" (Here")[0]:
        found.append(f"rank {outcome.rank} got another error then: {again}")
    return found


@pytest.mark.parametrize(
    ("stage", "world_size"), [*by_night((0, 3), (1, 2), (2, 2), (3, 3)), (3, 2)]
)
def test_each_living_rank_is_told(stage: int, world_size: int) -> None:
    cases = [case for case in CASES if stage in case.stages]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda case: check(case, stage, world_size), cases)
        assert [problem for case in found for problem in case] == []


def wait_in_a_barrier(act: Callable[[Model], None]) -> str:
    """Rank 0 does not come to the program's own barrier, in which all others wait.

    That is before the first step: the limit is the same there.
    """
    os.environ[STALL_SECONDS] = str(LIMIT)
    model = sharded(3)
    if dist.get_rank() == 0:
        act(model)
    with pytest.raises(dist.DistBackendError) as error:
        dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("act", [end, *by_night(stop)])
def test_a_barrier_of_the_program(act: Callable[[Model], None]) -> None:
    timeout = 2 * (LIMIT + PATIENCE)
    outcomes = run_to_end(wait_in_a_barrier, 3, act, timeout=timeout, group_timeout=600.0)
    for rank in (1, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        for told in ("waits in torch.distributed.barrier", "rank 0 did not answer within 3 s"):
            assert told in outcomes[rank].value


def save_alone(folder: Path, limit: float) -> str:
    """Only one rank saves, as programs do that saved whole models before."""
    os.environ[STALL_SECONDS] = str(limit)
    model = sharded(3)
    checkpoints = zerocore.Checkpoints(folder, model)
    with pytest.raises(dist.DistBackendError) as error:
        for number in (1, 2, 3):
            if dist.get_rank() == 0:
                checkpoints.save(number)
            step(model)
    return str(error.value)


@pytest.mark.parametrize(
    ("limit", "timeout", "advice"),
    [(LIMIT, 600.0, STALL_SECONDS), (600.0, LIMIT, "the timeout of the process group")],
)
def test_a_save_on_one_rank_only(tmp_path: Path, limit: float, timeout: float, advice: str) -> None:
    for outcome in run_to_end(save_alone, 2, tmp_path, limit, group_timeout=timeout):
        assert outcome.error is None, outcome.error
        assert f"raise {advice}, which is {LIMIT:g}" in outcome.value
        assert "rank 0 waits in Checkpoints.save of 'step-00000001'" in outcome.value
        assert re.search(r"rank 1 (waits in all_gather of '\w+' \(|has)", outcome.value)


class Critic(Model):
    """The other one of two models."""


def evaluate_alone(stage: int, num_models: int, ranks: str = "") -> tuple[str, float]:
    """Rank 0 evaluates while others train, the other model if there is one; no limit is near."""
    options: dict[str, Any] = {"units": ["Linear"]}
    if ranks == "replicas":
        options["group"] = mesh_of(2, dist.get_world_size() // 2)
    elif ranks == "near":
        options["communication"] = zerocore.Communication(regather=2)
    torch.manual_seed(0)
    model = critic = zerocore.shard(Model(), stage=stage, **options)
    if num_models == 2:
        critic = zerocore.shard(Critic(), stage=stage, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for each in (model, critic):
        each(torch.randn(2, 8), side=True).sum().backward()
    optimizer.step()
    if num_models == 2:
        critic.requires_grad_(False)  # rank 0 alone notes it, when it calls the critic
    start = time.monotonic()
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                for _ in range(3):
                    critic(torch.randn(2, 8))
        for _ in range(6):
            model(torch.randn(2, 8), side=True).sum().backward()
            optimizer.step()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_wait_for_each_other(world_size: int, num_models: int, stage: int) -> None:
    """Long before the limit, in words that name the models; where each rank has all, nothing."""
    outcomes = run_to_end(
        evaluate_alone, world_size, stage, num_models, timeout=60, group_timeout=600.0
    )
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
        told, seconds = outcome.value
        if stage < 3:
            assert told == ""
            continue
        assert re.search("The ranks wait for each other|about to issue different", told), told
        for name in ("Model", "Critic")[:num_models]:
            assert f"of the model {name}" in told, told
        assert "requires grad" not in told, told
        assert seconds < 30


@pytest.mark.parametrize(("ranks", "world_size"), [("replicas", 4), ("replicas", 8), ("near", 4)])
def test_ranks_of_several_groups_that_wait_for_each_other(ranks: str, world_size: int) -> None:
    for outcome in run_to_end(
        evaluate_alone, world_size, 3, 2, ranks, timeout=60, group_timeout=600.0
    ):
        assert outcome.value is not None, outcome.error
        told, seconds = outcome.value
        assert "The ranks wait for each other" in told, told
        assert seconds < 30


def be_slow(log: Path) -> None:
    """Training goes on when a rank comes that was slow, but not for too long."""
    os.environ[STALL_SECONDS] = str(6 * LIMIT)
    model = sharded(3)
    step(model)
    before, file = os.dup(2), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    if dist.get_rank() == ODD:
        time.sleep(4 * LIMIT)  # the others call the roll after 1.5, 3 and 6 s
    step(model)
    os.dup2(before, 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_slow_rank_ends_nothing_before_the_limit(tmp_path: Path, world_size: int) -> None:
    log = tmp_path / "log"
    run_ranks(be_slow, world_size, log, fresh=True)
    assert log.read_text() == ""


def fail_on_one_rank(stage: int) -> None:
    model = sharded(stage)
    step(model)
    loss = None
    model.fails = dist.get_rank() == ODD
    try:
        loss = model(torch.randn(2, 8)).sum()
    except KeyError:
        assert model.fails
    if loss is not None:
        with pytest.raises(RuntimeError, match="the forward raised on rank 1"):
            loss.backward()
    model.fails = False
    step(model)


def test_a_forward_that_raised_on_one_rank(stage: int) -> None:
    """The others are told by their backward, at once, and training can go on."""
    run_ranks(fail_on_one_rank, 3, stage, timeout=30)


def free_on_one_rank() -> None:
    model = sharded(3)
    step(model)
    kept = [model] if dist.get_rank() == 0 else []
    del model
    gc.collect()
    step(sharded(3))
    assert len(kept) == 1 - dist.get_rank()


def test_models_may_live_longer_on_one_rank() -> None:
    run_ranks(free_on_one_rank, 2)


HOLDER = "which rank 0 holds unless a launcher does"
PROGRAM = """
import os, sys, time
import torch.distributed as dist
from tests.watch.test_alarm import LIMIT, STALL_SECONDS, sharded, step

ending, rank = sys.argv[1], int(os.environ["RANK"])
os.environ[STALL_SECONDS] = str(LIMIT)
dist.init_process_group("gloo")
model = sharded(3)
if ending == "died" and rank == 0:
    os._exit(4)
step(model)
if ending == "raised" and rank == 1:
    raise KeyError("bad batch")
if ending == "left" and rank == 0:  # which holds the store
    sys.exit(3)
step(model)
if ending == f"slow {rank}":
    time.sleep(2.5 * LIMIT)
"""


@pytest.mark.parametrize(
    ("ending", "told", "codes"),
    [
        ("raised", "rank 1 ended the program after KeyError: 'bad batch'", (1, 1)),
        ("died", rf"the store at [^ ]+, {HOLDER}, did not answer", (4, 1)),
        ("left", rf"rank 0 ended the program|{HOLDER}, did not answer", (3, 1)),
    ],
)
def test_end_of_the_program(ending: str, told: str, codes: tuple[int, int]) -> None:
    outcomes = run_program(PROGRAM, 2, ending)
    assert tuple(code for code, _ in outcomes) == codes, outcomes
    survivor = outcomes[0 if ending == "raised" else 1][1]
    assert re.search(told, survivor), survivor
    assert "terminate called" not in "".join(output for _, output in outcomes)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_may_end_later_than_others(slow: int) -> None:
    """By more than the limit; also the rank that holds the store."""
    for code, output in run_program(PROGRAM, 2, f"slow {slow}"):
        assert code == 0, output
        assert "zerocore on rank" not in output


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (("", None), ("0", 0.0), ("1.5", 1.5)):
        monkeypatch.setenv(STALL_SECONDS, text)
        assert stall_seconds() == seconds
    for text in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv(STALL_SECONDS, text)
        with pytest.raises(ValueError, match=f"{STALL_SECONDS}.*{text}"):
            stall_seconds()
