"""An error of one rank is an error of all, and values of all ranks come back in their order."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run_ranks
from zerocore.common.agreement import SharedError, agree, from_rank, on_all_ranks


class DamageError(SharedError):
    pass


OTHERS = r"rank 1 failed: OSError: the disk is full"
# The error that each rank raises, and the type and message of the error that it gets.
CASES: list[tuple[list[Exception | None], list[tuple[type[Exception], str]]]] = [
    (
        [None, OSError("the disk is full"), None],
        [(RuntimeError, OTHERS), (OSError, "^the disk is full"), (RuntimeError, OTHERS)],
    ),
    (
        [None, DamageError("a is damaged"), DamageError("b is damaged")],
        [
            (DamageError, "rank 1 failed: DamageError: a is damaged"),
            (DamageError, "^a is damaged"),
            (DamageError, "^b is damaged"),
        ],
    ),
    (
        [DamageError("a is damaged"), OSError("the disk is full"), None],
        [(RuntimeError, OTHERS), (OSError, "^the disk is full"), (RuntimeError, OTHERS)],
    ),
]


def fail_together() -> None:
    groups, rank = [dist.group.WORLD], dist.get_rank()
    for raised, expected in CASES:

        def action(error: Exception | None = raised[rank]) -> int:
            if error is not None:
                raise error
            return rank

        kind, message = expected[rank]
        with pytest.raises(kind, match=message) as caught:
            on_all_ranks(groups, action)
        assert caught.type is kind
    assert on_all_ranks(groups, lambda: 10 * rank) == [0, 10, 20]
    assert on_all_ranks([], lambda: rank) == [rank]


def test_an_error_of_one_rank_is_one_of_all() -> None:
    run_ranks(fail_together, 3)


def agree_on_facts() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    groups = [mesh.get_group("inner"), mesh.get_group("outer")]  # ranks in their order
    facts = [f"fact {number}" for number in range(100)]
    refused = AssertionError("facts travelled")
    with (
        mock.patch.object(dist, "all_gather_object", side_effect=refused),
        mock.patch.object(dist, "broadcast_object_list", side_effect=refused),
    ):
        names = [agree(groups, None, facts) for _ in range(3)]
    assert len(set(names)) == 3
    assert on_all_ranks(groups, lambda: names) == [names] * 4
    assert [from_rank(groups, rank, rank=each) for each in range(4)] == [0, 1, 2, 3]

    # Facts of equal value whose text differs are the same.
    assert agree(groups, None, [1 if rank == 1 else True])
    odd = 2 if rank == 1 else True  # rank 3 has the digest of rank 0
    with pytest.raises(ValueError, match="rank 0 has True, rank 1 has 2"):
        agree(groups, None, [odd])
    with pytest.raises(ValueError, match="rank 0 has b, rank 2 has c"):
        agree(groups, None, ["a", "c" if rank >= 2 else "b"])
    with pytest.raises(ValueError, match="only rank 3 has b"):
        agree(groups, None, ["a", "b"] if rank == 3 else ["a"])
    kind, message = (OSError, "^full") if rank == 2 else (RuntimeError, "rank 2 failed: OSError")
    with pytest.raises(kind, match=message):
        agree(groups, OSError("full") if rank == 2 else None, [rank])


def test_facts_travel_only_where_they_differ() -> None:
    run_ranks(agree_on_facts, 4)
