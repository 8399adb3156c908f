"""A small byte-level GPT: pre-norm blocks in an `nn.ModuleList`, learned positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`; `context` is the longest sequence in tokens, `width` the residual width."""

    num_layers: int = 5
    width: int = 256
    num_heads: int = 8
    context: int = 64
    vocab_size: int = VOCAB_SIZE

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"GPTConfig.{name} is {value}; expected a positive integer")
        if self.width % self.num_heads:
            raise ValueError(
                f"GPTConfig.width is {self.width}; expected a multiple of num_heads, which is "
                f"{self.num_heads}"
            )


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and earlier ones."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, head width)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., width) to the same shape."""
        return self.proj(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer block: attention, then MLP, each normalised before and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A model that predicts the next token; its initial loss is close to a uniform guess's."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        """Draws normal weights scaled by fan-in; projections back to the residual start at zero.

        Every block is then the identity at first, so depth costs no stability early on. Tokens
        outweigh positions, because the first thing to learn is which byte follows which.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or "proj." in name:
                nn.init.zeros_(parameter)
            elif name.endswith(("qkv.weight", "up.weight")):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        nn.init.normal_(self.position_embedding.weight, std=0.2)
        nn.init.normal_(self.head.weight, std=0.005)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns logits (batch, time, vocab_size), or the mean loss if `targets` is given.

        `tokens` and `targets` are int64 of shape (batch, time) with time <= context. The loss is
        the cross-entropy in nats per token.
        """
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(f"got {time} tokens per sequence; expected <= {self.config.context}")
        positions = torch.arange(time, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, num_tokens: int, *, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """Continues `prompt` by `num_tokens` bytes drawn from `model`; returns only these.

    The model must hold full parameters on this rank. `temperature` divides the logits and must be
    positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; expected a positive number")
    device = next(model.parameters()).device
    draw = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(num_tokens):
        logits = model(tokens[:, -model.config.context :])[:, -1].float()
        chosen = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=draw)
        tokens = torch.cat((tokens, chosen), 1)
    return bytes(tokens[0, len(prompt) :].tolist())
