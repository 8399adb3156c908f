"""Full and local state: reading, changing, saving and loading parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    accumulate,
    assert_gradients,
    assert_same_state,
    case_named,
    train_sharded,
)

CASES = ("plain", "scalars", "empty_shards", "mixed_dtypes", "tied", "strided", "buffers", "frozen")


def read_full(stage: int, name: str) -> None:
    case = case_named(name)
    plain = case.seeded_build()
    model = zerocore.shard(case.seeded_build(), stage=stage)
    state = zerocore.full_state_dict(model, rank0_only=False)
    assert list(state) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert state[key].device.type == "cpu" and torch.equal(state[key], value), key
    plain.load_state_dict(state, strict=True)
    on_rank0 = zerocore.full_state_dict(model)
    assert list(on_rank0) == (list(state) if dist.get_rank() == 0 else [])


@pytest.mark.parametrize("name", CASES)
def test_full_state_dict(stage: int, name: str) -> None:
    run_ranks(read_full, 3, stage, name)


def watch_gathers() -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=3)
    with zerocore.reporting.record_events(model) as events:
        zerocore.full_state_dict(model)
    units = zerocore.describe(model).units
    expected = [("all_gather", unit.name, unit.buffer_nbytes, 0) for unit in units]
    assert [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events] == expected


def test_full_state_dict_gathers_every_unit_once_and_takes_nothing_from_the_pool() -> None:
    run_ranks(watch_gathers, 2)


def load_full(stage: int, name: str, broadcast: bool) -> None:
    case = case_named(name)
    saved = case.seeded_build(seed=1).state_dict()
    model = zerocore.shard(case.seeded_build(), stage=stage)
    accumulate(model, case, 0)  # what is loaded must not be hidden by what was gathered
    model.zero_grad()
    given = saved if dist.get_rank() == 0 or not broadcast else {}
    zerocore.load_full_state_dict(model, given, broadcast=broadcast)
    loaded = zerocore.full_state_dict(model, rank0_only=False)
    for key, value in saved.items():
        assert torch.equal(loaded[key], value), key
    plain = case.seeded_build(seed=1)
    batch = case.seeded_batch(0, dist.get_rank(), 2)
    torch.testing.assert_close(case.loss(model, batch), case.loss(plain, batch))


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_load_full_state_dict(stage: int, name: str, broadcast: bool) -> None:
    run_ranks(load_full, 3, stage, name, broadcast)


def load_wrong(stage: int) -> None:
    case = case_named("plain")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    saved = case.seeded_build(seed=1).state_dict()
    rank0 = dist.get_rank() == 0
    missing = {key: value for key, value in saved.items() if key != "head.bias"}
    for wrong in (missing, {**saved, "head.bias": torch.zeros(1)}):
        with pytest.raises((KeyError, ValueError, RuntimeError), match=r"head.bias"):
            zerocore.load_full_state_dict(model, wrong if rank0 else {})
    with pytest.raises((KeyError, ValueError, RuntimeError), match="surplus"):
        extra = {**saved, "surplus": torch.zeros(1)}
        zerocore.load_full_state_dict(model, extra if rank0 else {})
    zerocore.load_full_state_dict(model, saved if rank0 else {})


def test_loading_what_does_not_fit_is_an_error_on_every_rank(stage: int) -> None:
    run_ranks(load_wrong, 2, stage)


def read_local(stage: int) -> dict[str, tuple[tuple[int, int], Tensor]]:
    case = case_named("scalars")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    state = model.state_dict()
    plain = case.seeded_build().state_dict()
    assert list(state) == list(plain)
    for key, value in state.items():
        assert value.fqn == key and value.shape == plain[key].shape
        assert not value.requires_grad and value.local().dim() == 1
    local = {key: (value.shard_range, value.local().clone()) for key, value in state.items()}
    model.load_state_dict(state)
    return local


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_dict_holds_local_shards(stage: int) -> None:
    answers = run_ranks(read_local, 3, stage)
    for key, value in case_named("scalars").seeded_build().state_dict().items():
        full = torch.full_like(value, float("nan")).flatten()
        for answer in answers:
            (start, end), local = answer[key]
            full[start:end] = local
        assert torch.equal(full.view_as(value), value), key


def read_unsharded(stage: int, name: str) -> None:
    case = case_named(name)
    plain = case.seeded_build()
    model = zerocore.shard(case.seeded_build(), stage=stage)
    before = dict(model.named_parameters())
    with zerocore.unsharded(model):
        assert list(dict(model.named_parameters())) == list(before)
        for key, value in plain.named_parameters():
            full = model.get_parameter(key)
            assert full.stride() == value.stride() or name == "strided"
            assert torch.equal(full, value), key
    after = dict(model.named_parameters())
    assert all(after[key] is before[key] for key in before)


@pytest.mark.parametrize("name", [*CASES, "channels_last"])
def test_unsharded_shows_full_parameters(stage: int, name: str) -> None:
    run_ranks(read_unsharded, 3, stage, name)


def read_one_block(stage: int) -> None:
    case = case_named("plain")
    plain = case.seeded_build()
    model = zerocore.shard(case.seeded_build(), stage=stage)
    x = torch.randn(2, 7)
    with zerocore.unsharded(model.blocks[1]):
        weight = model.get_parameter("blocks.1.linear.weight")
        assert torch.equal(weight, plain.get_parameter("blocks.1.linear.weight"))
        other = model.get_parameter("blocks.2.linear.weight")
        assert zerocore.is_sharded(other) == (stage > 0)
        torch.testing.assert_close(model.blocks[1](x, 0), plain.blocks[1](x, 0))
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)


def test_unsharded_submodule(stage: int) -> None:
    run_ranks(read_one_block, 2, stage)


def write_full(stage: int) -> None:
    case = case_named("mixed_dtypes")
    model = zerocore.shard(case.seeded_build(), stage=stage)
    before = zerocore.full_state_dict(model, rank0_only=False)
    with zerocore.unsharded(model, write_back=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    after = zerocore.full_state_dict(model, rank0_only=False)
    assert_same_state(after, {key: value + 1.0 for key, value in before.items()})
    refused = pytest.raises(RuntimeError, match=r"head.bias.*write_back")
    with refused, zerocore.unsharded(model), torch.no_grad():
        model.get_parameter("head.bias").zero_()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_changes_are_written_back_or_refused(stage: int) -> None:
    run_ranks(write_full, 3, stage)


def sync_from_rank0(stage: int, sync_params: bool) -> Tensor:
    case = case_named("plain")
    model = case.seeded_build(seed=dist.get_rank())
    model = zerocore.shard(model, stage=stage, sync_params=sync_params)
    state = zerocore.full_state_dict(model, rank0_only=False)
    assert_same_state(state, case.seeded_build(seed=0).state_dict())
    return state["head.weight"]


def test_values_of_rank0_win(stage: int) -> None:
    run_ranks(sync_from_rank0, 3, stage, True)


def resume(stage: int) -> None:
    """Training on from saved shards and optimizer state equals training through."""
    case = case_named("plain")
    through = train_sharded(case, stage, steps=4)
    model = zerocore.shard(case.seeded_build(), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, weight_decay=0.1)
    for step in range(4):
        if step == 2:
            saved = zerocore.full_state_dict(model), optimizer.state_dict()
            model = zerocore.shard(case.seeded_build(seed=5), stage=stage)
            zerocore.load_full_state_dict(model, saved[0])
            optimizer = torch.optim.AdamW(model.parameters())
            optimizer.load_state_dict(saved[1])
        accumulate(model, case, step)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(zerocore.full_state_dict(model), through.state)


def test_resume(stage: int) -> None:
    run_ranks(resume, 2, stage)
