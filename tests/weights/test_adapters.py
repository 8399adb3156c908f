"""Adapters over a frozen base: what moves, what is held, and that it trains as in one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocore
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.distributed.training import adamw, assert_same_state
from tests.distributed.values import own_of, range_of
from tests.zoo_huggingface import DECODER, VOCABULARY
from zerocore.planning.prediction import planned_events

NUM_STEPS = 3
# fp32 A and B of q_proj (16 to 16) and of v_proj (16 to 8) in each of three layers; r = 4.
LAYER_NBYTES = 4 * (2 * 16 * 4 + 4 * 16 + 4 * 8)
ADAPTER_NBYTES = 3 * LAYER_NBYTES
PADDING = 0.02  # of these on three ranks, which share no layer evenly
LAYERS = [f"base_model.model.model.layers.{i}" for i in range(3)]
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
Collectives = list[tuple[str, str, str]]


def base_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **DECODER, head_dim=8, tie_word_embeddings=False, attn_implementation="sdpa"
    )
    return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)


def lora_config() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def lora_model() -> Any:
    """fp32 adapters, a base that is bf16 and frozen, its norms included."""
    return pytest.importorskip("peft").get_peft_model(base_model(), lora_config()).train()


def tokens(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(2, VOCABULARY, (2, 7), generator=generator)
    return {"input_ids": ids, "labels": ids}


def train_both(
    model: nn.Module, plain: nn.Module, loss: Callable[[nn.Module, int, int], Tensor]
) -> tuple[torch.optim.Optimizer, list[zerocore.reporting.Event]]:
    """Trains `model` on the ranks and `plain` alone, alike; events are those of the last step."""
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    trained = [p for p in plain.parameters() if p.requires_grad]
    plain_optimizer = adamw(trained)
    for step in range(NUM_STEPS):
        for each in (optimizer, plain_optimizer):
            each.zero_grad()
        with zerocore.reporting.record_events(model) as events:
            loss(model, step, dist.get_rank()).backward()
            optimizer.step()
        for rank in range(dist.get_world_size()):
            loss(plain, step, rank).backward()
        for param in trained:  # not the loss: a third of it would be rounded in the bf16 base
            param.grad /= dist.get_world_size()
        plain_optimizer.step()
    for (name, param), full in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is not None) == param.requires_grad == full.requires_grad, name
    assert_same_state(zerocore.full_state_dict(model, rank0_only=False), plain.state_dict())
    return optimizer, events


def language_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(**tokens(step, rank)).loss
    return loss


def named(events: list[zerocore.reporting.Event]) -> Collectives:
    """Collectives by unit, with the region that they move."""
    found = []
    for event in events:
        if event.op not in ("unshard", "reshard"):
            padded = event.nbytes == pytest.approx(LAYER_NBYTES, rel=PADDING)
            region = "adapters" if padded else "base"
            found.append((event.op, event.unit.split(" + ")[-1], region))
    return found


def gathers(*units: str) -> Collectives:
    """As stage 3 does them: both regions of a layer."""
    found: Collectives = []
    for unit in units:
        found.append(("all_gather", unit, "base"))
        if unit in LAYERS:
            found.append(("all_gather", unit, "adapters"))
    return found


def moves(op: str, *units: str) -> Collectives:
    return [(op, unit, "adapters") for unit in units]


first, second, third = LAYERS
EXPECTED = {
    0: moves("all_reduce", third, second, first),
    1: moves("reduce_scatter", third, second, first) + moves("all_gather", *LAYERS),
    2: moves("reduce_scatter", third, second, first) + moves("all_gather", *LAYERS),
    3: gathers(EMBED, *LAYERS, HEAD, third, second) + moves("reduce_scatter", third)
    + gathers(first) + moves("reduce_scatter", second, first),
}  # fmt: skip


def train_lora() -> list[tuple[int, int]]:
    """Bytes of gradients and of optimizer states at each stage."""
    held = []
    for stage in EXPECTED:
        print(f"stage {stage}", flush=True)
        model = zerocore.shard(lora_model(), stage=stage)
        optimizer, events = train_both(model, lora_model(), language_loss)
        assert named(events) == (EXPECTED[stage] if dist.get_world_size() > 1 else [])
        assert [(e.op, e.unit, e.nbytes, e.pool_nbytes) for e in events] == planned_events(model)
        usage = zerocore.memory_usage(model, optimizer)
        assert usage == zerocore.planning.predict_memory(model)
        held.append((usage.gradients, usage.optimizer))
    return held


@pytest.mark.parametrize("world_size", [*by_night(1, 2, 4), 3])
def test_lora(world_size: int) -> None:
    pytest.importorskip("peft")
    by_rank = run_ranks(train_lora, world_size, timeout=120)
    for stage, held in enumerate(zip(*by_rank, strict=True)):
        gradients, states = (sum(nbytes) for nbytes in zip(*held, strict=True))
        # Over all ranks; nothing of the base has a gradient or a state.
        copies = 1 if stage >= 2 else world_size
        assert gradients == pytest.approx(copies * ADAPTER_NBYTES, rel=PADDING)
        assert states == 2 * ADAPTER_NBYTES * (1 if stage >= 1 else world_size)


def train_lora_with(option: str) -> None:
    """Neither option moves anything more, or in another order."""
    for stage in EXPECTED if option != "compile" else (3,):
        print(f"stage {stage}", flush=True)
        models = [lora_model(), lora_model()]
        if option.startswith("checkpoint"):
            settings = {"use_reentrant": option.endswith("reentrant")}
            for model in models:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        model = zerocore.shard(models[0], stage=stage)
        if option == "compile":
            for layer in model.base_model.model.model.layers:
                layer.compile(backend="aot_eager")
        _, events = train_both(model, models[1], language_loss)
        assert named(events) == EXPECTED[stage]
        moved = [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]
        assert moved == zerocore.planning.predict_events(model)


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["checkpoint", *by_night("checkpoint_reentrant", "compile")])
def test_lora_with(option: str) -> None:
    pytest.importorskip("peft")
    run_ranks(train_lora_with, 2, option, timeout=120)


def save_adapters(directory: str) -> None:
    model = zerocore.shard(lora_model())
    state = zerocore.full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(directory, state_dict=state)


def test_save_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run_ranks(save_adapters, 2, str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(base_model(), str(tmp_path))
    assert_same_state(loaded.state_dict(), lora_model().state_dict())


class PackedProduct(torch.autograd.Function):
    """A product with a 4-bit weight; backward unpacks the weight again."""

    @staticmethod
    def forward(context: Any, x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(packed, scale)
        return x @ unpack(packed, scale).to(x.dtype).t()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ unpack(*context.saved_tensors).to(grad.dtype), None, None


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """Two values of 4 bits in a byte; `scale` has one factor for each row."""
    values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return (values.float() - 7.5) * scale


class Packed4Bit(nn.Module):
    """A frozen 4-bit layer with an fp32 adapter."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again  # unpack in backward
        packed = torch.randint(0, 256, (8, 4), dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(8, 1) / 8, requires_grad=False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            base: Tensor = PackedProduct.apply(x, self.packed, self.scale)
        else:
            base = x @ unpack(self.packed, self.scale).to(x.dtype).t()
        return x + torch.tanh(base + self.up(self.down(x)))


def packed_model(again: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Packed4Bit(again) for _ in range(3)), nn.Linear(8, 3))


def square_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss: Tensor = model(torch.randn(4, 8, generator=generator)).square().mean()
    return loss


def train_packed(stage: int) -> None:
    for again in (False, True):
        model = zerocore.shard(packed_model(again), stage=stage, units=[Packed4Bit, "3"])
        train_both(model, packed_model(again), square_loss)
        assert {param.dtype for param in model.parameters()} == {torch.uint8, torch.float32}


def test_packed_4_bit_weights(stage: int) -> None:
    run_ranks(train_packed, 2, stage)


def mixed_packed_gradients() -> None:
    """Bytes are moved as they are, scales in fp32, and adapters are computed with in bf16."""
    mixed = zerocore.MixedPrecision(
        torch.bfloat16, torch.float32, output_dtype=torch.float32, keep_fp32=("scale",)
    )
    for stage, again in product(EXPECTED, (False, True)):
        print(f"stage {stage}, unpacked again: {again}", flush=True)
        plain = packed_model(again)
        adapters = [p for p in plain.parameters() if p.requires_grad]
        for param in adapters:
            param.data = param.data.bfloat16()
        plain.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        plain.register_forward_hook(lambda _, __, output: output.float())
        model = zerocore.shard(
            packed_model(again), stage=stage, units=[Packed4Bit, "3"], mixed_precision=mixed
        )
        square_loss(model, 0, dist.get_rank()).backward()
        gradients = [torch.zeros(p.shape) for p in adapters]
        for rank in range(2):
            for total, part in zip(
                gradients, torch.autograd.grad(square_loss(plain, 0, rank), adapters), strict=True
            ):
                total += part.float() / 2
        shards = [p for p in model.parameters() if p.requires_grad]
        for shard, full in zip(shards, gradients, strict=True):
            expected = full.flatten()[slice(*range_of(shard))]
            torch.testing.assert_close(own_of(shard.grad), expected)
        with zerocore.unsharded(model):
            dtypes = [param.dtype for param in model[0].parameters()]
        assert dtypes == [torch.uint8, torch.float32, torch.bfloat16, torch.bfloat16]


def test_packed_4_bit_weights_in_mixed_precision() -> None:
    run_ranks(mixed_packed_gradients, 2)


def change_what_is_frozen(stage: int) -> None:
    """Frozen parameters are gathered once, and again whenever something has changed them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].bias.requires_grad_(True)
    plain = copy.deepcopy(model)
    zerocore.shard(model, stage=stage, units=["0", "1"])
    for change in (change_in_place, write_back, load_other, thaw_and_train):
        for _ in range(2):
            change(model, plain)
            print(change.__name__, flush=True)
            torch.testing.assert_close(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
        model.requires_grad_(False)
        plain.requires_grad_(False)


def change_in_place(model: Any, plain: Any) -> None:
    with torch.no_grad():
        for net in (model, plain):
            net[1].weight.mul_(1.5)


def write_back(model: Any, plain: Any) -> None:
    with torch.no_grad(), zerocore.unsharded(model, write_back=True):
        for net in (model, plain):
            net[0].weight.data.add_(0.5)


def load_other(model: Any, plain: Any) -> None:
    plain.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    zerocore.load_full_state_dict(model, plain.state_dict())


def thaw_and_train(model: Any, plain: Any) -> None:
    for net in (model, plain):
        net.requires_grad_(True)
        net(torch.ones(1, 4)).sum().backward()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()


def test_changes_of_frozen_parameters_are_noticed(stage: int) -> None:
    run_ranks(change_what_is_frozen, 2, stage)


def add_to_a_sharded_model() -> None:
    def refused(match: str) -> Any:
        return pytest.raises(ValueError, match=match)

    model: Any = zerocore.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with refused(r"parameter '0.extra' is added .* sharded already.* then call zerocore.shard"):
        model[0].extra = nn.Parameter(torch.ones(2))
    with refused(r"parameter 'head.weight' is added"):
        model.head = nn.Linear(2, 2)
    with refused(r"parameter '1.weight' is sharded and cannot be replaced.*write_back"):
        model[1].weight = nn.Parameter(torch.ones(4, 4))
    model[1].weight = model[1].weight  # as tie_weights() does
    model[0].add_module("activation", nn.ReLU())
    with refused(r"parameter '0.activation.slope' is added"):
        model[0].activation.slope = nn.Parameter(torch.ones(1))
    model(torch.ones(1, 4)).sum().backward()


def test_parameters_added_after_shard_are_refused() -> None:
    run_ranks(add_to_a_sharded_model, 2)


def adapt_a_sharded_model() -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"lora_A.default.weight' is added .*peft.get_peft_model"):
        peft.get_peft_model(zerocore.shard(base_model()), lora_config())
    model = zerocore.shard(lora_model())
    with pytest.raises(ValueError, match=r"lora_A.second.weight' is added"):
        model.add_adapter("second", lora_config())


def test_adapters_added_after_shard_are_refused() -> None:
    pytest.importorskip("peft")
    run_ranks(adapt_a_sharded_model, 2)


def step_with_a_part_outside() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerocore").addHandler(handler)
    model, head = zerocore.shard(nn.Linear(4, 4)), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for _ in range(2):
        head(model(torch.ones(1, 4))).sum().backward()
        optimizer.step()
    return messages


def test_parameters_outside_of_the_sharded_model_are_reported_once() -> None:
    for messages in run_ranks(step_with_a_part_outside, 2):
        (message,) = messages
        assert "2 parameters that are in no sharded model" in message and "[2, 4]" in message
