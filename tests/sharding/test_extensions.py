"""Parameters that gather themselves, under ``zerocore.shard``: beside FSDP2 and plain training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.harness import run_ranks
from tests.fsdp.both import NUM_STEPS, check_plan, loss_of, shard_blocks, tokens_of, train
from tests.fsdp.test_extensions import MIXED, Halves, make_halves
from zerocore.model.state import state_of

AdamW = torch.optim.AdamW


def steps(model: Any, optimizer: Any, first: int = 0) -> list[float]:
    losses = []
    for index in range(first, first + NUM_STEPS):
        loss = loss_of(model, tokens_of(index))
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full(model: Any) -> dict[str, Tensor]:
    values: dict[str, Tensor] = zerocore.full_state_dict(model, rank0_only=False)
    return values


def parity(*shape: int) -> None:
    """Losses and weights of FSDP2, where both gather halves; ranks' rows may be uneven."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = make_halves()
    theirs = train(shard_blocks(torch_fsdp, copy.deepcopy(model), mesh=mesh))
    for stage in (0, 1, 2, 3):
        Halves.asked = 0
        ours: Any = zerocore.shard(copy.deepcopy(model), stage=stage, group=mesh)
        assert type(ours.blocks[0].up.weight.detach()) is not Halves
        losses = steps(ours, AdamW(ours.parameters(), lr=1e-2))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs.losses))
        # Asked at the start, and where values have changed.
        times = Halves.asked // 6
        assert times == 0 if stage < 3 else 1 + NUM_STEPS <= times <= 2 + NUM_STEPS
        for name, value in full(ours).items():
            assert type(value) is Tensor
            expected = theirs.params[name]
            plain = expected._data if isinstance(expected, Halves) else expected
            torch.testing.assert_close(value, plain, rtol=1e-4, atol=1e-5)


def mixed_options() -> None:
    """Wires, accumulation and near ranks change nothing but rounding."""
    model = make_halves()
    mixed = zerocore.MixedPrecision
    plain: Any = zerocore.shard(copy.deepcopy(model), stage=3)
    expected = steps(plain, AdamW(plain.parameters(), lr=1e-2))
    for options in (
        {"mixed_precision": mixed(wire_dtype=torch.float32)},
        {"mixed_precision": mixed(torch.bfloat16, wire_dtype=torch.bfloat16)},
        {"mixed_precision": mixed(gather_dtype=torch.int8)},
        {"communication": zerocore.Communication(accumulate="full")},
        {
            "communication": zerocore.Communication(
                regather=2 if dist.get_world_size() == 4 else None
            )
        },
    ):
        ours: Any = zerocore.shard(copy.deepcopy(model), stage=3, **options)
        losses = steps(ours, zerocore.optim.AdamW(ours.parameters(), lr=1e-2))
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(expected), rtol=2e-2, atol=2e-2
        )
        check_plan(ours, "parameters", "main_weights", "gradients")


def report_and_faces() -> None:
    model: Any = zerocore.shard(make_halves(), stage=3)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer)
    assert "gathered as bfloat16" in str(zerocore.describe(model))
    assert "bfloat16" in str(zerocore.report(model)), str(zerocore.report(model))
    weight = model.blocks[0].up.weight
    with zerocore.unsharded(model):
        assert model.blocks[0].up.weight.shape == (13, 10)
        seen = model.blocks[0].up.weight.detach().clone()
    torch.testing.assert_close(weight.full_tensor(), seen, rtol=1e-4, atol=1e-4)
    refused = pytest.raises(NotImplementedError, match=r"qkv\.weight.*gathers itself")
    with refused, zerocore.unsharded(model, write_back=True):
        pass
    with pytest.raises(NotImplementedError, match=r"qkv\.weight.*gathers itself.*exports"):
        zerocore.weights.export_info(model)
    weight.data = torch.ones(13, 10)  # a call of a part asks anew
    x = torch.randn(2, 10)
    torch.testing.assert_close(
        model.blocks[0].up(x), nn.functional.linear(x, torch.ones(13, 10), None)
        + model.blocks[0].up.bias.full_tensor(),
    )  # fmt: skip


def state_dicts(folder: Path) -> None:
    """Full ones go to a plain model and back; ``Checkpoints`` as of plain parameters."""
    model: Any = zerocore.shard(make_halves(), stage=3)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer)
    saved = full(model)
    checkpoints = zerocore.Checkpoints(folder, model, optimizer)
    checkpoints.save(1).wait()
    expected = steps(model, optimizer, 4)
    checkpoints.load()
    assert expected == steps(model, optimizer, 4)
    zerocore.load_full_state_dict(model, saved if dist.get_rank() == 0 else None)
    for name, value in full(model).items():
        assert torch.equal(value, saved[name]), name
    plain = make_halves()
    plain.load_state_dict(saved)
    torch.testing.assert_close(loss_of(model, tokens_of(9)), loss_of(plain, tokens_of(9)))


class Reading(Halves):
    """Reads what TransformerEngine's tensors read."""

    def fsdp_pre_all_gather(self, *arguments: Any) -> Any:
        group = arguments[3]._get_fsdp_state()._fsdp_param_group
        assert not group._reshard_after_forward
        assert group._training_state.name == "FORWARD"
        return super().fsdp_pre_all_gather(*arguments)


def private_state() -> None:
    model: Any = make_halves()
    weight = model.blocks[0].up.weight
    model.blocks[0].up.weight = nn.Parameter(Reading(weight.detach()._data))
    expected = steps(copy.deepcopy(model), AdamW([torch.zeros(1)]))[0]
    model = zerocore.shard(model, stage=3)
    assert steps(model, AdamW(model.parameters(), lr=1e-2))[0] == pytest.approx(expected, rel=1e-4)


def bad_input() -> None:
    """An error that names the parameter, on all ranks, also where one rank is wrong."""

    class Silent(Halves):
        fsdp_pre_all_gather = fsdp_post_all_gather = property()  # type: ignore[assignment]

    model: Any = make_halves()
    model.head.weight = nn.Parameter(Silent(model.head.weight.detach()))
    with pytest.raises(ValueError, match=r"'head\.weight' is a Silent.*lacks fsdp_pre_all_gather"):
        zerocore.shard(model, stage=3)
    with pytest.raises(NotImplementedError, match=r"qkv\.weight.*unknown before the model"):
        zerocore.plan(make_halves(), 2)
    for option in ({"offload": zerocore.Offload()}, {"memory_budget": "1GiB"}):
        with pytest.raises(NotImplementedError, match=r"qkv\.weight.*gathers itself"):
            zerocore.shard(make_halves(), stage=3, **option)
    model = zerocore.shard(make_halves(), stage=3)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer)
    units = state_of(model).units
    found = {each.fqn: each for unit in units for each in unit.extensions}
    rows = found["blocks.1.up.weight"].rows
    if dist.get_rank() == 1:
        rows.fsdp_pre_all_gather = lambda mesh: ((torch.ones(3, 3),), None)
    words = ("another rank could not say", "fsdp_pre_all_gather returned")[dist.get_rank()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"'blocks\.1\.up\.weight': {words}"):
            loss_of(model, tokens_of(0))
    vars(rows).pop("fsdp_pre_all_gather", None)
    steps(model, optimizer)


def on_two(folder: Path) -> None:
    parity(2)
    mixed_options()
    report_and_faces()
    state_dicts(folder)
    private_state()
    bad_input()


def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_two, 2, tmp_path, timeout=180)


@pytest.mark.nightly
def test_uneven_rows() -> None:
    run_ranks(parity, 3, 3, timeout=120)


@pytest.mark.nightly
def test_replicas() -> None:
    run_ranks(parity, 4, 2, 2, timeout=120)


def run_torchao() -> None:
    """Float8, int8 and NF4 below LoRA: the losses of FSDP2 at stage 3, to the bit."""
    from tests.fsdp import torchao_models

    for make in torchao_models.MODELS.values():
        for policy in (torch_fsdp.MixedPrecisionPolicy(), MIXED):
            theirs = torchao_models.train(torch_fsdp, make(), policy).losses
            for stage in (1, 2, 3):
                ours = torchao_models.train(stage, make(), policy).losses
                if stage == 3:
                    assert ours == theirs
                assert ours == pytest.approx(theirs, rel=0.2)  # rounds other values


def adapters() -> None:
    """QLoRA: the frozen base stays 4-bit on the wire, adapters are loaded and saved."""
    from tests.fsdp import torchao_models

    plain = torchao_models.make_nf4()
    model: Any = zerocore.shard(torchao_models.make_nf4(), stage=3)
    saved = full(model)
    x = torch.randn(4, torchao_models.WIDTH)
    assert type(saved["0.0.weight"]).__name__ == "NF4Tensor"
    for name, value in plain.state_dict().items():
        assert torch.equal(saved[name].to(torch.float32), value.to(torch.float32)), name
    assert torch.equal(model(x), plain(x))
    assert "frozen, gathered as" in str(zerocore.describe(model))
    check_plan_of(model, x)
    with pytest.raises(RuntimeError, match=r"'0\.0\.weight' consists of several"):
        zerocore.load_full_state_dict(model, saved)
    with pytest.raises(RuntimeError, match=r"'0\.0\.weight' consists of several"):
        zerocore.Checkpoints("unused", model).save(1)
    with pytest.raises(NotImplementedError, match=r"'0\.0\.weight' .* which a snapshot cannot"):
        zerocore.snapshot(model, [])
    lora = {name: 2 * value for name, value in saved.items() if type(value) is Tensor}
    zerocore.load_full_state_dict(model, lora)
    plain.load_state_dict(lora, strict=False)
    assert torch.equal(model(x), plain(x))


def check_plan_of(model: Any, x: Tensor) -> None:
    model(x).sum().backward()
    with zerocore.reporting.record_events(model) as events:
        model(x).sum().backward()
    moved = [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]
    assert moved == list(zerocore.planning.predict_events(model)), (
        moved,
        zerocore.planning.predict_events(model),
    )


@pytest.mark.nightly
def test_torchao() -> None:
    pytest.importorskip("torchao", minversion="0.18")
    run_ranks(run_torchao, 2, timeout=240)
    run_ranks(adapters, 2, timeout=120)
