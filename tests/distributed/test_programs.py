"""No ordinary program gets a wrong number from zerocore, and a table says what each gets."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.programs.page import FULL, PAGE, as_page
from tests.distributed.programs.player import Error, Played
from tests.distributed.programs.registry import THEMES, Program, all_programs, broken_programs
from tests.distributed.programs.suite import Table, judge, measure
from tests.distributed.programs.systems import SYSTEMS
from tests.distributed.programs.table import Page, read_markdown, reasons, torch_version

BEHAVIOUR = Path(__file__).resolve().parents[2] / "docs" / "behaviour.md"
pytestmark = pytest.mark.timeout(1200)  # many reruns where many programs go wrong
OURS = tuple(system for system in SYSTEMS if system.startswith(("stage", "offload")))
# Stages 1 and 2 do what these do, in another mixture: every kind of program is met here.
GATE = ("stage0", "stage3", "offload3")
some_systems = pytest.mark.parametrize(
    "table",
    [pytest.param(False, id="gate"), pytest.param(True, id="rest", marks=pytest.mark.nightly)],
    indirect=True,
)


def systems_of(number: int, row: dict[str, str], rest: bool) -> tuple[str, ...]:
    """Systems of a program by day, or the rest.

    Every eighth exact one and each that is refused by all has one, in turn. Others have stage 0 and
    one, in turn, that differs from it.
    """
    kinds = {row.get(system) for system in GATE}
    first, other = divmod(number, 8)
    unlike = [system for system in GATE if row.get(system) != row.get(GATE[0])]
    by_day = GATE[:1] + tuple(unlike[number % max(len(unlike), 1) :][:1])
    if kinds == {"exact"}:
        by_day = GATE[first % len(GATE) :][:1] if other == 7 else ()
    elif kinds == {"refused"}:
        by_day = GATE[number % len(GATE) :][:1]
    return tuple(system for system in OURS if (system in by_day) != rest)


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    """All that can run here."""
    return all_programs()


@pytest.fixture(scope="module")
def table(programs: dict[str, Program], page: Page, request: pytest.FixtureRequest) -> Table:
    """Every program under some of the stages, or with offload.

    With another torch some programs differ: before 2.13 what nobody may read is a null pointer.
    """
    if page[0] != torch_version():
        pytest.skip(f"the page was written with torch {page[0]}")
    groups: dict[tuple[str, ...], list[str]] = {}
    for number, name in enumerate(programs):
        systems = systems_of(number, page[1].get(name, {}), request.param)
        groups.setdefault(systems, []).append(name)
    measured: Table = {}
    for systems, names in groups.items():
        if systems:
            measured |= measure(names, ["plain", *systems])
    return measured


@pytest.fixture(scope="module")
def page() -> Page:
    """Reads the full table: the version of torch, and the kinds by program and system."""
    return read_markdown(FULL.read_text())


def allowed_refusals(text: str) -> dict[str, str]:
    """Programs that docs/behaviour.md lists as refused where a peer is exact, with the reasons."""
    title = r"\*\*Refused where DDP or FSDP2 is exact"
    listed = re.search(title + r"[\s\S]*?\n((?:\| .*\n|\|-.*\n)+)", text)
    rows = re.findall(r"^\| (.+) \| .+ \| (.+) \|$", listed[1], re.MULTILINE) if listed else []
    return {name: why for does, why in rows for name in re.findall(r"\(`(\w+)`\)", does)}


def test_the_list_of_refusals_is_read() -> None:
    text = """
**Refused where DDP or FSDP2 is exact.** Each has
its reason:

| a program does this | at stages | reason |
|---|---|---|
| `f(x)` (`one`), (`two_b`) | 3 | a reason |
| another (`three`) | 1 to 3 | another |

| another table |
|---|
| (`four`) | 1 | no reason |
"""
    assert allowed_refusals(text) == {"one": "a reason", "two_b": "a reason", "three": "another"}
    assert allowed_refusals("nothing") == {}


def test_the_page_goes_with_the_full_table() -> None:
    page = PAGE.read_text()
    assert page == as_page(FULL.read_text())
    assert len(page.splitlines()) < 150
    for name, row in read_markdown(FULL.read_text())[1].items():
        is_named = re.search(rf"(\| |`){name}( \||`)", page) is not None
        assert is_named == (set(row.values()) != {"exact"}), name


def test_there_are_many(programs: dict[str, Program]) -> None:
    assert len(programs) >= 300


def test_each_theme_runs_by_day_and_each_program_under_all_systems_by_night(page: Page) -> None:
    programs, themes, count = all_programs(installed=False), set(), Counter[str]()
    for number, (name, row) in enumerate(page[1].items()):
        day, rest = systems_of(number, row, False), systems_of(number, row, True)
        assert sorted(day + rest) == sorted(OURS)
        count.update(day)
        themes |= {programs[name].theme} if day else set()
    assert themes == set(THEMES)
    assert set(count) == set(GATE) and min(count.values()) > 30
    assert systems_of(1, {"stage0": "exact"}, False) == ("stage0", "offload3")
    assert systems_of(1, dict.fromkeys(GATE, "refused"), False) == ("stage3",)


@pytest.mark.slow
@some_systems
def test_plain_runs_everything(table: Table) -> None:
    assert {name: row["plain"] for name, row in table.items() if row["plain"].kind != "exact"} == {}


@pytest.mark.slow
@some_systems
def test_zerocore_is_right_or_refuses(table: Table) -> None:
    bad = [
        f"{name}, {where}: {text}"
        for name, where, text in reasons(ours(table))
        if not text.startswith("refused: ")
    ]
    assert not bad, "\n".join(["", *bad])


@pytest.mark.slow
@some_systems
def test_refusals_where_a_peer_is_exact_have_a_reason(table: Table, page: Page) -> None:
    refused = {
        name
        for name, row in ours(table).items()
        if "exact" in (page[1][name]["ddp"], page[1][name]["fsdp2"])
        and any(verdict.kind == "refused" for verdict in row.values())
    }
    allowed = set(allowed_refusals(BEHAVIOUR.read_text()))
    assert refused - allowed == set()
    assert allowed & set(table) - refused == set()  # the list names nothing that works


@pytest.mark.slow
@some_systems
def test_the_full_table_says_what_was_measured(table: Table, page: Page) -> None:
    assert kinds_on(page, table) == kinds(table)
    rest = all_programs(installed=False)
    assert set(page[1]) == set(rest)


def ours(table: Table) -> Table:
    """The table without plain, which is the truth."""
    return {name: {s: row[s] for s in row if s != "plain"} for name, row in table.items()}


def kinds(table: Table) -> dict[str, dict[str, str]]:
    """Of each program and system, how it ended."""
    return {name: {s: verdict.kind for s, verdict in row.items()} for name, row in table.items()}


def kinds_on(page: Page, table: Table) -> dict[str, dict[str, str]]:
    """The page's kinds of the programs and systems in `table`."""
    return {name: {s: page[1][name][s] for s in row} for name, row in table.items()}


@pytest.mark.nightly
@pytest.mark.slow
def test_the_suite_notices() -> None:
    """Programs that go wrong in every way; the last one runs behind them all."""
    expected = {
        "broken_number": "WRONG",
        "broken_refused": "refused",
        "broken_error": "error",
        "broken_hang": "hang",
        "broken_wait": "hang",
        "broken_half": "crash",
        "broken_death": "crash",
        "broken_loop": "hang",
        "broken_not": "exact",
    }
    table = measure(list(broken_programs()), ["plain", "stage0"], seconds=2.0)
    assert {name: row["stage0"].kind for name, row in table.items()} == expected
    assert {row["plain"].kind for row in table.values()} == {"exact"}
    assert table["broken_hang"]["stage0"].detail.startswith("ValueError: zerocore does not")


def played(value: float, error: Error | None = None) -> Played:
    return Played("p", [value], [], error)


def refusal(**options: bool) -> Error:
    return Error("ValueError: no", **{"deliberate": True, "no_partner": False, **options}, trace="")


def test_the_judge() -> None:
    truth = [played(1.0), played(2.0)]
    assert judge(truth, truth, None).kind == "exact"
    assert judge([played(1.0), played(2.001)], truth, None).kind == "WRONG"
    assert judge([played(1.0), None], truth, None).kind == "hang"
    no = refusal()
    assert judge([played(0, no), played(0, no)], truth, None).kind == "refused"
    assert judge([played(0, no), played(2.0)], truth, None).kind == "crash"
    waits = refusal(no_partner=True)
    hang = judge([played(0, no), played(0, waits)], truth, None)
    assert (hang.kind, hang.detail) == ("hang", "ValueError: no")
    obscure = refusal(deliberate=False)
    assert judge([played(0, obscure), played(0, no)], truth, None).kind == "error"
    assert judge([None, None], truth, "died, exit code -6").kind == "crash"
