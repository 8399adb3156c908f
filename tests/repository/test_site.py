"""The site of the documentation: it builds without a warning, and a browser can read it."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
FLAGS = [f"--{flag}" for flag in f"{QUIET} disable-component-update disable-sync".split()]
pytest.importorskip("material", reason="the extra [docs] is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site: `make docs` may have built it since a source changed."""
    built = ROOT / "build" / "site"
    patterns = ("*.*", "docs/**/*", "scripts/*", "zerocore/**/*.py", "zerocore/**/*.pyi")
    sources = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    start = built / "index.html"
    if start.exists() and start.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return built
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Says nothing of requests."""


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_links_lead_somewhere(site: Path) -> None:
    """Those of notebooks, too, which mkdocs does not check."""
    for page in site.rglob("index.html"):
        article = page.read_text().partition("<article")[2].partition("</article>")[0]
        for target in re.findall(r'href="([^":#]+)["#]', article):
            assert (page.parent / target).resolve().exists(), f"{page.parent.name}: {target}"


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "CHANGELOG.md"]:
        assert (site / page.stem / "index.html").exists(), page
    text = (site / "api" / "index.html").read_text()
    for name in ("shard", "plan", "Checkpoints", "optim.AdamW", "fsdp.fully_shard"):
        assert f'id="zerocore.{name}"' in text
    assert ":class:" not in text


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_a_reader_finds_pages(address: str, tmp_path: Path) -> None:
    """Follows the navigation to its end, searches, and takes a picture."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=BROWSER, args=FLAGS
        )
        page = browser.new_page()
        asked: list[str] = []
        failed: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("response", lambda answer: answer.status >= 400 and failed.append(answer.url))
        page.goto(address)
        links = page.locator("nav.md-nav--primary a.md-nav__link[href]")
        pages = {link.evaluate("a => a.href").partition("#")[0] for link in links.all()}
        assert len(pages) >= len([*(ROOT / "docs").glob("*.md")])
        for each in sorted(pages):
            page.goto(each)
            assert page.locator("article h1").first.is_visible(), each
            assert not page.locator("article", has_text="](").count(), f"{each}: a broken link"
        page.goto(address)
        page.screenshot(path=tmp_path / "start.png")
        page.get_by_label("Search").first.click()
        page.keyboard.type("pinned memory", delay=20)
        page.locator("a.md-search-result__link", has_text="Offload").first.click()
        page.wait_for_url("**/offload/**")
        browser.close()
    assert (tmp_path / "start.png").stat().st_size > 20_000
    assert not failed
    assert [url for url in asked if not url.startswith(address)] == []


@pytest.mark.nightly
def test_the_tutorial_runs() -> None:
    """Its cells, two ranks among them; it ends with a picture."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    before = [cell.get("outputs") for cell in notebook.cells]
    nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
    after = [cell.get("outputs") for cell in notebook.cells]
    assert [outputs and len(outputs) for outputs in after] == [
        outputs and len(outputs) for outputs in before
    ]
    assert "image/png" in notebook.cells[-2].outputs[0].data
    said = re.findall(r"([\d,]+) bytes predicted, ([\d,]+) taken", str(after))
    assert len(said) == 4 and all(predicted == taken for predicted, taken in said)
