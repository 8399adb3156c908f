"""Counts the bytes that a language model gathers at stage 3, and the bytes that embeddings save."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.lib.links import Link
from bench.lib.models import GPT, GPT_SIZES
from bench.lib.systems import import_zerocore
from bench.lib.tables import Table
from zerocore.common.events import COLLECTIVES

QUICK, WHOLE = "small", "29m"


@dataclass(frozen=True)
class Sent:
    """The bytes of a steady step's collectives, and each gather by its unit."""

    gathers: dict[str, list[int]]
    total_nbytes: int
    exposed_nbytes: int  # bytes of the first gather and the last reduction

    def of_embeddings(self) -> list[list[int]]:
        """Returns the sizes of each embedding's gathers."""
        return [s for unit, s in self.gathers.items() if "tokens" in unit or "positions" in unit]

    def most_hidden(self, spared_nbytes: int = 0) -> float:
        """Returns the percentage that can be hidden, of bytes with the spared gathers."""
        return 100 * (1 - self.exposed_nbytes / (self.total_nbytes + spared_nbytes))


def sent_in_a_step(link: Link, tied: bool, size_name: str) -> Sent:
    """Counts the bytes of a GPT at stage 3, whose head may be its embedding."""
    size = GPT_SIZES[size_name]
    model: nn.Module = GPT(size).to(link.device)
    if tied:
        model.head.weight = model.tokens.weight
    zerocore = import_zerocore()
    model = zerocore.shard(model, stage=3, units=[type(model.blocks[0]), nn.Embedding])
    tokens = torch.randint(size.vocab_size, (size.batch, size.sequence), device=link.device)
    for _ in range(2):
        with zerocore.reporting.record_events(model) as recorded:
            loss: Tensor = model(tokens, tokens)
            loss.backward()
    events = [event for event in recorded if event.op in COLLECTIVES]
    gathers: dict[str, list[int]] = {}
    for event in events:
        if event.op == "all_gather":
            gathers.setdefault(event.unit, []).append(event.nbytes)
    total = sum(event.nbytes for event in events)
    return Sent(gathers, total, events[0].nbytes + events[-1].nbytes)


def lookups(link: Link, quick: bool) -> Table:
    """Makes a table of gathered and saved bytes, with a row for a tied head and its own."""
    name = QUICK if quick else WHOLE
    hidden = ["can be hidden %", "with these"]
    table = Table(
        f"{link.label}: gathers of a step of a GPT ({name}) at stage 3",
        ["head", "gathered MiB", "of embeddings", "gathers of them", "not gathered MiB", *hidden],
    )
    for tied in (False, True):
        sent = sent_in_a_step(link, tied, name)
        of_tables = sent.of_embeddings()
        spared = sum(sizes[0] for sizes in of_tables)
        table.add(
            "tied" if tied else "its own",
            f"{sum(map(sum, sent.gathers.values())) / 2**20:.2f}",
            f"{sum(map(sum, of_tables)) / 2**20:.2f}",
            str(sum(map(len, of_tables))),
            f"{spared / 2**20:.2f}",
            f"{sent.most_hidden():.1f}",
            f"{sent.most_hidden(spared):.1f}",
        )
    table.notes = [
        "Not gathered: each embedding once, as a lookup's backward reads no weight. Bytes of whole "
        "buckets, from the runtime's trace. A tied embedding is gathered for the lookup and for "
        "the head, whose backward comes next.",
        "Can be hidden: as in the tables above, all but the first gather and the last "
        "reduction, in bytes of this model. Without these gathers less is sent but as much is "
        "exposed, so the share that can be hidden is lower.",
    ]
    return table
