"""The benchmark of gathers runs on real ranks, and what it times is units that are gathered."""

from __future__ import annotations

from bench.gather.run import NUM_PARAMS, NUM_UNITS, Units, gather_on_this_rank, medians
from bench.lib.systems import System, wrap_model
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

SYSTEMS = [System("zerocore", 3, "shard"), System("fsdp2", 3, "FSDP2")]


def test_units_have_the_bytes_that_are_asked_for() -> None:
    units = Units(64 * 1024)
    assert len(units.blocks) == NUM_UNITS
    for block in units.blocks:
        sizes = [param.nbytes for param in block.parameters()]
        assert len(sizes) == NUM_PARAMS
        assert 64 * 1024 <= sum(sizes) <= 64 * 1024 + 64 * 4


def gather() -> tuple[list[str], dict[str, list[float]]]:
    sharded = wrap_model(SYSTEMS[0], model := Units(16 * 1024), model.blocks)
    return [unit.name for unit in state_of(sharded).units], gather_on_this_rank(SYSTEMS, 16384, 2)


def test_both_systems_gather_each_unit() -> None:
    ranks = run_ranks(gather, 2)
    assert ranks[0][0] == [f"blocks.{index}" for index in range(NUM_UNITS)]
    times = medians([times for _, times in ranks])
    assert {label: len(found) for label, found in times.items()} == {"shard": 2, "FSDP2": 2}
