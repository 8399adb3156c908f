"""python -m zerocore checkpoint: what is in files, whether it is whole, other kinds of files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import zerocore
from zerocore.cli import app as cli

safetensors = pytest.importorskip("safetensors.torch")


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["checkpoint", *map(str, args)])


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A folder of two checkpoints of one rank, and the weights of the last one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 3).bfloat16())
    model = zerocore.shard(net)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = zerocore.Checkpoints(tmp_path / "saved", model, optimizer)
    checkpoints.save(1).wait()
    checkpoints.save(2).wait()
    return tmp_path / "saved", zerocore.full_state_dict(model)


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[key].dtype == value.dtype and torch.equal(actual[key], value)
        for key, value in expected.items()
    )


def test_inspect(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = saved
    shown = json.loads(run("inspect", folder, "--json").output)
    assert shown["kind"] == "dcp" and shown["checkpoints"] == ["step-00000001", "step-00000002"]
    found = {row["name"]: (row["shape"], row["dtype"], row["nbytes"]) for row in shown["weights"]}
    assert found["0.weight"] == ([30, 40], "float32", 4800)
    assert found["2.weight"] == ([3, 30], "bfloat16", 180) and found.keys() == weights.keys()
    table = run("inspect", folder)
    assert "0.weight" in table.output and "4,800" in table.output


def test_convert_goes_around(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, weights = saved
    assert run("convert", folder, tmp_path / "hf").exit_code == 0
    assert same(safetensors.load_file(tmp_path / "hf" / "model.safetensors"), weights)
    assert run("convert", tmp_path / "hf", tmp_path / "dcp").exit_code == 0
    assert run("verify", tmp_path / "dcp").exit_code == 0
    assert run("convert", tmp_path / "dcp", tmp_path / "all.pt").exit_code == 0
    assert same(torch.load(tmp_path / "all.pt"), weights)
    back = run("convert", tmp_path / "all.pt", tmp_path / "again", "--to", "safetensors")
    assert back.exit_code == 0 and "9 tensors as safetensors" in back.output
    assert same(safetensors.load_file(tmp_path / "again" / "model.safetensors"), weights)
    twice = run("convert", folder, tmp_path / "hf")
    assert twice.exit_code == 1 and "is not overwritten" in twice.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again", "all.pt", "dcp", "hf", "saved",
    ]  # fmt: skip


def test_verify_names_what_is_damaged(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = saved
    good = run("verify", folder)
    assert good.exit_code == 0 and good.output.count("are good") == 2
    file = folder / "step-00000001" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    place = data.index(weights["0.weight"].view(torch.uint8).numpy().tobytes()[:64])
    data[place + 5] ^= 1
    file.write_bytes(bytes(data))
    bad = run("verify", folder)
    assert bad.exit_code == 1
    assert "step-00000001/__0_0.distcp is damaged" in bad.output and "model.0.weight" in bad.output
    assert "no safetensors files" in run("inspect", folder.parent).output


def test_a_name_is_no_markup_and_no_command(tmp_path: Path) -> None:
    names = ("blocks[bold].w", "[red]x[/red]", "evil\x1b[31m", "[/]")
    safetensors.save_file({name: torch.zeros(2) for name in names}, tmp_path / "a.safetensors")
    shown = run("inspect", tmp_path).output
    assert "blocks[bold].w" in shown and "[red]x[/red]" in shown and "[/]" in shown
    assert "\x1b" not in shown and r"evil\x1b[31m" in shown
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "\\u001b"}}')
    refused = run("inspect", tmp_path)
    assert refused.exit_code == 1 and "not the name of a file" in refused.output
    assert "\x1b" not in refused.output
