"""torch.distributed.checkpoint of sharded models: its own code, any ranks and stages, FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.checkpoint.saved_nets import (
    OPTIMIZERS,
    assert_equal,
    full_states,
    make,
    train,
    trained,
)
from tests.distributed.harness import run_ranks


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optim": states[1]}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"]
    )


def saved_stages(world_size: int) -> tuple[int, int]:
    return (0, 3) if world_size % 2 else (1, 2)


def name_of(stage: int) -> str:
    return list(OPTIMIZERS)[stage % len(OPTIMIZERS)]


def save_all_stages(folder: Path) -> None:
    for stage in saved_stages(dist.get_world_size()):
        model, optimizer = trained(stage, name_of(stage))
        place = folder / f"{dist.get_world_size()}-{stage}"
        save(model, optimizer, place)
        states = full_states(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(states, f"{place}.pt")


def load_all(folder: Path, world_sizes: tuple[int, ...]) -> None:
    for ranks in world_sizes:
        for saved in saved_stages(ranks):
            stage = (saved + ranks + dist.get_world_size()) % 4  # each of them with each
            model = make(stage, seed=1)
            optimizer = OPTIMIZERS[name_of(saved)](model.parameters())
            place = folder / f"{ranks}-{saved}"
            load(model, optimizer, place)
            assert_equal(full_states(model, optimizer), torch.load(f"{place}.pt"))
            train(model, optimizer, 1)


@pytest.mark.parametrize("world_sizes", [*by_night(((1, 2, 3, 4),)), (2, 3)])
def test_any_number_of_ranks_and_stages(tmp_path: Path, world_sizes: tuple[int, ...]) -> None:
    for world_size in world_sizes:
        run_ranks(save_all_stages, world_size, tmp_path)
    for world_size in world_sizes:
        run_ranks(load_all, world_size, tmp_path, world_sizes, timeout=120.0)


class Plain(nn.Sequential):
    """Parameters that FSDP2 takes: no empty ones and none without dimensions."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 3))


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def build(system: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = Plain(seed)
    if system == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in (*model, model):
            fully_shard(layer)
    elif system != "plain":
        model = zerocore.shard(model, stage=int(system))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def full_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True)
    states = get_state_dict(model, optimizer, options=options)
    flat = {f"{n}.{key}": v for n, s in states[1]["state"].items() for key, v in s.items()}  # type: ignore[union-attr]
    return {"model": dict(states[0]), "state": flat, "groups": states[1]["param_groups"]}


def go_between(folder: Path) -> None:
    pairs = [("fsdp2", "3"), ("fsdp2", "1"), ("3", "fsdp2"), ("0", "fsdp2"), ("2", "plain")]
    for source, target in [*pairs, ("plain", "3")]:
        model, optimizer = build(source, 0)
        steps_of(model, optimizer, 2)
        place = folder / f"{source}-{target}"
        save(model, optimizer, place)
        other, other_optimizer = build(target, 1)
        load(other, other_optimizer, place)
        assert_equal(full_of(other, other_optimizer), full_of(model, optimizer))
        steps_of(other, other_optimizer, 1)


def test_fsdp2_and_plain_models_in_both_directions(tmp_path: Path) -> None:
    run_ranks(go_between, 2, tmp_path)


def save_hybrid(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mixed = zerocore.MixedPrecision(torch.bfloat16, torch.float32, keep_fp32=("norm",))
    for stage in (1, 3):
        model, optimizer = trained(stage, "zerocore", group=mesh, mixed_precision=mixed)
        save(model, optimizer, folder / str(stage))
        expected = full_states(model, optimizer)
        assert expected["model"]["head.weight"].dtype == torch.float32  # the main weights
        again = make(stage, seed=1, mixed_precision=mixed)
        other = OPTIMIZERS["zerocore"](again.parameters())
        load(again, other, folder / str(stage))
        assert_equal(full_states(again, other), expected)
        sizes = [file.stat().st_size for file in (folder / str(stage)).glob("*.distcp")]
        assert len(sizes) == 4 and max(sizes) < sum(sizes) / 2  # replicas share the writing


def test_hybrid_meshes_and_mixed_precision(tmp_path: Path) -> None:
    run_ranks(save_hybrid, 4, tmp_path)


def save_in_background(folder: Path) -> None:
    group = dist.new_group(backend="gloo")  # the training uses the default one meanwhile
    for stage in (0, 3):
        model, optimizer = trained(stage)
        expected = full_states(model, optimizer)
        states = get_state_dict(model, optimizer)
        future = dcp.async_save(
            {"model": states[0], "optim": states[1]},
            checkpoint_id=folder / str(stage),
            process_group=group,
        )
        train(model, optimizer, 1, seed=7)
        future.result()  # type: ignore[union-attr]
        load(model, optimizer, folder / str(stage))
        assert_equal(full_states(model, optimizer), expected)
        writer = dcp.FileSystemWriter(folder / f"{stage}-blocking")  # which copies for itself
        stager = dcp.staging.BlockingAsyncStager()
        copied = stager.stage({"model": model.state_dict()})
        train(model, optimizer, 1, seed=7)
        dcp.save(copied, storage_writer=writer)
        states_loaded = {"model": model.state_dict()}
        dcp.load(states_loaded, checkpoint_id=folder / f"{stage}-blocking")
        assert_equal({**full_states(model, optimizer), "state": {}}, {**expected, "state": {}})


def test_async_save_keeps_the_moment_of_the_call(tmp_path: Path) -> None:
    run_ranks(save_in_background, 2, tmp_path)


def make_no_step() -> None:
    for stage in (0, 3):
        for name, make_optimizer in OPTIMIZERS.items():
            model = make(stage)
            before = zerocore.full_state_dict(model, rank0_only=False)
            optimizer = make_optimizer(model.parameters())
            states = get_optimizer_state_dict(model, optimizer)
            for key, state in states["state"].items():
                assert key != "frozen"
                for value in state.values():  # type: ignore[union-attr]
                    local = (
                        value.local() if isinstance(value, zerocore.tensor.LocalShard) else value
                    )
                    assert not local.any(), (name, key)
            after = zerocore.full_state_dict(model, rank0_only=False)
            assert all(torch.equal(after[key], value) for key, value in before.items())
            fresh, other = make(stage), None
            other = make_optimizer(fresh.parameters())
            train(model, optimizer, 2)
            train(fresh, other, 2)
            assert_equal(full_states(model, optimizer), full_states(fresh, other))


def test_states_are_made_without_a_step() -> None:
    run_ranks(make_no_step, 2)


def full_round_trip() -> None:
    for stage in (1, 2, 3):  # of plain tensors torch itself mixes up channels_last
        model, optimizer = trained(stage, "zerocore")
        expected = full_states(model, optimizer)
        offload = StateDictOptions(full_state_dict=True, cpu_offload=True)
        on_rank0 = get_model_state_dict(model, options=offload)
        states = get_optimizer_state_dict(model, optimizer, options=offload)
        assert bool(on_rank0) == bool(states) == (dist.get_rank() == 0)
        again = make(stage, seed=1)
        other = OPTIMIZERS["zerocore"](again.parameters())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(again, on_rank0, options=options)
        set_optimizer_state_dict(again, other, states, options=options)
        actual = full_states(again, other)
        for group in actual["groups"]:
            group["betas"] = tuple(group["betas"])
        assert_equal(actual, expected)


def test_full_state_dicts_of_torch() -> None:
    run_ranks(full_round_trip, 3)


def misuse(folder: Path) -> None:
    model, optimizer = trained(3)
    save(model, optimizer, folder / "saved")
    wrong = zerocore.shard(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(BaseException, match=r"Missing key.*0\.weight"):
        dcp.load({"model": wrong.state_dict()}, checkpoint_id=folder / "saved")
    other = zerocore.shard(nn.Sequential(nn.Linear(6, 4)))
    with pytest.raises(BaseException, match=r"Size mismatch.*model\.weight"):
        state = {"weight": other.state_dict()["0.weight"]}
        dcp.save({"model": state}, checkpoint_id=folder / "small")
        larger = {"model": {"weight": model.state_dict()["head.weight"]}}
        dcp.load(larger, checkpoint_id=folder / "small")
    with pytest.raises(BaseException, match=r"zerocore\.save_safetensors"):
        writer = dcp.HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True)
        dcp.save(model.state_dict(), storage_writer=writer)


def test_mistakes_are_errors_on_every_rank(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    run_ranks(misuse, 2, tmp_path)
