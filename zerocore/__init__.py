"""zerocore: shards training state over data-parallel ranks (ZeRO stages 0 to 3).

Names are imported at their first use, from the modules that ``__init__.pyi`` lists.
"""

import ast
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


@cache
def _places() -> dict[str, str]:
    """Returns the module of each public name."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


@cache
def load_core() -> None:
    """Imports the modules that every use of zerocore needs, and torch."""
    import torch  # noqa: F401  # loads the libraries that the extension links to

    import zerocore.extension  # noqa: F401  # first: raises if the extension does not fit
    from zerocore.install import register

    register(
        {
            "explain_forward": "zerocore.reporting.out_of_memory",
            "explain_backward": "zerocore.reporting.out_of_memory",
            "explain_step": "zerocore.reporting.out_of_memory",
            "check_budget": "zerocore.planning.candidates",
            "make_group": "zerocore.emulation.backend",
            "makes_shape": "zerocore.hooks.first_states",
            "probed_number": "zerocore.hooks.first_states",
            "explain_norm": "zerocore.optim.non_finite",
            "encode_changed": "zerocore.sharding.extensions",
            "receive": "zerocore.tensor.receiving",
            "call_gathered": "zerocore.tensor.gathered_calls",
            "refuse": "zerocore.tensor.refused",
            "call_on_copies": "zerocore.tensor.full_copies",
            "version_of_shard": "zerocore.tensor.full_copies",
            "copy_module": "zerocore.weights.copies",
            "view_of": "zerocore.model.copied_views",
            "check_weights": "zerocore.model.copied_views",
            "check_grads": "zerocore.model.copied_views",
        }
    )


def _is_command_line() -> bool:
    """Whether this process runs the command line, whose help needs no torch."""
    arguments = sys.orig_argv
    module = arguments[arguments.index("-m") + 1 :] if "-m" in arguments else []
    return module[:1] == ["zerocore"] or Path(*sys.argv[:1]).name == "zerocore"


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_places())
    if name.startswith("_") or name not in _places():
        raise AttributeError(f"module 'zerocore' has no attribute '{name}'")
    load_core()
    if _places()[name] == "zerocore":
        return import_module(f"zerocore.{name}")
    value = globals()[name] = getattr(import_module(_places()[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_places()})


if not _is_command_line():
    load_core()
