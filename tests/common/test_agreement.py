"""An error of one rank is an error of all, and values of all ranks come back in their order."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.distributed.harness import run_ranks
from zerocore.common.agreement import SharedError, on_all_ranks


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
