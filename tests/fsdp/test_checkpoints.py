"""State dicts and checkpoints go from one implementation to the other."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import zerocore
from tests.distributed.harness import run_ranks
from tests.fsdp.both import ENGINES, full_params, loss_of, make_net, shard_blocks, tokens_of

PAIRS = (("torch", "zerocore"), ("zerocore", "torch"), ("zerocore", "zerocore"))


def make(name: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = shard_blocks(ENGINES[name], make_net() if seed == 0 else _other_net())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _other_net() -> nn.Module:
    model = make_net()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    return model


def steps(model: Any, optimizer: Any, first: int, count: int = 2) -> list[float]:
    losses = []
    for index in range(first, first + count):
        loss = loss_of(model, tokens_of(index))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, n=name: f"{n}: {text}")


def save_and_load(folder: str) -> None:
    """Continues a run under the other implementation, from files and from state dicts."""
    for number, (writer, reader) in enumerate(PAIRS):
        model, optimizer = make(writer)
        steps(model, optimizer, 0)
        states = get_state_dict(model, optimizer)
        assert all(isinstance(value, DTensor) for value in states[0].values())
        path = Path(folder, str(number))
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
        expected = steps(model, optimizer, 2)
        other, its_optimizer = make(reader, seed=1)
        if number == 2:
            steps(other, its_optimizer, 0)  # states that are there are overwritten
        model_state, optimizer_state = get_state_dict(other, its_optimizer)
        read = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(read, checkpoint_id=path)
        set_state_dict(
            other,
            its_optimizer,
            model_state_dict=read["model"],
            optim_state_dict=read["optimizer"],
        )
        torch.testing.assert_close(
            torch.tensor(steps(other, its_optimizer, 2)), torch.tensor(expected)
        )
        check_equal(full_params(other), full_params(model))


def exchange_state_dicts() -> None:
    for writer, reader in PAIRS:
        model, optimizer = make(writer)
        steps(model, optimizer, 0)
        other, its_optimizer = make(reader, seed=1)
        sharded = {name: value.clone() for name, value in model.state_dict().items()}
        given = {name: value.clone() for name, value in sharded.items()}
        other.load_state_dict(given, assign=True)  # before the first forward
        check_equal(full_params(other), full_params(model))
        its_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        steps(other, its_optimizer, 2)
        other.load_state_dict(sharded)  # in place, and after it
        check_equal(full_params(other), full_params(model))
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert not any(isinstance(value, DTensor) for value in whole.values())
        third, _ = make(reader, seed=1)
        set_model_state_dict(third, whole, options=StateDictOptions(full_state_dict=True))
        check_equal(full_params(third), full_params(model))
        with torch.no_grad():
            model(tokens_of(0))  # the root's parameters stay unsharded
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens))  # type: ignore[no-any-return]


def assign_tied() -> None:
    """A load with ``assign=True`` gives each name its own tensor; the engine ties them again."""
    torch.manual_seed(0)
    plain = Tied()
    with torch.device("meta"):
        model = Tied()
    zerocore.fsdp.fully_shard(model)
    values = {
        key: distribute_tensor(plain.state_dict()[key], value.device_mesh, value.placements)
        for key, value in model.state_dict().items()
    }
    model.load_state_dict(values, assign=True)
    tokens = torch.arange(6)
    loss, expected = model(tokens).square().sum(), plain(tokens).square().sum()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert model.out.weight is model.embed.weight
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), plain.embed.weight.grad)


def test_tied_parameters_that_a_load_assigns() -> None:
    run_ranks(assign_tied, 2)


def test_checkpoints_go_from_one_to_the_other(tmp_path: Path) -> None:
    run_ranks(save_and_load, 2, str(tmp_path), timeout=120)


def test_state_dicts_go_from_one_to_the_other() -> None:
    run_ranks(exchange_state_dicts, 3, timeout=120)


def copy_and_save() -> None:
    """By torch's own functions, which read storages: states after a forward, views of them."""
    for number, name in enumerate(ENGINES):
        model, optimizer = make(name)
        steps(model, optimizer, 0)
        for state in (model.state_dict(), optimizer.state_dict()):
            values = flatten_state_dict(state)[0]
            buffer = io.BytesIO()
            torch.save(state, buffer)
            buffer.seek(0)
            for copied in (copy.deepcopy(state), torch.load(buffer, weights_only=False)):
                for key, value in flatten_state_dict(copied)[0].items():
                    if isinstance(value, torch.Tensor):
                        assert torch.equal(local_of(value), local_of(values[key])), key
                        assert value.data_ptr() == 0 or not isinstance(value, DTensor), key
        kept = copy.deepcopy(model.state_dict())  # as for the best epoch
        before = full_params(model)
        steps(model, optimizer, 2)
        model.load_state_dict(kept)
        check_equal(full_params(model), before)
        if number == 0:
            expected = steps(model, optimizer, 2)
        else:
            torch.testing.assert_close(
                torch.tensor(steps(model, optimizer, 2)), torch.tensor(expected)
            )


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@pytest.mark.nightly
def test_state_dicts_are_copied_and_saved() -> None:
    for world_size in (1, 3):
        run_ranks(copy_and_save, world_size, timeout=120)
