"""The distributions: the sources that a build needs, and which torch it compiles against."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if sys.version_info >= (3, 11):
    import tomllib


@pytest.fixture
def backend() -> ModuleType:
    """scripts/build_backend.py, which pyproject.toml names."""
    path = ROOT / "scripts" / "build_backend.py"
    spec = importlib.util.spec_from_file_location("build_backend", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly  # imports torch in four processes
def test_the_torch_of_the_environment_is_compiled_against(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert torch.__file__.startswith(f"{backend.torch_folder()}/")
    assert backend.get_requires_for_build_wheel() == []
    # pip hides the environment's packages by what it puts on PYTHONPATH.
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert backend.get_requires_for_build_editable() == []
    monkeypatch.setattr(backend.sys, "executable", shutil.which("false"))  # a Python without torch
    assert backend.get_requires_for_build_wheel() == [backend.ANY_TORCH]


@pytest.mark.timeout(200)
def test_a_source_distribution_is_complete(tmp_path: Path) -> None:
    if not (ROOT / "MANIFEST.in").exists() or not (ROOT / "setup.py").exists():
        pytest.skip("tests beside another build's copy of the package")
    names = ("csrc", "scripts", "zerocore")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in names:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in (
        "MANIFEST.in",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, tmp_path)
    command = "import build_backend; print(build_backend.build_sdist('dist'))"
    code = f"import sys; sys.path.insert(0, 'scripts'); {command}"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (path,) = (tmp_path / "dist").glob("zerocore-*.tar.gz")
    with tarfile.open(path) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
        metadata = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert metadata is not None
        # A build of it runs with the torch that it is built with, and says so.
        release = ".".join(torch.__version__.split(".")[:2])
        assert f"\nRequires-Dist: torch=={release}.*\n" in metadata.read().decode()
    wanted = {
        file.relative_to(tmp_path).as_posix()
        for name in names
        for file in (tmp_path / name).rglob("*")
        if file.is_file() and (name != "scripts" or file.name == "build_backend.py")
    }
    assert {"pyproject.toml", "setup.py", "LICENSE", *wanted} - members == set()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib, which came with Python 3.11")
def test_messages_name_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [path.read_text() for path in (ROOT / "zerocore").rglob("*.py")]
    named = set(re.findall(r'missing\(\s*"(\w+)", "(\w+)"', "".join(texts)))
    assert {extra for _, extra in named} == {"hf", "lightning", "plot"}
    for library, extra in named:
        assert any(re.match(rf"{library}\b", line) for line in extras[extra])
        assert any(re.match(rf"{library}\b", line) for line in extras["test"])
