"""Complex parameters train as in one process; sparse gradients of embeddings become dense."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.values import full_of
from zerocore import MixedPrecision, Offload

SIZE = 6
WIRED = MixedPrecision(wire_dtype=torch.float32)


class Spectral(nn.Module):
    """A filter of frequencies, its phase by a conjugated read, and a layer of complex weights."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(SIZE // 2 + 1, dtype=dtype))
        self.phase = nn.Parameter(torch.randn((), dtype=dtype))
        self.mix = nn.Linear(SIZE // 2 + 1, SIZE // 2 + 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x) * self.filter + self.filter.conj() * self.phase.conj()
        return torch.fft.irfft(self.mix(found), n=SIZE).to(x.dtype) + x


def spectral(dtype: torch.dtype = torch.complex64) -> nn.Module:
    torch.manual_seed(0)
    real = torch.float64 if dtype == torch.complex128 else torch.float32
    layers = [nn.Linear(SIZE, SIZE, dtype=real), Spectral(dtype), Spectral(dtype)]
    return nn.Sequential(*layers, nn.Linear(SIZE, SIZE, dtype=real))


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, SIZE, generator=generator, dtype=dtype)


def train(model: Any, num_steps: int, clips: bool, ranks: list[int]) -> list[Tensor]:
    """Trains on the mean of some ranks' losses, and returns norms of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    dtype = model[0].weight.dtype
    norms = []
    for step in range(num_steps):
        for rank in ranks:
            loss = model(batch(step, rank, dtype)).square().mean() / len(ranks)
            loss.backward()
        if not zerocore.is_sharded(model):
            for param in model.parameters():
                param.grad = param.grad.resolve_conj()  # torch clips no conjugated view
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1 if clips else 1e9))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def compare(stage: int, dtype: torch.dtype, **options: Any) -> None:
    plain = spectral(dtype)
    model = zerocore.shard(copy.deepcopy(plain), stage=stage, units=["Spectral"], **options)
    ranks = list(range(dist.get_world_size()))
    right = train(plain, 3, True, ranks)
    found = train(model, 3, True, [dist.get_rank()])
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert param.dtype == expected[name].dtype
        torch.testing.assert_close(full_of(param.detach()), expected[name].detach())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("world_size", [2, 3, *by_night(1, 4)])
def test_complex_parameters(stage: int, world_size: int, dtype: torch.dtype) -> None:
    run_ranks(compare, world_size, stage, dtype)


def measure(stage: int) -> None:
    """Norms are real, and zerocore's clipping takes complex gradients as torch's does."""
    for p in (0.5, 1.0, 2.0, 3.0, float("inf")):
        plain = spectral()
        model = zerocore.shard(copy.deepcopy(plain), stage=stage)
        for each in (plain, model):
            each(batch(0, 0, torch.float32)).square().mean().backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.grad is not None and other.grad is not None
            other.grad = other.grad.resolve_conj()
            for order in (1, 2, float("inf")):
                torch.testing.assert_close(param.grad.norm(order), other.grad.norm(order))
        right = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
        torch.testing.assert_close(zerocore.clip_grad_norm_(model, 0.1, p), right)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full_of(param.grad), other.grad)


def test_norms_of_complex_gradients(stage: int) -> None:
    run_ranks(measure, 3, stage)


def compare_options(stage: int) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    compare(stage, torch.complex64, group=mesh)
    compare(stage, torch.complex64, mixed_precision=WIRED)
    compare(stage, torch.complex64, offload=Offload(states="cpu"))
    if stage >= 2:
        place = "cpu" if stage == 3 else "device"
        offload = Offload(states="cpu", gradients="cpu", parameters=place)
        compare(stage, torch.complex64, offload=offload)


def test_complex_parameters_with_options(stage: int) -> None:
    run_ranks(compare_options, 4, stage)


def save_and_load(folder: Path, stage: int) -> None:
    model = zerocore.shard(spectral(), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(batch(0, dist.get_rank(), torch.float32)).square().mean().backward()
    optimizer.step()
    checkpoints = zerocore.Checkpoints(folder / "steps", model, optimizer)
    checkpoints.save(1)
    checkpoints.wait()
    before = {name: full_of(p.detach()).clone() for name, p in model.named_parameters()}
    zerocore.save_safetensors(model, folder / "weights")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
    assert checkpoints.load() == 1
    for name, param in model.named_parameters():
        assert torch.equal(full_of(param.detach()), before[name])
    other = zerocore.shard(spectral(), stage=stage)
    zerocore.load_safetensors(other, folder / "weights")
    for name, param in other.named_parameters():
        assert torch.equal(full_of(param.detach()), before[name])


def test_complex_parameters_are_saved(tmp_path: Path, stage: int) -> None:
    run_ranks(save_and_load, 2, tmp_path, stage)


def look_up(stage: int, bag: bool) -> None:
    torch.manual_seed(0)
    kind = nn.EmbeddingBag if bag else nn.Embedding
    plain = nn.Sequential(kind(9, 4, sparse=True), nn.Linear(4, 4))
    model = zerocore.shard(copy.deepcopy(plain), stage=stage)
    world = dist.get_world_size()
    makers = (torch.optim.SGD, torch.optim.Adagrad)
    for make in makers:
        optimizers = [make(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(3):
            rows = [torch.arange(4).view(2, 2) * (step + 1) % 9 + rank % 2 for rank in range(world)]
            for each in rows:
                (plain(each).square().mean() / world).backward()
            model(rows[dist.get_rank()]).square().mean().backward()
            assert model[0].weight.grad.layout == torch.strided
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_of(one.detach()), other.detach())


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_become_dense(stage: int, bag: bool) -> None:
    run_ranks(look_up, 2, stage, bag)
