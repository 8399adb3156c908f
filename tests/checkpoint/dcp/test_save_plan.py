"""Every element is saved once, where the metadata says; the planner says how many bytes."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.distributed.harness import run_ranks
from zerocore._C import Layout, ParamSpec
from zerocore.checkpoint.dcp import save_plan
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.dcp.save_plan import SavePlan, Spread
from zerocore.checkpoint.dcp.torch_chunks import chunk_nbytes
from zerocore.layout.cuts import Cut
from zerocore.layout.save_ownership import SavedRanges


def ranges_of(layout: Layout, position: int, copies: int) -> SavedRanges:
    """One rank's are those of all ranks; every shard's are the layout's."""
    cut = Cut.of(layout, position)
    assert [(shard, *cut.owned(shard)) for shard, _, _ in cut.ranges()] == list(cut.ranges())
    for shard in range(layout.num_shards):
        begin, end = cut.owned(shard)
        own = layout.owned(position, shard)
        assert (begin, end) == (own.begin, own.end) or (begin == end and own.begin == own.end)
    saved = SavedRanges(cut, copies)
    each = {rank: saved.of(rank) for rank in range(layout.num_shards * copies)}
    assert {rank: part for rank, part in each.items() if part[0] < part[1]} == {
        rank: (begin, end) for rank, begin, end in saved.all()
    }
    return saved


def random_plan(choose: random.Random) -> SavePlan:
    shards, copies = choose.choice([(1, 1), (1, 3), (2, 2), (4, 1), (3, 2)])
    shapes = [tuple(choose.choices(range(7), k=choose.randrange(4))) for _ in range(5)]
    specs = [ParamSpec(f"p{i}", list(shape), 6, 4) for i, shape in enumerate(shapes)]
    by_rows = choose.random() < 0.3 and all(shapes)
    across = choose.choice([n for n in (1, 2) if shards % n == 0 and not by_rows] or [1])
    layout = Layout.build(specs, shards, by_rows, across)
    tensors = {}
    for index, shape in enumerate(shapes):
        tensors[f"p{index}"] = (torch.float32, Spread(shape, ranges_of(layout, index, copies)))
    return SavePlan(tensors, shards * copies)


def test_every_element_is_saved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(5)
    monkeypatch.setattr(save_plan, "MAX_NBYTES", 80)  # 20 elements
    for _ in range(300):
        plan = random_plan(choose)
        metadata = plan.metadata({}, {})
        by_rank = {}
        for rank in range(plan.world_size):
            for piece in plan.pieces_of(rank):
                by_rank[piece.key, torch.Size(piece.box.offsets)] = (rank, piece)
        assert len(by_rank) == len(metadata.storage_data)
        ends = [0] * plan.world_size
        for index, info in metadata.storage_data.items():
            rank, piece = by_rank[index.fqn, index.offset]
            assert (info.relative_path, info.offset) == (plan.file_name(rank), piece.offset)
            assert piece.offset >= ends[rank]
            ends[rank] = piece.offset + info.length
            assert info.length == chunk_nbytes(4 * piece.box.numel)
            assert piece.box.numel <= 20
        assert ends == [plan.file_nbytes(rank) for rank in range(plan.world_size)]
        for key, (_, spread) in plan.tensors.items():
            seen = torch.zeros(spread.shape)
            for chunk in metadata.state_dict_metadata[key].chunks:  # type: ignore[union-attr]
                box = zip(chunk.offsets, chunk.sizes, strict=True)
                seen[tuple(slice(a, a + n) for a, n in box)] += 1
            assert bool((seen == 1).all())
            assert metadata.state_dict_metadata[key].chunks  # type: ignore[union-attr]


def save_and_predict(folder: Path, shape: tuple[int, int], stage: int) -> int:
    net = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100, bias=False))
    net[0].bias.requires_grad_(False)
    mixed = zerocore.MixedPrecision(torch.bfloat16)
    predicted = (
        zerocore.plan(
            net,
            shape[0] * shape[1],
            num_replicas=shape[0],
            workload=zerocore.Workload(rank=dist.get_rank()),
            mixed_precision=mixed,
        )
        .stages[stage]
        .checkpoint
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = zerocore.shard(net, stage=stage, group=mesh, mixed_precision=mixed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    zerocore.Checkpoints(folder, model, optimizer).save(1).wait()
    metadata = Contents(folder / "step-00000001").metadata
    total = own = 0
    for index, info in metadata.storage_data.items():
        facts = metadata.state_dict_metadata[index.fqn]
        if index.fqn.endswith(".step") or not hasattr(facts, "chunks"):
            continue
        chunk = next(c for c in facts.chunks if c.offsets == index.offset)
        nbytes = prod(chunk.sizes) * facts.properties.dtype.itemsize
        assert info.length == chunk_nbytes(nbytes)
        total += nbytes
        own += nbytes * (info.relative_path == f"__{dist.get_rank()}_0.distcp")
    assert (predicted.total, predicted.own) == (total, own)
    assert predicted.host == own
    return own


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_the_planner_says_the_bytes(shape: tuple[int, int], stage: int, tmp_path: Path) -> None:
    parts = run_ranks(save_and_predict, shape[0] * shape[1], tmp_path, shape, stage)
    assert max(parts) < 2 * sum(parts) / len(parts)  # replicas share the writing


@pytest.mark.parametrize("num_ranks", [2**power for power in range(1, 15)])
@pytest.mark.parametrize("by_rows", [False, True])
def test_a_rank_counts_nothing_of_the_others(
    num_ranks: int, by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges that are computed for one rank's file: one a parameter, at any number of ranks."""
    shapes = [[4096, 512], [512], [512, 4096]]
    specs = [ParamSpec(f"p{i}", shape, 6, 4) for i, shape in enumerate(shapes)]
    layout = Layout.build(specs, num_ranks, by_rows)
    tensors = {
        f"p{i}": (torch.float32, Spread(tuple(shape), SavedRanges(Cut.of(layout, i))))
        for i, shape in enumerate(shapes)
    }
    plan = SavePlan(tensors, num_ranks)
    counted = []
    owned = Cut.owned
    monkeypatch.setattr(Cut, "owned", lambda *args: counted.append(1) or owned(*args))
    monkeypatch.setattr(Cut, "ranges", None)
    plan.file_nbytes(num_ranks // 2)
    assert len(counted) == len(shapes)
