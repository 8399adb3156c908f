"""The commands of README and docs: plans run, other commands exist with their options.

The Python blocks run in test_blocks.py.
"""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import zerocore
from tests.cli.test_app import TINY
from tests.distributed.scripts import run_script
from zerocore.cli import app as cli
from zerocore.planning.huggingface import preset_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = ("python benchmarks/", "python examples/", "python scripts/")
LAUNCH = re.compile(
    r"^(torchrun (--nproc-per-node \d+ )?|([A-Z]+=\S+ )+examples/cluster/torchrun.sh )(?=examples/)"
)
# They cannot run here. The files that they get are tested elsewhere.
OTHERS = ("sbatch ", "kubectl ", "sky ", "docker ", "uv pip ", "rattler-build ")
PROGRAM = "python -m zerocore "
LANGUAGES = {"python", "bash"}


def blocks(page: Path, language: str) -> list[str]:
    """Blocks of a language, in order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def lines(page: Path) -> list[str]:
    """Commands in a page's blocks: lines joined, no comments, scripts without torchrun."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    found = (line.partition("#")[0].strip() for line in text.splitlines())
    return [LAUNCH.sub("python ", line) for line in found if line]


def commands(beginning: str) -> list[tuple[str, str]]:
    """(page, command) for each command that a page says to run, in blocks and in sentences."""
    found = set()
    for page in PAGES:
        inline = re.findall(r"`((?:python|make) [^`\n]+)`", page.read_text(encoding="utf-8"))
        found |= {(page.name, command) for command in [*lines(page), *inline]}
    return sorted(each for each in found if each[1].startswith(beginning))


def test_there_are_blocks() -> None:
    assert blocks(ROOT / "README.md", "python")
    for beginning in (*SCRIPTS, PROGRAM, "make "):
        assert commands(beginning), beginning


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_of_a_kind_that_is_tested(page: Path) -> None:
    for line in lines(page):
        assert line.startswith((*SCRIPTS, *OTHERS, PROGRAM, "make ", "pip install ")), line
        for path in re.findall(r"(?<=\s)examples/\S+", line):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_language_that_is_tested(page: Path) -> None:
    fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[::2]) <= LANGUAGES
    assert set(fences[1::2]) <= {""}


@cache
def help_of(script: str, *words: str) -> str:
    """With the words before its options, of which the first may be a subcommand."""
    code, text = run_script(ROOT / script, *words, "--help")
    assert code == 0, text
    return text


@pytest.mark.parametrize(("page", "command"), [c for each in SCRIPTS for c in commands(each)])
def test_scripts_have_the_options(page: str, command: str) -> None:
    _, script, *args = command.split()
    assert (ROOT / script).exists()
    words = list(takewhile(lambda word: not word.startswith("--"), args))
    for option in args:
        if option.startswith("--"):
            assert re.search(rf"{option}\b", help_of(script, *words)), option


def write_checkpoints() -> None:
    """Makes the files that the pages' commands name, in the current folder."""
    model = zerocore.shard(torch.nn.Linear(3, 2))
    zerocore.Checkpoints("runs", model).save(400).wait()
    zerocore.save_safetensors(model, "pretrained")


@pytest.mark.parametrize(("page", "command"), commands(PROGRAM))
def test_the_command_line_runs(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model: in place of a preset, or as the file that the command names."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(TINY))
    args = shlex.split(command.removeprefix(PROGRAM))
    if args[0] == "checkpoint":
        write_checkpoints()
    if "--preset" in args:
        place = args.index("--preset")
        assert args[place + 1] in preset_names()
        args[place : place + 2] = ["--hf-config", "config.json"]
    elif len(args) == 1:  # named in a sentence
        args.append("--help")
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("page", "command"), commands("make "))
def test_make_has_the_target(page: str, command: str) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command.split()[1] in targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
