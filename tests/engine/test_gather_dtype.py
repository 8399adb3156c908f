"""Parameters that are gathered as numbers of one byte with a scale for each block."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.sharding.experts import assert_follows_plan, loss_of_ones
from zerocore.model.state import state_of

FLOAT8, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
DTYPES = (FLOAT8, INT8)
WIDTH = 48


class Net(nn.Module):
    """An embedding, blocks with a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def policy(dtype: torch.dtype, **options: Any) -> zerocore.MixedPrecision:
    return zerocore.MixedPrecision(gather_dtype=dtype, **options)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
    x = torch.randint(20, (4, 6), generator=generator)
    return nn.functional.cross_entropy(model(x).float().view(-1, 20), x.flip(1).view(-1))


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Losses."""
    losses = []
    for step in range(count):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    with zerocore.unsharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def compute_with_gathered_weights(dtype: torch.dtype, param_dtype: torch.dtype | None) -> None:
    """The same values on all ranks, near the exact ones, and those that layers compute with."""
    model = zerocore.shard(make_net(), mixed_precision=policy(dtype, param_dtype=param_dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = make_net().to(param_dtype or torch.float32)
    for step in range(3):
        weights, exact = gathered_weights(model), zerocore.full_state_dict(model)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, weights)
        for name, weight in weights.items():
            assert all(torch.equal(other[name], weight) for other in everywhere)
        for name in exact:  # on rank 0
            weight = weights[name]
            error = (weight.float() - exact[name].float()).abs().max()
            largest = exact[name].abs().max()
            narrow = "embed" not in name and weight.dim() > 1
            least, most = (1e-3, 2**-4) if narrow else (0.0, 2**-8)
            assert float(least * largest) <= float(error) <= float(most * largest), name
        plain.load_state_dict(weights)
        loss = loss_of(model, step)
        assert torch.equal(loss.detach(), loss_of(plain, step).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("world", "dtype", "param_dtype"), [(2, FLOAT8, BF16), (3, INT8, None), (4, FLOAT8, None)]
)
def test_layers_compute_with_what_was_gathered(
    world: int, dtype: torch.dtype, param_dtype: torch.dtype | None
) -> None:
    run_ranks(compute_with_gathered_weights, world, dtype, param_dtype)


def export_what_layers_compute_with() -> None:
    """Also where few tensors of a unit are wanted, which an all-reduce would bring exactly."""
    model = zerocore.shard(make_net(), units=[], mixed_precision=policy(INT8))
    weights = gathered_weights(model)
    for name in ("blocks.1.1.weight", None):
        kept = {each: each if name in (each, None) else None for each in weights}
        found = [
            (each, torch.equal(value, weights[each]))
            for bucket in zerocore.export(model, names=kept)
            for each, value in bucket.items()
        ]
        assert found == [(each, True) for each in weights if kept[each]]


def test_exports_have_what_layers_compute_with() -> None:
    run_ranks(export_what_layers_compute_with, 2)


def plan_bytes() -> None:
    sent = {}
    for dtype in (None, *DTYPES):
        model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(3)))
        mixed = zerocore.MixedPrecision(BF16, gather_dtype=dtype)
        model = zerocore.shard(model, units=["0", "1", "2"], mixed_precision=mixed)
        optimizer = torch.optim.AdamW(model.parameters())
        own_loss = partial(loss_of_ones, model, 96)
        events = assert_follows_plan(model, optimizer, own_loss, since=1)
        assert zerocore.memory_usage(model, optimizer) == zerocore.planning.predict_memory(model)
        assert state_of(model).engine.pool_stats.in_use_nbytes == 0
        sent[dtype] = {e.nbytes for e in events if e.op == "all_gather"}
    numel = 96 * 96
    assert sent == {None: {2 * numel}, FLOAT8: {numel // 128 * 132}, INT8: {numel // 128 * 132}}


def test_bytes_are_as_planned() -> None:
    run_ranks(plan_bytes, 2)


def keep_what_was_not_written() -> None:
    """Writing back changes those elements alone that the program has changed."""
    for param_dtype in (None, BF16):
        model: Any = zerocore.shard(
            make_net(), mixed_precision=policy(INT8, param_dtype=param_dtype)
        )
        before = zerocore.full_state_dict(model)
        with zerocore.unsharded(model, write_back=True):
            model.head.weight.data[3, 5] = 7.0
        after = zerocore.full_state_dict(model)
        if dist.get_rank() == 0:
            assert float(after["head.weight"][3, 5]) == 7.0
            before["head.weight"][3, 5] = 7.0
        for name, value in before.items():
            assert torch.equal(after[name], value), name


def test_writing_back_keeps_exact_values() -> None:
    run_ranks(keep_what_was_not_written, 2)


def train_near() -> None:
    """Later gathers come from near ranks, with the values that the first one has brought."""
    losses = []
    for regather in (None, 2):
        model = zerocore.shard(
            make_net(),
            mixed_precision=policy(FLOAT8),
            communication=zerocore.Communication(regather=regather),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses += train_steps(model, optimizer, 3)
        assert (state_of(model).engine.counters["gather_near"].count > 0) == (regather == 2)
    assert losses[:3] == losses[3:]


def test_near_ranks_have_the_same_values() -> None:
    run_ranks(train_near, 4)


def train_rows(dtype: torch.dtype) -> None:
    """By rows, whose blocks hold parts of several rows: near losses of exact gathers, not alike."""
    found = {}
    for gather in (None, dtype):
        model: Any = make_net()
        mixed = zerocore.fsdp.MixedPrecisionPolicy(gather_dtype=gather)
        for module in (*model.blocks, model):
            zerocore.fsdp.fully_shard(module, mp_policy=mixed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found[gather] = torch.tensor(train_steps(model, optimizer, 4))
    differences = (found[None] - found[dtype]).abs()
    assert 0 < float(differences.max()) < 2e-2
    assert "float32 and" in str(zerocore.report(model)) and "int8" in str(zerocore.report(model))


def test_rows_are_gathered_narrow() -> None:
    run_ranks(train_rows, 3, INT8)


def describe_all() -> tuple[str, str, str]:
    texts = []
    for names in (None, (), ("head",)):
        model = zerocore.shard(
            make_net(), units=["head"], mixed_precision=policy(INT8, gather_exact=names)
        )
        texts.append(str(zerocore.describe(model)))
    return texts[0], texts[1], texts[2]


def test_descriptions_say_what_is_gathered() -> None:
    for default, everything, head in run_ranks(describe_all, 2):
        assert "float32 trainable, gathered as int8" in default
        assert default.count("trainable") == 2 + default.count("gathered as int8") == 4
        assert everything.count("trainable") == everything.count("gathered as int8") == 2
        assert head.count("trainable") == 1 + head.count("gathered as int8") == 2


def test_a_rank_alone_gathers_nothing() -> None:
    def train() -> list[float]:
        model = zerocore.shard(nn.Linear(9, 9), mixed_precision=mixed)
        model(torch.ones(1, 9)).sum().backward()
        return [p.grad.sum().item() for p in model.parameters()]  # type: ignore[union-attr]

    mixed = policy(INT8)
    assert train() == [81.0, 9.0]


def refuse_all() -> None:
    def refuse(
        text: str, mixed: zerocore.MixedPrecision, model: Any = None, **options: Any
    ) -> None:
        with pytest.raises(ValueError, match=text):
            zerocore.shard(model or make_net(), mixed_precision=mixed, **options)

    for stage in (1, 2):
        refuse(f"does not support stage={stage}", policy(INT8), stage=stage)
    mesh = init_device_mesh("cpu", (2, 1))
    refuse(
        "replicas_share",
        policy(INT8),
        group=mesh,
        communication=zerocore.Communication(replicas_share="optimizer"),
    )
    offload = zerocore.Offload(states="cpu", parameters="cpu")
    refuse("parameters on cpu", policy(INT8), offload=offload)
    offload = zerocore.Offload(states="disk", parameters="disk", path=tempfile.gettempdir())
    refuse("parameters on disk", policy(INT8), offload=offload)
    refuse(r"'blocks.0.1.weight' is torch.float64", policy(INT8), make_net().double())
    refuse("gather_exact: 'nose'", policy(INT8, gather_exact=("nose",)))
    refuse("gather_dtype", policy(DTYPES[dist.get_rank()]))


def test_mistakes_are_errors_on_all_ranks() -> None:
    run_ranks(refuse_all, 2)
    with pytest.raises(ValueError, match="gather_dtype must be one of"):
        policy(torch.float8_e5m2)
    with pytest.raises(TypeError, match="gather_dtype must be a"):
        policy("int8")  # type: ignore[arg-type]
