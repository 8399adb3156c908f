"""Gradients on the host, torch's optimizers there, a disk: the same bits as without offload."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.async_device.training import WIDTH, Block, make_model, start
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.values import own_of
from tests.engine.offloading import (
    ALL,
    ALL_ON_DISK,
    BF16,
    BOTH,
    DISK_BOTH,
    GRADIENTS,
    PARAMETERS,
    STATES,
    adamw,
    assert_same_bits,
    torchs,
)
from zerocore import Offload
from zerocore.model.state import state_of

Results = dict[str, Tensor]
Make = Callable[..., torch.optim.Optimizer]


def batch(device: torch.device, index: int) -> Tensor:
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + dist.get_rank()) / (1 + index)
    return x.to(device)


def backward(model: Any, device: torch.device, index: int) -> Tensor:
    x = batch(device, index)
    loss: Tensor = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    return loss.detach()


def clipped(params: Any) -> torch.optim.Optimizer:
    return adamw(params, clip_grad_norm=0.5)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def foreach(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, foreach=True)


def muon(params: Any) -> torch.optim.Optimizer:
    return zerocore.matrices.Muon(params, lr=0.02)


def owned(params: Any) -> torch.optim.Optimizer:
    return zerocore.matrices.owned(torch.optim.Adafactor, params, lr=0.02)


def train(
    device: torch.device,
    stage: int,
    offload: Offload | None,
    *,
    make: Make = adamw,
    syncs: tuple[bool, ...] = (True,),
    clips: bool = False,
    scales: bool = False,
    by_closure: bool = False,
    changes: bool = False,
    **options: Any,
) -> Results:
    """Returns losses, gradients, weights and states; ``syncs`` has a flag per micro-batch."""
    model = zerocore.shard(
        make_model(device), stage=stage, units=[Block], offload=offload, **options
    )
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
    found: Results = {}
    for step in range(3):

        def compute(step: int = step) -> Tensor:
            for index, sync in enumerate(syncs):
                with nullcontext() if sync else zerocore.no_sync(model):
                    loss = backward(model, device, 10 * step + index)
            return loss

        if by_closure:
            found[f"loss {step}"] = optimizer.step(compute)  # type: ignore[arg-type]
        else:
            found[f"loss {step}"] = compute()
            if changes:
                next(iter(model.parameters())).grad.mul_(0.5)
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if scales:
                scaler.scale(torch.zeros(()))
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        if step == 1:
            for name, param in model.named_parameters():
                found[f"grad {name}"] = own_of(param.grad).clone()
        optimizer.zero_grad(set_to_none=step != 1)
    states = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
    found |= zerocore.full_state_dict(model, rank0_only=False)
    found |= {f"{i}.{key}": v for i, of in states.items() for key, v in of.items()}
    return {name: value.cpu() for name, value in found.items()}


TWICE = (False, True)
# Gradients are summed in float32, which both backends do alike, and kept in bfloat16.
WIRED = zerocore.MixedPrecision(
    torch.bfloat16, torch.float32, grad_dtype=torch.bfloat16, output_dtype=torch.float32
)
SUMMED = zerocore.MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)
GRADIENTS_ON_HOST: dict[str, tuple[int, Offload, dict[str, Any]]] = {
    "gradients": (2, GRADIENTS, {}),
    "gradients, clipped": (3, GRADIENTS, {"make": clipped, "syncs": TWICE}),
    "both, clipped": (3, BOTH, {"make": clipped}),
    "all, every reduction": (3, ALL, {"syncs": (True, True), "changes": True}),
    "both, accumulate": (2, BOTH, {"syncs": TWICE, "make": clipped}),
    "both, full sums": (
        3,
        BOTH,
        {"syncs": TWICE, "communication": zerocore.Communication(accumulate="full")},
    ),
    "both, bf16": (3, BOTH, {"mixed_precision": WIRED, "make": clipped, "syncs": TWICE}),
    "all, scaled": (3, ALL, {"scales": True}),
    "both, clipped by torch": (2, BOTH, {"clips": True}),
    "both, torch's AdamW": (3, BOTH, {"make": torchs, "clips": True}),
}
TORCH_ON_HOST: dict[str, tuple[int, Offload, dict[str, Any]]] = {
    "SGD": (0, STATES, {"make": sgd}),
    "AdamW": (3, STATES, {"make": torchs, "clips": True}),
    "foreach, bf16": (2, STATES, {"make": foreach, "mixed_precision": SUMMED}),
    "parameters": (3, PARAMETERS, {"make": sgd, "syncs": TWICE}),
    "closure": (3, STATES, {"make": torchs, "by_closure": True}),
    "changed": (1, STATES, {"make": sgd, "changes": True}),
}
DISKS: dict[str, tuple[int, Offload, dict[str, Any]]] = {
    "states": (3, DISK_BOTH, {"make": clipped}),
    "all": (3, ALL_ON_DISK, {}),
}
MATRICES: dict[str, tuple[int, Offload, dict[str, Any]]] = {
    "Muon": (3, STATES, {"make": muon}),
    "Muon, all, bf16": (3, ALL, {"make": muon, "mixed_precision": SUMMED}),
    "Muon, whole": (0, STATES, {"make": muon}),
    "Muon, both": (2, BOTH, {"make": muon, "syncs": TWICE, "clips": True}),
    "owned": (3, STATES, {"make": owned}),
    "owned, both, bf16": (2, BOTH, {"make": owned, "mixed_precision": SUMMED}),
}
RUNS = {
    "gradients": GRADIENTS_ON_HOST,
    "torch": TORCH_ON_HOST,
    "disk": DISKS,
    "matrices": MATRICES,
}


def train_all(on_device: bool, kind: str) -> dict[str, Results]:
    """Trains each run: on the device with late tasks, on the CPU without offload."""
    device, extension = start(on_device)
    found = {}
    for number, (name, (stage, offload, options)) in enumerate(RUNS[kind].items()):
        print(name, flush=True)
        if on_device:
            extension.set_delays(number, 0.3 if number % 2 else 0.0, 400)
        found[name] = train(device, stage, offload if on_device else None, **options)
    return found


def compare(kind: str, num_ranks: int) -> None:
    expected = run_ranks(train_all, num_ranks, False, kind, launch="torchrun", timeout=150)
    found = run_ranks(train_all, num_ranks, True, kind, launch="torchrun", timeout=150)
    for ours, plain in zip(found, expected, strict=True):
        for name, results in plain.items():
            assert_same_bits(ours[name], results, name)


@pytest.mark.parametrize("num_ranks", [*by_night(1, 2), 3])
def test_gradients_on_the_host_keep_the_bits(num_ranks: int) -> None:
    compare("gradients", num_ranks)


def with_bfloat16_on_the_wire() -> None:
    """Compares with the same device without offload: backends may round reductions differently."""
    device, _ = start(on_device=True)
    for stage, offload, make in ((2, GRADIENTS, adamw), (3, ALL, clipped)):
        for syncs in ((True,), (True, True), TWICE):
            ways = [
                train(device, stage, each, mixed_precision=BF16, make=make, syncs=syncs)
                for each in (None, offload)
            ]
            assert_same_bits(ways[1], ways[0], f"stage {stage}, {offload}, {syncs}")


def test_gradients_sent_in_bfloat16_keep_the_bits() -> None:
    run_ranks(with_bfloat16_on_the_wire, 2, launch="torchrun", timeout=150)


def test_torchs_optimizers_on_the_host_keep_the_bits() -> None:
    compare("torch", 2)


def test_whole_matrices_keep_the_bits() -> None:
    compare("matrices", 2)


def test_a_disk_keeps_the_bits() -> None:
    compare("disk", 2)


def forwards_around_a_change(on_device: bool) -> list[Tensor]:
    """Parameters on the host change right after a forward whose loads are late."""
    device, extension = start(on_device)
    offload = PARAMETERS if on_device else None
    model = zerocore.shard(make_model(device), stage=3, units=[Block], offload=offload)
    if on_device:
        handle = state_of(model).engine.stream_handle("all_gather")
        extension.set_lag(extension.id_of_handle(handle), 20_000)
    found = []
    with torch.no_grad():
        for _ in range(2):
            found.append(model(batch(device, 0)))
            for param in model.parameters():
                param.mul_(0.5)
    return [output.cpu() for output in found]


def test_parameters_wait_for_their_loads() -> None:
    expected = run_ranks(forwards_around_a_change, 2, False, launch="torchrun")
    found = run_ranks(forwards_around_a_change, 2, True, launch="torchrun")
    for ours, plain in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, plain))


def check_memory() -> None:
    """The device keeps no gradient; a step takes the planned bytes and transfers."""
    device, _ = start(on_device=True)
    for stage, offload, precision in (
        (2, GRADIENTS, None),
        (2, BOTH, BF16),
        (3, BOTH, None),
        (3, ALL, BF16),
    ):
        for micro_batches in (1, 2):
            model = zerocore.shard(
                make_model(device),
                stage=stage,
                units=[Block],
                offload=offload,
                mixed_precision=precision,
            )
            optimizer = adamw(model.parameters())
            for step in range(3):
                context = zerocore.reporting.record_events(model) if step == 2 else nullcontext([])
                with context as events:
                    for index in range(micro_batches):
                        last = index == micro_batches - 1
                        with nullcontext() if last else zerocore.no_sync(model):
                            backward(model, device, index)
                    optimizer.step()
                optimizer.zero_grad()
            what = f"stage {stage}, {offload}, {precision}, {micro_batches} micro-batches"
            predicted = zerocore.planning.predict_memory(model, micro_batches=micro_batches)
            assert predicted == zerocore.memory_usage(model, optimizer), what
            assert predicted.gradients == 0 < predicted.host_gradients, what
            memory = state_of(model).engine.host_memory
            kept_on_device = predicted.host_optimizer == 0
            assert memory is not None and memory.nbytes == predicted.host, what
            assert kept_on_device == (offload.states == "device"), what
            planned = zerocore.planning.predict_events(model, micro_batches)
            sent = [event for event in planned if event[0] == "to_host"]
            found = [(e.op, e.unit, e.nbytes) for e in events if e.op == "to_host"]
            assert sent == found != [], what


@pytest.mark.parametrize("num_ranks", [*by_night(1), 2])
def test_planned_bytes_are_those_taken(num_ranks: int) -> None:
    run_ranks(check_memory, num_ranks, launch="torchrun", timeout=120)


def wait_on_threads() -> dict[str, int]:
    device, extension = start(on_device=True)
    for offload in (GRADIENTS, BOTH, ALL):
        model = zerocore.shard(make_model(device), stage=3, units=[Block], offload=offload)
        optimizer = adamw(model.parameters())
        for step in range(2):
            backward(model, device, step)
            optimizer.step()
    return dict(extension.host_waits())


def test_threads_wait_for_the_device_of_their_model() -> None:
    for waits in run_ranks(wait_on_threads, 2, launch="torchrun"):
        assert waits["for an event"] > 0 and "for an event, without a device" not in waits, waits


LATE_S = 0.3  # how late each copy of a gradient to the host is


def steps_with_late_copies() -> list[tuple[float, int, int]]:
    """Returns for each step the seconds until its backward had computed, and in ns when the next
    forward issued its first gather, and when the last unit was updated."""
    device, extension = start(on_device=True)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to(device)
    model = zerocore.shard(layers, stage=3, units=[nn.Linear], offload=STATES)
    optimizer: Any = adamw(model.parameters())
    stream = extension.id_of_handle(state_of(model).engine.stream_handle("device_to_host"))
    inputs, found = torch.ones(2, 2048, device=device), []
    for step in range(4):
        loss = model(inputs).square().mean()
        optimizer.synchronize()
        torch.get_device_module(device).synchronize()
        dist.barrier()
        extension.set_lag(stream, int(LATE_S * 1e6) if step > 0 else 0)
        begin = time.perf_counter()
        loss.backward()
        torch.get_device_module(device).current_stream().synchronize()
        seconds = time.perf_counter() - begin
        with zerocore.reporting.record_events(model) as events, torch.no_grad():
            optimizer.step()
            model(inputs)
            optimizer.synchronize()
        optimizer.zero_grad()
        gather = next(event for event in events if event.op == "all_gather")
        update = [event for event in events if event.op == "host_update"][-1]
        found.append((seconds, gather.issued_ns, update.done_ns))
    return found[1:]  # the first step allocates memory


def test_copies_and_updates_go_on_beside_the_backward_and_the_forward() -> None:
    """Gradients of four units are copied one after the other; a loaded host may be late."""
    for steps in run_ranks(steps_with_late_copies, 2, launch="torchrun"):
        assert any(seconds < 4 * LATE_S for seconds, _, _ in steps), steps
        assert any(gathers < updated for _, gathers, updated in steps), steps


class Counted:
    """An engine that counts how often its host was asked to wait for all updates."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.num_waits = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def synchronize(self) -> None:
        self.num_waits += 1
        self.engine.synchronize()


def sample_updates() -> None:
    """Steps 1 and 17 are traced; a logger asks for figures right after each update."""
    device, _ = start(on_device=True)
    model = zerocore.shard(make_model(device), stage=3, units=[Block], offload=BOTH)
    optimizer, meters = adamw(model.parameters()), state_of(model).meters
    meters._engine = engine = Counted(meters._engine)  # type: ignore[assignment]
    traced = []
    for step in range(20):
        backward(model, device, step)
        optimizer.step()
        optimizer.zero_grad()
        traced.append("zerocore/exposed_ms" in zerocore.metrics(model))
    assert engine.num_waits == 0 and traced == [step >= 2 for step in range(20)]
    steps = meters.steps()
    records = {step.number: step.records for step in steps if step.records is not None}
    assert list(records) == [1, 17]
    for each in records.values():
        updates = [record for record in each if record.op == "host_update"]
        assert len(updates) == 4 and all(record.done_ns > record.issued_ns for record in updates)


def test_a_traced_step_waits_for_no_update() -> None:
    run_ranks(sample_updates, 2, launch="torchrun")


def refuse() -> str:
    device, _ = start(on_device=True)
    model = zerocore.shard(make_model(device), stage=2, units=[Block], offload=GRADIENTS)
    optimizer = torchs(model.parameters())
    backward(model, device, 0)
    with pytest.raises(ValueError, match="AdamW updates parameters on") as error:
        optimizer.step()
    return str(error.value)


def test_an_optimizer_whose_parameters_stay_is_refused() -> None:
    first, second = run_ranks(refuse, 2, launch="torchrun")
    assert first == second and "use states='cpu', or zerocore.optim.AdamW" in first
