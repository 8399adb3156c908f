"""Which module of a package imports which, read from the source; every import counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def python_files(package: Path) -> dict[str, str]:
    """Text of each module of the package, subpackages too, by its dotted name."""
    texts = {}
    for path in package.rglob("*.py"):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        texts[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return texts


def imports(name: str, text: str, modules: set[str]) -> Iterator[str]:
    """Each module that the module ``name`` imports, with a dotted path; those in functions too.

    ``from package import x`` imports ``package.x`` where ``modules`` have it, else ``package``.
    """
    is_package = any(module.startswith(f"{name}.") for module in modules)
    for node in _imports_in(text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package that the module lies in, each further one the package above.
            up = max(node.level - is_package, 0)
            near = name.rsplit(".", up)[0] if node.level else ""
            base = ".".join(part for part in (near, node.module) if part)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in modules else base
        elif isinstance(node, ast.Call):
            yield from _named_in_call(node)


@cache  # copies of the package that tests change differ in one file
def _imports_in(text: str) -> list[ast.AST]:
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def _named_in_call(node: ast.Call) -> Iterator[str]:
    """The module that ``import_module("a.b")`` or ``__import__("a.b")`` imports."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    given = node.args[0] if node.args else None
    if name in ("import_module", "__import__") and isinstance(given, ast.Constant):
        yield str(given.value)


def import_graph(package: Path) -> dict[str, set[str]]:
    """The imports of each module of the package, from within it or not."""
    texts = python_files(package)
    modules = {*texts, f"{package.name}._C"}
    return {name: set(imports(name, text, modules)) for name, text in texts.items()}


# The core: a floor sees those below it and its own package. Packages side by side on one floor do
# not see each other.
CORE = (
    ("_C",),
    ("extension",),
    ("common",),
    ("options", "layout"),
    ("tensor",),
    ("model",),
    ("hooks",),
    ("optim", "sharding", "state_dict"),
    ("checkpoint",),
    ("install",),
    ("api", "fsdp"),
)
# Packages over the core, which sees none of them; each one with the others that it sees.
SATELLITES: dict[str, tuple[str, ...]] = {
    "matrices": (),
    "weights": (),
    "recovery": (),
    "emulation": (),
    "planning": ("matrices", "weights"),
    "reporting": ("matrices", "planning"),
    "integrations": ("weights", "reporting"),
}
# zerocore itself exports what is public.
TOP = (("",), ("cli",), ("__main__",))
FLOORS = (*CORE, tuple(SATELLITES), *TOP)
HEIGHTS = {part: height for height, parts in enumerate(FLOORS) for part in parts}


def _part(module: str) -> str:
    """The package or file below zerocore that a module belongs to."""
    return ".".join(module.split(".")[1:2])


def ladder_errors(package: Path) -> list[str]:
    """Modules that stand on no floor, and imports that do not point down."""
    errors = []
    for name, targets in import_graph(package).items():
        part = _part(name)
        if part not in HEIGHTS:
            errors.append(f"{name} stands on no floor: put it into a package, or name its floor")
            continue
        for target in sorted(targets):
            other = _part(target)
            if target.split(".")[0] != package.name or other in SATELLITES.get(part, ()):
                continue
            if other != part and HEIGHTS.get(other, len(FLOORS)) >= HEIGHTS[part]:
                errors.append(f"{name} must not import {target}, which is not below it")
    return errors


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of a cycle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def import_effects(text: str) -> list[str]:
    """Statements that a module runs when it is imported, and that act on what is not its own.

    Calls whose value is dropped, and assignments to attributes of what it did not define itself.
    """
    tree = ast.parse(text)
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return [ast.unparse(node) for node in _run_on_import(tree) if _acts_elsewhere(node, own)]


def _run_on_import(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements outside of functions; those of classes and of conditions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _run_on_import(child)


def _acts_elsewhere(node: ast.stmt, own: set[str]) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    attributes = [target for target in targets if isinstance(target, ast.Attribute)]
    return any(ast.unparse(attribute.value) not in own for attribute in attributes)
