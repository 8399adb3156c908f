"""States of Muon and of owned optimizers in checkpoints; what they send, and what they refuse."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.matrices.whole_matrices import (
    SPLIT,
    Block,
    assert_equal,
    full_parameters,
    make_muon,
    seeded_model,
    set_gradients,
    take_steps,
    train_sharded,
)
from zerocore.matrices import Muon, owned
from zerocore.tensor.rows import shard_of

muon = partial(make_muon, lr=0.02)


def owned_muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    return owned(torch.optim.Muon, matrices, lr=0.02)


MAKES: dict[str, Any] = {"muon": muon, "owned": owned_muon}


def resume_from_state_dicts() -> None:
    """Four steps are two, a state dict, and two by another optimizer."""
    for stage in (0, 3):
        for make in MAKES.values():
            model, optimizer = train_sharded(make, 4, stage=stage)
            expected = full_parameters(model)
            again, optimizer = train_sharded(make, 2, stage=stage)
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(again)
            optimizer.load_state_dict(saved)
            take_steps(again, optimizer, range(2, 4))
            assert_equal(full_parameters(again), expected)


def test_states_resume_in_a_new_optimizer() -> None:
    run_ranks(resume_from_state_dicts, 2)


def add_groups_later() -> None:
    """A group that is added, and a schedule, do what they do in an optimizer built at once."""
    kinds: list[Any] = [partial(Muon, lr=0.02), partial(owned, torch.optim.Adafactor, lr=0.02)]
    for make in kinds:
        found = []
        for later in (False, True):
            model = zerocore.shard(seeded_model(), units=[Block])
            groups = [
                {
                    "params": [
                        (n, p) for n, p in model.named_parameters() if ("blocks.1" in n) == last
                    ]
                }
                for last in (False, True)
            ]
            optimizer = make(groups[:1] if later else groups)
            if later:
                optimizer.add_param_group(groups[1])
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(2):
                take_steps(model, optimizer, range(step, step + 1))
                schedule.step()
            found.append(full_parameters(model))
        assert_equal(*found)


def test_groups_may_come_later() -> None:
    run_ranks(add_groups_later, 2)


def owned_loads_one_process() -> None:
    """The state dict of one process goes on here, and that of here in one process."""
    alone = seeded_model()
    optimizer = owned_twin(alone)
    take_steps(alone, optimizer, range(2))
    model, ours = train_sharded(owned_muon, 0, stage=3)
    ours.load_state_dict(optimizer.state_dict())
    zerocore.load_full_state_dict(model, alone.state_dict())
    optimizer.load_state_dict(copy.deepcopy(ours.state_dict()))
    take_steps(alone, optimizer, range(2, 4))
    take_steps(model, ours, range(2, 4))
    assert_equal(full_parameters(model), {n: p.detach() for n, p in alone.named_parameters()})


def owned_twin(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


def test_states_of_one_process_load() -> None:
    run_ranks(owned_loads_one_process, 3)


def save(folder: str) -> None:
    for name, make in MAKES.items():
        model, optimizer = train_sharded(make, 2, stage=3)
        zerocore.Checkpoints(Path(folder, name), model, optimizer, background=False).save(2)


def resume(folder: str, stage: int) -> None:
    for name, make in MAKES.items():
        model, optimizer = train_sharded(make, 0, stage=stage)
        zerocore.Checkpoints(Path(folder, name), model, optimizer).load()
        take_steps(model, optimizer, range(2, 4))
        other, _ = train_sharded(make, 4, stage=stage)
        assert_equal(full_parameters(model), full_parameters(other))


def test_checkpoints_resume_at_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path))
    run_ranks(resume, 3, str(tmp_path), 2)
    run_ranks(resume, 1, str(tmp_path), 3)


def pair_of(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Matrices by one optimizer and the rest by AdamW."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    matrices = [each for each in named if each[1].ndim == 2 and "embed" not in each[0]]
    rest = [param for name, param in named if name not in dict(matrices)]
    first = Muon(matrices, lr=0.02) if kind == "muon" else owned(torch.optim.Muon, matrices)
    half = len(rest) // 2
    return [first, torch.optim.AdamW([{"params": rest[:half], "lr": 0.1}, {"params": rest[half:]}])]


def train_pair(model: nn.Module, pair: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()


def resume_pairs(folder: str, stage: int, saves: bool) -> None:
    for kind in ("muon", "owned"):
        place = Path(folder, f"{kind}-{stage}" if saves else f"{kind}-{3 - stage}")
        model = zerocore.shard(seeded_model(), stage=stage)
        pair = pair_of(model, kind)
        if saves:
            train_pair(model, pair, range(2))
            zerocore.Checkpoints(place, model, pair, background=stage == 3).save(2).wait()
            train_pair(model, pair, range(2, 4))
            expected = full_parameters(model)
        else:
            train_pair(model, pair, range(4))
            expected = full_parameters(model)
        again = zerocore.shard(seeded_model(), stage=stage)
        new = pair_of(again, kind)
        new[1].param_groups[0]["lr"] = 7.0
        assert zerocore.Checkpoints(place, again, new).load() == 2
        train_pair(again, new, range(2, 4))
        assert_equal(full_parameters(again), expected)
    with pytest.raises((ValueError, RuntimeError), match="parameter groups of"):
        zerocore.Checkpoints(place, again, new[::-1]).load()
    with pytest.raises(ValueError, match=r"optimizer: two of the list hold 'embed\.weight'"):
        zerocore.Checkpoints(place, again, [new[1], torch.optim.SGD(again.parameters(), lr=1.0)])
    with pytest.raises(TypeError, match="expected an optimizer or a list of optimizers"):
        zerocore.Checkpoints(place, again, [new[1], again])  # type: ignore[list-item]


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [*by_night(1), 3])
def test_pairs_of_optimizers_resume(world_size: int, tmp_path: Path) -> None:
    for stage in (0, 3):
        run_ranks(resume_pairs, world_size, str(tmp_path), stage, True)
    run_ranks(resume_pairs, 2, str(tmp_path), 0, False)  # what stage 3 has saved, and vice versa
    run_ranks(resume_pairs, 2, str(tmp_path), 3, False)


# -- what is sent -------------------------------------------------------------------------------


def count_bytes() -> None:
    """Bytes in the report and in events are those that ``describe`` has planned."""
    for stage in (0, 1, 3):
        for make in MAKES.values():
            model, optimizer = train_sharded(make, 0, stage=stage)
            choice: Any = zerocore.describe(optimizer)
            assert str(choice).startswith(choice.title())
            with zerocore.reporting.record_events(model) as events:
                for _ in range(2):
                    model(torch.arange(6)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            exchanges = [event for event in events if event.op == "all_to_all"]
            used = 2 * choice.sent_nbytes
            assert sum(event.nbytes for event in exchanges) == used
            assert {event.unit for event in exchanges} <= {"optimizer"}
            steps = zerocore.report(model).steps
            assert sum(step.exchanged_nbytes for step in steps) == used
            num_messages = {0: 1, 1: 2, 3: 2}[stage]
            if make is muon:
                assert len(exchanges) == 2 * choice.num_rounds * num_messages
                assert_least_bytes(model, optimizer, stage, choice)


def assert_least_bytes(model: nn.Module, optimizer: Any, stage: int, choice: Any) -> None:
    """Of all ranks together: each element to its owner and back, in bfloat16; no gather."""
    groups = [group for group in optimizer.param_groups if group["use_muon"]]
    matrices = [p for group in groups for p in group["params"] if p.requires_grad]
    numel = sum(param.numel() for param in matrices)
    sent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sent, choice.sent_nbytes)
    world_size = dist.get_world_size()
    if stage == 0:
        assert sum(sent) == 2 * numel * (world_size - 1)
    else:
        assert sum(sent) <= 4 * numel
    assert list(choice.owners) == [shard_of(param).fqn for param in matrices]
    assert choice.others[0] == "embed.weight"


def plan_all_matrices() -> None:
    """The figures of ``plan`` before a model is sharded."""
    world_size = dist.get_world_size()
    planned = zerocore.plan(
        seeded_model(),
        world_size,
        workload=zerocore.Workload(optimizer="muon", rank=dist.get_rank()),
    )
    for stage, expected in enumerate(planned.stages):
        model = zerocore.shard(seeded_model(), stage=stage)
        found = Muon(model.parameters()).describe().sent_nbytes
        assert expected.exchanged_nbytes == found > 0
    hybrid = zerocore.plan(
        seeded_model(),
        world_size,
        num_replicas=2,
        workload=zerocore.Workload(optimizer="muon", rank=dist.get_rank()),
    )
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    model = zerocore.shard(seeded_model(), group=mesh)
    assert hybrid.stages[3].exchanged_nbytes == Muon(model.parameters()).describe().sent_nbytes
    assert "of it, by the optimizer" in str(hybrid)


def test_plan_knows_the_exchange() -> None:
    run_ranks(plan_all_matrices, 4)


def test_bytes_are_as_planned() -> None:
    run_ranks(count_bytes, 2)


# -- what is refused ----------------------------------------------------------------------------


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class OnlySquare(torch.optim.SGD):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for param in param_group["params"]:
            if param.ndim != 2 or param.shape[0] != param.shape[1]:
                raise ValueError("not square")
        super().add_param_group(param_group)


def refuse_all() -> list[str]:
    model = zerocore.shard(seeded_model(), units=[Block])
    other = zerocore.shard(nn.Linear(4, 4))
    named = dict(model.named_parameters())
    vectors = [p for p in model.parameters() if p.ndim < 2]
    plain = nn.Linear(4, 4)
    mistakes = [
        lambda: Muon(vectors),
        lambda: Muon([]),
        lambda: Muon([*model.parameters(), plain.weight]),
        lambda: Muon([*model.named_parameters(), *plain.named_parameters()]),
        lambda: Muon([*model.parameters(), *other.parameters()]),
        lambda: Muon(model.parameters(), split={"*.tall": 3}),
        lambda: Muon(model.parameters(), split={"*.missing": 3}),
        lambda: Muon(model.parameters(), split={"*.qkv": 0}),
        lambda: Muon(model.parameters(), split={"*.turned": 2}),
        lambda: Muon(model.parameters(), adamw_names=["head*"]),
        lambda: Muon(model.parameters(), adamw={"lr": -1.0}),
        lambda: Muon(model.parameters(), adjust_lr_fn="other"),
        lambda: Muon(model.parameters(), lr=-1.0),
        lambda: Muon(model.parameters(), clip_grad_norm=0.0),
        lambda: Muon([{"params": [named["blocks.0.bias"]], "use_muon": True}]),
        lambda: owned(torch.optim.LBFGS, model.parameters()),
        lambda: owned(NeedsClosure, model.parameters()),
        lambda: owned(OnlySquare, model.parameters()),
        lambda: owned(torch.optim.SGD, plain.parameters()),
        lambda: owned(torch.optim.SGD, model.parameters(), nonsense=1),
        lambda: owned(print, model.parameters()),  # type: ignore[arg-type]
        lambda: one_rank_differs(model),
    ]
    return [message_of(mistake) for mistake in mistakes]


def one_rank_differs(model: nn.Module) -> Muon:
    params = list(model.named_parameters())
    return make_muon(model) if dist.get_rank() else Muon(params[:5], split=SPLIT)


def message_of(mistake: Any) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        mistake()
    return f"{type(caught.value).__name__}: {caught.value}"


EXPECTED = [
    "Muon found no matrix among",
    "Muon got no parameters",
    "parameter 20 of shape (4, 4) does not belong to a sharded model",
    "parameter 'weight' of shape (4, 4) does not belong to a sharded model",
    "parameter 'weight' belongs to another sharded model",
    "'blocks.0.tall' of shape (40, 16) has 40 rows, which cannot be cut into 3 matrices",
    "split: '*.missing' matches no matrix",
    "split['*.qkv'] must be a positive integer, got 0",
    "'blocks.0.turned' of shape (16, 24) has 16 rows (columns first in memory)",
    "adamw_names: 'head*' matches no matrix",
    "lr must be 0 or more, got -1.0",
    "adjust_lr_fn must be None or one of",
    "lr must be 0 or more, got -1.0",
    "clip_grad_norm must be positive or None, got 0.0",
    "use_muon: parameter 'blocks.0.bias' of shape (16,) is neither a matrix",
    "the step of LBFGS needs a closure",
    "the step of NeedsClosure needs a closure",
    "owned(OnlySquare) rejects parameter '",
    "owned(SGD): parameter 0 of shape (4, 4) does not belong to a sharded model",
    "nonsense",
    "owned: expected a class of torch.optim",
    "the ranks",
]


def test_mistakes_are_named_on_all_ranks() -> None:
    for messages in run_ranks(refuse_all, 2):
        for message, expected in zip(messages, EXPECTED, strict=True):
            assert expected in message


def filter_by_ndim() -> None:
    """The filters that people write choose by the full shape, so they need no warning."""
    plain, model = seeded_model(), zerocore.shard(seeded_model(), units=[Block])
    for wanted in (lambda p: p.ndim == 2, lambda p: p.ndim >= 2, lambda p: p.dim() < 2):
        chosen = [name for name, p in model.named_parameters() if wanted(p)]
        assert chosen == [name for name, p in plain.named_parameters() if wanted(p)] != []
    set_gradients(model, 0)
    grads = [
        name for name, p in model.named_parameters() if p.grad is not None and p.grad.ndim == 2
    ]
    assert "blocks.0.tall" in grads


def test_filters_by_ndim_see_full_shapes() -> None:
    run_ranks(filter_by_ndim, 2)
