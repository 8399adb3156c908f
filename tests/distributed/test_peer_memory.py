"""Units that are gathered out of the other ranks' memory."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
import zerocore.fsdp as zerocore_fsdp
from tests.distributed.harness import run_ranks, run_to_end
from tests.distributed.test_export import assert_same, exported
from tests.fsdp.both import Net, make_net, tokens_of
from zerocore.model.state import ready_state_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has the system call")
BF16 = torch.bfloat16


def sharded(face: str, param_dtype: torch.dtype | None = None) -> Net:
    """Sizes that two to four ranks do not divide evenly; vectors that some have no part of."""
    model = make_net()
    if face == "shard":
        precision = param_dtype and zerocore.MixedPrecision(param_dtype=param_dtype)
        options: dict[str, Any] = {"mixed_precision": precision} if precision else {}
        return zerocore.shard(model, stage=3, units=["Block"], **options)
    policy = zerocore_fsdp.MixedPrecisionPolicy(param_dtype=param_dtype)
    for block in model.blocks:
        zerocore_fsdp.fully_shard(block, mp_policy=policy)
    zerocore_fsdp.fully_shard(model, mp_policy=policy)
    return model


def received(model: nn.Module) -> int:
    """Bytes of rows that are to be copied to their places."""
    state = ready_state_of(model)
    return sum(state.engine.received_nbytes(unit.index) for unit in state.units)


def compare(face: str, param_dtype: torch.dtype | None) -> None:
    dtype = param_dtype or torch.float32
    expected = {name: value.to(dtype) for name, value in make_net().state_dict().items()}
    model = sharded(face, param_dtype)
    model(tokens_of(0))
    assert received(model) == 0
    for size in (1, 900, "1GiB"):
        found = exported(model, max_bytes=size)
        assert_same(found, expected)
        assert set(found) == set(expected)
    model(tokens_of(0)).sum().backward()  # the model goes on


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("face", ["shard", "fsdp"])
@pytest.mark.parametrize("param_dtype", [None, BF16], ids=str)
def test_values(face: str, param_dtype: torch.dtype | None, world_size: int) -> None:
    run_ranks(compare, world_size, face, param_dtype)


def write_between(face: str, stops: bool) -> None:
    """The ranks come to each gather, and to each write behind it, at different times."""
    model = sharded(face)
    # The engine moves parameters of fsdp. A forward would leave full ones in the root.
    ready_state_of(model)
    rng = random.Random(dist.get_rank())
    parts = [getattr(param, "_local_tensor", param) for param in model.parameters()]

    def write(value: float) -> None:
        time.sleep(rng.choice([0, 0, 0.02]))
        with torch.no_grad():
            for part in parts:
                part.fill_(value)

    for turn in range(4):
        write(100.0 * turn)
        found: dict[str, Tensor] = {}
        for number, bucket in enumerate(zerocore.export(model, max_bytes=1)):
            found |= {name: tensor.clone() for name, tensor in bucket.items()}
            if stops and number == 5:
                break
            write(100.0 * turn + number + 1)
        write(-1.0)
        lows, highs = (torch.stack([f(v) for v in found.values()]) for f in (torch.min, torch.max))
        assert torch.equal(lows, highs)  # no part is from before another one
        own = lows.clone()
        dist.broadcast(lows, 0)
        assert torch.equal(own, lows)
        assert float(lows.min()) >= 100 * turn


@pytest.mark.one_by_day
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("face", ["shard", "fsdp"])
def test_ranks_may_write_behind_each_bucket(face: str, stops: bool) -> None:
    run_ranks(write_between, 3, face, stops)


def forbid(ranks: tuple[int, ...]) -> None:
    """No process wants to be read, and some of the ranks may not read those which do not."""
    libc = ctypes.CDLL(None)
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    if dist.get_rank() in ranks:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        flags = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
        assert libc.capget(header, flags) == 0
        flags[0] &= ~(1 << 19)  # CAP_SYS_PTRACE
        assert libc.capset(header, flags) == 0


def fall_back(ranks: tuple[int, ...]) -> None:
    expected = {name: value.clone() for name, value in make_net().state_dict().items()}
    forbid(ranks)
    for face in ("shard", "fsdp"):
        model = sharded(face)
        model(tokens_of(0)).sum().backward()  # a forward alone leaves a unit for its backward
        assert (received(model) > 0) == (face == "fsdp")
        info = zerocore.export_info(model)
        state = ready_state_of(model)
        state.engine.forget_recent_peak()
        assert_same(exported(model, info=info, max_bytes=900), expected)
        assert state.engine.pool_stats.recent_peak_nbytes == info.peak_nbytes(900)


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2)], ids=["one rank", "all ranks"])
def test_ranks_that_may_not_read_gather(ranks: tuple[int, ...]) -> None:
    run_ranks(fall_back, 3, ranks, fresh=True)


def lose_a_rank(face: str) -> str:
    model = sharded(face)
    model(tokens_of(0))
    buckets = zerocore.export(model, max_bytes=1)
    next(buckets)
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        for bucket in buckets:
            bucket.release()
    return str(caught.value)


@pytest.mark.parametrize("face", ["shard", "fsdp"])
def test_a_rank_that_dies_is_named(face: str) -> None:
    outcomes = run_to_end(lose_a_rank, 3, face, group_timeout=6.0)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.error
        assert "rank 1" in outcome.value and "all_gather" in outcome.value, outcome.value
