"""The models that the benchmarks train."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTSize:
    """The shape of a GPT and its batches; lengths in tokens, widths in elements."""

    num_blocks: int
    width: int
    num_heads: int
    vocab_size: int
    sequence: int = 128
    batch: int = 2
    dtype: str = "float32"


GPT_SIZES = {
    "29m": GPTSize(num_blocks=8, width=512, num_heads=8, vocab_size=3584),
    "10m": GPTSize(num_blocks=8, width=320, num_heads=5, vocab_size=256, sequence=64),
    "small": GPTSize(num_blocks=12, width=128, num_heads=4, vocab_size=128),
    "943m": GPTSize(16, 2048, 16, vocab_size=32768, sequence=1024, batch=8, dtype="bfloat16"),
}


class GPTBlock(nn.Module):
    """Pre-norm attention and MLP, 12 parameters; maps (batch, sequence, width) to the same."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder-only transformer with an untied head; its forward returns the mean loss in nats."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab_size, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)
        blocks = (GPTBlock(size.width, size.num_heads) for _ in range(size.num_blocks))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab_size, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss; both arguments are int64 of shape (batch, sequence)."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class BlockStack(nn.Module):
    """The blocks of a GPT without embedding and head, so that all units are alike."""

    def __init__(self, num_blocks: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GPTBlock(width, num_heads) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a loss of `x`, of shape (batch, sequence, width)."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class ChainBlock(nn.Module):
    """`num_params` square matrices in a row, each with the same small amount of compute."""

    def __init__(self, num_params: int, width: int) -> None:
        super().__init__()
        linears = (nn.Linear(width, width, bias=False) for _ in range(num_params))
        self.layers = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Chain(nn.Module):
    """Blocks so small that sharding them costs only host time."""

    def __init__(self, num_blocks: int, num_params: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ChainBlock(num_params, width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
