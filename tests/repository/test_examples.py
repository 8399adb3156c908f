"""The examples: a short real training run, its figures, and how its ranks start and end."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

RANKS_THAT_STAY = f"""
import os, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
from pathlib import Path
import torch.distributed as dist
from launch import run_on_ranks

def work(rank, options):
    folder, ending = options
    Path(folder, f"pid{{rank.rank}}").write_text(str(os.getpid()))
    dist.barrier()
    Path(folder, f"ready{{rank.rank}}").touch()
    if ending == "fail" and rank.rank == 1:
        raise RuntimeError("broken on purpose")
    time.sleep(600)

if __name__ == "__main__":
    run_on_ranks(work, sys.argv[1:], num_ranks=2, device_type="cpu")
"""


def rank_environment() -> dict[str, str]:
    """The package and the examples importable, and no ranks set from outside."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = [str(ROOT), str(EXAMPLES), *filter(None, [env.get("PYTHONPATH")])]
    return env | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run_python(*args: str | Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, at most `timeout` seconds."""
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, env=rank_environment(), timeout=timeout, capture_output=True, text=True
    )


def write_script(folder: Path) -> Path:
    """Write the script that starts two ranks; they leave their process ids in `folder`."""
    script = folder / "ranks_that_stay.py"
    script.write_text(RANKS_THAT_STAY)
    return script


def wait_until(condition: Callable[[], bool], seconds: float = 60, every: float = 0.1) -> None:
    """Poll until `condition()` holds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every)


def has_ended(pid: int) -> bool:
    """True if there is no such process, or only its exit status is left to be read."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of eight steps at stage 3 on two CPU ranks."""
    path = tmp_path_factory.mktemp("train_gpt") / "run.json"
    options = ("--steps", "8", "--ranks", "2", "--device", "cpu", "--json", path)
    assert "generated text" in run_example("train_gpt.py", *options, timeout=400, forked=True)
    return json.loads(path.read_text())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_short_run_learns(short_run: dict[str, Any]) -> None:
    held_out = short_run["held_out_loss"]
    assert 5.4 < held_out["before"] < 5.7  # a uniform guess over 256 bytes costs 5.545 nats
    assert held_out["after"] < held_out["before"] - 0.25
    assert len(short_run["losses"]) == 8
    assert short_run["losses"][-1] < short_run["losses"][0] - 0.25
    assert 4e6 <= short_run["settings"]["num_parameters"] <= 10e6


@pytest.mark.distributed
@pytest.mark.slow
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


def run_example(script: str, *args: str | Path, timeout: float, forked: bool = False) -> str:
    """The output of an example, as a user runs it, or (`forked`) without importing torch again."""
    if forked:
        code, text = run_script(EXAMPLES / script, *args, timeout=timeout)
    else:
        done = run_python(EXAMPLES / script, *args, timeout=timeout)
        code, text = done.returncode, done.stdout + done.stderr
    assert code == 0, text
    return text


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("script", ["experts.py", "context.py"])
def test_other_parallelism_on_four_ranks(script: str) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "4", EXAMPLES / script]
    done = run_python(*command, "--steps", "20", timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[1] < losses[0] < 5.0
    assert "FutureWarning" not in done.stderr


def finetune(folder: Path, *options: str | Path) -> dict[str, Any]:
    """The JSON of a few steps of fine-tuning on two CPU ranks."""
    path = folder / "run.json"
    sizes = [
        "--steps=8",
        "--eval-every=4",
        "--context=32",
        "--batch-size=2",
        "--ranks=2",
        "--device=cpu",
    ]
    run_example("finetune.py", *sizes, "--json", path, *options, timeout=200, forked=True)
    return json.loads(path.read_text())


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_fine_tuning_all_weights_then_adapters(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    saved = tmp_path / "weights.pt"
    full = finetune(tmp_path, "--stage=3", "--save", saved)
    first, *_, last = full["held_out"]
    assert 5.3 < first < 5.8 and last < first - 0.5
    assert len(full["losses"]) == len(full["norms"]) == 8
    assert len(full["generated"]) == 104
    weights = torch.load(saved)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    # Adapters start as zero, so what is measured first are the weights that were saved.
    options = ["--stage=1", "--load", saved, "--lora=4", "--lr=0.01"]
    adapted = finetune(tmp_path, *options)
    assert adapted["held_out"][0] == pytest.approx(min(full["held_out"]), rel=1e-3)
    assert min(adapted["held_out"]) < adapted["held_out"][0] - 0.01


def make_pretrained(folder: Path) -> None:
    """A small model with a tokenizer, as save_pretrained leaves them."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    plain.train_from_iterator([Path(__file__).read_text()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=300, num_attention_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fine_tuning_a_pretrained_model_with_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, out = tmp_path / "source", tmp_path / "out"
    make_pretrained(source)
    figures = finetune(tmp_path, "--model", source, "--out", out, "--dtype=float32")
    assert min(figures["held_out"]) < figures["held_out"][0]
    model = AutoModelForCausalLM.from_pretrained(out)
    before = AutoModelForCausalLM.from_pretrained(source)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    text = AutoTokenizer.from_pretrained(out).decode(figures["generated"])
    assert text.startswith("def ") and max(figures["generated"]) < 300


SMALL = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import gpt, train_gpt, typer

if __name__ == "__main__":
    gpt.GPTConfig.__init__.__defaults__ = (2, 16, 2, 8, gpt.VOCAB_SIZE)
    typer.run(train_gpt.main)
"""


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    """Its losses are those of a run that was not killed, bit for bit. The model is a small one."""
    folder, path, script = tmp_path / "checkpoints", tmp_path / "run.json", tmp_path / "small.py"
    script.write_text(SMALL)
    options = [
        "--ranks=2",
        "--device=cpu",
        "--steps=160",
        "--minutes=20",
        "--save-every=20",
        f"--json={path}",
    ]
    checkpointed = [*options, f"--checkpoint={folder}"]
    command = [sys.executable, str(script), *checkpointed]
    with subprocess.Popen(command, env=rank_environment(), stdout=subprocess.DEVNULL) as parent:
        try:
            wait_until(lambda: any(folder.glob("step-????????")), 200, every=0.02)
        finally:
            parent.kill()
    assert not path.exists()
    resumed = run_example(script, *checkpointed, "--resume", timeout=300, forked=True)
    assert "resumed at step: " in resumed and "step: None" not in resumed
    losses = json.loads(path.read_text())["losses"]
    run_example(script, *options, timeout=300, forked=True)
    assert losses == json.loads(path.read_text())["losses"]


def test_adapters_without_peft(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    finetune_script = importlib.import_module("finetune")
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--lora=4"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        finetune_script.main()
    assert "--lora needs PEFT: pip install peft" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_failing_rank_ends_the_others(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    code, text = run_script(script, tmp_path, "fail")
    assert code != 0
    assert "broken on purpose" in text
    for rank in (0, 1):
        assert not psutil.pid_exists(int((tmp_path / f"pid{rank}").read_text()))


@pytest.mark.distributed
@pytest.mark.timeout(150)
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_killed_parent_leaves_no_rank_behind(tmp_path: Path) -> None:
    command = [sys.executable, str(write_script(tmp_path)), str(tmp_path), "stay"]
    env = rank_environment() | {"TMPDIR": str(tmp_path)}  # the parent cannot clean up after itself
    with subprocess.Popen(command, env=env) as parent:
        try:
            wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        finally:
            parent.kill()
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    wait_until(lambda: all(map(has_ended, pids)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("option", ["--stage=4", "--device=tpu", "--ranks=0"])
def test_bad_options_are_refused(option: str) -> None:
    code, text = run_script(EXAMPLES / "train_gpt.py", option)
    assert code == 2
    assert option.removeprefix("--").split("=")[0] in text


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


def test_the_whole_loop_is_shown() -> None:
    """docs/training.md has all of it, where test_blocks.py runs it."""
    page = (ROOT / "docs" / "training.md").read_text()
    assert f"```python\n{(EXAMPLES / 'loop.py').read_text()}```\n" in page


def launch_quickstart(folder: Path, steps: int) -> str:
    """Its output under torchrun, as a user starts it."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--out", folder, "--steps", str(steps))
    run = run_python(*launch, EXAMPLES / "quickstart.py", *options, timeout=200)
    assert run.returncode == 0, run.stderr
    return run.stdout


def fork_quickstart(folder: Path, steps: int) -> str:
    """The same on ranks that have imported all it needs."""
    return run_ranks(run_quickstart, 2, folder, steps, launch="torchrun", timeout=200)[0]


def run_quickstart(folder: Path, steps: int) -> str:
    sys.argv = ["quickstart.py", "--out", str(folder), "--steps", str(steps)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    return printed.getvalue()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "launch", [pytest.param(launch_quickstart, marks=pytest.mark.nightly), fork_quickstart]
)
def test_the_quickstart_saves_reloads_and_resumes(
    tmp_path: Path, launch: Callable[[Path, int], str]
) -> None:
    pytest.importorskip("transformers")
    losses: list[float] = []
    for steps in (10, 30):  # the second run goes on from step 10
        printed = launch(tmp_path, steps)
        assert "reloaded 106,880 parameters" in printed
        losses += map(float, re.findall(r"loss ([0-9.]+)", printed))
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]
