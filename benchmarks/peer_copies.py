"""Times steps that copy the state to another node every ten steps, and steps that do not.

Nodes are network namespaces with limited links between them; layers compute by sleeping, so that
copies find the processor free, as with a GPU. It needs root, and Linux with ip and tc.

Usage: python benchmarks/peer_copies.py speed --rate 4gbit
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from bench.lib.nodes import nodes_class, run_on_nodes
from bench.lib.results import Results
from bench.lib.systems import import_zerocore
from bench.lib.tables import Table

RUN_TIMEOUT_S = 1800.0
SAVE_EVERY, SAVES_A_TURN = 10, 2
WITHOUT, PEERS, DISK = "no copies", "PeerCheckpoints", "Checkpoints on a disk"
app = typer.Typer(add_completion=False, help=__doc__)


class _Computed(torch.autograd.Function):
    """A function that sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Layer(nn.Linear):
    """A layer of `width` with one row of input, whose time is spent sleeping."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Computed.apply(x, self.seconds)).tanh()


class Training:
    """A sharded model that trains in turns of steps, and saves after some of them."""

    def __init__(self, width: int, depth: int, compute_ms: float, folder: Path) -> None:
        zerocore = import_zerocore()
        layers = [Layer(width, compute_ms / 1e3) for _ in range(depth)]
        self._model = zerocore.shard(nn.Sequential(*layers), stage=3, units=["Layer"])
        self._optimizer = zerocore.optim.AdamW(self._model.parameters())
        parts = (self._model, self._optimizer)
        self._checkpoints = {
            PEERS: zerocore.recovery.PeerCheckpoints(
                f"/dev/shm/{folder.name}-{dist.get_rank()}", *parts
            ),
            DISK: zerocore.Checkpoints(folder, *parts, keep=2),
        }
        self._batch = torch.randn(1, width)
        self._step = 0

    def take_turn(self, way: str) -> float:
        """Returns a step's ms; waits for the last save, which is five steps old at the end."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(SAVE_EVERY * SAVES_A_TURN):
            self._step += 1
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if way in self._checkpoints and self._step % SAVE_EVERY == SAVE_EVERY // 2:
                self._checkpoints[way].save(self._step)
        if way in self._checkpoints:
            self._checkpoints[way].wait()
        return (time.perf_counter() - start) * 1e3 / (SAVE_EVERY * SAVES_A_TURN)


@app.command(hidden=True)
def rank(width: int, depth: int, compute_ms: float, rounds: int, folder: Path) -> None:
    """Runs one rank; rank 0 prints the milliseconds of each way as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(width, depth, compute_ms, folder)
    ways = (WITHOUT, PEERS, DISK)
    for way in ways:
        training.take_turn(way)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way].append(training.take_turn(way))
    shutil.rmtree(f"/dev/shm/{folder.name}-{dist.get_rank()}")
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def copies_table(found: dict[str, list[float]], title: str) -> Table:
    """Shows a step's times, and their ratio to steps without copies in the same round."""
    table = Table(title, ["every ten steps", "ms a step", "of no copies"])
    for way, times in found.items():
        share = median(a / b for a, b in zip(times, found[WITHOUT], strict=True))
        table.add(way, f"{median(times):.1f}", f"{share:.3f}")
    return table


@app.command()
def speed(
    nodes: Annotated[int, typer.Option(min=2, max=8, help="Nodes of the network.")] = 2,
    rate: Annotated[str, typer.Option(help="Rate of a node's link, in tc's units.")] = "4gbit",
    width: Annotated[int, typer.Option(help="Width of the layers.")] = 1024,
    depth: Annotated[int, typer.Option(help="Number of layers.")] = 8,
    compute_ms: Annotated[float, typer.Option(help="Of a layer's forward; backward: twice.")] = 15,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 5,
) -> None:
    """Prints the time that copies add; writes a dated file."""
    if (make_nodes := nodes_class()) is None:
        return
    with (
        Results("peer_copies") as results,
        tempfile.TemporaryDirectory(prefix="peer-copies-") as folder,
        make_nodes(nodes, rate) as joined,
    ):
        sizes = [width, depth, compute_ms, rounds, folder]
        words = [__file__, "rank", *map(str, sizes)]
        found = run_on_nodes(joined, words, 29700, RUN_TIMEOUT_S)
        state_mb = depth * (width + 1) * width * 12 / nodes / 1e6
        table = copies_table(found, f"{nodes} nodes, {rate}, {state_mb:.0f} MB of state a rank")
        table.notes = [
            f"Stage 3, {depth} layers; a layer's compute is emulated by sleeping {compute_ms:g} ms "
            f"in forward and {2 * compute_ms:g} ms in backward. Medians of {rounds} turns of "
            f"{SAVE_EVERY * SAVES_A_TURN} steps with {SAVES_A_TURN} saves, the last one five steps "
            "before the end.",
            "Wanted: PeerCheckpoints <= 1.02.",
        ]
        raw: dict[str, Any] = {"ms": found, "rate": rate, "nodes": nodes}
        raw |= {"width": width, "depth": depth, "compute_ms": compute_ms}
        results.write([table], raw)


if __name__ == "__main__":
    app()
