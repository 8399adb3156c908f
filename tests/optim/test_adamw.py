"""zerocore.optim.AdamW on plain parameters: torch's numbers, states, schedulers, errors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from zerocore.optim import AdamW

SHAPES = ((64, 32), (32,), (16, 4, 3, 3), (), (5, 7), (0, 3))


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    return params


def set_grads(params: list[nn.Parameter], step: int, skip: tuple[int, ...] = ()) -> None:
    torch.manual_seed(100 + step)
    for index, param in enumerate(params):
        grad = torch.randn(param.shape).to(param.dtype) * 0.1
        param.grad = None if index in skip else torch.empty_like(param).copy_(grad)


def assert_close(own: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    """Equal but for the last bits of odd tails, see csrc/kernels/adamw.h."""
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def torch_adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **options)


def pair(
    make_groups: Callable[[list[nn.Parameter]], Any] = lambda params: params, **options: Any
) -> tuple[list[nn.Parameter], AdamW, list[nn.Parameter], torch.optim.AdamW]:
    own, other = make_params(), make_params()
    return (
        own,
        AdamW(make_groups(own), **options),
        other,
        torch_adamw(make_groups(other), **options),
    )


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": 0.02, "betas": (0.5, 0.9)},
        {"params": params[2:], "eps": 1e-4, "weight_decay": 0.3, "maximize": True},
    ]


@pytest.mark.parametrize("make_groups", [list, groups_of])
def test_steps_are_those_of_torch(make_groups: Any) -> None:
    own, optimizer, other, expected = pair(make_groups, lr=0.01)
    for step in range(4):
        for params, opt in ((own, optimizer), (other, expected)):
            set_grads(params, step, skip=(1, 4) if step in (0, 2) else ())
            opt.step()
    assert_close(own, other)
    for a, b in zip(own, other, strict=True):
        assert optimizer.state[a]["step"] == expected.state[b]["step"]
        assert optimizer.state[a]["exp_avg"].stride() == a.stride()


def test_a_parameter_without_gradient_gets_no_state() -> None:
    own, optimizer, _, _ = pair()
    before = own[1].clone()
    set_grads(own, 0, skip=(1,))
    optimizer.step()
    assert own[1] not in optimizer.state and torch.equal(own[1], before)
    optimizer.zero_grad()
    optimizer.step()  # nothing at all
    assert len(optimizer.state) == len(own) - 1


def test_moments_of_one_dtype_share_memory() -> None:
    params = [*make_params(), *make_params(torch.bfloat16)]
    optimizer = AdamW(params)
    set_grads(params, 0)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq", "step"):
        storages = {optimizer.state[p][name].untyped_storage().data_ptr() for p in params}
        assert len(storages) == 2, name
    for param in params:
        state = optimizer.state[param]
        assert state["exp_avg"].data_ptr() % 16 == 0
        assert state["exp_avg"].dtype == param.dtype and state["step"].dtype == torch.float32


def test_a_state_dict_of_torch_and_back() -> None:
    own, optimizer, other, expected = pair(groups_of)
    for step in range(6):
        if step == 2:  # what torch saved goes on in ours
            optimizer.load_state_dict(expected.state_dict())
        if step == 4:  # and the reverse, through a file
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            expected.load_state_dict(torch.load(file))
        for params, opt in ((own, optimizer), (other, expected)):
            set_grads(params, step)
            opt.step()
    assert_close(own, other)
    fresh = make_params()
    again = torch.optim.AdamW(groups_of(fresh))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[1]["maximize"] and again.param_groups[0]["betas"] == (0.5, 0.9)


def test_loading_copies_and_keeps_the_memory_it_has() -> None:
    own, optimizer, _, _ = pair()
    set_grads(own, 0)
    optimizer.step()
    address = optimizer.state[own[0]]["exp_avg"].data_ptr()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert optimizer.state[own[0]]["exp_avg"].data_ptr() == address
    optimizer.step()
    assert saved["state"][0]["step"] == 1 and optimizer.state[own[0]]["step"] == 2


def test_a_state_of_a_step_on_the_cpu_or_a_number() -> None:
    params, other = make_params(), make_params()
    slow = torch.optim.AdamW(params, foreach=False)
    set_grads(params, 0)
    slow.step()
    optimizer = AdamW(other)
    saved = slow.state_dict()
    saved["state"][0]["step"] = 7
    optimizer.load_state_dict(saved)
    assert optimizer.state[other[0]]["step"] == 7 and optimizer.state[other[1]]["step"] == 1
    assert optimizer.param_groups[0]["fused"] is True


def test_a_schedule_and_a_tensor_lr() -> None:
    own, optimizer, other, expected = pair(lr=0.1)
    tensor_lr = make_params()
    third = AdamW(tensor_lr, lr=torch.tensor(0.1, dtype=torch.float64))
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)
        for opt in (optimizer, expected, third)
    ]
    for step in range(4):
        for params, opt in ((own, optimizer), (other, expected), (tensor_lr, third)):
            set_grads(params, step)
            opt.step()
        for schedule in schedules:
            schedule.step()
    assert_close(own, other)
    assert_close(own, tensor_lr)


def test_hooks_and_a_closure() -> None:
    params = make_params()
    optimizer, calls = AdamW(params), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        loss = params[0].square().sum()
        loss.backward()
        return loss

    before = params[0].square().sum()
    assert torch.equal(optimizer.step(closure), before)
    assert calls == ["before", "closure", "after"]
    assert params[0].square().sum() < before


@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler(unscale_first: bool) -> None:
    own, optimizer, other, expected = pair()
    for params, opt in ((own, optimizer), (other, expected)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            loss = sum((param * (step + 1)).square().sum() for param in params)
            if step == 2:
                loss = loss * float("inf")
            opt.zero_grad()
            scaler.scale(loss).backward()
            if unscale_first:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() == 512.0
        assert opt.state[params[0]]["step"] == 3
    assert_close(own, other)


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_in_the_same_pass(scaled: bool) -> None:
    own, optimizer, other, expected = pair()
    optimizer.clip_grad_norm = 0.5
    for step in range(3):
        set_grads(own, step)
        set_grads(other, step)
        norm = nn.utils.clip_grad_norm_(other, 0.5)
        if scaled:
            optimizer.grad_scale = torch.tensor(8.0)
            for param in own:
                param.grad *= 8
        optimizer.step()
        expected.step()
        torch.testing.assert_close(optimizer.grad_norm, norm)
    assert_close(own, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_skips_the_step(bad: float) -> None:
    params = make_params()
    optimizer = AdamW(params, clip_grad_norm=0.5, fused=True, foreach=False)
    set_grads(params, 0)
    optimizer.step()
    state = [value.clone() for param in params for value in optimizer.state[param].values()]
    before = [param.detach().clone() for param in params]
    set_grads(params, 1)
    params[0].grad.view(-1)[-1] = bad
    optimizer.step()
    assert optimizer.grad_norm is not None and not optimizer.grad_norm.isfinite()
    now = [value for param in params for value in optimizer.state[param].values()]
    assert_close(params + now, before + state)


def test_gradients_and_model_weights_of_other_dtypes() -> None:
    own, other = make_params(), make_params()
    optimizer, expected = AdamW(own), torch_adamw(other)
    for param in own:
        param.model_weight = torch.zeros(param.numel(), dtype=torch.bfloat16)
    for step in range(3):
        set_grads(other, step)
        for param, like in zip(own, other, strict=True):
            like.grad = like.grad.bfloat16().float()
            param.grad_dtype = None
            param.grad = like.grad.bfloat16()
        optimizer.step()
        expected.step()
    assert_close(own, other)
    for param in own:
        flat = param.as_strided((param.numel(),), (1,))
        assert torch.equal(param.model_weight, flat.bfloat16())


def test_a_group_added_later_and_states_cleared() -> None:
    own, other = make_params(), make_params()
    optimizer, expected = AdamW(own[:2]), torch_adamw(other[:2])
    for step in range(3):
        for params, opt in ((own, optimizer), (other, expected)):
            if step == 1:
                opt.add_param_group({"params": params[2:], "lr": 0.1})
            if step == 2:
                opt.state.clear()
            set_grads(params, step)
            opt.step()
    assert_close(own, other)
    assert optimizer.state[own[0]]["step"] == 1


def test_pickled() -> None:
    params = make_params()
    optimizer = AdamW(params, lr=0.25, clip_grad_norm=2.0)
    set_grads(params, 0)
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    for group in again.param_groups:
        set_grads(group["params"], 1)
    again.step()
    assert again.clip_grad_norm == 2.0 and again.param_groups[0]["lr"] == 0.25
    assert again.state[again.param_groups[0]["params"][0]]["step"] == 2


ONE = nn.Parameter(torch.ones(4, 4))
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: AdamW([ONE], amsgrad=True), ValueError, "does not support amsgrad"),
    (lambda: AdamW([ONE], lr=-1.0), ValueError, "lr must be 0 or more, got -1"),
    (lambda: AdamW([ONE], lr=torch.ones(2)), ValueError, "a tensor lr must have one element"),
    (lambda: AdamW([ONE], betas=(0.9, 1.0)), ValueError, r"betas\[1\] must be in \[0, 1\)"),
    (lambda: AdamW([{"params": [ONE], "eps": -1}]), ValueError, "eps must be 0 or more"),
    (lambda: AdamW([ONE], clip_grad_norm=0.0), ValueError, "clip_grad_norm must be positive"),
    (
        lambda: AdamW([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))]),
        TypeError,
        "parameter 'w' is torch.complex64",
    ),
    (
        lambda: AdamW([ONE, nn.Parameter(torch.ones(4, 4)[:, ::2])]),
        ValueError,
        "parameter 1 of group 0 has gaps in its memory",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_options(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_states_that_do_not_fit_change_nothing() -> None:
    own, optimizer, _, _ = pair()
    set_grads(own, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    short = copy.deepcopy(saved)
    short["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 of group 0 has shape \(3,\)"):
        optimizer.load_state_dict(short)
    momentum = copy.deepcopy(saved)
    momentum["state"][1] = {"momentum_buffer": torch.zeros(32)}
    with pytest.raises(ValueError, match="saved by another kind of optimizer"):
        optimizer.load_state_dict(momentum)
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="does not support amsgrad"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[own[0]]["step"] == 2


def test_data_of_another_order_is_an_error() -> None:
    """Moments lie in memory as the weight did before."""
    params = make_params()
    optimizer = AdamW(params)
    set_grads(params, 0)
    optimizer.step()
    params[0].data = params[0].data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"exp_avg 0 has strides \[32, 1\]"):
        optimizer.step()
    params[0].data = params[0].data.contiguous()
    optimizer.step()


def test_it_is_exported() -> None:
    assert zerocore.optim.AdamW is AdamW
