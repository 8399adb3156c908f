"""The Python blocks of README and docs run on two ranks, as under torchrun, without a warning.

A block that imports zerocore begins a program; the blocks after it go on with its names.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.harness import RanksFailed, run_ranks
from tests.repository.test_readme import PAGES, blocks

BEGINNING = re.compile(r"^(import|from) zerocore", re.MULTILINE)
PRINTED = re.compile(r"^\[W|warning\b", re.IGNORECASE)  # also by the C++ of torch


def programs(page: Path) -> list[str]:
    """The page's programs, each with empty lines in front: a traceback has the page's lines."""
    found: list[str] = []
    text = page.read_text(encoding="utf-8")
    place = 0
    for block in blocks(page, "python"):
        place = text.index(block, place)
        line = text.count("\n", 0, place)
        if BEGINNING.search(block) or not found:
            found.append("")
        found[-1] += "\n" * (line - found[-1].count("\n")) + block
    return found


class Warnings(logging.Handler):
    """Messages of a logger's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run_program(text: str, name: str, folder: str) -> None:
    """Runs as a rank. Fails on a warning, logged or printed, and on a world of another size."""
    os.chdir(folder)
    handler = Warnings()
    logging.getLogger("zerocore").addHandler(handler)
    warnings.simplefilter("always")
    for category in (DeprecationWarning, FutureWarning):  # one library about another one's names
        warnings.filterwarnings(
            "ignore", category=category, module=r"torch\b|transformers\b|peft\b"
        )
    exec(compile(text, name, "exec"), {"__name__": "__main__"})
    printed = Path("/proc/self/fd/2").read_text().splitlines()
    found = handler.messages + [line for line in printed if PRINTED.search(line)]
    assert not found, found
    assert not dist.is_initialized() or dist.get_world_size() == 2


CASES = [
    pytest.param(page, text, id=f"{page.stem}-{number}", marks=[pytest.mark.nightly] * (number % 2))
    for page in PAGES
    for number, text in enumerate(programs(page))
]


@pytest.mark.distributed
@pytest.mark.parametrize(("page", "text"), CASES)
def test_a_program_of_a_page_runs(page: Path, text: str, tmp_path: Path) -> None:
    run_ranks(run_program, 2, text, str(page), str(tmp_path), launch="torchrun")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import warnings; warnings.warn('careful')", "careful"),
        ("import logging; logging.getLogger('zerocore').warning('careful')", "careful"),
        ("import os\nassert os.environ['RANK'] == '0'", "AssertionError"),
        (
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())",
            "AssertionError",
        ),
    ],
)
def test_a_mistake_is_found(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=error):
        run_ranks(run_program, 2, text, "page", str(tmp_path), launch="torchrun")
