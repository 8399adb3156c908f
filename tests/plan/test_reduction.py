"""Reductions of gradients, decided on integers: blocks, sums, collectives, step by step."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.bindings import _C_testing
from zerocore._C import ElementType, Layout, ParamSpec, Range, ShardOptions

NUMEL = 1024
FP32, BF16 = 4 * NUMEL, 2 * NUMEL  # bytes of a bucket
WORLD = 4
WIDE, NARROW = ElementType(6, 4), ElementType(15, 2)
WIRED = {"main": WIDE, "reduce": WIDE, "grad": NARROW}  # kept in bf16, sent in fp32


def layout(world: int = WORLD, **types: Any) -> Layout:
    """Two parameters that fill one region."""
    dtype = (15, 2) if types else (6, 4)
    return Layout.build([ParamSpec(f"{i}", [NUMEL // 2], *dtype, **types) for i in "ab"], world)


def make(stage: int, world: int = WORLD, units: int = 1, **options: Any) -> _C_testing.Reduction:
    types = WIRED if options.pop("wired", False) else {}
    shards = world if stage > 0 else 1
    layouts = [layout(shards, **types) for _ in range(units)]
    gradients = options.pop("gradients", "device")
    sharding = ShardOptions(
        stage=stage,
        hold_full=options.pop("hold_full", False),
        sums_in_order=options.pop("sums_in_order", False),
        reductions=options.pop("reductions", 1),
        gradients=gradients,
    )
    return _C_testing.Reduction(
        _C_testing.ReductionOptions(sharding, world_size=world, **options), layouts
    )


GIVEN = {"compute": "", "device_to_host": " when it is copied"}


def start(step: _C_testing.Step) -> str:
    """A collective: those that follow the first one are, by default, sums over the replicas."""
    parts = f" {step.parts} parts" if step.parts > 1 else ""
    if step.axis == "state" and step.op != "gather_sums":
        return f"{step.op} {step.source} {step.target} {step.nbytes}{parts}"
    named = step.op == "gather_sums" or (step.op == "reduce_scatter" and step.source == "sums")
    return f"{f'{step.op} {step.axis}' if named else 'across'} {step.target} {step.nbytes}"


def text(step: _C_testing.Step) -> str:
    """A step in words: those of its fields that mean something for its kind."""
    adds = " added to" if step.adds else ""
    parts = f" {step.parts} parts" if step.parts > 1 else ""
    return {
        "take": f"take {step.target} {step.nbytes}",
        "free": f"give back {step.source}{GIVEN[step.stream]}" if step.stream in GIVEN else "",
        "pack": f"pack {step.target}",
        "cast": f"cast {step.source} {step.target}",
        "start": start(step),
        "zero": f"zero {step.param}",
        "copy": f"offload {step.source} {step.nbytes}{adds}",
        "sum": f"sum {step.source}{parts}{adds} {step.target}",
    }.get(step.kind, step.kind)


def texts(steps: list[_C_testing.Step]) -> list[str]:
    """All but the memory that stays and the order of streams."""
    stays = [step.kind == "take" and step.target == "kept" for step in steps]
    return [
        text(step)
        for step, is_kept in zip(steps, stays, strict=True)
        if not is_kept and step.kind != "order"
    ]


def test_gradients_that_are_not_sharded_are_reduced_where_they_stay() -> None:
    replicated, sliced = make(0), make(1)
    assert texts(replicated.reduce(0)) == ["pack full", f"all_reduce full kept {FP32}"]
    assert texts(sliced.reduce(0)) == ["pack full", f"reduce_scatter full kept {FP32}"]
    assert texts(sliced.finish()) == texts(replicated.finish()) == ["wait"]
    assert replicated.kept_nbytes(0) == sliced.kept_nbytes(0) == FP32


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_gradients_pass_through_a_block(stage: int) -> None:
    reduction = make(stage)
    assert reduction.kept_nbytes(0) == 0
    assert texts(reduction.reduce(0)) == [
        f"take full {FP32}",
        "pack full",
        f"reduce_scatter full kept {FP32}",
    ]
    assert texts(reduction.finish()) == ["wait", "give back full"]
    assert reduction.kept_nbytes(0) == FP32 // WORLD


def test_what_is_kept_is_added_to_from_scratch() -> None:
    reduction = make(3)
    reduction.reduce(0)
    reduction.finish()
    assert texts(reduction.reduce(0)) == [
        f"take full {FP32}",
        "pack full",
        f"take scratch {FP32 // WORLD}",
        f"reduce_scatter full scratch {FP32}",
    ]
    assert texts(reduction.finish()) == [
        "wait",
        "sum scratch added to kept",
        "give back scratch",
        "give back full",
    ]


def test_gradients_on_the_host_come_from_a_block() -> None:
    """Where a device computes; on the CPU they are where they are reduced."""
    reduction = make(3, gradients="cpu")
    part = FP32 // WORLD
    begun = [f"take full {FP32}", "pack full", f"take scratch {part}"]
    ends = ["give back scratch when it is copied", "give back full"]
    for adds in ("", " added to"):
        assert texts(reduction.reduce(0)) == [*begun, f"reduce_scatter full scratch {FP32}"]
        assert texts(reduction.finish()) == ["wait", f"offload scratch {part}{adds}", *ends]
    assert reduction.kept_nbytes(0) == part
    reduction.drop(0, 1)
    reduction.reduce(0)
    landed = f"offload scratch {part} added to"
    assert texts(reduction.finish())[:3] == ["wait", "zero 1", landed]
    on_host = make(3, gradients="cpu", on_host=True)
    assert texts(on_host.reduce(0))[-1] == f"reduce_scatter full kept {FP32}"


def test_gradients_on_the_host_come_off_the_wire_and_off_one_rank() -> None:
    wired = make(2, gradients="cpu", wired=True)
    assert texts(wired.reduce(0))[-1] == f"reduce_scatter wire wire {FP32}"
    ends = [f"offload wire {FP32 // WORLD}", "give back wire when it is copied"]
    assert texts(wired.finish()) == ["wait", *ends]
    alone = make(3, world=1, gradients="cpu")
    packed = [f"take full {FP32}", "pack full", f"offload full {FP32}"]
    assert texts(alone.reduce(0)) == [*packed, "give back full when it is copied"]
    assert texts(alone.reduce(0))[2] == f"offload full {FP32} added to"
    parts = make(3, gradients="cpu", backend="gloo")
    parts.reduce(0)
    summed = [f"sum scratch {WORLD} parts scratch", f"offload scratch {FP32 // WORLD}"]
    assert texts(parts.finish())[1:3] == summed
    replicas = make(3, gradients="cpu", num_replicas=2)
    assert texts(replicas.reduce(0))[-1] == f"across scratch {FP32 // WORLD}"
    assert texts(replicas.finish())[0] == "wait"
    alike = make(3, world=1, gradients="cpu", num_replicas=4)
    assert texts(alike.reduce(0))[-1] == f"all_reduce full full {FP32}"


def test_a_gradient_that_was_dropped_is_not_added_to() -> None:
    reduction = make(3)
    reduction.reduce(0)
    reduction.finish()
    reduction.drop(0, 1)
    assert not reduction.is_valid(0, 1)
    reduction.reduce(0)
    assert texts(reduction.finish())[:3] == ["wait", "zero 1", "sum scratch added to kept"]
    reduction.drop(0, 0)
    reduction.drop(0, 1)
    assert f"reduce_scatter full kept {FP32}" in texts(reduction.reduce(0))


def test_an_exchange_leaves_a_part_of_each_rank() -> None:
    reduction = make(1, backend="gloo")
    assert texts(reduction.reduce(0)) == [
        "pack full",
        f"take scratch {FP32}",
        f"reduce_scatter full scratch {FP32} {WORLD} parts",
    ]
    done = ["wait", f"sum scratch {WORLD} parts kept", "give back scratch"]
    assert texts(reduction.finish()) == done


def test_the_wire_has_a_block_of_its_own_type() -> None:
    reduction = make(0, wired=True)
    begun = [f"take wire {FP32}", "pack wire", f"all_reduce wire wire {FP32}"]
    assert texts(reduction.reduce(0)) == begun
    assert texts(reduction.finish()) == ["wait", "sum wire kept", "give back wire"]
    assert reduction.kept_nbytes(0) == BF16
    reduction.reduce(0)
    assert texts(reduction.finish())[1] == "sum wire added to kept"


@pytest.mark.parametrize(("stage", "hold_full"), [(0, False), (1, False), (2, True), (3, True)])
def test_sums_of_this_rank_are_held_until_sync(stage: int, hold_full: bool) -> None:
    reduction = make(stage, hold_full=hold_full)
    first, second = reduction.reduce(0, sync=False), reduction.reduce(0, sync=False)
    block = [f"take full {FP32}"] if stage >= 2 else []
    assert texts(first) == [*block, "pack full"]
    assert texts(second) == ["pack full"]
    halves = [Range(0, NUMEL // 2), Range(NUMEL // 2, NUMEL)]
    assert [step.added for step in first + second if step.kind == "pack"] == [
        [Range(0, 0), Range(NUMEL // 2, NUMEL // 2)],
        halves,
    ]
    assert reduction.finish() == []
    last = reduction.reduce(0)
    assert [step.added for step in last if step.kind == "pack"] == [halves]
    assert texts(last)[:1] == ["pack full"]
    assert ("give back full" in texts(reduction.finish())) == (stage >= 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_without_a_place_for_full_sums_every_backward_is_reduced(stage: int) -> None:
    assert texts(make(stage).reduce(0, sync=False)) == texts(make(stage).reduce(0, sync=True))


def test_held_sums_are_cast_to_the_wire() -> None:
    reduction = make(3, wired=True, hold_full=True)
    assert texts(reduction.reduce(0, sync=False)) == [f"take full {BF16}", "pack full"]
    assert texts(reduction.reduce(0)) == [
        f"take wire {FP32}",
        "pack full",
        "cast full wire",
        f"reduce_scatter wire wire {FP32}",
    ]
    given = ["give back wire", "give back full"]
    assert texts(reduction.finish()) == ["wait", "sum wire kept", *given]


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_reduced_gradient_counts_once_in_the_next_sum(stage: int, counts: bool) -> None:
    """Of a bucket that stays, on one of the ranks that have it: here the first shard."""
    reduction = make(stage, rank=0 if counts else 4)
    reduction.reduce(0)
    reduction.finish()
    (pack,) = [step for step in reduction.reduce(0) if step.kind == "pack"]
    end = (NUMEL // 2 if stage == 0 else NUMEL // WORLD) if counts else 0
    rest = NUMEL if stage == 0 and counts else NUMEL // 2
    assert pack.added == [Range(0, end), Range(NUMEL // 2, rest)]


def test_blocks_are_given_back_before_the_next_unit_takes_its_own() -> None:
    reduction = make(3, units=2)
    reduction.reduce(0)
    assert texts(reduction.reduce(1))[:3] == ["wait", "give back full", f"take full {FP32}"]
    together = make(1, units=2)
    together.reduce(0)
    assert texts(together.reduce(1)) == ["pack full", f"reduce_scatter full kept {FP32}"]
    # On a stream the last one is behind the others.
    assert [step.unit for step in together.finish()] == [1, 0, 1]


@pytest.mark.parametrize("reductions", [1, 2, 3])
def test_as_many_units_are_reduced_at_a_time(reductions: int) -> None:
    """The oldest is completed first; at the end one wait on a stream is behind all."""
    reduction = make(3, units=5, reductions=reductions)
    waited = []
    for unit in range(5):
        steps = reduction.reduce(unit)
        waited += [step.unit for step in steps if step.kind == "wait"]
        assert waited == list(range(unit + 1 - reductions))
    waits = [step.unit for step in reduction.finish() if step.kind == "wait"]
    assert waits == [4][: reductions - 1] + list(range(5 - reductions, 5))


def test_a_unit_that_is_reduced_again_completes_first() -> None:
    reduction = make(1)
    reduction.reduce(0)
    assert texts(reduction.reduce(0))[:2] == ["wait", "pack full"]
    assert texts(reduction.finish()) == ["wait"]


def test_replicas_on_a_stream_sum_right_behind() -> None:
    reduction = make(3, num_replicas=2)
    assert texts(reduction.reduce(0))[-2:] == [
        f"reduce_scatter full kept {FP32}",
        f"across kept {FP32 // WORLD}",
    ]
    assert texts(reduction.finish()) == ["wait", "give back full"]


def test_replicas_on_the_host_sum_what_is_known() -> None:
    """In place the sum is waited for at the end of the backward, elsewhere before it is added."""
    reduction = make(1, num_replicas=2, backend="gloo", on_host=True)
    reduction.reduce(0)
    done = [
        "wait",
        f"sum scratch {WORLD} parts kept",
        f"across kept {FP32 // WORLD}",
        "give back scratch",
    ]
    assert texts(reduction.finish()) == [*done, "wait"]
    added = make(3, num_replicas=2, on_host=True)
    for _ in range(2):
        added.reduce(0)
        steps = texts(added.finish())
    assert steps[:4] == [
        "wait",
        f"across scratch {FP32 // WORLD}",
        "wait",
        "sum scratch added to kept",
    ]


def test_replicas_of_everything_have_one_collective() -> None:
    reduction = make(3, world=1, num_replicas=4)
    assert texts(reduction.reduce(0)) == ["pack full", f"all_reduce full kept {FP32}"]


def test_one_rank_has_no_collective() -> None:
    for wired in (False, True):
        reduction = make(3, world=1, wired=wired)
        assert texts(reduction.reduce(0)) == ["pack full"]
        assert reduction.finish() == []


def test_what_is_frozen_is_left_alone() -> None:
    reduction = make(3)
    reduction.set_trainable(0, 0, False)
    assert texts(reduction.reduce(0)) == []
    options = _C_testing.ReductionOptions(ShardOptions(stage=3), world_size=2)
    frozen = _C_testing.Reduction(options, [Layout.build([ParamSpec("a", [8], 6, 4, False)], 2)])
    assert texts(frozen.reduce(0)) == []
    assert frozen.kept_nbytes(0) == 0


def test_reset_gives_everything_back_and_begins_anew() -> None:
    reduction = make(3, hold_full=True, wired=True)
    reduction.reduce(0, sync=False)
    reduction.reduce(0)
    dropped = texts(reduction.reset())
    assert dropped == ["wait", *(f"give back {p}" for p in BLOCKS)]
    assert reduction.finish() == []
    assert texts(reduction.reduce(0))[:2] == [f"take wire {FP32}", "pack wire"]


BLOCKS = ("sums", "scratch", "wire", "full")
FLAGS = ("hold_full", "on_host", "wired")


def watch_backwards(reduction: _C_testing.Reduction, holds: bool) -> None:
    """Backwards that reduce one of two units twice; nothing but sums for later stays held."""
    held: set[tuple[int, str]] = set()
    flying: set[int] = set()
    for sync, _ in product((True, False, False, True), range(2)):
        steps = [step for unit in (1, 0, 1) for step in reduction.reduce(unit, sync)]
        for step in steps + reduction.finish():
            if step.kind == "take" and step.target != "kept":
                assert (step.unit, step.target) not in held
                held.add((step.unit, step.target))
            elif step.kind == "free":
                held.remove((step.unit, step.source))
            elif step.kind == "start" and step.axis == "state" and step.op != "gather_sums":
                assert step.unit not in flying
                flying.add(step.unit)
            elif step.kind == "wait":
                flying.discard(step.unit)
        assert held == ({(0, "full"), (1, "full")} if holds and not sync else set())
        assert not flying


@pytest.mark.parametrize(
    ("stage", "gradients"), [*((stage, "device") for stage in range(4)), (2, "cpu"), (3, "cpu")]
)
def test_blocks_are_taken_once_and_given_back(stage: int, gradients: str) -> None:
    grid = product((1, 2, 4), (1, 2), ("nccl", "gloo"), *len(FLAGS) * [(False, True)])
    for world, replicas, backend, *flags in grid:
        options: dict[str, Any] = dict(zip(FLAGS, flags, strict=True), backend=backend)
        lands = gradients == "cpu" and not options["on_host"]
        holds = options["hold_full"] and stage >= 2 and (world > 1 or lands)
        options["gradients"] = gradients
        watch_backwards(make(stage, world, units=2, num_replicas=replicas, **options), holds)
