"""zerocore.optim.Muon: the bits of torch.optim.Muon in one process, at every stage."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.distributed.harness import run_ranks
from tests.distributed.whole_matrices import (
    assert_equal,
    full_parameters,
    make_muon,
    train_by_torch,
    train_sharded,
)

STAGES = (0, 1, 2, 3)
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"lr": 0.01, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "ns_steps": 3},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (2.0, -1.5, 0.5)},
]


def train_all(stages: tuple[int, ...], all_options: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for options in all_options:
        expected = train_by_torch(4, **options)
        for stage in stages:
            print(stage, options, flush=True)
            model, _ = train_sharded(partial(make_muon, **options), 4, stage=stage)
            assert_equal(full_parameters(model), expected)


def test_steps_are_those_of_one_process(world_size: int) -> None:
    options = OPTIONS if world_size == 2 else OPTIONS[:1]
    run_ranks(train_all, world_size, STAGES, options)
