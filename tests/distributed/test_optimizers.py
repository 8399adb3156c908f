"""Public optimizers train exactly, or as the table of them says."""

from __future__ import annotations

import re

import pytest

from tests.distributed.optimizers.__main__ import PAGE, measured
from tests.distributed.optimizers.listed import all_optimizers
from tests.distributed.optimizers.page import as_markdown
from tests.distributed.optimizers.trained import AGAIN, programs_of
from tests.distributed.programs.suite import Table, Verdict

# A step without rules, two that gather, and one with a closure.
BY_DAY = {"Adam", "Adafactor", "LBFGS", "Muon"}


def inexact(table: Table) -> dict[str, str]:
    """Returns the results that are neither exact nor a matter of rounding."""
    return {
        f"{name}, {system}": verdict.detail or verdict.kind
        for name, row in table.items()
        for system, verdict in row.items()
        if row["plain"].kind == "exact" and verdict.kind not in ("exact", "rounding")
    }


def exact_on_the_page() -> set[str]:
    """Optimizers of the paragraph of exact ones, as package and class."""
    part = PAGE.read_text().partition("## Exact")[2].partition("##")[0]
    listed = re.findall(r"\*\*(\S+) \S+\*\* \(\d+\): (.+?)\.$", part, re.MULTILINE)
    return {f"{package} {name}" for package, names in listed for name in names.split(", ")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_optimizers_of_torch() -> None:
    names = [f"torch.optim.{name}{after}" for name in sorted(BY_DAY) for after in ("", AGAIN)]
    assert inexact(measured(names, ["plain", "stage3"])) == {}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_what_the_page_calls_exact() -> None:
    exact = exact_on_the_page()
    installed = [of for of in all_optimizers() if f"{of.package} {of.short}" in exact]
    assert len(installed) > 10
    names = [of.name + after for of in installed for after in ("", AGAIN)]
    assert inexact(measured(names, ["plain", "stage3"])) == {}


def test_the_page() -> None:
    """Counts, and what is said of an optimizer that is not exact everywhere."""
    one, other, broken = [of for of in all_optimizers() if of.package == "torch"][:3]
    exact = dict.fromkeys(
        ("plain", "stage0", "stage1", "stage2", "stage3", "states3", "owned3"), Verdict("exact")
    )
    refused = exact | {"stage3": Verdict("refused", "TypeError: no | not")}
    row = {"": exact, AGAIN: exact}
    table = {one.name + after: value for after, value in row.items()}
    table |= {other.name: refused, other.name + AGAIN: exact}
    bad = {"plain": Verdict("error", "bad")}
    table |= {broken.name: bad, broken.name + AGAIN: bad}
    page = as_markdown(table, [one, other, broken], "2.13")
    assert f"(1): {one.short}." in page
    assert "| torch.optim: Adadelta | stage3 | by owned: TypeError: no / not |" in page
    assert f"| {broken.name} | bad |" in page
    assert "| 2 optimizers |" in page and "| stage3 | 1 | 1 |" in page


def test_names_of_programs() -> None:
    assert set(programs_of(["torch.optim.SGD", "plain_loop"])) == {"torch.optim.SGD"}
