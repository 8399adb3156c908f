"""Streams hand buffers over in order, on random module graphs, as the log of a run shows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import zerocore
from tests.engine.hand_overs import find_race, waits
from tests.plan.driver import Call, random_tree
from zerocore import _C
from zerocore.model.state import state_of
from zerocore.sharding import build

WIDTH = 4


class Block(nn.Module):
    """Two dtypes, a frozen and an unused parameter: several regions a unit."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        if rng.random() < 0.3:
            self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        if rng.random() < 0.2:
            self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor, inside: Call, root: Graph) -> Tensor:
        root.change_stream()
        y = root.run(inside, self.linear(x) * self.scale[0].float())
        if y.requires_grad:
            y.register_hook(lambda _: root.change_stream())
        return x + y.tanh()


class Graph(nn.Module):
    """Calls blocks as a tree of calls says; some of them checkpointed, some skipped."""

    def __init__(self, seed: int, num_units: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.calls = random_tree(rng, num_units)
        self.blocks = nn.ModuleList(Block(rng) for _ in range(num_units))
        self.reentrant = {u: rng.random() < 0.3 for u in range(num_units) if rng.random() < 0.4}
        self.skipped: set[int] = set()
        self.streams: random.Random | None = None  # draws the one that computes from here on

    def change_stream(self) -> None:
        if self.streams is not None:
            _C.set_logged_compute_stream(self.streams.randrange(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(tuple(self.calls), x)

    def run(self, calls: tuple[Call, ...], x: Tensor) -> Tensor:
        for unit, inside in calls:
            if unit in self.skipped:
                continue
            block = self.blocks[unit]
            if unit in self.reentrant and not inside:
                x = checkpoint(block, x, inside, self, use_reentrant=self.reentrant[unit])
            else:
                x = block(x, inside, self)
        return x


class Mesh:
    """Three replicas of two shards each, as a DeviceMesh of two dimensions says it."""

    ndim = 2
    mesh = torch.tensor([[0, 1], [2, 3], [4, 5]])

    def __init__(self) -> None:
        self.groups = [dist.new_group([1, 3, 5]), dist.new_group([0, 1])]

    def get_group(self, dimension: int) -> dist.ProcessGroup:
        return self.groups[dimension]


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("fake", rank=1, world_size=6, store=FakeStore())
    yield Mesh()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def log_hand_overs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines stand in for a device with streams and log what they would do."""
    monkeypatch.setattr(build, "EngineOptions", partial(_C.EngineOptions, log_hand_overs=True))


def train(model: Graph, seed: int, steps: int = 4) -> list[_C.HandOver]:
    """Steps with accumulation, evaluation, another order and skipped units; the log."""
    rng = random.Random(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = range(len(model.blocks))
    for _ in range(steps):
        for micro_batch in reversed(range(rng.randint(1, 2))):
            skipped = {u for u in units if rng.random() < 0.1}
            # A backward that meets no unit is not seen, and reduces nothing.
            model.skipped = skipped if len(skipped) < len(units) else set()
            with zerocore.no_sync(model) if micro_batch else nullcontext():
                model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=rng.random() < 0.7)
        if rng.random() < 0.3:
            rng.shuffle(model.calls)
        if rng.random() < 0.2:
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
    return state_of(model).engine.hand_overs


POLICIES = (
    None,
    zerocore.MixedPrecision(torch.bfloat16, keep_fp32=("scale",)),
    zerocore.MixedPrecision(torch.bfloat16, torch.float32, keep_fp32=("scale",)),
)


def shard(seed: int, stage: int, mesh: Mesh, **options: Any) -> Graph:
    rng = random.Random(seed)
    accumulate = rng.choice(["sharded", "full"])
    graph = Graph(seed, rng.randint(1, 8))
    return zerocore.shard(
        graph,
        stage=stage,
        units=[Block],
        prefetch=seed % 5,
        accumulate=accumulate,
        mixed_precision=POLICIES[seed % 3],
        group=mesh if seed % 4 == 0 else None,
        **options,
    )


@pytest.fixture
def one_stream_at_the_end() -> Iterator[None]:
    yield
    _C.set_logged_compute_stream(0)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("one_stream_at_the_end")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("seed", range(24))
def test_compute_goes_from_stream_to_stream(seed: int, stage: int, mesh: Mesh) -> None:
    """Between forward and backward, in the middle of them, and where gradients accumulate.

    Each stream is ordered behind the one before, as torch and users have to.
    """
    model = shard(seed, stage, mesh)
    model.streams = random.Random(seed)
    for unit, block in enumerate(model.blocks):
        for param in block.parameters():
            if param.requires_grad and unit % 2:
                full = param.full
                full.register_hook(lambda _: model.change_stream())  # before it accumulates
    assert find_race(train(model, seed)) is None


def steps_of_five(
    stage: int, streams: random.Random | None = None
) -> tuple[list[_C.HandOver], int]:
    """The log of four steps of five blocks in a row, and where they begin in it."""
    model = Graph(0, 5)
    model.calls, model.reentrant = [(unit, ()) for unit in range(5)], {}
    zerocore.shard(model, stage=stage, units=[Block])
    setup = len(state_of(model).engine.hand_overs)
    model.streams = streams
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model).engine.hand_overs, setup


@pytest.mark.usefixtures("one_stream_at_the_end")
@pytest.mark.parametrize("stage", [1, 3])
def test_events_of_either_stream_are_needed(stage: int) -> None:
    """Of both directions, and where the one is left for the other."""
    log, _ = steps_of_five(stage, random.Random(0))
    assert find_race(log) is None
    needed = {
        (log[i].stream, log[i].source) for i in waits(log) if find_race(log, without=i) is not None
    }
    computes = ("compute", "compute 1")
    roles = ("all_gather", "reduce_scatter")
    assert needed >= {(role, compute) for role in roles for compute in computes}
    assert needed >= {(compute, role) for role in roles for compute in computes}
    assert needed >= {computes, computes[::-1]}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_communicator_of_two_roles_hides_waits(stage: int) -> None:
    """Where gathers and reductions go by one, a gather is behind what the reduction before it is.

    So at stage 3 some of its waits for compute would not be missed. They are where it goes by two.
    """
    log, setup = steps_of_five(stage)
    made = [i for i in waits(log) if i >= setup]
    both = frozenset(("all_gather", "reduce_scatter"))
    hidden = [i for i in made if find_race(log, without=i, communicator=both) is None]
    kinds = {(log[i].stream, log[i].source) for i in hidden}
    assert kinds == ({("all_gather", "compute")} if stage == 3 else set())
    assert find_race(log) is None
    assert all(find_race(log, without=i) is not None for i in made)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("seed", range(80))
def test_every_hand_over_is_ordered(seed: int, stage: int, mesh: Mesh) -> None:
    model = shard(seed, stage, mesh)
    assert find_race(train(model, seed)) is None
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0


WAYS = ("plain", "hybrid", "checkpointed", "reentrant")


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("policy", range(len(POLICIES)), ids=["plain", "bf16", "fp32_reduce"])
@pytest.mark.parametrize("how", WAYS)
def test_every_wait_is_needed(stage: int, policy: int, how: str, mesh: Mesh) -> None:
    """Without any one of the waits the checker objects: it can fail, and no wait is idle.

    Any two of stage, prefetch, policy and way meet.
    """
    mixed, prefetch = POLICIES[policy], (policy + WAYS.index(how)) % 3
    model = Graph(0, 5)
    model.calls, model.reentrant = [(unit, ()) for unit in range(5)], {}
    if how in ("checkpointed", "reentrant"):
        model.reentrant = dict.fromkeys((1, 2, 3), how == "reentrant")
    group = mesh if how == "hybrid" else None
    zerocore.shard(
        model, stage=stage, units=[Block], prefetch=prefetch, mixed_precision=mixed, group=group
    )
    setup = len(state_of(model).engine.hand_overs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    log = state_of(model).engine.hand_overs
    assert find_race(log) is None
    needed = [position for position in waits(log) if position >= setup]
    assert needed
    idle = [(i, log[i].stream) for i in needed if find_race(log, without=i) is None]
    assert not idle


GRADIENTS = zerocore.Offload(states="device", gradients="cpu")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("seed", range(24))
def test_gradients_on_their_way_to_the_host_are_ordered(seed: int, stage: int, mesh: Mesh) -> None:
    model = shard(seed, stage, mesh, offload=GRADIENTS)
    log = train(model, seed)
    assert find_race(log) is None
    assert any(each.what == "leaves" for each in log)
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("mixed", POLICIES, ids=["plain", "bf16", "fp32_reduce"])
def test_every_wait_for_gradients_is_needed(
    stage: int, mixed: zerocore.MixedPrecision | None
) -> None:
    """Of a unit's copies for the reductions, and of a block's next user for the copy."""
    model = Graph(0, 5)
    model.calls, model.reentrant = [(unit, ()) for unit in range(5)], {}
    zerocore.shard(model, stage=stage, units=[Block], mixed_precision=mixed, offload=GRADIENTS)
    setup = len(state_of(model).engine.hand_overs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    log = state_of(model).engine.hand_overs
    made = [i for i in waits(log) if i >= setup]
    idle = [i for i in made if find_race(log, without=i) is None]
    # Both of a unit's reductions may be done when the first one's result is copied.
    copies = [i for i in made if (log[i].stream, log[i].source) == ("device_to_host", "compute")]
    assert set(idle) <= set(copies) and 0 < 2 * len(idle) <= len(copies)
    assert any(log[i].source == "device_to_host" for i in made)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", range(30))
def test_a_gather_at_the_step_is_ordered(seed: int, mesh: Mesh) -> None:
    model = shard(seed, 3, mesh, gather_at_step=True)
    assert find_race(train(model, seed)) is None
    engine = state_of(model).engine
    assert engine.pool_stats.in_use_nbytes in (0, engine.layout(engine.order[0].unit).nbytes)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("mixed", POLICIES, ids=["plain", "bf16", "fp32_reduce"])
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "zerocore"])
def test_every_wait_of_a_gather_at_the_step_is_needed(
    prefetch: int, mixed: zerocore.MixedPrecision | None, ours: bool
) -> None:
    model = Graph(0, 5)
    model.calls, model.reentrant = [(unit, ()) for unit in range(5)], {}
    zerocore.shard(
        model, units=[Block], prefetch=prefetch, mixed_precision=mixed, gather_at_step=True
    )
    engine = state_of(model).engine
    setup = len(engine.hand_overs)
    make = zerocore.optim.AdamW if ours else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    log = engine.hand_overs
    copies = [each for each in log if (each.what, each.kind) == ("is copied", "write")]
    assert len(copies) == 4 * len(engine.layout(0).regions)
    assert find_race(log) is None
    needed = [position for position in waits(log) if position >= setup]
    idle = [(i, log[i].stream) for i in needed if find_race(log, without=i) is None]
    # The forward's own wait for shards that may have changed. Without prefetch the second unit's
    # gather is behind the use of the first one as well, whose bytes it takes.
    assert {stream for _, stream in idle} <= {"all_gather"}
    assert len(idle) == (0 if prefetch else 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reset_waits_for_gathers_under_way(stage: int) -> None:
    """Also for those into memory that stays: what frees it next is ordered behind compute only."""
    model = Graph(0, 4)
    model.calls, model.reentrant = [(unit, ()) for unit in range(4)], {}
    zerocore.shard(model, stage=stage, units=[Block], prefetch=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(TypeError, match="linear"):
        model("no tensor")  # within the first unit, while those after it are gathered
    log = state_of(model).engine.hand_overs
    gathers = [each for each in log if (each.kind, each.stream) == ("write", "all_gather")]
    spans = {(each.begin, each.end) for each in gathers}
    frees = partial(
        SimpleNamespace, kind="write", stream="compute", source="", event=-1, what="frees", unit=""
    )
    freed: list[Any] = [frees(begin=begin, end=end) for begin, end in spans]
    assert gathers
    assert find_race([*log, *freed]) is None


@pytest.mark.parametrize("stage", range(4))
def test_main_weights_are_cast_once_per_update(stage: int) -> None:
    """However many micro-batches and gathers there are in a step."""
    model = Graph(0, 3)
    model.calls, model.reentrant = [(unit, ()) for unit in range(3)], {}
    zerocore.shard(model, stage=stage, units=[Block], mixed_precision=POLICIES[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = state_of(model).engine

    def num_casts() -> int:
        log = engine.hand_overs
        return sum(entry.kind == "write" and entry.what == "is cast" for entry in log)

    casts = []
    for _ in range(3):
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        casts.append(num_casts())
    assert casts == [0, 3, 6]  # in the first step the weights are as they were filled


@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_that_casts_spares_the_cast(stage: int) -> None:
    model = Graph(0, 3)
    model.calls, model.reentrant = [(unit, ()) for unit in range(3)], {}
    zerocore.shard(model, stage=stage, units=[Block], mixed_precision=POLICIES[1])
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    log = state_of(model).engine.hand_overs
    assert not [each for each in log if each.kind == "write" and each.what == "is cast"]
    assert find_race(log) is None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # not seen by the optimizer, and cast before its next step
    optimizer.zero_grad()
    optimizer.step()
    for parameter in model.parameters():
        if parameter.model_weight is not None:
            assert torch.equal(parameter.model_weight, parameter.detach().bfloat16())
