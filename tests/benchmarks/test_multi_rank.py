"""benchmarks/multi_rank.py on gloo: real ranks train as one rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_parity_on_gloo(tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(ROOT / "benchmarks" / "multi_rank.py")],
        env={**os.environ, **hidden, "ZEROCORE_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*_multi_rank_gloo.json")
    found = json.loads(path.read_text())
    expected = found["losses"].pop("one rank")
    assert expected[0] != expected[-1]
    stages = [f"zerocore stage {stage}" for stage in range(4)]
    assert set(found["losses"]) == {"FSDP2", *stages, "zerocore stage 3, registered"}
    for losses in found["losses"].values():
        assert losses == pytest.approx(expected, abs=1e-5)
    assert all(overlap["hidden"] is None for overlap in found["overlap"].values())
