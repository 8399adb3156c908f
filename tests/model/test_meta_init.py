"""Models built on the meta device get their values unit by unit, the same at any world size."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.training import accumulate, assert_gradients, assert_same_state, case_named


def materialize(stage: int, name: str) -> dict[str, Tensor]:
    case = case_named(name)
    with torch.device("meta"):
        model = case.build()
    torch.manual_seed(11)
    model = zerocore.shard(model, stage=stage, device=torch.device("cpu"))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    accumulate(model, case, 0)
    return zerocore.full_state_dict(model)


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", ["plain", "tied", "encoder_decoder", "one_layer"])
def test_same_weights_at_any_world_size(stage: int, name: str) -> None:
    states = [run_ranks(materialize, size, stage, name)[0] for size in (1, 2, 3, 4)]
    for state in states[1:]:
        assert all(torch.equal(state[key], states[0][key]) for key in states[0])
    weight = states[0].get("blocks.1.linear.weight")
    assert weight is None or (weight.isfinite().all() and weight.std() > 0.05)


def fill(module: nn.Module) -> None:
    """Values that tell which parameter they belong to."""
    for index, parameter in enumerate(module.parameters(recurse=False)):
        assert parameter.device.type == "cpu"
        with torch.no_grad():
            ramp = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.copy_((0.1 * (index + 1) + 0.01 * ramp).view(parameter.shape))


def use_init_fn(stage: int, name: str) -> None:
    case = case_named(name)
    with torch.device("meta"):
        model = case.build()
    model = zerocore.shard(model, stage=stage, device=torch.device("cpu"), init_fn=fill)
    plain = case.build()
    plain.apply(fill)
    state = zerocore.full_state_dict(model, rank0_only=False)
    assert_same_state(state, plain.state_dict())


@pytest.mark.parametrize("name", ["plain", "scalars", "mixed_dtypes", "containers", "tied"])
def test_init_fn(stage: int, name: str) -> None:
    run_ranks(use_init_fn, 3, stage, name)


class TwoNames(nn.Module):
    """A parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(4, 4))
        self.down = self.up

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up @ self.down.T


def initialise_two_names() -> None:
    calls: list[nn.Module] = []
    with torch.device("meta"):
        model = TwoNames()
    model = zerocore.shard(model, device=torch.device("cpu"), init_fn=calls.append)
    assert calls == [model] and model.up is model.down


def test_a_parameter_of_two_names_is_initialised_once() -> None:
    run_ranks(initialise_two_names, 2)


def watch_full_parameters() -> None:
    case = case_named("plain")
    plain = case.build()
    blocks = [sum(p.numel() for p in block.parameters()) for block in plain.blocks]
    rest = sum(p.numel() for p in plain.parameters()) - sum(blocks)
    with torch.device("meta"):
        model = case.build()
    full: list[int] = []

    def init(module: nn.Module) -> None:
        fill(module)
        full.append(
            sum(
                parameter.numel()
                for name, parameter in model.named_parameters()
                if parameter.device.type != "meta"
                and parameter.shape == plain.get_parameter(name).shape
                and not hasattr(parameter, "shard_range")
            )
        )

    zerocore.shard(model, stage=3, device=torch.device("cpu"), init_fn=init)
    assert 0 < max(full) <= max(*blocks, rest)


def test_never_more_than_one_unit_in_full() -> None:
    run_ranks(watch_full_parameters, 2)


class NoReset(nn.Module):
    """A parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.orphan = nn.Parameter(torch.empty(3))


def lack_reset(stage: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), NoReset())
    with pytest.raises((TypeError, ValueError), match=r"1.*(reset_parameters|init_fn)"):
        zerocore.shard(model, stage=stage, device=torch.device("cpu"))


def test_module_that_cannot_initialise_itself_is_an_error(stage: int) -> None:
    run_ranks(lack_reset, 2, stage)


def load_into_meta(stage: int) -> None:
    """The way to load a big model: build on meta, shard, load from rank 0."""
    case = case_named("plain")
    with torch.device("meta"):
        model = case.build()
    model = zerocore.shard(model, stage=stage, device=torch.device("cpu"))
    saved = case.seeded_build().state_dict() if dist.get_rank() == 0 else {}
    zerocore.load_full_state_dict(model, saved)
    accumulate(model, case, 0)
    assert_gradients(model, case, 0)


def test_load_into_meta_model(stage: int) -> None:
    run_ranks(load_into_meta, 2, stage)


class Rotary(nn.Module):
    """A weight beside a buffer that no file has, as positions of Hugging Face models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("frequencies", torch.arange(6.0), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(2.0)
            self.get_buffer("frequencies").copy_(torch.arange(6.0))


def buffers_are_not_lost() -> None:
    """Values that are there stay; the log names a buffer that nothing gives any."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerocore").addHandler(handler)
    try:
        for on_meta, init in ((True, None), (False, fill), (True, fill)):
            with torch.device("meta"):
                model = Rotary()
            if not on_meta:
                model.frequencies = torch.arange(6.0)
            zerocore.shard(model, init_fn=init, device=torch.device("cpu"))
            named = [line for line in lines if "buffer 'frequencies' of a Rotary" in line]
            assert bool(named) == (on_meta and init is fill)
            if not named:
                assert torch.equal(model.frequencies, torch.arange(6.0))
    finally:
        logging.getLogger("zerocore").removeHandler(handler)


def test_buffers_keep_values_or_are_named() -> None:
    run_ranks(buffers_are_not_lost, 2)
