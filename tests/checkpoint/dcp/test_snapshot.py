"""Copies made ahead: their values are those of the moment, their memory is within the budget."""

from __future__ import annotations

import threading

import pytest
import torch

from zerocore.checkpoint.dcp.snapshot import StreamedCopy

CPU = torch.device("cpu")


def start(copy: StreamedCopy) -> threading.Thread:
    thread = threading.Thread(target=copy.run)
    thread.start()
    return thread


def test_the_budget_holds_and_nothing_is_lost() -> None:
    values = torch.arange(1000.0)
    copy = StreamedCopy(values.split(10), 120, CPU, lambda: None)
    thread = start(copy)
    taken = []
    for part in copy:
        taken.append(part.clone())
        assert part.data_ptr() != values.data_ptr()
    thread.join()
    assert torch.equal(torch.cat(taken), values)
    assert 40 <= copy.peak_nbytes <= 120


def test_the_step_waits_for_what_is_not_copied() -> None:
    values = torch.zeros(100)
    copy = StreamedCopy(values.split(10), 80, CPU, lambda: None)
    thread, taken = start(copy), []

    def take() -> None:
        for part in copy:
            taken.append(part.sum().item())

    taker = threading.Thread(target=take)
    taker.start()
    copy.wait_read()
    values.fill_(1.0)  # as a step does
    for each in (thread, taker):
        each.join()
    assert taken == [0.0] * 10


def test_nobody_waits_for_a_save_that_failed() -> None:
    copy = StreamedCopy(torch.zeros(100).split(10), 80, CPU, lambda: None)
    thread = start(copy)
    copy.close()
    copy.wait_read()
    thread.join()


def test_a_change_meanwhile_is_an_error() -> None:
    def check() -> None:
        raise RuntimeError("changed")

    copy = StreamedCopy(torch.zeros(10).split(5), 80, CPU, check)
    thread = start(copy)
    with pytest.raises(RuntimeError, match="changed"):
        list(copy)
    copy.wait_read()
    thread.join()
