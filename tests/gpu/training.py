"""Models whose training on the emulated link equals that of one process, and how they are trained.

A peer there is a replica of this rank, so a gather repeats this rank's shard. Training equals that
of one process if all shards of a unit are equal and stay so: a unit here is the mean of as many
equal branches as there are ranks, every parameter a multiple of the layout's 128 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocore

WORLD_SIZE = 4  # a power of two: sums of replicas and the mean over the ranks are exact
WIDTH = 64
NUM_UNITS = 5
# Where the host is when it calls a pause: "forward", "backward", "step" or "stepped".
Pause = Callable[[str], None]


def no_pause(place: str) -> None:
    """Does nothing."""


class Branch(nn.Module):
    """A layer of double precision, so that a difference is a mistake and not rounding."""

    def __init__(self, mixed: bool, frozen: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.extra = nn.ParameterDict()
        if mixed:
            self.extra["f32"] = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))
            self.extra["bf16"] = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
        if frozen:
            weight = 0.1 * torch.randn(WIDTH, WIDTH, dtype=dtype)
            self.extra["frozen"] = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if "f32" in self.extra:
            y = y + (x.float() @ self.extra["f32"]).double() * self.extra["bf16"].double()
        if "frozen" in self.extra:
            y = y + x @ self.extra["frozen"]
        return y.tanh()


class Branches(nn.Module):
    """A unit: the mean of equal branches."""

    def __init__(
        self, mixed: bool = False, frozen: bool = False, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(mixed, frozen, dtype) for _ in range(WORLD_SIZE))
        for branch in self.branches:
            branch.load_state_dict(self.branches[0].state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([branch(x) for branch in self.branches]).mean(0)


@dataclass(frozen=True)
class Variant:
    """The extras of a model and its training; `checkpoint` is use_reentrant."""

    name: str
    mixed: bool = False
    frozen: bool = False
    checkpoint: bool | None = None
    micro_batches: int = 1
    accumulate: str = "sharded"
    precision: zerocore.MixedPrecision | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: what mixed precision casts must be a dtype that it can cast."""
        return torch.float64 if self.precision is None else torch.float32


VARIANTS = (
    Variant("plain"),
    Variant("mixed_dtypes", mixed=True),
    Variant("frozen", frozen=True),
    Variant("checkpoint", checkpoint=False),
    Variant("reentrant", checkpoint=True),
    Variant("accumulates_sharded", micro_batches=3),
    Variant("accumulates_full", micro_batches=3, accumulate="full"),
    Variant("all", True, True, False, 2),
)
# Layers in bfloat16 over fp32 main weights: not what one process computes, but with the same bits
# at every stage, as sums of replicas are exact.
_BF16 = torch.bfloat16
PRECISIONS = (
    Variant("bf16", precision=zerocore.MixedPrecision(_BF16, torch.float32)),
    Variant("bf16_reduced", precision=zerocore.MixedPrecision(_BF16)),
    Variant(
        "bf16_full",
        frozen=True,
        checkpoint=False,
        micro_batches=2,
        accumulate="full",
        precision=zerocore.MixedPrecision(_BF16, torch.float32),
    ),
)


class Stack(nn.Module):
    """Units one after the other; calls `pause` within forward and backward."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        torch.manual_seed(0)
        units = (Branches(variant.mixed, variant.frozen, variant.dtype) for _ in range(NUM_UNITS))
        self.units = nn.ModuleList(units)
        self.variant = variant
        # Tells the device that computes; parameters may lie on the host.
        self.register_buffer("place", torch.empty(0), persistent=False)
        self.checkpoint = variant.checkpoint
        self.pause: Pause = no_pause

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            self.pause("forward")
            if self.checkpoint is None:
                x = unit(x)
            else:
                x = checkpoint(unit, x, use_reentrant=self.checkpoint)
            if x.requires_grad:
                x.register_hook(self._pause_backward)
        return x

    def _pause_backward(self, grad: Tensor) -> None:
        self.pause("backward")


def peers(
    bandwidth: str = "100GB/s", latency: str = "5us"
) -> AbstractContextManager[zerocore.emulation.Emulation | None]:
    """The ranks to train with: those of the default group, or `WORLD_SIZE` on an emulated link."""
    if dist.is_initialized():
        return nullcontext()
    return zerocore.emulate(WORLD_SIZE, bandwidth, latency)


def shard(model: Stack, stage: int, prefetch: int = 1, accumulate: str = "sharded") -> Stack:
    """The model under zerocore, every `Branches` a unit."""
    zerocore.shard(
        model,
        stage=stage,
        units=[Branches],
        communication=zerocore.Communication(prefetch=prefetch, accumulate=accumulate),
        mixed_precision=model.variant.precision,
    )
    return model


def make_optimizer(model: Stack) -> torch.optim.Optimizer:
    """AdamW whose eps keeps rounding small where a gradient is nothing but rounding.

    The fused one where there are model weights to be written in the same pass.
    """
    kind = torch.optim.AdamW if model.variant.precision is None else zerocore.optim.AdamW
    return kind(model.parameters(), lr=1e-2, eps=1e-5)


def run_step(
    model: Stack, optimizer: torch.optim.Optimizer, seed: int, micro_batches: int = 1
) -> list[Tensor]:
    """One step; returns the losses without waiting for the device."""
    device = model.place.device
    losses = []
    for index in range(micro_batches):
        # Made on the device: a copy from the host's pageable memory would wait for it.
        generator = torch.Generator(device).manual_seed(100 * seed + index)
        dtype = model.variant.dtype
        inputs = torch.randn(8, WIDTH, dtype=dtype, generator=generator, device=device)
        with nullcontext() if index == micro_batches - 1 else no_sync(model):
            loss = (model(inputs.requires_grad_()) - inputs.flip(1)).square().mean()
            (loss / micro_batches).backward()
        losses.append(loss.detach())
    model.pause("step")
    optimizer.step()
    model.pause("stepped")
    optimizer.zero_grad()
    return losses


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """zerocore's; a plain model never communicates."""
    is_sharded = isinstance(next(model.parameters()), zerocore.ShardedParameter)
    return zerocore.no_sync(model) if is_sharded else nullcontext()


def train(model: Stack, steps: int = 4, micro_batches: int = 1) -> Tensor:
    """The losses of all micro-batches."""
    optimizer = make_optimizer(model)
    losses = []
    for step in range(steps):
        losses += run_step(model, optimizer, step, micro_batches)
    return torch.stack(losses).cpu()
