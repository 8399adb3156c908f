"""``fully_shard`` with ``CPUOffloadPolicy`` on a device gives the same bits as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import zerocore
from tests.async_device.device import DEVICE
from tests.async_device.training import WIDTH, Block, make_model, start
from tests.distributed.harness import run_ranks
from tests.engine.offloading import adamw, torchs
from zerocore.fsdp import fully_shard
from zerocore.model.state import state_of

Make = Callable[..., torch.optim.Optimizer]
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def clipping(params: Any) -> torch.optim.Optimizer:
    return adamw(params, clip_grad_norm=0.5)


def shard(model: Any, device: torch.device, offloads: bool, **options: Any) -> Any:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options |= {"mesh": mesh} | ({"offload_policy": CPUOffloadPolicy()} if offloads else {})
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model: Any, device: torch.device, index: int) -> Tensor:
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + dist.get_rank()) / (1 + index)
    return (model(x) - x.to(device).flip(1)).square().mean()  # the root moves its inputs


def on_host(tensors: Any) -> list[Tensor]:
    """Copies this rank's parts now: even without a wait the host must not see old values."""
    return [tensor.to_local().detach().cpu().clone() for tensor in tensors]


def train(
    device: torch.device,
    offloads: bool,
    *,
    make: Make = torchs,
    syncs: tuple[bool, ...] = (True,),
    clips: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Returns losses, gradients, weights and states; ``syncs`` has a flag per micro-batch."""
    model = shard(make_model(device), device, offloads, **options)
    params = list(model.parameters())  # modules may show full parameters later
    optimizer = make(params)
    found: list[Tensor] = []
    for step in range(4):
        for index, sync in enumerate(syncs):
            model.set_requires_gradient_sync(sync)
            loss = loss_of(model, device, 10 * step + index)
            loss.backward()
        found += [loss.detach().cpu(), *on_host(param.grad for param in params)]
        if clips:
            norm: Any = nn.utils.clip_grad_norm_(params, 0.1)
            found.append(norm.full_tensor().cpu())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
        with torch.no_grad():  # weights change right after a forward whose loads may be late
            found.append(model(torch.ones(2, WIDTH, device=device)))
            for param in params:
                param.mul_(0.9)
    states = [value for state in optimizer.state.values() for value in state.values()]
    found += on_host(value for value in states if isinstance(value, DTensor))
    return [value.cpu() for value in [*found, *on_host(params)]]


CASES: dict[str, dict[str, Any]] = {
    "torch's AdamW, clipped": {"clips": True},
    "SGD, two reductions": {"make": sgd, "syncs": (True, True)},
    "zerocore's AdamW, clipped": {"make": clipping, "syncs": (False, True)},
    "bfloat16 layers": {"mp_policy": BF16, "syncs": (False, True)},
    "bfloat16 layers, zerocore's AdamW": {"mp_policy": BF16, "make": adamw},
    "unsharded from forward to backward": {"reshard_after_forward": False},
}


def train_all(on_device: bool, offloads: bool) -> dict[str, list[Tensor]]:
    """Trains each case, with late tasks on the device."""
    device, extension = start(on_device)
    found = {}
    for number, (name, options) in enumerate(CASES.items()):
        print(name, flush=True)
        if on_device:
            extension.set_delays(number, 0.3, 400)
        found[name] = train(device, offloads, **options)
    return found


@pytest.mark.one_by_day
@pytest.mark.parametrize("num_ranks", [3, 2])
def test_losses_gradients_and_weights_are_those_without_offload(num_ranks: int) -> None:
    """Compares with a CPU: both sum in the order of the ranks."""
    expected = run_ranks(train_all, num_ranks, False, False, launch="torchrun", timeout=150)
    found = run_ranks(train_all, num_ranks, True, True, launch="torchrun", timeout=150)
    for ours, plain in zip(found, expected, strict=True):
        for name, values in plain.items():
            assert len(ours[name]) == len(values)
            different = [i for i, v in enumerate(values) if not torch.equal(ours[name][i], v)]
            assert not different, f"{name}: values {different} of {len(values)}"


def check_places() -> None:
    """Parameters, gradients and states are DTensors of the device's mesh with parts on the host."""
    device, _ = start(on_device=True)
    net: Any = make_model(device)
    net.register_buffer("scale", torch.ones(1))
    model = shard(net, device, offloads=True)
    optimizer = torchs(model.parameters())
    for step in range(2):
        for param in model.parameters():
            assert isinstance(param, DTensor) and param.device_mesh.device_type == DEVICE
            assert param.device.type == param.to_local().device.type == "cpu"
        loss = loss_of(model, device, step)
        loss.backward()
        assert loss.device == device
        for param in model.parameters():
            assert param.grad is not None and param.grad.device.type == "cpu"
            assert param.grad.device_mesh is param.device_mesh
        optimizer.step()
        optimizer.zero_grad()
    assert model.scale.device == device
    for state in optimizer.state.values():
        assert {value.device.type for value in state.values()} == {"cpu"}


def test_parameters_gradients_and_states_lie_on_the_host() -> None:
    run_ranks(check_places, 2, launch="torchrun")


def peak_nbytes(offloads: bool) -> int:
    """Returns a step's peak of device memory, and checks the plan against the memory taken."""
    device, _ = start(on_device=True)
    model = shard(make_model(device, num_blocks=8), device, offloads)
    optimizer = torchs(model.parameters())
    for step in range(3):
        if step == 2:
            torch.get_device_module(device).synchronize()
            torch.accelerator.reset_peak_memory_stats()
        loss_of(model, device, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    predicted = zerocore.planning.predict_memory(model)
    assert predicted == zerocore.memory_usage(model, optimizer)
    engine = state_of(model).engine
    assert (engine.host_memory is not None) == offloads
    if offloads:
        assert predicted.parameters == predicted.gradients == predicted.optimizer == 0
        assert engine.host_memory.nbytes == predicted.host
    torch.get_device_module(device).synchronize()
    return torch.accelerator.max_memory_allocated()


def test_the_device_holds_less_memory() -> None:
    (plain, _), (offloaded, _) = (
        run_ranks(peak_nbytes, 2, each, launch="torchrun") for each in (False, True)
    )
    block = sum(param.nbytes for param in Block().parameters())
    states = 8 * block // 2 * 4  # weights, gradients and two moments of half of eight blocks
    assert plain - offloaded > 0.9 * states


def check_refusals() -> None:
    device, _ = start(on_device=True)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = shard(make_model(device), device, offloads=True).to(device)
    with pytest.raises(RuntimeError, match="should be materialized on CPU when enabling CPU off"):
        model(torch.ones(2, WIDTH))
    mixed: Any = make_model(device)
    fully_shard(mixed[0], mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(mixed, mesh=mesh)
    with pytest.raises(NotImplementedError, match="takes one policy per model"):
        mixed(torch.ones(2, WIDTH))


def test_parameters_on_the_device_and_two_policies_are_refused() -> None:
    run_ranks(check_refusals, 2, launch="torchrun")
