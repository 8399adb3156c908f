"""Each attribute of torch that zerocore replaces is there; where torch renames one, a test fails.

The first shard raises if torch lacks a name of the table; helpers of
``torch.distributed.checkpoint`` that it lacks are left alone, so nothing else would tell of these.
"""

from __future__ import annotations

import re
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from zerocore.hooks.patches import PATCHES, Patch, find_targets, install
from zerocore.install import MORE_PATCHES

TARGETS = [
    f"{patch.owner}.{patch.name}"
    for patch in (*PATCHES, *MORE_PATCHES)
    if patch.before is None or torch.__version__ < patch.before
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


def unchanged(old: Any) -> Any:
    raise AssertionError("nothing is replaced if torch lacks a name")


@pytest.mark.parametrize(
    ("owner", "name"), [("torch.nn.Module", "_apply_to_all"), ("torch.autograds", "backward")]
)
def test_a_name_that_torch_lacks_is_an_error(
    owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before anything is replaced: a second attempt must not wrap twice."""
    monkeypatch.setattr("zerocore.hooks.patches.PATCHES", (Patch("torch.nn", "Module", unchanged),))
    lacking = f"torch {torch.__version__} lacks {owner}.{name}"
    with pytest.raises(RuntimeError, match=re.escape(lacking)):
        install((Patch(owner, name, unchanged),))


def test_a_release_that_is_known_to_lack_a_name_is_named() -> None:
    gone = Patch("torch.nn.Module", "_apply_to_all", unchanged, before="2.0")
    needed = Patch("torch.nn.Module", "_apply", unchanged, before="99.0")
    found = find_targets((gone, needed))
    assert found == [(needed, torch.nn.Module, torch.nn.Module._apply)]
