"""The GPU of a rank; a second communicator has the options of the first."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zerocore.model import ranks


class LikeNCCL:
    """Options of a torch without NCCL."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config: Any = SimpleNamespace(max_ctas=-1, net_name="", traffic_class=-1)
        self._timeout = timedelta(minutes=10)
        self.group_name, self.split_from = "", None


Options = dist.ProcessGroupNCCL.Options if dist.is_nccl_available() else LikeNCCL


def make_group(name: str, options: Any) -> Any:
    backend = SimpleNamespace(name=lambda: name, options=options)
    return SimpleNamespace(
        group_name=f"first_{name}",
        _get_backend=lambda _: backend,
        _device_types=[torch.device("cpu")],
    )


def sibling_options(name: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made: dict[str, Any] = {}
    monkeypatch.setattr(ranks, "shared_group", lambda *_, **given: made.update(given))
    ranks.sibling_of(make_group(name, options), torch.device("cpu"), [0, 1], "second")
    return made


def test_options_of_nccl_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Options(is_high_priority_stream=True)
    given.config.max_ctas, given.config.net_name, given.config.traffic_class = 8, "IB", 3
    given._timeout, given.group_name = timedelta(seconds=77), "first"
    made = sibling_options("nccl", given, monkeypatch)
    options, config = made["pg_options"], made["pg_options"].config
    assert options is not given and options.is_high_priority_stream
    assert (config.max_ctas, config.net_name, config.traffic_class) == (8, "IB", 3)
    assert options._timeout == made["timeout"] == timedelta(seconds=77)  # torch warns if not
    assert options.group_name == "" and options.split_from is None


def test_other_backends_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sibling_options("gloo", None, monkeypatch)
    assert made["pg_options"] is None and made["timeout"] is None


class Gpus:
    """The answers of torch.cuda on a machine with GPUs; the program has set one, or none."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
        self.current = current
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "set_device", lambda index: setattr(self, "current", index))


@pytest.mark.parametrize(
    ("local_rank", "set_before", "expected"),
    [("3", 0, 3), ("3", 2, 2), ("0", 0, 0), ("5", 0, 0), (None, 0, 0)],
    ids=["launched", "set by the program", "the first", "fewer GPUs than ranks", "not launched"],
)
def test_the_gpu_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, set_before: int, expected: int
) -> None:
    gpus = Gpus(monkeypatch, count=4, current=set_before)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert ranks.local_gpu() == torch.device("cuda", expected)
    assert gpus.current == expected


@pytest.mark.parametrize(
    ("where", "device", "expected"),
    [("cpu", None, False), ("meta", None, True), ("cpu", "cuda", True), ("meta", "cpu", False)],
)
def test_where_parameters_go(
    monkeypatch: pytest.MonkeyPatch, where: str, device: str | None, expected: bool
) -> None:
    model = nn.Linear(2, 2, device=where)
    given = None if device is None else torch.device(device)
    assert not ranks.goes_to_gpu(model, given)  # this machine's torch has none
    Gpus(monkeypatch, count=2)
    assert ranks.goes_to_gpu(model, given) == expected
