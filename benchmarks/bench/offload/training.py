"""A model that is larger than memory, and its loss."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block with causal attention; maps (batch, tokens, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output, which has the input's shape."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(found.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def gpt(num_blocks: int, width: int, heads: int, vocabulary: int) -> nn.Sequential:
    """Makes a GPT whose children have similar sizes and become units."""
    blocks = (Block(width, heads) for _ in range(num_blocks))
    head = nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, head)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the cross entropy of each token, predicted from the tokens before it."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
