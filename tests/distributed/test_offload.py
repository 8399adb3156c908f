"""Training with states, gradients and parameters on the host: the bits of training without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, case_named
from tests.zoo_case import Case
from zerocore import MixedPrecision, Offload, emulated
from zerocore._C import HostUpdate
from zerocore.common.host_link import set_emulated_host_link
from zerocore.model.state import state_of

Optimizer = torch.optim.Optimizer
STEPS = 3
STATES = Offload(states="cpu")
GRADIENTS = Offload(states="device", gradients="cpu")
BOTH = Offload(states="cpu", gradients="cpu")
ALL = Offload(states="cpu", gradients="cpu", parameters="cpu")
PARAMETERS = Offload(states="cpu", parameters="cpu")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def adamw(params: Iterable[Any], **options: Any) -> Optimizer:
    return zerocore.optim.AdamW(params, lr=3e-3, eps=1e-5, weight_decay=0.1, **options)


def grouped(params: Iterable[Any]) -> Optimizer:
    """A group without weight decay, and clipping."""
    held = list(params)
    groups = [
        {"params": [p for p in held if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in held if p.ndim < 2], "weight_decay": 0.0},
    ]
    return zerocore.optim.AdamW(groups, lr=3e-3, eps=1e-5, clip_grad_norm=0.5)


def torchs(params: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, eps=1e-5, weight_decay=0.1)


def train(
    case: Case,
    stage: int,
    make: Callable[[Iterable[Any]], Optimizer],
    offload: Offload | None,
    *,
    scaler: bool = False,
    clip_by_torch: bool = False,
    sync_every: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Losses, weights and states after some steps."""
    units = list(case.units) if case.units else None
    model = zerocore.shard(
        case.seeded_build(), stage=stage, units=units, offload=offload, **options
    )
    optimizer = make(model.parameters())
    scales = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaler)
    losses = []
    for step in range(STEPS):
        losses.append(accumulate(model, case, step, sync_every))
        if clip_by_torch:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if scaler:
            scales.scale(torch.zeros(()))  # it wants to have been used
            if step == 1:  # the step changes nothing
                next(p for p in model.parameters() if p.grad is not None).grad.local().fill_(inf)
            scales.step(optimizer)
            scales.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        **zerocore.full_state_dict(model, rank0_only=False),
        **{f"{index}.{key}": value for index, of in states.items() for key, value in of.items()},
    }


def assert_same_bits(ours: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), f"{what}: {key} differs"


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"make": adamw},
    "clip, groups": {"make": grouped},
    "clip by torch": {"make": adamw, "clip_by_torch": True},
    "bf16": {"make": adamw, "mixed_precision": BF16},
    "bf16, clip, every reduction": {"make": grouped, "mixed_precision": BF16, "sync_every": True},
    "scaler": {"make": adamw, "scaler": True},
    "torch's AdamW": {"make": torchs},
    "full sums": {"make": adamw, "accumulate": "full"},
}


def offloads_of(stage: int) -> list[Offload]:
    offloads = [STATES]
    if stage >= 2:
        offloads += [GRADIENTS, BOTH]
    return offloads + ([PARAMETERS, ALL] if stage == 3 else [])


def compare_all() -> None:
    """Each variant with two offloads at each stage, in turn: all pairs of parts come."""
    case = case_named("plain")
    for stage in range(4):
        for number, (name, variant) in enumerate(VARIANTS.items()):
            options = dict(variant)
            run = partial(train, case, stage, options.pop("make"), **options)
            expected = run(None)
            offloads = offloads_of(stage)
            turn = number % len(offloads)
            for offload in {offloads[turn], offloads[-1 - turn]}:
                what = f"stage {stage}, {name}, {offload}"
                print(what, flush=True)
                assert_same_bits(run(offload), expected, what)


def test_bits_are_those_of_no_offload(world_size: int) -> None:
    run_ranks(compare_all, world_size, timeout=300.0)


def frozen(case: Case) -> Case:
    """All but every third parameter is frozen, as under adapters."""

    def build() -> nn.Module:
        model = case.build()
        for index, param in enumerate(model.parameters()):
            param.requires_grad_(index % 3 == 0)
        return model

    return Case(case.name, build, case.make_batch, case.loss, case.units)


def compare_others() -> None:
    """Replicas of shards, frozen parameters, dtypes, tied and unused parameters."""
    mesh = init_device_mesh("cpu", (2, 2))
    runs = {
        "hybrid": (case_named("plain"), {"group": mesh}),
        "hybrid, bf16": (case_named("plain"), {"group": mesh, "mixed_precision": BF16}),
        "frozen": (frozen(case_named("plain")), {}),
        "frozen, bf16": (frozen(case_named("plain")), {"mixed_precision": BF16}),
        **{name: (case_named(name), {}) for name in ("mixed_dtypes", "tied", "empty_shards")},
    }
    for name, (case, options) in runs.items():
        for stage, offload in ((0, STATES), (2, BOTH), (3, STATES), (3, ALL)):
            run = partial(train, case, stage, grouped, **options)
            assert_same_bits(run(offload), run(None), f"{name}, stage {stage}, {offload}")


def test_bits_of_other_models_and_meshes() -> None:
    run_ranks(compare_others, 4, timeout=300.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x).tanh())
        return x + hidden


def blocks(stage: int, offload: Offload | None, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    model = zerocore.shard(model, stage=stage, units=[Block], offload=offload, **options)
    return model, adamw(model.parameters(), clip_grad_norm=1.0)


def backward(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 64).view(4, 16) * (1 + dist.get_rank())
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


class Clamped(Block):
    """Changes its weights in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def trained_blocks(kind: str, stage: int, offload: Offload | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Clamped() if kind == "clamped" else Block() for _ in range(3)))
    if kind == "checkpointed":
        model = nn.Sequential(*map(Checkpointed, model))
    model = zerocore.shard(model, stage=stage, units=[Block], offload=offload)
    if kind == "compiled":
        for block in model:
            block.compile(backend="eager")
    optimizer = adamw(model.parameters(), clip_grad_norm=1.0)
    losses = []
    for _ in range(3):
        losses.append(backward(model))
        optimizer.step()
        optimizer.zero_grad()
    full: dict[str, torch.Tensor] = zerocore.full_state_dict(model, rank0_only=False)
    return {"losses": torch.stack(losses), **full}


def compare_blocks() -> None:
    for kind in ("clamped", "checkpointed", "compiled"):
        for stage, offload in ((0, STATES), (2, STATES), (3, ALL)):
            expected = trained_blocks(kind, stage, None)
            assert_same_bits(trained_blocks(kind, stage, offload), expected, f"{kind}, {stage}")


def test_bits_of_changed_checkpointed_and_compiled_blocks() -> None:
    run_ranks(compare_blocks, 2, timeout=120.0)


def record_step(stage: int, offload: Offload) -> list[zerocore.Event]:
    """Events from a backward to the next forward, over a slow link."""
    set_emulated_host_link(emulated.link("1GB/s,20ms"))
    model, optimizer = blocks(stage, offload)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    with zerocore.record_events(model) as events:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
    return events


def check_order() -> None:
    for stage in (1, 2, 3):
        events = record_step(stage, STATES)
        ops = [(event.op, event.unit) for event in events]
        names = ["0", "1", "2", "3"]
        first = ops[: ops.index(("host_update", "0"))]
        # Gradients leave under the backward: that of the last unit before the first is reduced.
        assert first.index(("to_host", "3")) < first.index(("reduce_scatter", "0"))
        assert [unit for op, unit in first if op == "to_host"] == names[::-1]
        # Units are updated in the order of the forward, and their weights return at once.
        both = [(op, unit) for op, unit in ops if op in ("host_update", "to_device")]
        assert both == [(op, unit) for unit in names for op in ("host_update", "to_device")]
        # The first of each, behind those of the backward.
        by_op = {(event.op, event.unit): event for event in reversed(events[len(first) :])}
        for unit in names:
            update, sent = by_op["host_update", unit], by_op["to_device", unit]
            assert update.done_ns <= sent.issued_ns
            assert sent.done_ns <= by_op["all_gather", unit].issued_ns
        # The forward began when its first unit had come back; the others were on their way.
        assert by_op["all_gather", "0"].issued_ns < by_op["to_device", "3"].issued_ns
        # The next unit is updated while weights return.
        assert by_op["host_update", "1"].issued_ns < by_op["to_device", "0"].done_ns


def test_units_leave_and_return_one_by_one() -> None:
    run_ranks(check_order, 2)


def check_readers() -> None:
    """Whoever reads after a step finds all of it done."""
    set_emulated_host_link(emulated.link("1GB/s,20ms"))
    readers: dict[str, Callable[[nn.Module, Any], Any]] = {
        "full_state_dict": lambda model, _: zerocore.full_state_dict(model, rank0_only=False),
        "state_dict": lambda model, _: {k: v.local() for k, v in model.state_dict().items()},
        "full_tensor": lambda model, _: {n: p.full_tensor() for n, p in model.named_parameters()},
        "norm": lambda model, _: {n: p.detach().norm() for n, p in model.named_parameters()},
        "optimizer": lambda _, optimizer: {
            str(key): value["exp_avg"].local()
            for key, value in optimizer.state_dict()["state"].items()
        },
    }
    for name, read in readers.items():
        found = []
        for offload in (None, STATES, ALL):
            model, optimizer = blocks(3, offload)
            for _ in range(2):
                backward(model)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            found.append({key: value.clone() for key, value in read(model, optimizer).items()})
        for other in found[1:]:
            assert_same_bits(other, found[0], name)


def check_checkpoints(folder: str) -> None:
    """A checkpoint right after a step, and loaded without offload; and the other way around."""
    for index, (saving, loading) in enumerate(((ALL, None), (None, ALL), (STATES, BOTH))):
        path = f"{folder}/{index}"
        model, optimizer = blocks(3, saving)
        backward(model)
        optimizer.step()
        checkpoints = zerocore.Checkpoints(path, model, optimizer)
        checkpoints.save(1)
        checkpoints.wait()
        other, fresh = blocks(3, loading)
        assert zerocore.Checkpoints(path, other, fresh).load() == 1
        results = []
        for trained, by in ((model, optimizer), (other, fresh)):
            by.zero_grad()
            backward(trained)
            by.step()
            results.append(zerocore.full_state_dict(trained, rank0_only=False))
        assert_same_bits(*results, f"{saving} to {loading}")


def test_readers_wait_for_the_step() -> None:
    run_ranks(check_readers, 2)


def test_checkpoints_of_any_offload() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check_checkpoints, 2, folder)


def check_memory() -> None:
    mixed = (None, BF16, MixedPrecision(torch.bfloat16, grad_dtype=torch.bfloat16))
    for stage in range(4):
        for offload in offloads_of(stage):
            for precision in mixed:
                model, optimizer = blocks(stage, offload, mixed_precision=precision)
                for _ in range(2):
                    backward(model)
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.synchronize()
                what = f"stage {stage}, {offload}, {precision}"
                measured = zerocore.memory_usage(model, optimizer)
                assert zerocore.predict_memory(model) == measured, what
                assert measured.host > 0, what


def test_planned_bytes_are_those_taken(world_size: int) -> None:
    run_ranks(check_memory, world_size)


def fail_on_one_rank() -> str:
    """What the ranks are told when an update has failed on rank 0."""
    model, optimizer = blocks(3, STATES)
    backward(model)
    optimizer.step()
    if dist.get_rank() == 0:
        engine, lists = state_of(model).engine, [[]] * 6
        wrong = [(torch.zeros(2), torch.zeros(3))]
        numbers = dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), 0.0)
        engine.update_on_host(
            HostUpdate(
                0, [], *lists, wrong, **numbers, maximize=False, grad_scale=None, found_inf=None
            )
        )
        engine.send_weights(0)
    try:
        backward(model)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_failed_update_reaches_all_ranks() -> None:
    failed, other = run_ranks(fail_on_one_rank, 2)
    assert "must match the size" in failed
    assert "the forward raised on rank 0" in other


def refuse_all() -> list[str]:
    errors = []

    def refused(act: Callable[[], Any]) -> None:
        with pytest.raises((ValueError, TypeError)) as error:
            act()
        errors.append(str(error.value))

    for stage, offload in ((1, GRADIENTS), (2, ALL), (3, "cpu")):
        refused(lambda stage=stage, offload=offload: blocks(stage, offload))
    for options in ({"states": "disk"}, {"states": "host"}, {"states": 1}, {"path": "/tmp"}):
        refused(lambda options=options: Offload(**options))
    refused(lambda: Offload(states="device", parameters="cpu"))
    refused(lambda: Offload(states="device"))
    model, _ = blocks(3, STATES)
    muon = zerocore.optim.Muon(model.named_parameters(), lr=0.01)
    backward(model)
    refused(muon.step)
    return errors


def test_refusals_are_named_on_every_rank() -> None:
    errors, other = run_ranks(refuse_all, 2)
    assert errors == other
    parts = ["gradients='cpu' needs stage 2", "parameters='cpu' needs stage 3", "zerocore.Offload"]
    parts += ["not built yet", "'device' or 'cpu', got 'host'", "got 1", "path"]
    parts += ["goes with states='cpu'", "nothing leaves", "Muon moves whole matrices"]
    for error, part in zip(errors, parts, strict=True):
        assert part in error
