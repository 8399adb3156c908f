"""Compares the kernels with the fastest plain copy and with torch's functions for lists.

Usage: python benchmarks/kernels.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from bench.kernels.contests import OWN, Contest, against_copy, beside_torch, small_tensors
from bench.lib.results import Results
from bench.lib.tables import Table
from bench.lib.timing import fastest, ratio, time_in_turns

COPY_NOTE = (
    "GB/s: bytes read plus bytes written. The copy moves as many bytes in all, by the fastest of "
    "copy_, memcpy (CPU) and an elementwise kernel (CUDA). Ratio: its time / the kernel's, so 1 is "
    "as fast as a copy."
)
TORCH_NOTE = "Ratio: zerocore's time / the other's, so below 1 is faster."
HOW_NOTES = {
    "cpu": "Medians over rounds in which all take their turn; wall time, one thread each. The call "
    "from Python is included, about 0.15 us a tensor; the engine calls from C++.",
    "cuda": "Medians over rounds in which all take their turn; device time of replayed graphs.",
}


def copy_table(contests: list[Contest], title: str) -> Table:
    """Compares each kernel with the fastest copy of as many bytes."""
    columns = ["kernel", "tensors", "MB moved", "us", "GB/s", "copy us", "copy GB/s", "ratio"]
    table = Table(title, [*columns, "copy by"], notes=[COPY_NOTE])
    for contest in contests:
        best = fastest(contest.seconds, [name for name in contest.seconds if name != OWN])
        cells = [contest.name, str(contest.num_tensors), f"{contest.nbytes / 1e6:.1f}"]
        for name in (OWN, best):
            cells += [f"{contest.micros(name):.0f}", f"{contest.rate(name):.1f}"]
        table.add(*cells, f"{ratio(contest.seconds, best, OWN):.2f}", best)
    return table


def torch_table(contests: list[Contest], title: str) -> Table:
    """Compares each kernel with torch's calls that do the same."""
    columns = ["kernel", "tensors", "MB moved", "us", "GB/s", "beside", "its us", "its GB/s"]
    table = Table(title, [*columns, "ratio"], notes=[TORCH_NOTE])
    for contest in contests:
        own = [f"{contest.micros(OWN):.1f}", f"{contest.rate(OWN):.1f}"]
        for name in contest.seconds:
            if name != OWN:
                other = [name, f"{contest.micros(name):.1f}", f"{contest.rate(name):.1f}"]
                head = [contest.name, str(contest.num_tensors), f"{contest.nbytes / 1e6:.1f}"]
                table.add(*head, *own, *other, f"{ratio(contest.seconds, OWN, name):.2f}")
    return table


def themes(
    sizes: list[int], device: str
) -> Iterator[tuple[str, Callable[[list[Contest], str], Table], Iterable[Contest]]]:
    """Yields the title, table and contests of each theme."""
    for size in sizes:
        title, nbytes = f"{device}, {size} MiB", size * 2**20
        yield f"{title}: kernels and a copy", copy_table, against_copy(nbytes, device)
        yield f"{title}: lists beside torch", torch_table, beside_torch(nbytes, device)
    yield f"{device}: small tensors", torch_table, small_tensors(device)


def measure(sizes: list[int], device: str, rounds: int, results: Results) -> None:
    """Times contests one after the other, so that only one holds memory."""
    found: dict[str, list[dict[str, Any]]] = {}
    tables: list[Table] = []
    name = {"device": torch.cuda.get_device_name()} if device == "cuda" else {}
    for title, make_table, contests in themes(sizes, device):
        done: list[Contest] = []
        for contest in track(contests, title, transient=True):
            contest.seconds = time_in_turns(contest.calls, device, rounds)
            contest.calls = {}
            done.append(contest)
            table = make_table(done, title)
            table.notes.append(HOW_NOTES[device])
            found[title] = [raw(each) for each in done]
            results.write([*tables, table], {**name, "contests": found})
        tables.append(table)


def raw(contest: Contest) -> dict[str, Any]:
    """Returns a contest's figures for the JSON file."""
    figures = {"name": contest.name, "num_tensors": contest.num_tensors}
    return {**figures, "nbytes": contest.nbytes, "seconds": contest.seconds}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = "",
    mib: Annotated[str, typer.Option(help="MiB of sources; default 64,256, CUDA also 1024")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds in which each call takes its turn.")] = 15,
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Prints the bandwidth of the kernels."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    sizes = [int(size) for size in (mib or {"cpu": "64,256"}.get(device, "64,256,1024")).split(",")]
    with Results("kernels", save) as results:
        measure(sizes, device, rounds, results)


if __name__ == "__main__":
    typer.run(main)
