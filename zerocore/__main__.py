"""Entry point of ``python -m zerocore`` and of the ``zerocore`` script.

Prints the list of commands and the version without importing torch, which takes seconds.
"""

from __future__ import annotations

import sys

import zerocore

COMMANDS = {
    "plan": "Plan each stage's memory and time and recommend one; needs no GPU.",
    "describe": "List the units by which a model is sharded: bytes, shards, padding, regions.",
    "env": "Print versions and devices for a bug report.",
    "bench": "Run benchmarks/NAME.py of a checkout; arguments after NAME go to it, --help too.",
    "checkpoint": "Inspect, verify and convert checkpoints.",
}


def help_text() -> str:
    """Returns the list of commands, one per line."""
    lines = [f"  {name:<12}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: zerocore COMMAND [ARGS]...",
            "Options: --help, --version, --install-completion",
            "Commands, each with a --help of its own:",
            *lines,
        ]
    )


def main() -> None:
    """Runs the command line; if its libraries are missing, names the extra that installs them."""
    arguments = sys.argv[1:]
    if arguments in ([], ["--help"], ["--version"]):
        print(zerocore.__version__ if arguments == ["--version"] else help_text())
        return
    zerocore.load_core()
    try:
        from zerocore.cli.app import app

        app(prog_name="zerocore")
    except ModuleNotFoundError as error:
        library = (error.name or "").split(".")[0]
        if library not in ("typer", "rich"):
            raise
        if arguments == ["env"]:  # a bug report may come from an installation without extras
            from zerocore.cli.environment import environment

            print("\n".join(f"{name}: {fact}" for name, fact in environment().items()))
            return
        sys.exit(f"the command line needs {library}: pip install 'zerocore[cli]'")


if __name__ == "__main__":
    main()
