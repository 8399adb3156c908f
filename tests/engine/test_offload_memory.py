"""The host's memory of a model is one mapping of the planned size, made when it is sharded."""

from __future__ import annotations

import gc
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zerocore
from tests.distributed.harness import run_ranks
from tests.engine.offloading import (
    ALL,
    ALL_ON_DISK,
    BF16,
    BOTH,
    DISK,
    GRADIENTS,
    PARAMETERS,
    STATES,
    adamw,
    assert_same_bits,
    backward,
    blocks,
    torchs,
)
from zerocore import Offload, memory_usage
from zerocore._C import HostMemory
from zerocore.model.state import state_of
from zerocore.planning import predict_memory
from zerocore.sharding.host_memory import obtainable_nbytes


def memory_of(model: nn.Module) -> HostMemory:
    memory = state_of(model).engine.host_memory
    assert memory is not None
    return memory


def lies_in(memory: HostMemory, tensor: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        begin, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return memory.address <= begin <= memory.address + memory.nbytes - nbytes


def step(model: nn.Module, optimizer: Any) -> None:
    backward(model)
    optimizer.step()
    optimizer.synchronize()


def check_mapping() -> None:
    """Every tensor is in it, and it takes what the plan says, to the byte."""
    cases = [(stage, STATES) for stage in range(4)]
    cases += [(2, GRADIENTS), (2, BOTH), (3, GRADIENTS), (3, PARAMETERS), (3, ALL)]
    cases += [(0, DISK), (3, ALL_ON_DISK)]
    for stage, offload in cases:
        for precision in (None, BF16):
            model, optimizer = blocks(stage, offload, mixed_precision=precision)
            what = f"stage {stage}, {offload}, {precision}"
            memory = memory_of(model)
            assert memory.nbytes == state_of(model).engine.host_memory_nbytes > 0, what
            for _ in range(2):
                step(model, optimizer)
            predicted, measured = predict_memory(model), memory_usage(model, optimizer)
            assert predicted == measured, what
            if not offload.uses_disk:
                assert predicted.host == memory.nbytes, what
            for param in model.parameters():
                state = optimizer.state[param]
                if param.local().numel() == 0:
                    continue
                assert lies_in(memory, param) == (offload.states == "cpu"), what
                assert lies_in(memory, param.grad) == (offload.gradients == "cpu"), what
                for name in ("exp_avg", "exp_avg_sq"):
                    assert lies_in(memory, state[name]) == (offload.states == "cpu"), what


@pytest.mark.one_by_day
def test_all_lies_in_one_mapping_of_the_planned_size(world_size: int) -> None:
    run_ranks(check_mapping, world_size)


def check_moments() -> None:
    """A second optimizer has moments of its own; when the first is gone, its place is free."""
    model, first = blocks(3, STATES)
    memory = memory_of(model)
    step(model, first)
    second = adamw(model.parameters())
    step(model, second)
    param = next(p for p in model.parameters() if p.local().numel() > 0)
    assert lies_in(memory, first.state[param]["exp_avg"])
    assert not lies_in(memory, second.state[param]["exp_avg"])
    del first
    gc.collect()
    third = adamw(model.parameters())
    step(model, third)
    assert lies_in(memory, third.state[param]["exp_avg"])
    other, plain = blocks(3, None)  # it begins as the only one would
    step(other, plain)
    step(other, adamw(other.parameters()))
    fresh = adamw(other.parameters())
    step(other, fresh)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        moments = third.state[ours]["exp_avg"], fresh.state[theirs]["exp_avg"]
        assert torch.equal(*moments)
    plain = torchs(model.parameters())
    backward(model)
    plain.step()
    assert not lies_in(memory, plain.state[param]["exp_avg"])
    assert predict_memory(model) == memory_usage(model, plain)


def test_moments_of_one_optimizer_have_a_place() -> None:
    run_ranks(check_moments, 2)


def refuse_all(limits: bool) -> list[str]:
    """The errors of this rank where rank 0 has too little memory."""
    errors = []
    with torch.device("meta"):
        huge = nn.Linear(1 << 22, 1 << 20, bias=False)
        large = nn.Linear(1 << 14, 1 << 14, bias=False)
    if limits and dist.get_rank() == 0:
        used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert used is not None
        nbytes = 1024 * int(used[1]) + (1 << 29)
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
    for model in (large,) if limits else (huge,):
        with pytest.raises((MemoryError, RuntimeError)) as error:
            zerocore.shard(model, stage=3, offload=ALL)
        errors.append(f"{type(error.value).__name__}: {error.value}")
    return errors


@pytest.mark.parametrize("limits", [False, True])
def test_too_little_memory_is_an_error_on_all_ranks(limits: bool) -> None:
    (first,), (second,) = run_ranks(refuse_all, 2, limits, fresh=True)
    numel = (1 << 28 if limits else 1 << 42) // 2
    assert f"MemoryError: offload=: this rank wants {16 * numel:,} bytes" in first, first
    assert "available: " in first
    assert ("Cannot allocate memory" in first) == limits
    if limits:
        assert second.startswith("RuntimeError: rank 0 failed: MemoryError: offload="), second


class Reading(Dataset[Tensor]):
    """Looks at a parameter in the process that loads, as one that embeds does."""

    def __init__(self, param: Any, reads: bool) -> None:
        self.param, self.reads = param, reads

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        x = torch.full((16,), float(index))
        if self.reads:
            with torch._C.DisableTorchFunctionSubclass():
                x[0] = self.param.detach().view(-1)[:1].sum()
        return x


def load_forked(offload: Offload | None) -> dict[str, Tensor]:
    """Batches of forked workers, under way while the model trains."""
    model, optimizer = blocks(3, offload)
    step(model, optimizer) if offload else (backward(model), optimizer.step())
    found = {}
    param = next(iter(model.parameters()))
    for reads in (False, True):
        loader = DataLoader(Reading(param, reads), 2, num_workers=1, multiprocessing_context="fork")
        for index, batch in enumerate(loader):
            found[f"{reads} {index}"] = batch.clone()
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            found[f"loss {reads} {index}"] = loss.detach()
    return found


def compare_loads() -> None:
    expected = load_forked(None)
    for offload in (STATES, ALL):
        assert_same_bits(load_forked(offload), expected, str(offload))


def test_a_forked_worker_loads_data_and_reads_parameters() -> None:
    run_ranks(compare_loads, 1)


def test_obtainable_memory(tmp_path: Any) -> None:
    """The machine's free memory and what the process holds, or the limit of a container."""
    assert obtainable_nbytes(1, tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable:  4096 kB\nSwapFree: 1024 kB\n")
    (tmp_path / "proc/self/statm").write_text("1000 2 0 0 0 0 0\n")
    page = resource.getpagesize()
    assert obtainable_nbytes(1, tmp_path) == 5 * 2**20 + 2 * page
    assert obtainable_nbytes(4, tmp_path) == 5 * 2**18 + 2 * page
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for limit, expected in (("max", 5 * 2**19 + 2 * page), (str(2**21), 2**20)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        assert obtainable_nbytes(2, tmp_path) == expected
