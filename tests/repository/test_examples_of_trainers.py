"""The examples of trainers, other libraries' ones and that of GRPO: they run, save and go on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.repository.test_examples import EXAMPLES, run_example, run_python


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hugging_faces_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    path = tmp_path / "run.json"
    options = ["--every=2", "--context=32", "--batch-size=2", "--ranks=2", "--device=cpu"]
    options += [f"--output={tmp_path / 'out'}", f"--json={path}"]
    for more in (["--steps=4"], ["--steps=6", "--resume"]):
        text = run_example("hf_trainer.py", *options, *more, timeout=190, forked=True)
        assert "generated: b'def " in text
    figures = [entry for entry in json.loads(path.read_text()) if "loss" in entry]
    assert [entry["step"] for entry in figures] == [1, 2, 3, 4, 5, 6]
    assert figures[-1]["loss"] < figures[0]["loss"] - 0.3


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trainer", ["accelerate", "fabric", "lightning"])
def test_other_trainers(tmp_path: Path, trainer: str) -> None:
    pytest.importorskip("accelerate" if trainer == "accelerate" else "lightning")
    options = ["--steps=8", "--ranks=2", "--device=cpu", f"--output={tmp_path}"]
    options += [f"--trainer={trainer}"]
    text = run_example("other_trainers.py", *options, timeout=250, forked=True)
    first, last = re.findall(r"stage 3: ([\d.]+) -> ([\d.]+)", text)[0]
    assert float(last) < float(first) - 0.3
    assert (tmp_path / "zerocore" if trainer == "accelerate" else tmp_path / "last.ckpt").exists()


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_policy_learns_by_exports() -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / "rl.py"]
    done = run_python(*command, "--iterations", "30", timeout=300)
    assert done.returncode == 0, done.stderr
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert rewards[0] < 0.15 and rewards[-1] > rewards[0] + 0.05
    assert "no values" not in done.stderr  # buffers of the reference
