"""zerocore.recovery.PeerCheckpoints: what nodes keep in memory survives processes and nodes."""

from __future__ import annotations

import shutil
import signal
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_day
from tests.checkpoint.saved_nets import OPTIMIZERS, assert_equal, full_states, make, train
from tests.distributed.harness import run_ranks
from tests.distributed.scripts import run_program
from tests.recovery import lives
from tests.reported import warnings_of
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.recovery.peers import Move, rounds_of

RANKS_ON_A_NODE = 2


def node_of(folder: Path, rank: int, size: int = RANKS_ON_A_NODE) -> Path:
    """A node is a folder of its own."""
    return folder / f"node{rank // size}"


class Training:
    """A model, its optimizer, and checkpoints on this rank's node."""

    def __init__(self, folder: Path, stage: int, name: str, mesh: tuple[int, int] | None) -> None:
        options: dict[str, Any] = {} if mesh is None else {"group": init_device_mesh("cpu", mesh)}
        self.model = make(stage, **options)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.checkpoints = zerocore.recovery.PeerCheckpoints(
            node_of(folder, dist.get_rank()), self.model, self.optimizer
        )

    def states(self) -> dict[str, Any]:
        return full_states(self.model, self.optimizer)


def save(folder: Path, *kind: Any) -> list[dict[str, Any]]:
    """Three steps, each saved; the states of each."""
    training, found = Training(folder, *kind), []
    for step in (1, 2, 3):
        train(training.model, training.optimizer, 1, seed=step)
        training.checkpoints.save(step)
        found.append(training.states())
    training.checkpoints.wait()
    return found


def resume(folder: Path, *kind: Any) -> tuple[int | None, dict[str, Any]]:
    training = Training(folder, *kind)
    step = training.checkpoints.load()
    training.checkpoints.save(7).wait()  # afterwards all is as before
    return step, training.states()


KINDS = [(3, "zerocore", (2, 2)), (3, "adamw", None), (0, "sgd", None)]
LIVES = list(zip(KINDS, (4, 3, 6), strict=True))  # each kind on one number of ranks


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    by_day(product(KINDS, (4, 3, 6)), LIVES),
)
def test_a_node_is_lost(kind: Any, num_ranks: int, tmp_path: Path) -> None:
    """The same number of ranks, fewer and more of them, with a node that is new."""
    expected = run_ranks(save, 4, tmp_path, *kind)
    names = sorted(path.name for path in (tmp_path / "node0" / "step-00000003").iterdir())
    assert names.count("rank-2.pt") == 1, names  # the other node's
    shutil.rmtree(tmp_path / "node0")
    stage, name, mesh = kind
    mesh = mesh if num_ranks == 4 else None
    for step, states in run_ranks(resume, num_ranks, tmp_path, stage, name, mesh):
        assert step == 3
        assert_equal(states, expected[0][2])
    assert sorted(path.name for path in (tmp_path / "node0").iterdir()) == [
        "step-00000003",
        "step-00000007",
    ]


def hold(folder: Path, stage: int) -> None:
    """Elements in the files of a rank and its peer, beside the plan."""
    torch.manual_seed(0)
    predicted = (
        zerocore.plan(nn.Linear(64, 32), 4, workload=zerocore.Workload(rank=dist.get_rank()))
        .stages[stage]
        .checkpoint
    )
    model = zerocore.shard(nn.Linear(64, 32), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    node = node_of(folder, dist.get_rank())
    zerocore.recovery.PeerCheckpoints(node, model, optimizer).save(1).wait()
    metadata = Contents(node / "step-00000001").metadata
    here = {path.name: 0 for path in node.glob("step*/*.distcp")}
    for index, info in metadata.storage_data.items():
        facts = metadata.state_dict_metadata[index.fqn]
        if info.relative_path in here and index.offset and not index.fqn.endswith(".step"):
            assert isinstance(facts, TensorStorageMetadata)
            chunk = next(each for each in facts.chunks if each.offsets == index.offset)
            here[info.relative_path] += prod(chunk.sizes) * 4
    sizes = {name: nbytes for name, nbytes in here.items() if nbytes}
    own = f"__{dist.get_rank()}_0.distcp"
    assert len(sizes) == 2 * RANKS_ON_A_NODE and sizes[own] == predicted.own
    assert predicted.near == 3 * 2 * max(sizes.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_plan_says_the_memory_of_a_node(stage: int, tmp_path: Path) -> None:
    run_ranks(hold, 4, tmp_path, stage)


def test_rounds() -> None:
    moves = [Move(str(i), 1, i % 5, (3 * i + 1) % 5) for i in range(40) if i % 5 != (3 * i + 1) % 5]
    rounds = rounds_of(moves)
    assert sorted(move for each in rounds for move in each) == sorted(moves)
    for each in rounds:
        assert len({m.source for m in each}) == len({m.target for m in each}) == len(each)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def resume_damaged(folder: Path, *kind: Any) -> tuple[int | None, dict[str, Any], list[str]]:
    training = Training(folder, *kind)
    with warnings_of("zerocore") as messages:
        step = training.checkpoints.load()
    with pytest.raises(FileNotFoundError, match=r"checkpoint of step 3; complete: \[2\]"):
        training.checkpoints.load(3)
    with pytest.raises(FileNotFoundError, match=r"checkpoint of step 3; complete: \[2\]"):
        training.checkpoints.load(fallback=False)
    return step, training.states(), messages


def test_damaged_copies_are_named_and_not_used(tmp_path: Path) -> None:
    """One copy of a file of step 2, and both of a file of step 3."""
    kind = KINDS[0]
    expected = run_ranks(save, 4, tmp_path, *kind)
    damage(tmp_path / "node1" / "step-00000002" / "__0_0.distcp")
    for node in ("node0", "node1"):
        damage(tmp_path / node / "step-00000003" / "rank-3.pt")
    said = []
    for step, states, messages in run_ranks(resume_damaged, 4, tmp_path, *kind):
        assert step == 2
        assert_equal(states, expected[0][1])
        said += messages
    for name in ("node1/step-00000002/__0_0.distcp", "node0/step-00000003/rank-3.pt"):
        assert any(f"{name} is not used" in text and "checksum mismatch" in text for text in said)


def resume_nothing(folder: Path, *kind: Any) -> tuple[int | None, list[str]]:
    training = Training(folder, *kind)
    with warnings_of("zerocore") as messages:
        return training.checkpoints.load(), messages


def test_no_copy_is_left(tmp_path: Path) -> None:
    """A warning says what is lost, and a program can load something else."""
    run_ranks(save, 4, tmp_path, *KINDS[0])
    for path in tmp_path.glob("node*/step-*/rank-3.pt"):
        path.unlink()
    lost = [f"step {step} cannot be loaded: 1 of its " for step in (3, 2)]
    for step, messages in run_ranks(resume_nothing, 4, tmp_path, *KINDS[0]):
        found = [text for text in messages if "cannot be loaded" in text]
        assert step is None and all(map(str.startswith, found, lost)) and len(found) == 2, messages


LIVES = """
import os, signal, sys
from pathlib import Path
from tests.recovery import lives
folder, point, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
begin, losses = lives.train(folder / f"node{rank}", point if rank == int(sys.argv[3]) else "", die)
print(begin, *(loss.hex() for loss in losses))
"""


@pytest.mark.parametrize(
    ("point", "victim"),
    by_day(product(lives.POINTS, range(3)), [("commit", 2)]),
)
def test_a_killed_rank_and_its_node(point: str, victim: int, tmp_path: Path) -> None:
    """Losses of the next life are those of an undisturbed run, bit for bit."""
    folder = str(tmp_path)
    undisturbed = [text for code, text in run_program(LIVES, 3, f"{folder}/a", "", "-1")]
    for each in ["", point] if point == "load" else [point]:
        ended = run_program(LIVES, 3, f"{folder}/b", each or "forward", str(victim))
        assert ended[victim][0] == -signal.SIGKILL, ended
    shutil.rmtree(tmp_path / "b" / f"node{victim}")
    for (code, text), whole in zip(
        run_program(LIVES, 3, f"{folder}/b", "", "-1"), undisturbed, strict=True
    ):
        begin, *losses = text.split()
        assert (code, begin) in ((0, "2"), (0, "4")), text
        assert losses == whole.split()[1 + int(begin) :]
