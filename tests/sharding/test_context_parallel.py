"""Sequences that are cut over ranks, beside one process; what is said of the mesh's names."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context.py"
CLOSE = {"rtol": 2e-5, "atol": 2e-7}


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("context_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(stage: int, parts: int) -> None:
    """Three steps of SGD: gradients are those of one process with whole sequences."""
    example: Any = load_example()
    replicas = dist.get_world_size() // parts
    mesh = init_device_mesh("cpu", (replicas, parts), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = example.Model(mesh.get_group("cp"))
    torch.manual_seed(0)
    truth = example.Model()
    group = mesh["dp", "cp"]._flatten("dp_cp")
    zerocore.shard(
        model,
        stage=stage,
        group=group,
        communication=zerocore.Communication(gradient_divide_factor=1),
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, truth)]
    text = torch.arange(2000) % 251
    replica, part = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    num_tokens = replicas * 4 * example.LENGTH
    for step in range(3):
        batches = [example.batch_of(text, each, step) for each in range(replicas)]
        example.loss_of(model, batches[replica], part, parts, num_tokens).backward()
        for batch in batches:
            example.loss_of(truth, batch, 0, 1, num_tokens).backward()
        for (name, own), whole in zip(model.named_parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(full_of(own.grad), whole.grad, msg=name, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.one_by_day
@pytest.mark.parametrize("parts", [2, 4])
def test_gradients_are_those_of_whole_sequences(stage: int, parts: int) -> None:
    run_ranks(train, 4, stage, parts)


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def said_of(names: tuple[str, ...], shape: tuple[int, ...], **options: Any) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    handler = Lines()
    logging.getLogger("zerocore").addHandler(handler)
    try:
        zerocore.shard(nn.Linear(4, 4), group=mesh, **options)
    finally:
        logging.getLogger("zerocore").removeHandler(handler)
    return handler.texts


def test_what_is_said_of_names() -> None:
    texts = run_ranks(said_of, 2, ("dp", "cp"), (1, 2))
    assert "2-D mesh ('dp', 'cp') is taken as 1 replicas of 2 shards" in texts[0][0]
    assert texts[1] == []  # the first rank says it
    [text] = run_ranks(said_of, 2, ("dp_cp",), (2,))[0]
    assert "gradient_divide_factor=1" in text
    [text] = run_ranks(said_of, 2, ("tp",), (2,))[0]
    assert "ranks of dimension 'tp' seem to hold different parts of the model" in text
    for names, shape in ((("dp",), (2,)), (("dp_replicate", "dp_shard"), (1, 2))):
        assert run_ranks(said_of, 2, names, shape) == [[], []]
    assert run_ranks(factor_given, 2) == [[], []]


def factor_given() -> list[str]:
    return said_of(("dp_cp",), (2,), communication=zerocore.Communication(gradient_divide_factor=1))
