"""The rules of the house: who may include whom, no cycles, no file or class over 600 lines."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.file_map import named_files
from tests.repository.python_tree import cycle_in, python_files

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 600
MAX_FUNCTION_LINES = 40
MAX_PAGE_LINES = 150
LONG_PAGES = ("design.md", "performance.md", "process.md", "training.md")
# A room sees itself and those of a lower rank. A file's room is the longest of these that its path
# begins with.
RANKS = {
    "common": 0,
    "io": 1,
    "plan": 1,
    "watch": 2,
    "emulation": 2,
    "device": 2,
    "kernels": 3,
    "memory": 3,
    "comm": 3,
    "engine/unit": 4,
    "engine/graph": 5,
    "engine/offload": 6,
    "engine/gradients": 7,
    "engine": 8,
    "bindings": 9,
}
ANY_TORCH = r"(torch|ATen|c10|caffe2)/(?!util/Exception\.h$)"
# (headers, files that may include them; paths from csrc/)
RESERVED = [
    (r"pybind11/|torch/extension\.h$|torch/csrc/utils/pybind\.h$", r"bindings/"),
    (
        r"torch/csrc/distributed/c10d/",
        r"engine/|watch/(alarm|control_link|issue_guard|outside_ledger|roll_call)\."
        r"|emulation/(emulated_(group|link|work)|mirrored_call)\."
        r"|comm/|memory/registered_memory\.",
    ),
    (r"(c10/|ATen/)?cuda", r"kernels/cuda/|emulation/emulated_timer\.cu|device/cuda_calls\.cu"),
    (ANY_TORCH, r"(kernels|watch|emulation|device|memory|comm|engine|bindings)/"),
]


def includes(text: str) -> Iterator[tuple[bool, str]]:
    """Each include of a C++ file as (is ours, path)."""
    for mark, path in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', text, re.MULTILINE):
        yield mark == '"', path


def room_of(file: str) -> str | None:
    rooms = [room for room in RANKS if file.startswith(f"{room}/")]
    return max(rooms, key=len, default=None)


def include_errors(file: str, text: str) -> list[str]:
    """The mistakes among the includes of csrc/`file`."""
    errors = []
    room = room_of(file)
    for ours, path in includes(text):
        target = room_of(path)
        if ours and target is None:
            errors.append(f"{file}: write '{path}' as a path from csrc/")
        elif ours and target != room and RANKS[target] >= RANKS[room]:
            errors.append(f"{file}: {room} must not include {path}")
        for headers, owners in RESERVED:
            if re.match(headers, path) and not re.match(owners, file):
                errors.append(f"{file}: {path} is only for {owners}")
    return errors


def cpp_files() -> dict[str, str]:
    """Text of each C++ file, by its path from csrc/."""
    csrc = ROOT / "csrc"
    files = (path for path in csrc.rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"})
    return {path.relative_to(csrc).as_posix(): path.read_text() for path in files}


def test_includes_point_down_the_ladder():
    files = cpp_files().items()
    assert [error for file, text in files for error in include_errors(file, text)] == []


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("common/types.h", '"plan/layout.h"'),
        ("kernels/ops.cpp", '"memory/bucket.h"'),
        ("memory/bucket.cpp", '"kernels/ops.h"'),
        ("engine/unit/unit.h", '"bindings/module.h"'),
        ("engine/unit/unit.h", '"scheduler.h"'),
        ("engine/unit/unit.h", "<pybind11/pybind11.h>"),
        ("memory/bucket.h", "<torch/csrc/distributed/c10d/ProcessGroup.hpp>"),
        ("plan/layout.h", "<c10/core/ScalarType.h>"),
        ("plan/layout.h", "<ATen/ATen.h>"),
        ("device/stream.cpp", "<c10/cuda/CUDAStream.h>"),
    ],
)
def test_a_bad_include_is_found(file, include):
    assert include_errors(file, f"#include {include}\n") != []


def test_good_includes_pass():
    text = '#include <c10/util/Exception.h>\n#include <vector>\n#include "common/math.h"\n'
    assert include_errors("plan/layout.cpp", text) == []


def test_no_cycles():
    headers = {file: {path for _, path in includes(text)} for file, text in cpp_files().items()}
    assert cycle_in(headers) == []
    assert cycle_in({"a.h": {"b.h"}, "b.h": {"a.h"}}) != []


def test_the_file_map_is_complete():
    """Every file is named in its folder's row of docs/files.md, and no other is."""
    named = named_files((ROOT / "docs" / "files.md").read_text(), "csrc/")
    found = {(str(Path(file).parent), Path(file).stem) for file in cpp_files()}
    assert found == named


def test_public_functions_say_what_they_raise():
    """Those that refuse a model that is not sharded."""
    for name, text in python_files(ROOT / "zerocore").items():
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            called = {getattr(inner, "id", None) for inner in ast.walk(node)}
            if called & {"state_of", "planned_events"}:
                assert "Raises:" in (ast.get_docstring(node) or ""), f"{name}.{node.name}"


def source_files() -> dict[Path, str]:
    """Text of each file of code."""
    folders = ["csrc", "zerocore", "tests", "benchmarks", "examples", "scripts"]
    suffixes = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi"}
    files = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {path: path.read_text() for path in files if path.suffix in suffixes}


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Functions and the lines of their statements; signature and docstring do not count."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            yield node.name, int(node.end_lineno or 0) - body[0].lineno + 1


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Texts from a left margin to a brace there that are no types, as clang-format has them."""
    begin, lines = None, text.split("\n")
    for number, line in enumerate(lines):
        if line[:1].strip() and line.endswith("{"):
            is_scope = re.match(r"(namespace|class|struct|enum|union)\b|.*=\s*{$", line)
            begin = None if is_scope else number
        elif line == "}" and begin is not None:
            yield lines[begin], number - begin + 1
            begin = None


def test_files_are_short():
    lengths = {path: text.count("\n") for path, text in source_files().items()}
    assert {str(path): n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_functions_are_short():
    """Those of csrc/bindings are lists of what Python sees."""
    long = []
    for path, text in source_files().items():
        functions = python_functions if path.suffix in {".py", ".pyi"} else cpp_functions
        if path.parent.name != "bindings":
            long += [(path.name, *f) for f in functions(text) if f[1] > MAX_FUNCTION_LINES]
    assert long == []
    body = "    pass\n" * (MAX_FUNCTION_LINES + 1)
    assert [n for _, n in python_functions(f"def f():\n{body}")] == [MAX_FUNCTION_LINES + 1]
    assert list(cpp_functions("int f(int x) {\n  return x;\n}\n")) == [("int f(int x) {", 3)]


def test_what_the_second_run_leaves_out_exists() -> None:
    words = re.search(r"local same=\(([^)]*)\)", (ROOT / ".ci" / "run").read_text())
    assert words is not None
    expand = ["bash", "-c", "echo " + " ".join(words[1].split())]
    names = subprocess.run(expand, capture_output=True, text=True, check=True).stdout.split()
    assert len(names) > 40
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []


def test_pages_are_short() -> None:
    """A page is as long as its subject where that is one sequence or one list of figures."""
    pages = (ROOT / "docs").glob("*.md")
    lengths = {path.name: path.read_text().count("\n") for path in pages}
    for name in LONG_PAGES:
        del lengths[name]
    assert {name: n for name, n in lengths.items() if n > MAX_PAGE_LINES} == {}
    assert (ROOT / "README.md").read_text().count("\n") <= 100
