"""`make speed`: commits that cannot be compared, verdicts, the table, and runs of both builds."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

import speed
from bench.lib.tables import Table
from bench.speed import commits
from bench.speed.turns import Found, Row, run
from bench.speed.verdict import Ratio, ratio_of, verdict_of

HOST = Row("host", "host/block", "fake", "host", 1)
# Builds an extension that has nothing in it.
EMPTY_SETUP = "open('zerocore/_C.abi.so', 'w').close()"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository without a commit, which stands for the checkout; builds go beside it."""
    root = tmp_path / "checkout"
    (root / "zerocore").mkdir(parents=True)
    (root / "zerocore" / "__init__.py").touch()
    git(root, "init", "-q")
    monkeypatch.setattr(commits, "ROOT", root)
    monkeypatch.setattr(commits, "CACHE", tmp_path / "cache")
    return root


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(root), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path, setup: str | None) -> str:
    """The hash of a commit with that setup.py."""
    if setup is not None:
        (root / "setup.py").write_text(setup)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "a commit")
    return git(root, "rev-parse", "HEAD")


@pytest.mark.parametrize("name", ["no-such-branch", "0123456789", "--all", "HEAD:zerocore"])
def test_a_name_that_is_no_commit_is_named(repository: Path, name: str) -> None:
    commit(repository, None)
    with pytest.raises(commits.SpeedError, match=f"BASE={name} is not a commit"):
        commits.resolve(name)


@pytest.mark.parametrize(
    ("setup", "error"),
    [
        (None, "does not build: it has no setup.py"),
        ("raise ValueError('no compiler')", "does not build:\n.*ValueError: no compiler"),
        ("print('done')", "does not build:\ndone"),
    ],
)
def test_a_commit_that_does_not_build_is_named(
    repository: Path, setup: str | None, error: str
) -> None:
    found = commit(repository, setup)
    with pytest.raises(commits.SpeedError, match=f"(?s){found[:12]} {error}"):
        commits.build(found)
    assert list(commits.CACHE.iterdir()) == []
    assert git(repository, "status", "--porcelain", "--ignored") == ""
    assert git(repository, "worktree", "list").count("\n") == 0


def test_a_build_is_kept_and_the_checkout_stays_as_it_is(repository: Path) -> None:
    found = commit(repository, EMPTY_SETUP)
    folder = commits.build(found)
    assert sorted(path.name for path in (folder / "zerocore").iterdir())[-1] == "__init__.py"
    (folder / "kept").touch()
    assert (commits.build(found) / "kept").exists()
    assert git(repository, "status", "--porcelain", "--ignored") == ""


def test_a_commit_with_another_interface_is_named(repository: Path) -> None:
    folder = commits.build(commit(repository, EMPTY_SETUP))
    builds = {"this": Path(speed.__file__).parents[1], "commit 1a2b": folder}
    with pytest.raises(commits.SpeedError, match=r"(?s)do not run with commit 1a2b:.*no.*shard"):
        run([HOST], builds, {"host": Found()}, 0)


def test_a_failed_comparison_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        speed.main("no-such-branch", quick=True, only="", runs=5, save=False)
    assert ended.value.code == 2
    assert "BASE=no-such-branch" in capsys.readouterr().err


def test_both_builds_give_figures_of_each_run() -> None:
    root = Path(speed.__file__).parents[1]
    found = {"host": Found()}
    for first in (0, 1):
        run([HOST], {"this": root, "other": root}, found, first)
    for figures in (found["host"].wall, found["host"].cpu):
        assert [len(build) for build in figures] == [2, 2]
        assert all(value > 0 for build in figures for value in build)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.0, 1.0], "same"),
        ([1.02, 1.03, 1.01, 1.02, 1.03], "slower"),
        ([0.98, 0.97, 0.99, 0.98, 0.97], "faster"),
        ([1.0, 1.06, 0.99, 1.0, 1.01], "noise"),
        ([1.1, 1.2, 1.3, 1.2, 1.3], "slower"),  # wide, and yet no ratio is near 1
        ([1.0, 1.06, 0.99, 1.0, 1.01, 1.0, 0.99, 1.01, 1.0], "same"),  # one of nine is left out
    ],
)
def test_verdicts(ratios: list[float], verdict: str) -> None:
    assert ratio_of((ratios, [1.0] * len(ratios))).verdict == verdict


def test_processor_time_decides_where_wall_time_is_noise() -> None:
    noise, slower = Ratio(1.01, 0.9, 1.1), Ratio(1.05, 1.04, 1.06)
    assert verdict_of(noise, slower) == "noise; by CPU slower"
    assert verdict_of(noise, noise) == "noise"
    assert verdict_of(Ratio(1.0, 0.99, 1.01), slower) == "same"


def test_the_newest_table_comes_first(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(speed, "PAGE", tmp_path / "speed.md")
    with pytest.raises(commits.SpeedError, match="names no commit; name one"):
        speed.newest_measured()
    found = commit(repository, EMPTY_SETUP)
    for title in ("1111111, 2026-01-01", "2222222, 2026-01-02"):
        speed.save_table(Table(title, ["row"]), {"host": Found()}, "base")
    text = speed.PAGE.read_text()
    assert text.index("## 2222222") < text.index("## 1111111")
    assert text.startswith("# Speed, watched\n") and text.count("# Speed") == 1
    assert speed.newest_measured() == "2222222"
    assert json.loads((tmp_path / "speed.json").read_text())["commit"] == found


def test_more_runs_of_noisy_rows_end_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    monkeypatch.setattr(
        "bench.speed.turns.run", lambda rows, *_: began.extend(r.name for r in rows)
    )
    rows = [HOST, Row("other", "host/clip", "fake", "host", 1)]
    for deadline, more in ((0.0, 0), (time.monotonic() + 1000, 10)):
        began.clear()
        speed.measure(rows, {}, 5, deadline, lambda row, _: row is HOST)
        assert (began.count("host"), began.count("other")) == (5 + more, 5)
