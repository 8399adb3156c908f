"""Random pairs of features train as in one process that does every rank's part.

`python -m tests.distributed.test_random_pairs FIRST COUNT [SHAPE ...]` trains other pairs; a SHAPE
is a number of ranks. `1000 2000` took 16 minutes on two cores and ended with `2000 seeds, 0
failed`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.programs.run import MUON_REST
from tests.distributed.random_pairs import (
    FEATURES,
    OFFLOADED,
    Block,
    Case,
    Player,
    build,
    case_of,
    reference,
)
from tests.distributed.random_runs import Planned, failing_backward, failing_forward
from tests.distributed.random_seeds import (
    begin,
    check,
    parser_of,
    references,
    seeds_of,
    train_all,
    world_of,
)
from tests.distributed.test_random_graphs import mesh_of
from zerocore.common.alarm import STALL_SECONDS

SHAPES = ("2", "3", "4")
PAIRS_OF_A_SHAPE = 10
FIRST = 5880  # from which on few pairs have every feature
PAIRS_BY_NIGHT = 20


class ShardedPlayer(Player):
    """This rank's part of the run, by `zerocore.shard`."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__(case, model, [dist.get_rank()])
        rng = random.Random(f"options {case.seed}")
        parts = [name for name in OFFLOADED if self.has(name)]
        # The same numbers, summed by the backend or by the ranks in their order.
        sums = self.case.choose({"reduce_dtype": torch.float32}, {"wire_dtype": torch.float32})
        narrow = zerocore.MixedPrecision(torch.bfloat16, **sums)
        zerocore.shard(
            model,
            stage=case.stage,
            units=rng.choice([None, [Block]]),
            communication=zerocore.Communication(
                prefetch=rng.randrange(3),
                reductions_in_flight=1 + case.seed % 3,
                registered=case.seed % 2 == 1,
                accumulate="full" if self.has("accumulate_full") else "sharded",
                regather=rng.choice([None, 2]) if self.has_near() else None,
            ),
            group=mesh_of(2, 2) if self.has("hybrid") else None,
            mixed_precision=narrow if self.has("mixed_precision") else None,
            offload=zerocore.Offload(**{part.removeprefix("offload_"): "cpu" for part in parts})
            if parts
            else None,
        )

    def has_near(self) -> bool:
        """Whether some ranks may be near; not where a forward changes codes in place."""
        alike = self.has("hybrid") or self.has("codebook")
        return self.case.stage in (3, "fsdp") and self.case.world_size == 4 and not alike

    def adamw(self, parameters: Any, **options: Any) -> Any:
        make = self.case.choose(torch.optim.AdamW, zerocore.optim.AdamW)
        if self.has("complex"):
            make = torch.optim.AdamW
        return make(parameters, **options)

    def muon(self) -> list[Any]:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        rest = ["inp.*", "out.*"] + ["extra.*"] * self.has("unused_later")
        rest += ["table.*"] * self.has("sparse")
        return [zerocore.matrices.Muon(named, lr=0.02, adamw=MUON_REST, adamw_names=rest)]

    def clip(self, most: float) -> Tensor:
        if self.case.choose("zerocore's", "torch's") == "torch's":
            return super().clip(most)
        return zerocore.clip_grad_norm_(self.model, most)

    def held(self) -> AbstractContextManager[Any]:
        return zerocore.no_sync(self.model)

    def average(self) -> None:
        pass

    def fail(self, clock: tuple[int, ...]) -> None:
        # A rank whose first of two forwards fails makes one call less than the others.
        who = self.case.choose("all", "backward", *[] if self.has("double_forward") else ["one"])
        place = self.case.choose(*range(20))
        if who == "backward":
            # Where a backward may fail all ranks must have come the same way.
            with failing_backward(self.model, place) as backward, pytest.raises(Planned):
                self.ranks, ranks = [0], self.ranks
                backward(self.loss(0, clock))
            self.ranks = ranks
        elif who == "one" and place % dist.get_world_size() != dist.get_rank():
            self.loss(dist.get_rank(), clock)
        else:
            with failing_forward(self.model, place), pytest.raises(Planned):
                self.loss(dist.get_rank(), clock)

    def save(self) -> None:
        if self.case.choose("memory", "files") == "memory" or self.case.stage == "fsdp":
            super().save()
            return
        folder = [tempfile.mkdtemp(prefix="pairs-")]
        dist.broadcast_object_list(folder)
        self.kept = zerocore.Checkpoints(folder[0], self.model, self.optimizers[0])
        self.kept.save(1)
        self.kept.wait()

    def load(self) -> None:
        if isinstance(self.kept, tuple):
            super().load()
        else:
            self.kept.load()

    def final_state(self) -> dict[str, Tensor]:
        return zerocore.full_state_dict(self.model, rank0_only=False)


class FsdpPlayer(ShardedPlayer):
    """The same by `zerocore.fsdp.fully_shard`."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        Player.__init__(self, case, model, [dist.get_rank()])
        dtypes = (torch.bfloat16, torch.float32) if self.has("mixed_precision") else (None, None)
        fully_shard = partial(
            zerocore.fsdp.fully_shard,
            mesh=mesh_of(2, 2) if self.has("hybrid") else flat_mesh(),
            mp_policy=zerocore.fsdp.MixedPrecisionPolicy(*dtypes),
        )
        for block in self.net.blocks:
            near = self.case.choose(True, 2) if self.has_near() else None
            fully_shard(block, reshard_after_forward=near)
        fully_shard(model)

    def adamw(self, parameters: Any, **options: Any) -> Any:
        return torch.optim.AdamW(parameters, **options)

    def clip(self, most: float) -> Tensor:
        return Player.clip(self, most).full_tensor()

    @contextmanager
    def held(self) -> Iterator[None]:
        self.net.set_requires_gradient_sync(False)
        yield
        self.net.set_requires_gradient_sync(True)

    def final_state(self) -> dict[str, Tensor]:
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))


def flat_mesh() -> DeviceMesh:
    """All ranks in one dimension."""
    return mesh_of(1, dist.get_world_size())["shard"]


def compare(seeds: range, shape: str) -> None:
    """Trains the pair of each seed."""
    os.environ[STALL_SECONDS] = "20"
    for seed, right in references(reference, seeds).items():
        case = case_of(seed, world_of(shape))
        begin(seed, str(case))
        player = FsdpPlayer if case.stage == "fsdp" else ShardedPlayer
        near = (1e-3, 1e-4) if case.dtype == torch.float32 else (1e-7, 1e-9)
        check(player(case, build(case)).run(), right, *near)


@pytest.mark.one_by_day
@pytest.mark.parametrize("shape", SHAPES)
def test_random_pairs_train_as_one_process(shape: str) -> None:
    seeds = seeds_of(SHAPES.index(shape), PAIRS_OF_A_SHAPE, after=FIRST)
    run_ranks(compare, world_of(shape), seeds, shape, timeout=200)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_more_random_pairs(shape: str) -> None:
    seeds = seeds_of(SHAPES.index(shape), PAIRS_BY_NIGHT)
    run_ranks(compare, world_of(shape), seeds, shape, timeout=200)


def test_the_pairs_have_everything() -> None:
    cases = [case_of(seed, 4) for seed in range(1000, 3000)]
    met = {frozenset(pair) for case in cases for pair in pairs_of(case)}
    assert {name for pair in met for name in pair} == set(FEATURES)
    assert len(met) > 0.95 * len(FEATURES) * (len(FEATURES) - 1) / 2
    few = [
        case_of(seed, world_of(shape))
        for index, shape in enumerate(SHAPES)
        for seed in seeds_of(index, PAIRS_OF_A_SHAPE, after=FIRST)
    ]
    assert {name for case in few for name in case.features} == set(FEATURES)
    for some in (cases, few):
        assert {case.stage for case in some} == {0, 1, 2, 3, "fsdp"}


def pairs_of(case: Case) -> list[tuple[str, str]]:
    names = sorted(case.features)
    return [(a, b) for a in names for b in names if a < b]


def main() -> bool:
    """Trains random pairs of features and prints the seeds of those that went wrong."""
    options = parser_of(main.__doc__, SHAPES).parse_args()
    return train_all(compare, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
