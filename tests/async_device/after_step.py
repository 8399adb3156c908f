"""Actions of a program right after an optimizer step, while streams and the worker are late.

`python -m tests.async_device.after_step FIRST COUNT` runs the programs of other seeds: a state on
the host or on disk, random lags of the device's streams, and one action after a step. The truth is
the same program without offload and without lags. `0 300` took 6 minutes on two busy cores and
ended with `up to 299: 0 failures`; without waits for copies 9 of the first 200 failed.
"""

from __future__ import annotations

import gc
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.async_device.training import WIDTH, Block, make_model, start
from tests.distributed.harness import RanksFailed, run_ranks
from tests.distributed.values import own_of
from tests.engine.offloading import (
    ALL,
    ALL_ON_DISK,
    BOTH,
    DISK,
    DISK_BOTH,
    GRADIENTS,
    PARAMETERS,
    PARAMETERS_ON_DISK,
    STATES,
    STATES_ON_DISK,
    adamw,
    torchs,
)
from zerocore.model.state import state_of

NUM_BLOCKS = 3
ROLES = ("compute", "all_gather", "reduce_scatter", "device_to_host", "host_to_device")
OFFLOADS = (  # each with the first stage that has it
    *[(offload, 0) for offload in (STATES, DISK)],
    *[(offload, 2) for offload in (GRADIENTS, BOTH, DISK_BOTH)],
    *[(offload, 3) for offload in (PARAMETERS, ALL, ALL_ON_DISK, STATES_ON_DISK)],
    (PARAMETERS_ON_DISK, 3),
)
NARROW = zerocore.MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A program: its action after a step, and where its states lie."""

    action: str
    stage: int
    is_narrow: bool
    is_ours: bool  # whether the optimizer is zerocore's
    offload: zerocore.Offload | None = None

    @staticmethod
    def of(seed: int) -> Case:
        """Returns the program of a seed; actions take turns."""
        rng = random.Random(f"after a step {seed}")
        action = list(ACTIONS)[seed % len(ACTIONS)]
        while True:
            offload, least = rng.choice([*OFFLOADS, *3 * OFFLOADS[:1]])
            stage = rng.choice([s for s in (0, 1, 2, 3, 3, 3) if s >= least])
            case = Case(
                action,
                stage,
                is_narrow=rng.random() < 0.4,
                is_ours=offload is GRADIENTS or rng.random() < 0.7,
                offload=offload,
            )
            if case.is_allowed():
                return case

    def is_allowed(self) -> bool:
        """Returns False for states on a disk with torch's optimizers or snapshots."""
        assert self.offload is not None
        on_disk = self.offload.states == "disk"
        return not (on_disk and (self.action == "snapshot" or not self.is_ours))

    @property
    def truth(self) -> Case:
        """Returns the same program without offload."""
        return Case(self.action, self.stage, self.is_narrow, self.is_ours)


class Program:
    """A model that is trained on the device."""

    def __init__(self, case: Case, device: torch.device, extension: Any) -> None:
        self.case, self.device, self.extension = case, device, extension
        self.model: Any = zerocore.shard(
            make_model(device, NUM_BLOCKS),
            stage=case.stage,
            units=[Block],
            offload=case.offload,
            mixed_precision=NARROW if case.is_narrow else None,
        )
        make = adamw if case.is_ours else torchs
        self.optimizer: Any = make(self.model.parameters())
        engine = state_of(self.model).engine
        copies = case.offload is not None
        roles = [role for role in ROLES[1:] if copies or "host" not in role]
        self.streams = {role: extension.id_of_handle(engine.stream_handle(role)) for role in roles}
        self.streams["compute"] = extension.current_stream()
        self.num_steps = 0

    def step(self) -> Tensor:
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + dist.get_rank())
        x = x.to(self.device) / (1 + self.num_steps)
        loss: Tensor = (self.model(x) - x.flip(1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return loss.detach()

    def set_lags(self, rng: random.Random | None) -> None:
        """Makes some streams late; none without ``rng``."""
        for role, stream in self.streams.items():
            often = 0.6 if role == "host_to_device" else 0.25
            late = rng is not None and rng.random() < often
            self.extension.set_lag(stream, rng.choice([500, 3_000, 15_000]) if late else 0)

    def weights(self) -> Found:
        return zerocore.full_state_dict(self.model, rank0_only=False)


def outputs(program: Program, model: Any) -> Found:
    """Returns a model's output, which compares weights that only layers see."""
    with torch.no_grad():
        return {"output": model(torch.ones(2, WIDTH, device=program.device))}


def cloned(values: Any) -> Found:
    return {name: value.detach().clone() for name, value in values.items()}


# -- actions --------------------------------------------------------------------------------


def park(program: Program) -> Found:
    with zerocore.parked(program.model, program.optimizer):
        pass
    return {}


def park_and_export(program: Program) -> Found:
    with zerocore.parked(program.model, program.optimizer):
        return export(program)


def export(program: Program) -> Found:
    found: Found = {}
    for bucket in zerocore.export(program.model, max_bytes=3000):
        found |= cloned(bucket)
        bucket.release()
    return found


def clone(program: Program) -> Found:
    def make() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))

    copied = zerocore.clone_sharded(program.model, make)
    program.step()
    zerocore.weights.copy_weights(program.model, copied)
    return outputs(program, copied) | zerocore.full_state_dict(copied, rank0_only=False)


def end(program: Program) -> Found:
    """Frees the model, and returns whether tensors that reuse its memory keep their values."""
    engine = state_of(program.model).engine
    sizes = [m.nbytes for unit in range(NUM_BLOCKS) for m in engine.device_memory(unit)]
    del engine
    program.model = program.optimizer = None
    gc.collect()
    made = [torch.ones(n, dtype=torch.uint8, device=program.device) for n in 4 * sizes]
    program.extension.synchronize()
    return {"others": torch.tensor([bool((t.cpu() == 1).all()) for t in made]).all()}


def full_states(program: Program) -> Found:
    states = zerocore.full_optimizer_state_dict(program.optimizer, rank0_only=False)["state"]
    return {f"{i}.{key}": v.clone() for i, of in states.items() for key, v in of.items()}


def local_states(program: Program) -> Found:
    state = program.model.state_dict()
    return {name: own_of(value).clone() for name, value in state.items()}


def save_and_load(program: Program) -> Found:
    folder = [tempfile.mkdtemp(prefix="after-step-")]
    dist.broadcast_object_list(folder)
    checkpoints = zerocore.Checkpoints(folder[0], program.model, program.optimizer)
    checkpoints.save(1)
    losses = {"between": program.step()}
    checkpoints.load()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return losses


def average(program: Program) -> Found:
    ema = zerocore.weights.EMA(program.model.parameters(), decay=0.5)
    program.step()
    ema.update()
    with ema.swapped():
        found = outputs(program, program.model)
    return found


def heal(program: Program) -> Found:
    snap = zerocore.snapshot(program.model, program.optimizer)
    saved = snap.state_dict()
    losses = {"between": program.step()}
    snap.load_state_dict(saved)
    return losses


def load(program: Program) -> Found:
    halves = {name: value * 0.5 for name, value in program.weights().items()}
    program.step()
    zerocore.load_full_state_dict(program.model, halves)
    return outputs(program, program.model)


def write_unsharded(program: Program) -> Found:
    with zerocore.unsharded(program.model, write_back=True), torch.no_grad():
        found = cloned(dict(program.model.named_parameters()))
        for param in program.model.parameters():
            param.mul_(0.5)
    return found


def write_shards(program: Program) -> Found:
    with torch.no_grad():
        for param in program.model.parameters():
            param.mul_(0.5)
    return {}


def step_again(program: Program) -> Found:
    return {"loss": program.step()}


def evaluate(program: Program) -> Found:
    return outputs(program, program.model)


ACTIONS: dict[str, Callable[[Program], Found]] = {
    "parked": park,
    "end": end,
    "clone": clone,
    "park and export": park_and_export,
    "export": export,
    "full states": full_states,
    "local states": local_states,
    "save and load": save_and_load,
    "averages": average,
    "snapshot": heal,
    "load": load,
    "unsharded": write_unsharded,
    "shards": write_shards,
    "step again": step_again,
    "evaluation": evaluate,
}


# -- runs -----------------------------------------------------------------------------------


def run(case: Case, device: torch.device, extension: Any, seed: int | None) -> Found:
    """Returns the program's values. With a seed its streams are late around the action."""
    rng = None if seed is None else random.Random(f"lags {seed}")
    extension.set_delays(seed or 0, 0.0 if rng is None else rng.choice([0.0, 0.1, 0.3]), 400)
    program = Program(case, device, extension)
    found = {"first": program.step()}
    program.set_lags(rng)
    found["second"] = program.step()
    if rng is None:
        extension.synchronize()
    found |= {f"{case.action}: {k}": v for k, v in ACTIONS[case.action](program).items()}
    if program.model is not None:
        found["third"] = program.step()
        found |= outputs(program, program.model) | program.weights()
    program.set_lags(None)
    return {name: value.cpu() for name, value in found.items()}


def check_seeds(seeds: Sequence[int]) -> list[str]:
    """Returns a line for each seed whose values differ from the truth."""
    device, extension = start(on_device=True)

    @cache
    def right(truth: Case) -> Found:
        return run(truth, device, extension, None)

    wrong = []
    for seed in seeds:
        case = Case.of(seed)
        print(seed, case, flush=True)
        expected, found = right(case.truth), run(case, device, extension, seed)
        assert found.keys() == expected.keys()
        if names := [name for name in found if not torch.equal(found[name], expected[name])]:
            wrong.append(f"{seed}: {case}: {', '.join(names)} of {len(found)} differ")
    return wrong


def check(seeds: Sequence[int]) -> list[str]:
    """Runs check_seeds() on two ranks and returns the lines of both."""
    ranks = run_ranks(check_seeds, 2, seeds, launch="torchrun", timeout=300)
    return sorted({line for rank in ranks for line in rank})


def main() -> bool:
    """Prints a line for each seed that goes wrong; returns whether all went well."""
    first, count = (int(each) for each in sys.argv[1:])
    failures = 0
    for begin in range(first, first + count, 50):
        seeds = range(begin, min(begin + 50, first + count))
        try:
            wrong = check(seeds)
        except RanksFailed as error:
            wrong = [f"{seeds}: {error}"]
        failures += len(wrong)
        print(*wrong, f"up to {seeds[-1]}: {failures} failures", sep="\n", flush=True)
    return failures == 0


if __name__ == "__main__":
    sys.exit(not main())
