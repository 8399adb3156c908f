"""Experts that only some ranks share, beside one process that has all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of
from tests.sharding.experts import (
    DIM,
    NUM_EXPERTS,
    experts_as_dtensors,
    loss_of,
    spread_model,
    whole_model,
)

Bounds = Sequence[int]
EVEN, UNEVEN, SINGLE = [0, 2, 4], [0, 1, 4], [0, 1, 2, 3, 4]
# Replicas of each expert by parts, and which experts each part has.
LAYOUTS = {"2x2": ((2, 2), EVEN), "uneven": ((2, 2), UNEVEN), "1x4": ((1, 4), SINGLE)}
DTENSORS = {"DTensors": ((2, 2), EVEN)}
LARGE = {"2x4": ((2, 4), SINGLE), "8x2": ((8, 2), UNEVEN)}
ALL_LAYOUTS = LAYOUTS | DTENSORS | LARGE
PATTERN = "*.experts.*"
CLOSE = {"rtol": 2e-6, "atol": 2e-7}


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("edp", "ep"))


def sharded(
    shape: tuple[int, int],
    bounds: Bounds,
    stage: int,
    as_dtensors: bool = False,
    **options: Any,
) -> Any:
    mesh = mesh_of(shape)
    model = spread_model(mesh.get_group("ep"), list(bounds))
    if as_dtensors:
        experts_as_dtensors(model, mesh["ep"])
    part = zerocore.ParameterMesh(mesh["edp"], of=mesh["ep"])
    return zerocore.shard(model, stage=stage, groups={PATTERN: part}, **options)


def own_of(name: str, full: Tensor, shape: tuple[int, int], bounds: Bounds) -> Tensor:
    """This rank's part of a tensor of the whole model."""
    part = dist.get_rank() % shape[1]
    return full[bounds[part] : bounds[part + 1]] if ".experts." in name else full


def train(
    stage: int, layout: str, clip: Callable[..., Tensor], micro_batches: int, **options: Any
) -> None:
    """Three steps: gradients, norm and weights are those of one process."""
    shape, bounds = ALL_LAYOUTS[layout]
    options["as_dtensors"] = layout in DTENSORS
    model, truth = sharded(shape, bounds, stage, **options), whole_model()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, truth)]
    for number in range(3):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with nullcontext() if is_last else zerocore.no_sync(model):
                loss_of(model, [dist.get_rank()], number + 10 * micro).backward()
            loss_of(truth, range(dist.get_world_size()), number + 10 * micro).backward()
        for (name, param), whole in zip(model.named_parameters(), truth.parameters(), strict=True):
            expected = own_of(name, whole.grad, shape, bounds)
            torch.testing.assert_close(full_of(param.grad), expected, **CLOSE)
        norms = clip(model.parameters(), 0.1), nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        torch.testing.assert_close(*norms, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), whole in zip(model.named_parameters(), truth.parameters(), strict=True):
        expected = own_of(name, whole.detach(), shape, bounds)
        torch.testing.assert_close(full_of(param), expected, rtol=1e-5, atol=2e-6)


def train_all_ways(stage: int, layout: str) -> None:
    train(stage, layout, zerocore.clip_grad_norm_, 1)
    train(stage, layout, nn.utils.clip_grad_norm_, 2)
    train(
        stage,
        layout,
        zerocore.clip_grad_norm_,
        2,
        communication=zerocore.Communication(accumulate="full", prefetch=2),
    )
    in_order = zerocore.MixedPrecision(wire_dtype=torch.float32)
    train(stage, layout, zerocore.clip_grad_norm_, 2, mixed_precision=in_order)


@pytest.mark.one_by_day
@pytest.mark.parametrize("layout", [*LAYOUTS, *DTENSORS, *by_night(*LARGE)])
def test_training_is_that_of_one_process(stage: int, layout: str) -> None:
    (replicas, parts), _ = ALL_LAYOUTS[layout]
    run_ranks(train_all_ways, replicas * parts, stage, layout, timeout=170)


def train_with_own_adamw(options: dict[str, Any]) -> None:
    """Zerocore's AdamW clips by the norm of all experts, wherever the states are."""
    shape, bounds = LAYOUTS["uneven"]
    model, truth = sharded(shape, bounds, 3, **options), whole_model()
    own = zerocore.optim.AdamW(model.parameters(), lr=0.05, clip_grad_norm=0.1)
    plain = torch.optim.AdamW(truth.parameters(), lr=0.05)
    for number in range(3):
        loss_of(model, [dist.get_rank()], number).backward()
        loss_of(truth, range(4), number).backward()
        norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        for optimizer in (own, plain):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(own.grad_norm, norm, **CLOSE)
    full = zerocore.full_state_dict(model, rank0_only=False)
    for name, whole in truth.named_parameters():
        torch.testing.assert_close(full[name], whole.detach(), rtol=1e-5, atol=2e-6)
    states = zerocore.full_optimizer_state_dict(own, rank0_only=False)
    own.load_state_dict(states)
    plain.load_state_dict(states)
    again = zerocore.full_optimizer_state_dict(own, rank0_only=False)
    for index, state in plain.state_dict()["state"].items():
        assert torch.equal(again["state"][index]["exp_avg"], state["exp_avg"]), index


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "states on the host": {"offload": zerocore.Offload(states="cpu")},
    "all on the host": {"offload": zerocore.Offload("cpu", "cpu", "cpu")},
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("kind", OPTIONS)
def test_own_adamw_and_offload(kind: str) -> None:
    run_ranks(train_with_own_adamw, 4, OPTIONS[kind])


def write_to_experts(stage: int, where: str) -> None:
    """Ranks that share experts have to write the same to them; others write other values."""
    model = sharded((2, 2), EVEN, stage)
    replica, part = divmod(dist.get_rank(), 2)
    bias = model.blocks[1].experts.bias

    def write(number: float) -> None:
        with torch.no_grad():
            (model.blocks[1].experts.bias if where == "forward" else bias).fill_(number)

    def run(number: float) -> None:
        hooked = model.blocks[1].experts.register_forward_pre_hook(lambda *_: write(number))
        if where == "between steps":
            hooked.remove()
            write(number)
        loss_of(model, [dist.get_rank()], 0).backward()
        hooked.remove()
        model.zero_grad()

    run(part)
    torch.testing.assert_close(bias.full_tensor(), torch.full((2, DIM), float(part)))
    for wrong in (replica, replica if part == 0 else 5.0):
        with pytest.raises(ValueError, match=r"'blocks.1.experts.bias' was changed in place"):
            run(wrong)
    run(part)
    torch.testing.assert_close(bias.full_tensor(), torch.full((2, DIM), float(part)))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("where", ["forward", "between steps"])
def test_writes_to_experts_that_differ(stage: int, where: str) -> None:
    run_ranks(write_to_experts, 4, stage, where)


def train_in_nodes(stage: int) -> None:
    """World 8: the dense parameters in two replicas, experts in two parts of two times two."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "edp", "ep"))
    model, truth = spread_model(mesh.get_group("ep"), EVEN), whole_model()
    dense = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("replicas", "shards"))
    part = zerocore.ParameterMesh(mesh["replicas", "edp"], of=mesh["ep"])
    zerocore.shard(model, stage=stage, group=dense, groups={PATTERN: part})
    loss_of(model, [dist.get_rank()], 0).backward()
    loss_of(truth, range(8), 0).backward()
    for (name, param), whole in zip(model.named_parameters(), truth.parameters(), strict=True):
        expected = own_of(name, whole.grad, (4, 2), EVEN)
        torch.testing.assert_close(full_of(param.grad), expected, **CLOSE)
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in truth.parameters()]))
    torch.testing.assert_close(zerocore.clip_grad_norm_(model, 1e9), norm, **CLOSE)


@pytest.mark.one_by_day
def test_hybrid_sharding_of_both(stage: int) -> None:
    run_ranks(train_in_nodes, 8, stage)


def trained(layout: str, stage: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(*LAYOUTS[layout], stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number in range(steps):
        loss_of(model, [dist.get_rank()], number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_everywhere(folder: str, layout: str, stage: int) -> dict[str, Any]:
    model, optimizer = trained(layout, stage, 2)
    zerocore.Checkpoints(f"{folder}/own", model, optimizer).save(2).wait()
    zerocore.save_safetensors(model, f"{folder}/files")
    states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    full = zerocore.full_state_dict(model, rank0_only=False)
    return {"model": full, "states": states}


def load_everywhere(folder: str, layout: str, stage: int, expected: dict[str, Any]) -> None:
    for way in ("own", "files", "full"):
        model, optimizer = trained(layout, stage, 1)
        if way == "own":
            assert zerocore.Checkpoints(f"{folder}/own", model, optimizer).load() == 2
            states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
            for index, state in states.items():
                for key, value in state.items():
                    assert torch.equal(value, expected["states"][index][key]), (index, key)
        elif way == "files":
            zerocore.load_safetensors(model, f"{folder}/files")
        else:
            first = expected["model"] if dist.get_rank() == 0 else None
            zerocore.load_full_state_dict(model, first)
        found = zerocore.full_state_dict(model, rank0_only=False)
        for key, value in expected["model"].items():
            assert torch.equal(found[key], value), (way, key)


def load_into_plain(folder: str, expected: dict[str, Any]) -> None:
    """Torch's own reader, and the files of one process."""
    state = {"model": whole_model().state_dict()}
    newest = sorted(Path(folder, "own").iterdir())[-1]
    dcp.load(state, checkpoint_id=newest, no_dist=True)
    files = load_file(f"{folder}/files/model.safetensors")
    for key, value in expected["model"].items():
        assert torch.equal(state["model"][key], value), key
        assert torch.equal(files[key], value), key


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [*by_night(("uneven", "uneven"), ("1x4", "uneven")), ("2x2", "1x4"), ("uneven", "2x2")],
)
def test_checkpoints_go_from_each_mesh_to_another(stage: int, saved: str, loaded: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(save_everywhere, 4, folder, saved, stage)[0]
        assert expected["model"]["blocks.0.experts.weight"].shape[0] == NUM_EXPERTS
        load_into_plain(folder, expected)
        run_ranks(load_everywhere, 4, folder, loaded, 3 - stage, expected)


def skip_a_block(stage: int) -> None:
    """Ranks that call no expert of the first block take part in its collectives."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    model = spread_model(mesh.get_group("ep"), EVEN)
    for block in model.blocks:
        block.group = None  # the tokens of each rank stay with its own experts
    part = zerocore.ParameterMesh(mesh["edp"], of=mesh["ep"])
    zerocore.shard(model, stage=stage, groups={PATTERN: part})
    whole = model.blocks[0].forward
    model.blocks[0].forward = lambda tokens: tokens if rank >= 2 else whole(tokens)
    for number in range(3):
        loss_of(model, [rank], number).backward()
        grads = [p.grad for name, p in model.named_parameters() if "blocks.0.experts" in name]
        assert all(grad is not None for grad in grads)  # as the other rank of the part has them
        model.zero_grad()


def test_ranks_that_call_no_expert(stage: int) -> None:
    run_ranks(skip_a_block, 4, stage)


def raise_on_one_rank(stage: int) -> None:
    model = sharded(*LAYOUTS["2x2"], stage)
    expected = gradients_of(model)
    fails = dist.get_rank() == 3
    hook = model.last.register_forward_pre_hook(_fail) if fails else None
    with pytest.raises(RuntimeError, match="no more" if fails else "raised on rank 3"):
        loss_of(model, [dist.get_rank()], 0).backward()
    if hook is not None:
        hook.remove()
    model.zero_grad()
    for name, grad in gradients_of(model).items():
        assert torch.equal(grad, expected[name]), name


def _fail(*_: Any) -> None:
    raise RuntimeError("no more")


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    loss_of(model, [dist.get_rank()], 0).backward()
    found = {name: full_of(param.grad) for name, param in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.one_by_day
def test_an_exception_on_one_rank_leaves_the_model_usable(stage: int) -> None:
    run_ranks(raise_on_one_rank, 4, stage)


PARTS = {
    "twice": ({PATTERN: "edp", "blocks.*weight": "edp"}, "is on several meshes"),
    "pattern": ({"*.nothing.*": "edp"}, "matches no parameter"),
    "overlap": ({PATTERN: ("edp", "edp")}, "are in mesh and in of="),
    "number": (
        {PATTERN: ("edp", "pair")},
        "parts on 2 ranks each are 2 ranks, and the model",
    ),
    "dict": ([PATTERN], "expected a dict"),
}


def refuse(kind: str) -> str:
    mesh = mesh_of((2, 2))
    model = spread_model(mesh.get_group("ep"), EVEN)
    given: Any = PARTS[kind][0]
    if isinstance(given, dict):
        alone = dist.new_subgroups(1)[0]
        names: dict[str, Any] = {"edp": mesh["edp"], "ep": mesh["ep"], "pair": alone}
        given = {
            pattern: names[of]
            if isinstance(of, str)
            else zerocore.ParameterMesh(*(names[n] for n in of))
            for pattern, of in given.items()
        }
    with pytest.raises((ValueError, TypeError)) as caught:
        zerocore.shard(model, groups=given)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("kind", PARTS)
def test_mistakes_are_named_on_every_rank(kind: str) -> None:
    for text in run_ranks(refuse, 4, kind):
        assert PARTS[kind][1] in text


def refuse_strangers() -> None:
    mesh = mesh_of((2, 2))
    model = spread_model(mesh.get_group("ep"), EVEN)
    with pytest.raises(ValueError, match=r"are not among the model's ranks \["):
        zerocore.shard(model, group=mesh["edp"], groups={PATTERN: mesh["ep"]})


def refuse_other_shapes() -> None:
    mesh = mesh_of((2, 2))
    model = spread_model(mesh.get_group("ep"), EVEN if dist.get_rank() < 2 else UNEVEN)
    with pytest.raises(ValueError, match="the ranks shard different models"):
        zerocore.shard(model, groups={PATTERN: zerocore.ParameterMesh(mesh["edp"], of=mesh["ep"])})


def refuse_ties() -> None:
    mesh = mesh_of((2, 2))
    model = spread_model(mesh.get_group("ep"), EVEN)
    model.blocks[0].router.weight = nn.Parameter(model.blocks[0].experts.bias.detach()[:, :6])
    model.blocks[0].experts.extra = model.blocks[0].router.weight
    with pytest.raises(ValueError, match="is on several meshes"):
        zerocore.shard(model, groups={PATTERN: zerocore.ParameterMesh(mesh["edp"], of=mesh["ep"])})


def test_ranks_and_shapes_are_compared() -> None:
    for check in (refuse_strangers, refuse_other_shapes, refuse_ties):
        run_ranks(check, 4)


def without_of(folder: str) -> None:
    """The experts train, but no file can hold two tensors of one name."""
    mesh = mesh_of((2, 2))
    model = spread_model(mesh.get_group("ep"), EVEN)
    zerocore.shard(model, groups={PATTERN: mesh["edp"]})
    loss_of(model, [dist.get_rank()], 0).backward()
    for save in (
        lambda: zerocore.Checkpoints(folder, model).save(1),
        lambda: zerocore.save_safetensors(model, folder),
        lambda: zerocore.full_state_dict(model),
    ):
        with pytest.raises(ValueError, match=r"blocks\.0\.experts\.weight'.*of=\.\.\."):
            save()


def test_parts_without_a_place_are_not_saved(tmp_path: Path) -> None:
    run_ranks(without_of, 4, str(tmp_path))


def tell_of_meshes() -> tuple[list[list[str]], str]:
    model, _ = trained("2x2", 3, 3)
    return zerocore.describe(model).rows(), str(zerocore.report(model))


def test_report_and_description_name_ranks_and_divisor() -> None:
    rows, reported = run_ranks(tell_of_meshes, 4)[0]
    cells = {row[0]: row[-2:] for row in rows}
    assert cells["unit"] == ["ranks", "divisor"]
    assert cells["last"] == ["4", "4"]
    assert cells[f"blocks.0 ({PATTERN})"] == ["2", "4"]
    assert f"gradients over 2 ranks, divided by 4: 'blocks.0 ({PATTERN})'" in reported


def report_operations() -> list[float | None]:
    """The report's mfu with the default FLOPs of a token, and with those that the program gives."""
    model, _ = trained("2x2", 3, 3)
    given = ({}, {"flops_per_token": 100.0})
    return [zerocore.report(model, tokens=8, peak_flops=1e9, **each).mean("mfu") for each in given]


def test_a_share_of_the_peak_needs_the_operations_of_experts() -> None:
    for default, given in run_ranks(report_operations, 4):
        assert default is None and given is not None and given > 0


def set_full_gradients() -> None:
    """Gradients of experts may differ between parts; those of one part may not."""
    model = sharded(*LAYOUTS["2x2"], 3)
    weight = model.blocks[0].experts.weight
    part = dist.get_rank() % 2
    weight.grad = torch.full(weight.global_shape, float(part))
    assert torch.equal(weight.grad.full_tensor(), torch.full(weight.global_shape, float(part)))
    with pytest.raises(ValueError, match="differ between the ranks"):
        weight.grad = torch.full(weight.global_shape, float(dist.get_rank()))


def test_gradients_are_compared_within_a_part() -> None:
    run_ranks(set_full_gradients, 4)
