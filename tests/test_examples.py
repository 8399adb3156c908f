"""The examples: a short real training run, its figures, and how its ranks start and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"

ONE_RANK_FAILS = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from launch import run_on_ranks

def work(rank, folder):
    Path(folder, f"pid{rank.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank.rank == 1:
        raise RuntimeError("broken on purpose")
    time.sleep(600)

if __name__ == "__main__":
    run_on_ranks(work, sys.argv[1], num_ranks=2, device_type="cpu")
"""


def run_python(*args: str | Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a script with the package and the examples importable and no ranks set from outside."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = [str(ROOT), str(EXAMPLES), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, env=env, timeout=timeout, capture_output=True, text=True)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of twelve steps at stage 3 on two CPU ranks."""
    path = tmp_path_factory.mktemp("train_gpt") / "run.json"
    options = ("--steps", "12", "--ranks", "2", "--device", "cpu", "--json", path)
    result = run_python(EXAMPLES / "train_gpt.py", *options, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "generated text" in result.stdout
    return json.loads(path.read_text())


@pytest.mark.timeout(420)
def test_short_run_learns(short_run: dict[str, Any]) -> None:
    held_out = short_run["held_out_loss"]
    assert 5.4 < held_out["before"] < 5.7  # a uniform guess over 256 bytes costs 5.545 nats
    assert held_out["after"] < held_out["before"] - 0.5
    assert len(short_run["losses"]) == 12
    assert short_run["losses"][-1] < short_run["losses"][0] - 0.5
    assert 4e6 <= short_run["settings"]["num_parameters"] <= 10e6


@pytest.mark.timeout(420)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_measured_figures_are_those_predicted(short_run: dict[str, Any], stage: int) -> None:
    figures = short_run["stages"][stage]
    assert figures["stage"] == stage
    assert figures["trained"] == (stage == 3)
    for kind in ("parameters", "gradients"):
        assert figures["measured_nbytes"][kind] == figures["predicted_nbytes"][kind] > 0
    assert figures["collectives"]
    for collective in figures["collectives"].values():
        assert collective["num_calls"] == collective["predicted_num_calls"] > 0
        assert collective["nbytes"] == collective["predicted_nbytes"] > 0


@pytest.mark.timeout(120)
def test_a_failing_rank_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "one_rank_fails.py"
    script.write_text(ONE_RANK_FAILS)
    result = run_python(script, tmp_path, timeout=100)
    assert result.returncode != 0
    assert "broken on purpose" in result.stderr
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("option", ["--stage=4", "--device=tpu", "--ranks=0"])
def test_bad_options_are_refused(option: str) -> None:
    result = run_python(EXAMPLES / "train_gpt.py", option, timeout=100)
    assert result.returncode == 2
    assert option.removeprefix("--").split("=")[0] in result.stderr


def test_no_position_sees_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=2, width=16, num_heads=2, context=8))
    for parameter in model.parameters():  # some start at zero, which would hide a leak
        torch.nn.init.normal_(parameter)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_corpus_is_split_by_file_and_always_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from text_data import load_corpus

    for number in range(100):
        (tmp_path / f"{number}.py").write_text(f"<{number:02}>" * 4000)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("not ours")
    (tmp_path / "picture.png").write_bytes(b"not text")
    corpus, again = load_corpus(tmp_path), load_corpus(tmp_path)
    assert corpus.num_train_files + corpus.num_held_out_files == 100
    assert 0 < corpus.num_held_out_files < 20
    held_out, train = (bytes(text.tolist()) for text in (corpus.held_out, corpus.train))
    assert all(
        (f"<{number:02}>".encode() in held_out) != (f"<{number:02}>".encode() in train)
        for number in range(100)
    )
    assert b"not" not in held_out + train
    assert torch.equal(corpus.train, again.train)


def test_too_little_text_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from text_data import load_corpus

    (tmp_path / "short.py").write_text("pass\n")
    with pytest.raises(ValueError, match="found 5 bytes"):
        load_corpus(tmp_path)
