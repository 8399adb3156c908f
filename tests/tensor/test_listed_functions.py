"""The list of elementwise functions beside torch's own tags."""

from __future__ import annotations

import pytest
import torch

from zerocore.tensor.functions import COPIES, ELEMENTWISE, GLOBAL, LIKES, RANDOM, VIEWS, base_of


def names(text: str) -> set[str]:
    return set(text.split())


# Listed, and torch has no tag for them: other names of tagged functions, and what is composed.
NAMES = names(
    """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide expit fix floor_divide
    greater greater_equal less less_equal multiply negative not_equal subtract hardswish isclose
    isreal logsigmoid softsign tanhshrink
    """
)
# These give the same elements, in another dtype or place, or set all of them.
CASTS = names(
    """
    alias bfloat16 bool byte char contiguous copy cpu cuda double fill float half int long
    pin_memory short type zero
    """
)


def tagged() -> set[str]:
    """Names of operators that torch says are pointwise, in any overload."""
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        if not name.startswith("aten::"):
            continue
        operator = torch._C._get_operation_overload(name, overload)
        if operator is not None and torch.Tag.pointwise in operator[2]:
            found.add(base_of(name.removeprefix("aten::")))
    return found


@pytest.mark.skipif(torch.__version__ < "2.13", reason="earlier releases have fewer tags")
def test_what_is_listed_has_a_tag_or_a_reason() -> None:
    untagged = NAMES | CASTS | COPIES | VIEWS | LIKES
    assert ELEMENTWISE - tagged() <= untagged
    assert ELEMENTWISE.isdisjoint(GLOBAL | RANDOM - LIKES)


def test_tags_alone_would_be_wrong() -> None:
    """Of one tensor these give a number of all elements, or draw: a tag of torch is no proof, so
    the list stays, and what is not on it is refused."""
    wrong = {"equal", "max", "min", "rrelu"}
    assert wrong <= tagged()
    assert ELEMENTWISE.isdisjoint(wrong)
