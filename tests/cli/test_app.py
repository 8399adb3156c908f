"""The command line, as a user runs it: tables, JSON, mistakes, missing libraries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

import zerocore
from tests.distributed.scripts import run_program
from zerocore.__main__ import COMMANDS
from zerocore.cli import app as cli
from zerocore.planning.huggingface import build_model, load_config, preset_names

ROOT = Path(zerocore.__file__).resolve().parents[1]
PRESET_PARAMS = {
    "gpt-3-175b": 174_604_259_328,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-4b": 4_022_468_096,
}
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args))


def run_json(*args: str) -> dict:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_help_and_version_need_no_torch() -> None:
    code = (
        "import runpy, sys; sys.argv[1:], sys.orig_argv = [{0!r}], ['python', '-m', 'zerocore']; "
        "runpy.run_module('zerocore', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    for option, text in (("--help", "checkpoint"), ("--version", zerocore.__version__)):
        command = [sys.executable, "-c", code.format(option)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert text in run.stdout


def test_help_names_all_commands() -> None:
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    assert {name: command.help for name, command in commands.items()} == COMMANDS


def test_plan_prints_a_table(config: str) -> None:
    result = run("plan", "--hf-config", config, "--gpus", "2", "--memory", "24GiB")
    assert result.exit_code == 0, result.output
    for text in ("stage 3", "= model state", "bucket pool", "activations", "sent a step"):
        assert text in result.stdout
    assert "stage 0 is the smallest that fits" in result.stdout


def test_plan_prints_what_print_does(config: str) -> None:
    result = run("plan", "--hf-config", config, "--gpus", "2", "--seq-len", "16")
    assert result.stdout == f"{zerocore.plan(config, 2, workload=zerocore.Workload(seq_len=16))}\n"


def test_plan_prints_json_that_is_the_plan(config: str) -> None:
    options = ["--gpus", "8", "--micro-batch", "2", "--seq-len", "16", "--link", "eth100"]
    found = run_json("plan", "--hf-config", config, *options)
    plan = zerocore.plan(
        config,
        8,
        workload=zerocore.Workload(micro_batch=2, seq_len=16),
        machine=zerocore.Machine(links=["eth100"]),
    )
    assert found == json.loads(json.dumps(plan.to_dict()))
    assert [stage["fits"] for stage in found["stages"]] == [True] * 4
    assert found["stages"][3]["timings"][0]["link"] == "eth100"


def test_plan_of_replicas_prints_json_that_is_the_plan(config: str) -> None:
    options = ["--gpus", "16", "--num-replicas", "2", "--seq-len", "16"]
    options += ["--link", "nvlink4", "--replica-link", "ib400"]
    found = run_json("plan", "--hf-config", config, *options)
    plan = zerocore.plan(
        config,
        16,
        num_replicas=2,
        workload=zerocore.Workload(seq_len=16),
        machine=zerocore.Machine(links="nvlink4", replica_link="ib400"),
    )
    assert found == json.loads(json.dumps(plan.to_dict()))
    assert found["setting"]["num_replicas"] == 2
    assert found["setting"]["machine"]["replica_link"]["name"] == "ib400"
    assert found["stages"][3]["across_nbytes"] > 0
    assert found["stages"][3]["timings"][0]["across_s"] > 0


def test_plan_on_a_named_machine(config: str) -> None:
    options = ["--gpus", "16", "--machine", "8xA100-ib200", "--seq-len", "16", "--compiled"]
    found = run_json("plan", "--hf-config", config, *options)
    plan = zerocore.plan(
        config,
        16,
        machine=zerocore.Machine("8xA100-ib200"),
        workload=zerocore.Workload(seq_len=16, compiled=True),
    )
    assert found == json.loads(json.dumps(plan.to_dict()))
    timing = found["stages"][3]["timings"][0]
    assert timing["tokens_per_s"] == 16 / timing["step_s"]
    assert 0 < timing["mfu"] < 1
    assert "256 tokens a step: 16 in a micro-batch, 1 of them, 16 ranks" in str(plan)


def test_plan_in_mixed_precision(config: str) -> None:
    narrow = run_json("plan", "--hf-config", config, "--dtype", "bf16")["stages"][0]
    mixed = run_json("plan", "--hf-config", config, "--mixed-precision", "bf16")["stages"][0]
    assert mixed["parameters"] == narrow["parameters"]
    assert mixed["main_weights"] == 2 * narrow["parameters"]
    assert mixed["optimizer"] == 2 * narrow["optimizer"]


def test_plan_with_narrow_wires(config: str) -> None:
    wires = ("--mixed-precision", "bf16", "--wire-dtype", "bf16", "--gather-dtype", "int8")
    stages = run_json("plan", "--hf-config", config, *wires)["stages"]
    mixed = zerocore.MixedPrecision(
        torch.bfloat16, wire_dtype=torch.bfloat16, gather_dtype=torch.int8
    )
    planned = zerocore.plan(config, 8, mixed_precision=mixed).to_dict()["stages"]
    assert [each["pool"] for each in stages] == [each["pool"] for each in planned]
    exact = run_json("plan", "--hf-config", config, *wires[:4])["stages"]
    assert stages[3]["pool"] != exact[3]["pool"]
    assert stages[2]["pool"] == exact[2]["pool"]


def test_a_folder_is_taken_for_its_config(config: str) -> None:
    assert run_json("plan", "--hf-config", str(Path(config).parent)) == {
        **run_json("plan", "--hf-config", config),
        "model": str(Path(config).parent),
    }


def test_describe(config: str) -> None:
    found = run_json("describe", "--hf-config", config, "--gpus", "3", "--stage", "3")
    names = [unit["name"] for unit in found["units"]]
    assert names == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm + lm_head",
    ]
    assert all(3 * unit["shard_nbytes"] == unit["buffer_nbytes"] for unit in found["units"])
    table = run("describe", "--hf-config", config).stdout
    assert "model.layers.1" in table and "float32 trainable" in table


def test_env_has_a_line_for_each_fact() -> None:
    lines = run("env").stdout.splitlines()
    facts = run_json("env")
    assert lines == [f"{name}: {fact}" for name, fact in facts.items()]
    assert {"zerocore", "zerocore build", "torch", "CUDA", "NCCL", "NVML"} <= set(facts)
    build = r"(GCC|clang) \d+\.[^,]*, torch \d+\.[^,]*, CUDA: [^,]+, C\+\+ flags: .+"
    assert re.fullmatch(build, facts["zerocore build"])
    assert "/" not in facts["zerocore build"]


def test_bench_runs_a_script_and_hands_on_arguments_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    (tmp_path / "_helper.py").write_text("")
    monkeypatch.setattr(cli, "BENCHMARKS", tmp_path)
    assert run("bench", "step", "--ranks", "2").exit_code == 3
    assert "['--ranks', '2']" in capfd.readouterr().out
    result = run("bench", "memory")
    assert result.exit_code == 2
    assert "there is no benchmark 'memory'; choose one of step" in result.stderr
    monkeypatch.setattr(cli, "BENCHMARKS", tmp_path / "none")
    assert "run this from a checkout" in run("bench", "step").stderr


BENCHMARK = """
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=0)
rounds = parser.parse_args().rounds
folder = pathlib.Path(os.environ["ZEROCORE_RESULTS"])
print("measuring")
for number in range(rounds):
    (folder / f"day_{number}.json").write_text(json.dumps({"theme": "step", "round": number}))
    (folder / f"day_{number}_trace.json").write_text("[]")
"""


def test_bench_prints_the_help_and_the_results_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step.py").write_text(BENCHMARK)
    (tmp_path / "old.json").write_text('{"theme": "old"}')
    monkeypatch.setattr(cli, "BENCHMARKS", tmp_path)
    monkeypatch.setenv("ZEROCORE_RESULTS", str(tmp_path))
    assert run("bench", "step", "--help").exit_code == 0
    assert "--rounds" in capfd.readouterr().out
    assert "benchmarks/NAME.py" in run("bench", "--help").stdout
    assert run_json("bench", "step", "--rounds", "1") == {"theme": "step", "round": 0}
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "measuring\n")
    result = run("bench", "step", "--json")
    assert result.exit_code == 2
    assert f"benchmark 'step' wrote no results to {tmp_path}" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either --hf-config or --preset"),
        (("--preset", "gpt-5"), "preset must be one of gpt-3-175b"),
        (("--hf-config", "nowhere.json"), "'nowhere.json' is neither a file nor a preset"),
        (("--preset", "qwen3-4b", "--reduce-dtype", "fp32"), "needs --mixed-precision"),
        (("--preset", "qwen3-4b", "--optimizer", "adamm"), "optimizer must be one of sgd"),
    ],
)
def test_mistakes_are_one_message(args: tuple[str, ...], message: str) -> None:
    result = run("plan", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "a configuration needs a 'model_type'"),
        ('{"model_type": "abacus"}', "has no model_type 'abacus'"),
        ('{"model_type": "llama", "architectures": ["Abacus"]}', "has no model class 'Abacus'"),
        ('{"model_type": "llama", "architectures": ["LlamaConfig"]}', "has no model class"),
        ('{"model_type": "llama", "hidden_size": "abc"}', "'hidden_size' expected int, got str"),
        (
            '{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}',
            "The hidden size (65) is not a multiple of the number of attention heads (4)",
        ),
        (
            '{"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "abacus"}',
            "transformers cannot use this configuration: KeyError: 'abacus'",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plan", "describe"])
def test_a_bad_configuration_is_named(
    tmp_path: Path, command: str, content: str, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    result = run(command, "--hf-config", str(path))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: '{path}'") and message in result.stderr


def test_a_folder_without_a_configuration_is_called_so(tmp_path: Path) -> None:
    result = run("plan", "--hf-config", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr == f"error: '{tmp_path}' is a folder without a config.json\n"


def test_presets_are_all_tested() -> None:
    assert preset_names() == sorted(PRESET_PARAMS)
    assert load_config("Qwen3-4B").num_hidden_layers == 36


@pytest.mark.parametrize("preset", PRESET_PARAMS)
def test_presets_have_the_published_sizes(preset: str) -> None:
    """On the meta device: no weights, whatever the size."""
    model = build_model(load_config(preset), torch.bfloat16)
    assert sum(param.numel() for param in model.parameters()) == PRESET_PARAMS[preset]
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.one_by_day
@pytest.mark.parametrize("preset", PRESET_PARAMS)
def test_activations_of_presets_are_measured(preset: str) -> None:
    values = json.loads((ROOT / "zerocore" / "planning" / "presets" / f"{preset}.json").read_text())
    depth = "n_layer" if "n_layer" in values else "num_hidden_layers"
    plan = zerocore.plan(
        {**values, depth: 2}, 64, dtype=torch.bfloat16, workload=zerocore.Workload(seq_len=256)
    )
    assert plan.note == ""
    assert plan.checkpointed.saved_nbytes < plan.activations.saved_nbytes


def test_python_m_zerocore(config: str) -> None:
    command = [sys.executable, "-m", "zerocore", "plan", "--hf-config", config, "--gpus", "2"]
    command += ["--memory", "24GiB", "--dtype", "bf16"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "stage 3" in result.stdout


@pytest.mark.parametrize("missing", ["typer", pytest.param("rich", marks=pytest.mark.nightly)])
def test_a_missing_library_is_named(missing: str) -> None:
    code = (
        f"import sys; sys.modules['{missing}'] = None; from zerocore.__main__ import main; main()"
    )
    told = f"the command line needs {missing}: pip install 'zerocore[cli]'\n"
    assert run_program(code, 1, "plan") == [(1, told)]


def test_the_environment_is_told_without_extras() -> None:
    code = "import sys; sys.modules['typer'] = None; from zerocore.__main__ import main; main()"
    ((exit_code, told),) = run_program(code, 1, "env")
    assert exit_code == 0
    assert f"torch: {torch.__version__}" in told


def test_completion_is_offered() -> None:
    assert "--install-completion" in run("--help").stdout
