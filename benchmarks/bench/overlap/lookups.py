"""What a step of a language model gathers at stage 3, and what embeddings spare it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.lib.links import Link
from bench.lib.models import GPT, GPT_SIZES
from bench.lib.systems import import_zerocore
from bench.lib.tables import Table

QUICK, WHOLE = "small", "29m"


def gathers_by_unit(link: Link, tied: bool, size_name: str) -> dict[str, list[int]]:
    """Bytes of each gather of a steady step, by unit; of a GPT whose head may be its embedding."""
    size = GPT_SIZES[size_name]
    model: nn.Module = GPT(size).to(link.device)
    if tied:
        model.head.weight = model.tokens.weight
    zerocore = import_zerocore()
    model = zerocore.shard(model, stage=3, units=[type(model.blocks[0]), nn.Embedding])
    tokens = torch.randint(size.vocab_size, (size.batch, size.sequence), device=link.device)
    for _ in range(2):
        with zerocore.record_events(model) as events:
            loss: Tensor = model(tokens, tokens)
            loss.backward()
    found: dict[str, list[int]] = {}
    for event in events:
        if event.op == "all_gather":
            found.setdefault(event.unit, []).append(event.nbytes)
    return found


def lookups(link: Link, quick: bool) -> Table:
    """A row for each way of using the embedding: what is gathered, and what is not any more."""
    name = QUICK if quick else WHOLE
    table = Table(
        f"{link.label}: gathers of a step of a GPT ({name}) at stage 3",
        ["head", "gathered MiB", "of embeddings", "gathers of them", "not gathered MiB"],
    )
    for tied in (False, True):
        gathers = gathers_by_unit(link, tied, name)
        of_tables = [s for unit, s in gathers.items() if "tokens" in unit or "positions" in unit]
        total = sum(sum(sizes) for sizes in gathers.values())
        table.add(
            "tied" if tied else "its own",
            f"{total / 2**20:.2f}",
            f"{sum(sum(sizes) for sizes in of_tables) / 2**20:.2f}",
            str(sum(len(sizes) for sizes in of_tables)),
            f"{sum(sizes[0] for sizes in of_tables) / 2**20:.2f}",
        )
    table.notes = [
        "Not gathered: each embedding once, for a backward that reads no weight. Bytes of whole "
        "buckets, from the runtime's trace. A tied embedding is gathered for the lookup and for "
        "the head, whose backward comes next."
    ]
    return table
