"""Optimizers with states of every kind resume in all ways that plain torch has, or are refused."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zerocore
from tests.checkpoint.resumed_optimizers import (
    WAYS,
    build,
    plain_resumes,
    plain_resumes_with,
    resume,
    train,
)
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of

_Optimizer: Any = torch.optim.Optimizer


class Odd(_Optimizer):
    """States in containers, of one element, in full, late, of no parameter; an option it adds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "rate": torch.tensor(0.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.state.setdefault("count", torch.zeros(()))
        count += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                self.update(param, group, self.state[param], count)

    def update(self, param: Tensor, group: Any, state: Any, count: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        if not state:
            state["number"] = torch.zeros(1)
            state["by_rate"] = {0.5: torch.zeros_like(param), "old": [torch.zeros_like(param)]}
            state["window"] = deque()  # torch drops a maxlen
            state["pair"] = (1, torch.zeros_like(param))
            state["ordered"] = OrderedDict(a=torch.zeros_like(param), b="text")
        if group["steps"] == 2:
            state["late"] = torch.full_like(param, 0.1)
        state["number"].add_(1.0)
        state["window"].append(grad.clone())
        if len(state["window"]) > 2:
            state["window"].popleft()
        state["by_rate"][0.5].lerp_(grad, 0.5)
        state["by_rate"]["old"][0].add_(grad)
        state["pair"][1].add_(grad)
        state["ordered"]["a"].sub_(grad)
        moves = [*state["window"], state["by_rate"][0.5], state["by_rate"]["old"][0]]
        moves += [state["pair"][1], state["ordered"]["a"].mul(0.1)]
        moves += [state["late"]] if "late" in state else []
        for move in moves:
            rate = group["lr"] * float(group["rate"]) / (float(state["number"]) + float(count))
            param.add_(move, alpha=-rate / (1 + group["steps"]))


class Blocks(_Optimizer):
    """Keeps one number for each block of four elements, also of a vector."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            state = self.state[param]
            flat = torch.nn.functional.pad(param.grad.flatten(), (0, -param.numel() % 4))
            scale = state.setdefault("scale", torch.zeros(len(flat) // 4))
            scale += flat.view(-1, 4).abs().amax(1)
            rate = scale.repeat_interleave(4)[: param.numel()].view(param.shape)
            param -= 0.05 * param.grad / (rate + 1)


def resume_blocks(stage: int) -> None:
    assert resume(Blocks, stage, "full") == "resumes"
    assert resume(Blocks, stage, "full", 4 - stage) == "resumes"
    model = zerocore.shard(build(), stage=stage)
    state = Blocks(model.parameters()).state_dict()
    state["state"] = {2: {"scale": torch.zeros(5)}}
    message = r"'inner.bias' has shape \(5,\), expected the full \(6,\)"
    with pytest.raises(ValueError, match=message):
        Blocks(model.parameters()).load_state_dict(state)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_blocks(stage: int) -> None:
    assert plain_resumes(Blocks) is True
    run_ranks(resume_blocks, 2, stage)


def resume_odd(stage: int, way: str) -> None:
    assert resume(Odd, stage, way) == "resumes"
    if way != "own":  # of this rank, for it alone
        assert resume(Odd, stage, way, 4 - stage) == "resumes"


@pytest.mark.parametrize("way", ["full", "own", "checkpoints"])
def test_states_of_every_kind(way: str) -> None:
    assert plain_resumes(Odd) is True
    for stage in (1, 3):
        run_ranks(resume_odd, 3, stage, way)


class Around(_Optimizer):
    """Wraps another optimizer and has no groups of its own: no ``Optimizer.__init__``."""

    def __init__(self, params: Any) -> None:
        self._optimizer_step_pre_hooks = OrderedDict[int, Any]()
        self._optimizer_step_post_hooks = OrderedDict[int, Any]()
        self._patch_step_function()
        self.inner = torch.optim.AdamW(params, lr=0.01)

    param_groups = property(lambda self: self.inner.param_groups, lambda self, new: self.put(new))
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def put(self, groups: Any) -> None:
        self.inner.param_groups = groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class AroundWithStates(Around):
    """Keeps something beside the inner optimizer's states."""

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict(), "slow": 1}


def resume_around(way: str) -> None:
    for stage in (0, 1, 3):
        assert resume(Around, stage, way) == "resumes"
        if way != "own":
            message = r"AroundWithStates wraps an? AdamW, but its state_dict .*'slow'"
            with pytest.raises(TypeError, match=message):
                resume(AroundWithStates, stage, way)


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_around_another_one(way: str) -> None:
    run_ranks(resume_around, 2, way)


class AroundList(Around):
    """Holds the other optimizer where nobody looks for it."""

    inner = property(lambda self: self.held[0], lambda self, new: self.hold(new))

    def hold(self, optimizer: Any) -> None:
        self.held = [optimizer]


class Sharp(torch.optim.SGD):
    """Needs a closure, and a gradient that is not zero."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].grad.count_nonzero() > 0
        return super().step(closure)


class Averaging(_Optimizer):
    """Has a state of the name that an average of weights might have, and draws numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.rand(1)
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["average"] = state.get("average", torch.zeros_like(param)).lerp(param.grad, 0.5)
            param.sub_(state["average"], alpha=0.05)


class Numbered(Averaging):
    """Has a state whose key is a number."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param][0] = torch.zeros_like(param)


class Adding(Averaging):
    """Adds a key to its state dict."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "calls": 1}


def probe_carefully() -> None:
    for kind in (Sharp, Averaging):
        for stage in (0, 3):
            assert resume(kind, stage, "checkpoints") == "resumes"
    for kind, message in ((Numbered, "the key 0"), (Adding, r"Adding has .*'calls'")):
        with pytest.raises(TypeError, match=message):
            resume(kind, 3, "checkpoints")
    model = zerocore.shard(build(), stage=3)
    for kind in (AroundList, Averaging):
        optimizer: Any = kind(model.parameters())
        groups, seed = optimizer.param_groups, torch.get_rng_state()
        with suppress(TypeError):
            get_optimizer_state_dict(model, optimizer)
        assert optimizer.param_groups is groups and len(groups[0]["params"]) == 7
        assert torch.equal(torch.get_rng_state(), seed)


def test_a_probe_changes_neither_the_optimizer_nor_random_streams() -> None:
    run_ranks(probe_carefully, 2)


class FromWeights(Averaging):
    """Has a first state that is the parameter's value."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if "z" not in state:
                state["z"] = param.clone()
            state["z"].sub_(param.grad, alpha=self.param_groups[0]["lr"])
            param.lerp_(state["z"], 0.5)


class Bound(FromWeights):
    """Holds a bound method of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.update = self.step_all

    def step_all(self) -> None:
        super().step()

    def step(self, closure: Any = None) -> None:
        self.update()


class Cached(FromWeights):
    """Holds a list of its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = [*self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.all:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)


def damped(params: Any) -> Any:
    return torch.optim.SGD(params, 0.05, momentum=0.9, dampening=0.5)


def read_before_a_step(stage: int) -> None:
    """A state dict before the first step changes nothing, and begins a run as no state does."""
    for make in (damped, FromWeights, Bound, torch.optim.AdamW, torch.optim.NAdam):
        models = [zerocore.shard(build(), stage=stage) for _ in range(3)]
        optimizers: Any = [make(model.parameters()) for model in models]
        get_optimizer_state_dict(models[1], optimizers[1])
        saved = copy.deepcopy(get_optimizer_state_dict(models[2], optimizers[2]))
        for model, optimizer in zip(models[:2], optimizers[:2], strict=True):
            train(model, optimizer, 0, 3)
        ends = [zerocore.full_state_dict(model, rank0_only=False) for model in models]
        for key, value in ends[0].items():
            assert torch.equal(ends[1][key], value), f"{make} {key}"
        if make is not damped:  # plain torch's state dict before a step has the wrong sums, too
            set_optimizer_state_dict(models[2], optimizers[2], saved)
            train(models[2], optimizers[2], 0, 3)
            ends[2] = zerocore.full_state_dict(models[2], rank0_only=False)
            for key, value in ends[0].items():
                assert torch.equal(ends[2][key], value), f"loaded {make} {key}"


def read_after_a_step(stage: int) -> None:
    """A parameter's late first step is that of plain torch, whatever was read before."""
    for make in (damped, FromWeights, torch.optim.AdamW):
        ends = []
        for model in (build(), zerocore.shard(build(), stage=stage)):
            optimizer: Any = make([*model.parameters()][:3])
            train(model, optimizer, 0, 2)
            optimizer.add_param_group({"params": [*model.parameters()][3:], "lr": 0.05})
            if ends:
                get_optimizer_state_dict(model, optimizer)
            train(model, optimizer, 2, 2)
            full = model.state_dict() if not ends else zerocore.full_state_dict(model, False)
            ends.append(full)
        for key, value in ends[0].items():
            torch.testing.assert_close(ends[1][key], value, rtol=1e-5, atol=1e-6)


class Rules(FromWeights):
    """Holds its functions and parameters in containers and objects."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.numbers = {p: n for n, p in enumerate(self.param_groups[0]["params"])}
        self.rules = {"all": partial(self.step_all), "counts": {"steps": 0}}
        self.inner = [torch.optim.SGD([*self.numbers], 0.1)]

    def step_all(self) -> None:
        super().step()
        for param in self.numbers:
            if param.grad is not None:
                param.data.sub_(param.grad, alpha=0.1)
        self.inner[0].step()

    def step(self, closure: Any = None) -> None:
        self.rules["all"]()
        self.rules["counts"]["steps"] += 1


def probe_with_gradients(stage: int) -> None:
    for make in (Cached, Rules):
        model = zerocore.shard(build(), stage=stage)
        optimizer: Any = make(model.parameters())
        model(torch.randn(5, 4)).sum().backward()
        before = [zerocore.full_state_dict(model, rank0_only=False)]
        grads = [full_of(p.grad) for p in model.parameters()]
        get_optimizer_state_dict(model, optimizer)
        after = zerocore.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(value, after[key]) for key, value in before[0].items())
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert torch.equal(full_of(param.grad), grad)
        assert len(optimizer.state) in (0, len(grads))
        assert make is Cached or optimizer.rules["counts"]["steps"] == 0


def change_made_states(stage: int) -> None:
    """States that somebody puts into an optimizer before its first step are its states."""
    model = zerocore.shard(build(), stage=stage)
    for make in (damped, torch.optim.AdamW):
        optimizer: Any = make(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        param = next(iter(model.parameters()))
        key = "momentum_buffer" if make is damped else "step"
        optimizer.state[param][key] = optimizer.state[param][key] + 100.0
        train(model, optimizer, 0, 1)
        assert optimizer.state[param][key].max().item() > 80
        optimizer = make(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            for state in optimizer.state.values():
                for value in state.values():
                    value.local().fill_(7) if hasattr(value, "local") else value.fill_(7)
        for state in optimizer.state.values():
            for value in state.values():
                dist.broadcast(value, 0)
        train(model, optimizer, 0, 1)
        state = zerocore.full_optimizer_state_dict(optimizer, rank0_only=False)["state"]
        assert make is damped or state[0]["step"] == 8
        assert len(state) == 7


def load_in_place(folder: str) -> None:
    """dcp.load fills states without a set; all ranks keep these, also of empty parts."""
    torch.manual_seed(0)
    make = partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5)
    model = zerocore.shard(build(), stage=3)
    optimizer = make(model.parameters())
    train(model, optimizer, 0, 2)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    again = zerocore.shard(build(), stage=3)
    zerocore.load_full_state_dict(again, zerocore.full_state_dict(model))
    fresh = make(again.parameters())
    state = {"optim": get_optimizer_state_dict(again, fresh)}
    dcp.load(state, checkpoint_id=folder)
    again.scale.requires_grad_(False)  # makes no state in the next step
    assert len(fresh.state) == 7
    train(again, fresh, 2, 1)
    assert len(fresh.state) == 7
    model.scale.requires_grad_(False)
    train(model, optimizer, 2, 1)
    full = [zerocore.full_state_dict(each, rank0_only=False) for each in (model, again)]
    assert all(torch.equal(value, full[1][key]) for key, value in full[0].items())


def test_states_loaded_in_place(tmp_path: Path) -> None:
    run_ranks(load_in_place, 4, str(tmp_path / "saved"))


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_made_states_that_change_stay(stage: int) -> None:
    run_ranks(change_made_states, 2, stage)


@pytest.mark.parametrize("check", [read_before_a_step, read_after_a_step])
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_states_read_before_a_first_step(check: Any, stage: int) -> None:
    run_ranks(check, 2, stage)


@pytest.mark.parametrize("stage", (1, 3))
def test_a_probe_steps_no_parameter(stage: int) -> None:
    run_ranks(probe_with_gradients, 2, stage)


# With states in containers, of one element, in full, of no parameter, late, and options they add.
NAMES: tuple[str, ...] = (
    "a2grad",
    "adalite",
    "adanorm",
    "adashift",
    "aggmo",
    "dadaptsgd",
    "madgrad",
    "prodigy",
)
NAMES += ("qhadam", "sm3", "swats", "scalableshampoo")


def maker(name: str) -> Any:
    cls = pytest.importorskip("pytorch_optimizer.optimizer").OPTIMIZERS[name]

    def make(params: Any) -> Any:
        try:
            return cls(params, lr=1e-2)
        except TypeError:
            return cls(params)

    return make


def resume_collected(names: list[str], stages: list[int], ways: list[str]) -> dict[str, str]:
    warnings.filterwarnings("ignore")
    wrong = {}
    for name in names:
        for way in ways:
            if "torch" in way and not plain_resumes_with(maker(name), way):
                continue
            for stage in stages:
                found = outcome(name, stage, way)
                if found.startswith("refused"):
                    break
                if found != "resumes":
                    wrong[f"{name} {stage} {way}"] = found
    return wrong


def outcome(name: str, stage: int, way: str) -> str:
    try:
        return resume(maker(name), stage, way)
    except TypeError as error:
        if way == "checkpoints" and "without running code" in str(error):
            return "refused"  # by name, by save: an object
        raise


def test_a_public_collection() -> None:
    pytest.importorskip("pytorch_optimizer")
    names = [name for name in NAMES if plain_resumes(maker(name)) is True]
    assert len(names) == len(NAMES)
    assert run_ranks(resume_collected, 2, names, [3], ["full", "checkpoints"]) == [{}, {}]


@pytest.mark.nightly
@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_of_a_public_collection(way: str, world_size: int) -> None:
    collection = pytest.importorskip("pytorch_optimizer.optimizer").OPTIMIZERS
    names = [name for name in sorted(collection) if plain_resumes(maker(name)) is True]
    assert len(names) > 80
    wrong = run_ranks(resume_collected, world_size, names, [1, 3], [way], timeout=600.0)
    assert wrong == [{}] * world_size
