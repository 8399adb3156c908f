"""The distributions: the sources that a build needs, and which torch it compiles against."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

import zerocore
from zerocore import _C

ROOT = Path(__file__).resolve().parents[2]
if sys.version_info >= (3, 11):
    import tomllib


def load_script(name: str) -> ModuleType:
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend() -> ModuleType:
    """scripts/build_backend.py, which pyproject.toml names."""
    return load_script("build_backend")


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


def test_a_wheel_may_link_to_torch_and_the_system_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extension as it is passes, one that needs another library does not."""
    wheels = load_script("build_wheels")
    assert wheels.local_version("2.13.0+cu130", "13.0") == "torch2.13.cu130"
    assert wheels.local_version("2.11.1", None) == "torch2.11.cpu"
    wheel = tmp_path / "zerocore.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (*(ROOT / "zerocore").rglob("*.py"), *(ROOT / "zerocore").rglob("*.pyi")):
            archive.write(path, path.relative_to(ROOT))
        archive.write(_C.__file__, Path("zerocore", Path(_C.__file__).name))
    said = wheels.check(sys.executable, wheel, tmp_path / "good")
    assert re.search(r"links to torch and the system, glibc 2\.\d+ or newer", said)
    monkeypatch.setattr(wheels, "SYSTEM", r"libc\.so\.6")
    with pytest.raises(RuntimeError, match=r"zerocore.whl links to .*libstdc\+\+\.so\.6"):
        wheels.check(sys.executable, wheel, tmp_path / "bad")


@pytest.mark.nightly  # compiles everything
@pytest.mark.timeout(2400)
def test_a_wheel_is_built_for_a_torch(tmp_path: Path) -> None:
    version = torch.__version__.partition("+")[0]
    command = [sys.executable, ROOT / "scripts" / "build_wheels.py", tmp_path, version]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kind = "cpu" if torch.version.cuda is None else "cu"
    assert re.search(rf"\+torch{version.rpartition('.')[0]}\.{kind}", done.stdout)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib, which came with Python 3.11")
def test_the_dockerfile_names_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert set(re.findall(r"^([A-Z]+) ", text, re.MULTILINE)) <= {
        "ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR", "CMD",
    }  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for extras in re.findall(r'"\.\[([a-z,]+)\]"', text):
        assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    for requirement in project["build-system"]["requires"]:
        assert requirement in text
    release = re.search(r"^ARG TORCH=(\d+)\.(\d+)\.\d+$", text, re.MULTILINE)
    assert release and (2, 11) <= tuple(map(int, release.groups())) <= (2, 15)


@pytest.mark.nightly
def test_pyright_accepts_a_typical_program() -> None:
    """As mypy does in `make lint`."""
    pytest.importorskip("pyright")
    program = ROOT / "tests" / "repository" / "typed_program.py"
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python cannot read pyproject.toml")
def test_the_conda_recipe_asks_for_what_pip_asks_for(backend: ModuleType) -> None:
    """Rendered for a Python and a torch, as conda-forge's machines do before they build."""
    rattler = pytest.importorskip("rattler_build")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    variants = {"python": ["3.11.*"], "pytorch": ["2.13.*"], "cxx_compiler": ["gxx"]}
    (found,) = rattler.Stage0Recipe.from_file(ROOT / "conda" / "recipe.yaml").render(
        rattler.VariantConfig(variants)
    )
    recipe = found.recipe.to_dict()
    assert recipe["package"]["version"] == zerocore.__version__
    assert recipe["about"]["license"] == project["project"]["license"]
    needs = recipe["requirements"]
    assert f"python {project['project']['requires-python']}" in needs["run"]
    torch_versions = backend.ANY_TORCH.removeprefix("torch")
    assert f"pytorch {torch_versions}" in needs["host"]
    asked = {need.replace(" ", "") for need in (*needs["build"], *needs["host"])}
    assert set(project["build-system"]["requires"]) <= asked
    assert "gxx_linux-64" in needs["build"]
