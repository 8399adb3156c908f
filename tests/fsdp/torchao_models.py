"""Models whose weights torchao makes tensors that say themselves what is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerocore
from tests.fsdp.both import Trained

WIDTH = 64  # what torchao's blocks need


def make_mlps(linear: Callable[..., nn.Module] = nn.Linear) -> nn.Sequential:
    """Three of two layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(linear(WIDTH, 2 * WIDTH), nn.GELU(), linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
    )


def make_float8() -> nn.Module:
    """Weights are float8 on the wire."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(make_mlps(), config=config)


def make_int8() -> nn.Module:
    """Matrix products in int8; the wire has the parameters' dtype."""
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    model = make_mlps()
    quantize_(model, Int8MixedPrecisionTrainingConfig())
    return model


class LowRank(nn.Module):
    """A frozen base of 4 bits below LoRA (QLoRA)."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        weight = to_nf4(torch.randn(num_out, num_in) / 8, block_size=64, scaler_block_size=2)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a = nn.Linear(num_in, 4, bias=False)
        self.b = nn.Linear(4, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        base: Tensor = linear_nf4(x, self.weight)
        return base + self.b(self.a(x))


def make_nf4() -> nn.Module:
    """Of such layers."""
    return make_mlps(LowRank)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "float8": make_float8,
    "int8": make_int8,
    "nf4": make_nf4,
}


def train(fsdp: Any, model: Any, policy: MixedPrecisionPolicy) -> Trained:
    """Losses of a few steps; ``fsdp``: FSDP2's module, or a stage of ``zerocore.shard``."""
    if isinstance(fsdp, int):
        mixed = zerocore.MixedPrecision(policy.param_dtype, policy.reduce_dtype)
        model = zerocore.shard(model, stage=fsdp, mixed_precision=mixed)
    else:
        for block in model:
            fsdp.fully_shard(block, mp_policy=policy)
        fsdp.fully_shard(model, mp_policy=policy)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(5 + dist.get_rank())
    inputs = torch.randn(16, WIDTH)
    losses = []
    for _ in range(4):
        loss = model(inputs).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, [], {})
