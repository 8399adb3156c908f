"""torchtitan's own trainer over ``zerocore.fsdp``: losses as over torch's FSDP2, and it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.titan import behind, difference, resume, train, write_assets

pytest.importorskip("torchtitan.config")
pytest.importorskip("spmd_types")
pytestmark = pytest.mark.nightly  # by day its decoders, in test_fsdp_torchtitan


@pytest.mark.parametrize(
    "case,writers", [("llama3-fsdp", ["zerocore"]), ("llama3-tp", ["zerocore", "torch"])]
)
def test_its_trainer_trains_as_over_fsdp2_and_resumes(
    tmp_path: Path, case: str, writers: list[str]
) -> None:
    """Bit for bit: the shards, the order of sums and the dtypes are the same."""
    write_assets(tmp_path)
    found, expected = (train(case, name, str(tmp_path)) for name in ("zerocore", "torch"))
    assert found == expected
    for writer in writers:
        assert resume(case, "zerocore", str(tmp_path), run=writer) == behind(expected)


def test_experts_under_tensor_parallelism_train_as_over_fsdp2(tmp_path: Path) -> None:
    """In float32: torchtitan's backends sum the router's gradient at different places."""
    write_assets(tmp_path)
    options = ["--training.seq-len=64", "--training.local-batch-size=1", "--training.steps=2"]
    options.append("--training.mixed-precision-param=float32")
    found, expected = (
        train("qwen3-tp", name, str(tmp_path), *options) for name in ("zerocore", "torch")
    )
    assert difference(found, expected) < 1e-5
