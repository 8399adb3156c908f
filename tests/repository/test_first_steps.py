"""scripts/first_steps.py: a page's commands and blocks in order, and what fails is shown."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = """
```bash
echo one  # a comment
```
```python
import os
assert os.environ.get("WORLD_SIZE", "2") == "2"
```
```bash
make everything
ls nothing-of-this-name
```
"""


def test_steps_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("first_steps", ROOT / "scripts/first_steps.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = list(script.steps(PAGE, tmp_path))
    twice = ["python block1.py", f"{script.TWO_RANKS} block1.py"]
    assert found == ["echo one", *twice, "make everything", "ls nothing-of-this-name"]
    assert (tmp_path / "block1.py").read_text().startswith("import os")
    readme = list(script.steps((ROOT / "README.md").read_text(), tmp_path))
    assert readme[0] == "pip install -e ." and readme[1] == "python block1.py"


@pytest.mark.nightly
def test_a_step_that_fails_ends_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    command = [sys.executable, str(ROOT / "scripts" / "first_steps.py"), "--page", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert [line.split(" s  ")[1] for line in done.stdout.splitlines()] == [
        "echo one",
        "python block1.py",
        "torchrun --standalone --nproc-per-node 2 block1.py",
    ]
    assert "nothing-of-this-name" in done.stderr
    assert done.stderr.endswith("failed: ls nothing-of-this-name\n")
