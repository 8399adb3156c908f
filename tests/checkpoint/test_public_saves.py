"""Eleven public training programs' ways to save on rank 0.

At stages 1 and 2 the file has the weights that DDP's would have. Saving optimizer states there, or
anything at stage 3, is an error that names the line to write. No program may write one rank's part
as if it were the whole.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.checkpoint.saved_nets import AwkwardNet
from tests.checkpoint.test_rank_0_saves import batch
from tests.distributed.harness import run_ranks

State = dict[str, Any]
# Makes what a program saves of its model and its optimizer.
Shape = Callable[[nn.Module, Any], State]


def unwrapped(model: nn.Module) -> Any:
    return model.module if hasattr(model, "module") else model


def schedule() -> State:
    own = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    return torch.optim.lr_scheduler.StepLR(own, 2).state_dict()


def nano_gpt(model: nn.Module, optimizer: Any) -> State:
    states = {"model": unwrapped(model).state_dict(), "optimizer": optimizer.state_dict()}
    return {**states, "model_args": {"n_layer": 2}, "iter_num": 3, "best_val_loss": 0.5}


def min_gpt(model: nn.Module, optimizer: Any) -> State:
    return {"model": unwrapped(model).state_dict()}


def imagenet(model: nn.Module, optimizer: Any) -> State:
    states = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {"epoch": 1, "arch": "net", **states, "scheduler": schedule()}


def timm(model: nn.Module, optimizer: Any) -> State:
    scaler = torch.amp.GradScaler("cpu").state_dict()
    own = {"epoch": 1, "arch": "net", "optimizer": optimizer.state_dict(), "version": 2}
    return {**own, "amp_scaler": scaler, "state_dict": unwrapped(model).state_dict()}


def torchvision(model: nn.Module, optimizer: Any) -> State:
    states = {"model": unwrapped(model).state_dict(), "optimizer": optimizer.state_dict()}
    return {**states, "lr_scheduler": schedule(), "args": SimpleNamespace(lr=0.1), "epoch": 1}


def detectron(model: nn.Module, optimizer: Any) -> State:
    data: State = {"model": model.state_dict()}
    for name, each in {"optimizer": optimizer}.items():
        data[name] = each.state_dict()
    return {**data, "iteration": 4}


def mmengine(model: nn.Module, optimizer: Any) -> State:
    weights = OrderedDict((key, value.cpu()) for key, value in model.state_dict().items())
    return {"meta": {"epoch": 1}, "state_dict": weights, "optimizer": optimizer.state_dict()}


def fairseq(model: nn.Module, optimizer: Any) -> State:
    def to_cpu(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu()
        if isinstance(value, dict):
            return {key: to_cpu(each) for key, each in value.items()}
        return [to_cpu(each) for each in value] if isinstance(value, list) else value

    state = {"model": model.state_dict(), "last_optimizer_state": optimizer.state_dict()}
    return to_cpu({**state, "extra_state": {"epoch": 1}})


def diffusion(model: nn.Module, optimizer: Any) -> State:
    """The weights by way of a list of parameters."""
    state = model.state_dict()
    for name, param in model.named_parameters():
        state[name] = param.detach()
    return {"model": state}


def yolo(model: nn.Module, optimizer: Any) -> State:
    """Halves of a copy."""
    state = copy.deepcopy(unwrapped(model).state_dict())
    halves = {k: v.half() if v.is_floating_point() else v for k, v in state.items()}
    return {"epoch": 1, "model": halves, "optimizer": optimizer.state_dict()}


def torchrun_tutorial(model: nn.Module, optimizer: Any) -> State:
    """The weights alone, and where to go on."""
    return {"MODEL_STATE": unwrapped(model).state_dict(), "EPOCHS_RUN": 3}


SHAPES: tuple[Shape, ...] = (
    *(nano_gpt, min_gpt, imagenet, timm, torchvision, torchrun_tutorial),
    *(detectron, mmengine, fairseq, diffusion, yolo),
)
MODEL_KEYS = ("model", "state_dict", "MODEL_STATE")


def written(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=False))


def trained(stage: int | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: nn.Module = AwkwardNet().eval()
    if stage is not None:
        model = zerocore.shard(model, stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_as(shape: Shape, stage: int) -> None:
    model, optimizer = trained(stage)
    plain, other = trained(None)
    if dist.get_rank() == 0:
        expected = shape(plain, other)
        if stage == 3:
            with pytest.raises((TypeError, pickle.PicklingError), match="full_state_dict"):
                written({k: v for k, v in shape(model, optimizer).items() if k in MODEL_KEYS})
            state: State = {}
        else:
            state = shape(model, optimizer)
        states_key = next((key for key in expected if "optimizer" in key), "")
        if state and states_key and stage > 0:
            with pytest.raises(TypeError, match="full_optimizer_state_dict"):
                written(state)
            del state[states_key], expected[states_key]
        if state:
            found = written(state)
            assert found.keys() == expected.keys()
            for key in {*MODEL_KEYS, states_key} & found.keys():
                torch.testing.assert_close(dict(found[key]), dict(expected[key]))
    dist.barrier()
    model(batch()).square().mean().backward()  # training goes on


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_public_programs_file(shape: Shape, stage: int) -> None:
    run_ranks(save_as, 2, shape, stage)
