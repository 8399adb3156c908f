"""The command line for checkpoints: inspect, verify, convert."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from zerocore.checkpoint.convert import TORCH_SUFFIXES, open_weights
from zerocore.checkpoint.convert import convert as convert_weights
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.safetensors.files import check_entries, read_folder
from zerocore.common.tables import on_terminal, print_table

app = typer.Typer(help="Inspect, verify and convert checkpoints.")
_Folder = Annotated[Path, typer.Argument(help="A checkpoint, or a folder of several.")]


class Kind(str, Enum):
    """The kinds of files that weights can be converted to."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"
    TORCH = "torch"


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(on_terminal(f"{error}"), err=True)
        raise typer.Exit(1) from error


def _checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, or the folder itself if it has none."""
    inside = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    return [path for path in inside if path.name[5:].isdigit()] or [folder]


@app.command()
def inspect(
    folder: _Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes.")] = False,
) -> None:
    """Print names, shapes, dtypes and bytes of the weights in a checkpoint or safetensors files."""
    with _named_errors():
        checkpoints = _checkpoints(folder)
        weights = open_weights(checkpoints[-1])
    rows: list[dict[str, Any]] = [
        {"name": name, "shape": list(shape), "dtype": f"{dtype}".removeprefix("torch."),
         "nbytes": dtype.itemsize * prod(shape)}
        for name, (dtype, shape) in weights.facts.items()
    ]  # fmt: skip
    if as_json:
        names = [path.name for path in checkpoints]
        typer.echo(json.dumps({"kind": weights.kind, "checkpoints": names, "weights": rows}))
        return
    title = f"{checkpoints[-1]}: {weights.nbytes:,} bytes of weights ({weights.kind})"
    cells = [[row["name"], f"{row['shape']}", row["dtype"], f"{row['nbytes']:,}"] for row in rows]
    inside = ", ".join(path.name for path in checkpoints)
    notes = [f"{len(checkpoints)} checkpoints: {inside}"] if checkpoints != [folder] else []
    print_table(title, [["name", "shape", "dtype", "bytes"], *cells], notes)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    return Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True))


@app.command()
def verify(folder: _Folder) -> None:
    """Compare the size of every file and the checksum of every byte; exit 1 if one is damaged."""
    with _named_errors(), _progress() as progress:
        for path in _checkpoints(folder):
            if not (path / ".metadata").exists():
                entries = read_folder(path).values()
                count = check_entries(entries)
                typer.echo(
                    f"{path}: {len(entries)} tensors, sizes are right, and checksums of "
                    f"{count} files"
                )
                continue
            contents = Contents(path)
            contents.check_sizes()
            files = contents.files if contents.sums is None else contents.sums
            total = sum((path / name).stat().st_size for name in files)
            task = progress.add_task(path.name, total=total)
            contents.verify(advance=partial(progress.advance, task))
            typer.echo(f"{path}: {len(files)} files are good")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint, safetensors, or a torch file.")],
    target: Annotated[Path, typer.Argument(help="File or folder to make; must not exist yet.")],
    to: Annotated[
        Kind | None, typer.Option(help="Default: by the suffix, or dcp to safetensors and back.")
    ] = None,
) -> None:
    """Convert a model's weights from one kind of file to another, one tensor at a time."""
    with _named_errors(), _progress() as progress:
        weights = open_weights(_checkpoints(source)[-1])
        kind = "safetensors" if weights.kind == "dcp" else "dcp"
        if to is not None:
            kind = to.value
        elif target.suffix in TORCH_SUFFIXES:
            kind = "torch"
        task = progress.add_task(target.name, total=weights.nbytes)
        convert_weights(weights, target, kind, lambda nbytes: progress.advance(task, nbytes))
        typer.echo(f"{target}: {len(weights.facts)} tensors as {kind}")
