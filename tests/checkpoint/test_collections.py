"""Collections wait, and come again after an error."""

from __future__ import annotations

import gc

import pytest

from zerocore.checkpoint.checkpoints import no_collections


def test_collections_come_again_where_they_were() -> None:
    with pytest.raises(KeyError), no_collections():
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
