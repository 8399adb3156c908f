"""The mode that works out an operator once finds what a FakeTensorMode finds, with less work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.by_night import by_day
from tests.zoo import CASES
from zerocore.model.units import choose_units
from zerocore.planning import modes
from zerocore.planning.activations import Activations, record
from zerocore.planning.modes import RepeatingFakeMode, fake_copy, fake_like


def figures(run: Activations) -> tuple[object, ...]:
    order = [(event.enter, event.unit, event.needs_backward) for event in run.order]
    return order, run.backward, run.saved_nbytes, run.live_nbytes, run.flops, run.unused


def outcome(run: Callable[[], Activations]) -> tuple[object, ...]:
    """The figures, or the error of a model that needs data."""
    try:
        return figures(run())
    except Exception as error:
        return type(error), str(error)


# By day each other model, in one of the two ways.
BY_DAY = [(name, bool(number % 4)) for number, name in enumerate(CASES) if number % 2 == 0]


@pytest.mark.parametrize(("name", "checkpointing"), by_day(product(CASES, (False, True)), BY_DAY))
def test_figures_are_those_of_a_fake_tensor_mode(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    case = CASES[name]
    model = case.seeded_build()
    run = partial(
        record,
        model,
        choose_units(model, case.units),
        case.seeded_batch(0, 0, 3),
        case.loss,
        checkpointing=checkpointing,
    )
    outcome(run)  # autograd orders ties in the first backward of a process in another way
    found = outcome(run)
    monkeypatch.setattr(modes, "_kind_of", lambda _: modes._OTHER)
    assert found == outcome(run)


def worked_out(num_blocks: int) -> int:
    """How often the FakeTensorMode is asked about a forward and backward."""
    dispatch, asked = FakeTensorMode.dispatch, []

    def ask(*args: Any) -> Any:
        asked.append(args)
        return dispatch(*args)

    blocks = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(num_blocks))
    model = nn.Sequential(*blocks)
    with mock.patch.object(FakeTensorMode, "dispatch", ask), RepeatingFakeMode() as mode:
        fake_copy(model, mode, None)(fake_like(torch.empty(3, 8))).sum().backward()
    return len(asked)


def test_equal_blocks_are_worked_out_once() -> None:
    worked_out(2)  # decompositions ask, too, until torch's own cache has their results
    assert worked_out(8) == worked_out(2)


def test_one_true_and_a_float_are_different_arguments() -> None:
    with RepeatingFakeMode():
        whole = fake_like(torch.zeros(2, dtype=torch.long))
        assert [(whole * factor).dtype for factor in (1, 1.0)] == [torch.long, torch.float32]


def test_results_share_storages_as_they_would() -> None:
    """Views are of what they are views of; new tensors of equal shapes are not one."""

    def storage(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    with RepeatingFakeMode():
        x = fake_like(torch.zeros(4, 2))
        for _ in range(2):
            doubled = x + x
            assert storage(doubled.t()) == storage(doubled) != storage(x)
            assert [storage(part) for part in x.split(1)] == [storage(x)] * 4


def test_constants_keep_their_values() -> None:
    with RepeatingFakeMode():
        assert [torch.tensor(value).item() for value in (3, 4)] == [3, 4]
