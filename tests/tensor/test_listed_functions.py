"""Element-wise functions: by torch's tags and schemas, and the names listed beside these."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from zerocore.tensor.functions import GLOBAL, LIKES, LISTED, RANDOM, base_of, is_pointwise

TAG = torch.Tag.pointwise
PART = slice(3, 7)


@cache
def overloads() -> dict[str, list[Any]]:
    """The overloads of each of torch's operators by base name, without those that write to
    ``out=`` or to their first argument."""
    found: dict[str, list[Any]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        if full.startswith("aten::") and not name.endswith("_") and "out" not in overload:
            packet = getattr(torch.ops.aten, name)
            found.setdefault(base_of(name), []).append(getattr(packet, overload or "default"))
    return found


def tagged() -> set[str]:
    """The names of which torch tags an overload."""
    return {base for base, ops in overloads().items() if any(TAG in op.tags for op in ops)}


def test_tags_alone_would_be_wrong() -> None:
    """Torch tags an overload of these, which give a number of all elements, draw, or give more."""
    wrong = {base for base in tagged() if not is_pointwise(base)}
    assert wrong == {"equal", "frexp", "max", "min", "rrelu"}
    assert not any(map(is_pointwise, (GLOBAL | RANDOM) - LIKES))


def test_a_listed_name_has_no_tag() -> None:
    """A name that torch tags needs no place in the list, unless an earlier release lacks the tag,
    or an overload is no such function."""
    assert LISTED & tagged() <= {"leaky_relu", "where"}


def test_foreach_functions_have_tags() -> None:
    """Torch's own lists of functions for optimizers: a release that drops a tag fails here."""
    names = [name for name in dir(torch) if re.fullmatch(r"_foreach_.*[^_]", name)]
    bases = set(map(base_of, names)) - {"norm", "powsum", "max", "mm"}
    assert len(bases) > 40
    assert [base for base in sorted(bases) if not is_pointwise(base)] == []


def results(op: Any) -> tuple[Tensor, Tensor] | None:
    """Returns an operator's result for a part, and the part of its result for the whole; None if
    it takes none of the dtypes."""
    whole = torch.rand(12) * 0.8 + 0.1
    floats, integers = (whole, torch.rand(12)), (torch.arange(12), torch.arange(12) + 2)
    for values, dtype in product((floats, integers), (None, torch.bool)):
        pairs: list[Tensor] = [v if dtype is None else v > 0.5 for v in values]
        try:
            full = op(*arguments(op, pairs))
            return op(*arguments(op, [v[PART] for v in pairs])), full[PART]
        except RuntimeError:
            continue
    return None


def arguments(op: Any, tensors: list[Tensor]) -> list[Any]:
    numbers = {"int": 1, "float": 0.5, "bool": True, "number": 2, "str": "none"}
    kinds = [str(arg.type) for arg in op._schema.arguments if not arg.kwarg_only]
    return [
        tensors[index % 2].clone() if kind == "Tensor" else numbers.get(kind)
        for index, kind in enumerate(kinds)
    ]


def test_tagged_functions_are_pointwise() -> None:
    """Each overload gives for a part what it gives for the whole, there."""
    torch.manual_seed(0)
    compared = set()
    for base in filter(is_pointwise, tagged()):
        for op in overloads()[base]:
            tensors = sum(str(arg.type) == "Tensor" for arg in op._schema.arguments)
            if tensors and TAG in op.tags and (both := results(op)) is not None:
                torch.testing.assert_close(*both, equal_nan=True, msg=f"{op}")
                compared.add(base)
    assert len(compared) > 150, tagged() - compared


@pytest.mark.parametrize("name", ["mylib::update", "a.module.mul", "grad=", "__setitem__", ""])
def test_other_names_are_not(name: str) -> None:
    assert not is_pointwise(name)
