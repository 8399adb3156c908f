"""From the third step on the device allocates nothing and the host waits for nothing.

Memory is moved and set by the runtime in one place only: on the emulated link, which receives a
bucket as copies of the shard. Packing gradients is a kernel, gathers and
reductions write where their result is used, and the slots of the pool are never cleared.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, record_function

import zerocore
from bench.kernels.timeline import DeviceWork, Timeline
from tests.gpu.profiled import timeline_of
from tests.gpu.training import (
    PRECISIONS,
    VARIANTS,
    WORLD_SIZE,
    Stack,
    Variant,
    make_optimizer,
    peers,
    run_step,
    shard,
)
from zerocore._C import allocator_counts
from zerocore.model.state import state_of

NUM_STEPS = 2
# Calls that make the host wait for the device. None is needed in a step.
WAITING_CALLS = {
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemset",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cuMemAlloc",
    "cuMemFree",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
}
DEVICE_COUNTERS = ("num_device_alloc", "num_device_free", "num_alloc_retries")
BY_NAME = {variant.name: variant for variant in VARIANTS}


def record_steps(model: Stack, variant: Variant) -> Timeline:
    """The timeline of some steps after two to warm up."""
    optimizer = make_optimizer(model)

    def run(num_steps: int) -> None:
        for step in range(num_steps):
            run_step(model, optimizer, step, variant.micro_batches)

    def recorded() -> None:
        with record_function("steps"):
            run(NUM_STEPS)

    run(2)
    return timeline_of(recorded, ProfilerActivity.CPU, ProfilerActivity.CUDA)


def moved(timeline: Timeline, streams: set[int] | None = None) -> Counter[tuple[str, int]]:
    """How often which memory was copied or set, by kind and bytes."""
    return Counter(
        (work.name, work.nbytes)
        for work in timeline.work
        if work.kind != "kernel" and (streams is None or work.stream in streams)
    )


def is_of_the_link(work: DeviceWork) -> bool:
    return work.kind == "kernel" and "hold_kernel" in work.name


def received_nbytes(model: Stack, stage: int, micro_batches: int) -> int:
    """Bytes that the emulated link writes for the gathers of `NUM_STEPS` steps."""
    with zerocore.reporting.record_events(model) as events:
        run_step(model, make_optimizer(model), 0, micro_batches)
    gathered = sum(event.nbytes for event in events if event.op == "all_gather")
    # Stages 1 and 2 gather in place: the rank's own slice is there.
    num_slices = WORLD_SIZE if stage == 3 else WORLD_SIZE - 1
    return gathered // WORLD_SIZE * num_slices * NUM_STEPS


@pytest.mark.parametrize("name", ["plain", "all", "accumulates_full"])
def test_host_and_copies(cuda: torch.device, stage: int, name: str) -> None:
    variant = BY_NAME[name]
    plain = record_steps(Stack(variant).to(cuda), variant)
    with peers():
        model = shard(Stack(variant).to(cuda), stage, accumulate=variant.accumulate)
        timeline = record_steps(model, variant)
        expected = received_nbytes(model, stage, variant.micro_batches)
    # The driver's functions may carry the suffix of a version.
    called = {name.split("_")[0] for name in timeline.calls_within("steps")}
    assert not WAITING_CALLS & called
    assert any("Launch" in name for name in called)
    link = {work.stream for work in timeline.work if is_of_the_link(work)}
    others = {work.stream for work in timeline.work} - link
    assert link and others
    # The model's and the optimizer's own work is in the plain run, too.
    assert moved(timeline, others) == moved(plain)
    on_link = moved(timeline, link)
    assert all("DtoD" in kind for kind, _ in on_link), on_link
    assert (expected > 0) == (stage > 0)
    # The runtime makes one copy a slice, or fewer; a kernel that copies has no count of bytes.
    nbytes = sum(nbytes * count for (_, nbytes), count in on_link.items())
    assert nbytes in (expected, 0), on_link
    assert nbytes > 0 or stage == 0 or copy_kernels(timeline, link)


def copy_kernels(timeline: Timeline, streams: set[int]) -> int:
    """Kernels on these streams that are torch's copies."""
    return sum("copy" in work.name for work in timeline.work if work.stream in streams)


def clip_by_torch(params: list[torch.Tensor], norm: float) -> None:
    """The function that is in torch when this runs: the first ``shard`` replaces it."""
    torch.nn.utils.clip_grad_norm_(params, norm)


CLIPS = (None, clip_by_torch, zerocore.clip_grad_norm_)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("variant", (*VARIANTS, *PRECISIONS), ids=lambda variant: variant.name)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nothing_waits_or_allocates(
    cuda: torch.device, stage: int, variant: Variant, clip: object
) -> None:
    module = torch.get_device_module(cuda)
    with peers():
        model = shard(Stack(variant).to(cuda), stage, accumulate=variant.accumulate)
        engine = state_of(model).engine
        optimizer = make_optimizer(model)

        def pause(place: str) -> None:
            if place == "step" and callable(clip):
                clip(list(model.parameters()), 0.1)

        model.pause = pause
        for step in range(2):
            run_step(model, optimizer, step, variant.micro_batches)
        module.synchronize()
        before = module.memory_stats(cuda)
        slots = engine.pool_stats.num_allocations
        module.set_sync_debug_mode("error")
        for step in range(3):
            run_step(model, optimizer, step, variant.micro_batches)
        module.set_sync_debug_mode("default")
        module.synchronize()
        after = module.memory_stats(cuda)
        assert {k: after[k] for k in DEVICE_COUNTERS} == {k: before[k] for k in DEVICE_COUNTERS}
        assert engine.pool_stats.num_allocations == slots
        assert engine.pool_stats.in_use_nbytes == 0
        # The report counts the same.
        counts = allocator_counts(str(cuda))
        assert counts is not None
        assert counts.num_device_allocations == after["num_device_alloc"]
        assert counts.num_retries == after["num_alloc_retries"]
        last = zerocore.report(model).steps[-1]
        assert (last.num_device_allocations, last.num_retries, last.num_pool_allocations) == (
            0,
            0,
            0,
        )
