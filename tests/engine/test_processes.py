"""Processes beside a sharded model: workers of a DataLoader, and forks that use the model."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import select
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import own_of

ANSWER_SECONDS = 10.0


class Numbers(Dataset[Tensor]):
    """Sixteen rows, as a user's data set."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((5,), index / 16)


def make(stage: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2)]
    return zerocore.shard(nn.Sequential(*layers), stage=stage)


def train_with_workers(start_method: str | None, num_workers: int, num_epochs: int) -> list[float]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_epochs):  # each starts new workers, in the middle of a training
        loader = DataLoader(
            Numbers(), 4, num_workers=num_workers, multiprocessing_context=start_method
        )
        for batch in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


# A spawned worker imports torch anew.
@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("start_method", "num_workers", "num_epochs"), [("fork", 2, 3), ("spawn", 1, 1)]
)
def test_data_loader_workers(start_method: str, num_workers: int, num_epochs: int) -> None:
    expected = run_ranks(train_with_workers, 2, None, 0, num_epochs)
    trained = run_ranks(train_with_workers, 2, start_method, num_workers, num_epochs, timeout=120)
    assert trained == expected


def forward(model: nn.Module) -> None:
    model(torch.ones(1, 5))


def forward_of_a_layer(model: Any) -> None:
    with torch.no_grad():
        model[1](torch.ones(1, 8))


def enter_unsharded(model: nn.Module) -> None:
    with zerocore.unsharded(model):
        pass


def load(model: nn.Module) -> None:
    zerocore.load_full_state_dict(model, {})


USES = (forward, forward_of_a_layer, enter_unsharded, zerocore.full_state_dict, load)


def answer_of_child(work: Callable[[], None]) -> str:
    """The error of `work` in a forked process, or "done"; fails if it does not end."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "done"
        try:
            work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(sender, answer.encode())
        os._exit(0)
    ready, _, _ = select.select([receiver], [], [], ANSWER_SECONDS)
    answer = os.read(receiver, 4096).decode() if ready else "did not end"
    if not ready:
        os.kill(child, 9)
    os.waitpid(child, 0)
    return answer


def use_in_a_fork(stage: int) -> None:
    model = make(stage)
    for round in range(2):  # before the first forward, and with a backward pending
        pending = model(torch.ones(1, 5)).sum() if round else None
        for use in USES:
            answer = answer_of_child(lambda use=use: use(model))  # type: ignore[misc]
            assert "RuntimeError: this process was forked" in answer, (use, answer)
        local = [own_of(parameter).clone() for parameter in model.parameters()]

        def read() -> None:
            torch.testing.assert_close([own_of(p) for p in model.parameters()], local)  # noqa: B023

        assert answer_of_child(read) == "done"
        if pending is not None:
            pending.backward()  # the parent is as it was


def test_a_fork_that_uses_the_model_gets_an_error(stage: int) -> None:
    run_ranks(use_in_a_fork, 2, stage, fresh=True)


def forget_in_a_fork() -> None:
    models = [make()]
    pending = models[0](torch.ones(1, 5)).sum()

    def forget() -> None:
        models.clear()
        gc.collect()

    assert answer_of_child(forget) == "done"
    process = multiprocessing.get_context("fork").Process(target=forget)
    process.start()
    process.join(ANSWER_SECONDS)
    assert process.exitcode == 0
    pending.backward()


def test_a_fork_that_drops_the_model_ends() -> None:
    run_ranks(forget_in_a_fork, 2, fresh=True)


def use_alone() -> None:
    """One rank has no peers: its forks may use the model."""
    model = make()
    assert answer_of_child(lambda: forward(model)) == "done"


def test_a_world_of_one_may_fork() -> None:
    run_ranks(use_alone, 1, fresh=True)
    run_ranks(use_alone, 1, launch="none")


def pickle_model() -> None:
    model = make()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)


def test_a_model_cannot_be_sent_to_a_spawned_process() -> None:
    run_ranks(pickle_model, 2)
