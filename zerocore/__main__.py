"""Entry of ``python -m zerocore`` and of the ``zerocore`` script."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; without its libraries, says which extra has them."""
    try:
        from zerocore.cli.app import app

        app(prog_name="zerocore")
    except ModuleNotFoundError as error:
        library = (error.name or "").split(".")[0]
        if library not in ("typer", "rich"):
            raise
        if sys.argv[1:] == ["env"]:  # for a bug report, also of an installation without extras
            from zerocore.cli.environment import environment

            print("\n".join(f"{name}: {fact}" for name, fact in environment().items()))
            return
        sys.exit(f"the command line needs {library}: pip install 'zerocore[cli]'")


if __name__ == "__main__":
    main()
