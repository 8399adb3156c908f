"""A second communicator has the options of the first."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
