"""Each attribute of torch that zerocore replaces is there; where torch renames one, a test fails.

At run time a name that torch lacks is left alone, so nothing else would tell.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from zerocore.checkpoint.dcp.patches import _SEAMS
from zerocore.hooks.patches import PATCHES
from zerocore.install import CLIPS

DUE = [
    patch for patch in (*PATCHES, CLIPS) if patch.before is None or torch.__version__ < patch.before
]
TARGETS = [
    *(f"{patch.owner}.{patch.name}" for patch in DUE),
    *(f"{module}.{path}" for module, seams in _SEAMS.items() for path, _ in seams),
]


def replaced(target: str) -> Any:
    """The attribute; raises AttributeError or ModuleNotFoundError if torch has none."""
    owner, _, name = target.rpartition(".")
    return getattr(resolve_name(owner), name)


@pytest.mark.parametrize("target", TARGETS)
def test_torch_has_what_is_replaced(target: str) -> None:
    found = replaced(target)
    assert callable(found) or hasattr(found, "__get__")


def test_the_table_names_each_target_once() -> None:
    assert sorted(set(TARGETS)) == sorted(TARGETS)
    assert len(TARGETS) >= 60


@pytest.mark.parametrize(
    "renamed", ["torch.nn.Module._apply_to_all", "torch.autograds.backward", "torch.Tensors.data"]
)
def test_a_target_that_is_gone_is_noticed(renamed: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        replaced(renamed)
