"""Rows of the table of torchtitan's runs, without torchtitan."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.integrations import titan


def _raise() -> None:
    raise ValueError("no such parallelism")


def _train(monkeypatch: pytest.MonkeyPatch, zerocore: Any, resumed: Any) -> None:
    """In place of torchtitan: FSDP2 trains, the others call what they are given."""

    def train(case: str, name: str, folder: str, *options: str, **kwargs: Any) -> list[float]:
        if name == "torch":
            return [4.0, 3.0, 2.0, 1.0, 9.0, 8.0, 7.0, 6.0]
        call = resumed if "--checkpoint.load-step=3" in options else zerocore
        figures: list[float] = call()
        return figures

    monkeypatch.setattr(titan, "train", train)


def _hang() -> Any:
    return run_ranks(time.sleep, 1, 60, launch="none", timeout=0.5, fresh=True)


def _fail() -> Any:
    return run_ranks(_raise, 1, launch="none")


def test_a_run_that_ends_late_is_a_cell_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that times out has no error to show."""
    _train(monkeypatch, _hang, _hang)
    assert titan.row("llama3-fsdp", "", []) == [
        *("llama3-fsdp", "4", "1.00000000", "rank 0 did not end", "", "")
    ]


def test_a_rank_that_raises_says_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of its traceback."""
    _train(monkeypatch, _fail, _fail)
    assert titan.row("llama3-fsdp", "", [])[3] == "ValueError: no such parallelism"


def test_a_resume_that_ends_late_keeps_the_rest_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of both runs and their difference stay."""
    _train(monkeypatch, lambda: [4.0, 3.0, 2.0, 1.1, 9.0, 8.0, 7.0, 6.0], _hang)
    assert titan.row("llama3-fsdp", "", []) == [
        *("llama3-fsdp", "4", "1.00000000", "1.10000000", "1.0e-01", "rank 0 did not end")
    ]


def test_a_run_without_steps_behind_its_checkpoint_is_not_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of three steps end at their checkpoint."""
    three = [3.0, 2.0, 1.0, 9.0, 8.0, 7.0]
    monkeypatch.setattr(titan, "train", lambda *_, **__: three)
    assert titan.row("llama3-fsdp", "", []) == [
        *("llama3-fsdp", "3", "1.00000000", "1.00000000", "none", "")
    ]
