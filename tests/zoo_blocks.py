"""Blocks that make sharding hard, each by one property.

No parameter may be one that its model is insensitive to (a shift or scale in front of a layer
norm): its gradient would be nothing but rounding, which Adam blows up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

WIDTH = 7  # a prime: no dimension is a multiple of a world size


class Block(nn.Module):
    """A residual layer; the ordinary case and the base of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class ScalarBlock(Block):
    """Parameters of no dimension, of one element, and of fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.randn(1))
        self.slope = nn.Parameter(torch.randn(3, 1))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        scaled = self.gain * super().forward(x, rank) + self.slope.sum() * x
        return scaled + torch.sin(self.offset + x)


class EmptyBlock(nn.Module):
    """So little that most ranks own nothing, and a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + torch.tanh(self.gain * x) + (x @ self.nothing.t()).sum()


class MixedDtypeBlock(Block):
    """float64 beside float32."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return super().forward(x, rank) + (self.gain * self.wide(x.double())).float()


class AdaptedBlock(Block):
    """A frozen layer with a trainable low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return super().forward(x, rank) + self.up(self.down(x))


class IntegerBlock(Block):
    """A frozen weight of small integers, as quantised models have."""

    def __init__(self) -> None:
        super().__init__()
        quantised = torch.randint(-4, 5, (WIDTH, WIDTH), dtype=torch.int8)
        self.quantised = nn.Parameter(quantised, requires_grad=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return super().forward(x, rank) + 0.1 * torch.sin(x @ self.quantised.to(x.dtype))


class ParametrizedBlock(Block):
    """A weight computed from two parameters that live in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(self.linear)


class RecurrentBlock(nn.Module):
    """A module that keeps its parameters in a list of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + self.lstm(x)[0]


class AttentionBlock(nn.TransformerEncoderLayer):
    """A module that reads parameters of children without calling them."""

    def __init__(self) -> None:
        super().__init__(WIDTH, nhead=1, dim_feedforward=9, dropout=0.0)

    def forward(self, x: Tensor, rank: int) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class StridedBlock(nn.Module):
    """Parameters that are not contiguous: transposed, and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter((0.3 * torch.randn(WIDTH, 5)).t())
        self.gaps = nn.Parameter((0.3 * torch.randn(WIDTH, 10))[:, ::2])

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + torch.tanh(x @ self.transposed.t()) @ self.gaps.t()


class ConvBlock(nn.Module):
    """A channels_last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + torch.tanh(self.conv(x))


class ContainerBlock(nn.Module):
    """Parameters in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(0.3 * torch.randn(WIDTH, WIDTH) for _ in range(2))
        self.named = nn.ParameterDict({"scale": torch.ones(WIDTH), "shift": torch.randn(WIDTH)})

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for weight in self.listed:
            x = x + torch.tanh(x @ weight)
        return x * self.named["scale"] + self.named["shift"]


class BufferBlock(Block):
    """Buffers of several dtypes, saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x + super().forward(x, rank) * self.scale * self.mask


class BranchBlock(Block):
    """Even ranks take one branch, odd ranks another; one parameter is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        branch = self.odd if rank % 2 else self.even
        return super().forward(x, rank) + torch.tanh(branch(x))


class ExpertBlock(Block):
    """A mixture of experts that sends every sample of a rank to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return super().forward(x, rank) + self.experts[rank % 3](x)


class PassThroughBlock(Block):
    """Returns its very input on odd ranks."""

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x if rank % 2 else super().forward(x, rank)


class StructuredBlock(Block):
    """Takes a dictionary, returns nested containers, with and without gradients."""

    def forward(  # type: ignore[override]
        self, state: dict[str, Tensor], *, rank: int
    ) -> tuple[dict[str, Tensor], tuple[None, list[Tensor]]]:
        hidden = super().forward(state["hidden"], rank)
        return {"hidden": hidden}, (None, [hidden.detach(), hidden.mean()])


class OuterBlock(Block):
    """A unit that holds units and parameters of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.inner[0](x, rank)
        return self.inner[1](super().forward(x, rank), rank)
