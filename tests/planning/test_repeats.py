"""A model of equal blocks is measured on a few of them, and the figures are those of all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.by_night import by_day
from tests.planning.measuring import measure
from tests.planning.test_fake_mode import figures
from zerocore.model.units import choose_units
from zerocore.planning import repeats
from zerocore.planning.activations import default_loss
from zerocore.planning.repeats import measure as measure_few

DEPTH = 11
WIDTH = 16


class Block(nn.Module):
    """A residual block that knows its number."""

    def __init__(self, number: int, inner: int = 32, unused: bool = True) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(WIDTH, inner)
        self.outer = nn.Linear(inner, WIDTH)
        self.unused = nn.Parameter(torch.zeros(3)) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ByNumber(Stack):
    """Needs all of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(DEPTH):
            x = self.blocks[number](x)
        return self.head(self.embedding(x))


class Twice(Stack):
    """Goes through its blocks twice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(self.embedding(x))


class Collecting(Stack):
    """The head sees what every block returned, so its own activations grow, too."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.head(torch.stack(outputs).exp())


def equal() -> list[nn.Module]:
    return [Block(number) for number in range(DEPTH)]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 10}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def tokens() -> dict[str, Any]:
    ids = torch.zeros(2, 8, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def used() -> list[nn.Module]:
    return [Block(number, unused=False) for number in range(DEPTH)]


Case = tuple[Callable[[], nn.Module], list[Any] | None]
REPEATED: dict[str, Case] = {
    "blocks": (lambda: Stack(used()), None),
    "blocks that keep gradients": (lambda: Stack(equal()), None),
    "layers": (lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(9))), [nn.Linear]),
    "two units in a block": (lambda: Stack(used()), [nn.Linear]),
    "another block first": (lambda: Stack([Block(0, 64), *equal()]), None),
    "llama": (llama, None),
}
WHOLE: dict[str, Case] = {  # all blocks run, at once or after runs that do not repeat each other
    "few": (lambda: Stack(equal()[:7]), None),
    "none alike": (lambda: Stack([Block(i, 32 + 8 * i) for i in range(DEPTH)]), None),
    "by number": (lambda: ByNumber(equal()), None),
    "twice": (lambda: Twice(equal()), None),
    "collecting": (lambda: Collecting(equal()), None),
    "one unit": (lambda: Stack(equal()), [Stack]),
}
CASES = REPEATED | WHOLE


# By day each other model, in one of the two ways.
BY_DAY = [(name, bool(number % 4 == 1)) for number, name in enumerate(CASES) if number % 2]


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    by_day(product(CASES, (False, True)), BY_DAY),
)
def test_figures_are_those_of_all_blocks(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, units = CASES[name]
    model = build()
    inputs = tokens() if name == "llama" else torch.randn(3, WIDTH)
    run = (model, choose_units(model, units), inputs, default_loss)
    measure(*run, checkpointing=checkpointing)  # autograd orders ties of the first in another way
    expected = measure(*run, checkpointing=checkpointing)
    runs: list[int] = []
    record = repeats.record

    def counting(*args: Any, **options: Any) -> Any:
        runs.append(len(options["dropped"]))
        return record(*args, **options)

    monkeypatch.setattr(repeats, "record", counting)
    found = measure_few(*run, checkpointing=checkpointing)
    assert figures(found) == figures(expected)
    assert found.work == expected.work
    assert (0 in runs) == (name in WHOLE)
    assert len(runs) <= (2 if name in REPEATED else 3)


def test_layers_that_a_configuration_tells_apart_all_run() -> None:
    model = Stack(equal())
    model.config = type("Config", (), {})()  # type: ignore[assignment]
    modules, _ = repeats._equal_blocks(model, choose_units(model, None))
    assert len(modules) == DEPTH
    vars(model.config)["layer_types"] = ["full", "sliding"] * DEPTH
    assert repeats._equal_blocks(model, choose_units(model, None)) == ([], [])


def test_a_shared_parameter_is_no_repetition() -> None:
    blocks = equal()
    shared = nn.Parameter(torch.zeros(3))
    for block in blocks:
        block.unused = shared
    model = Stack(blocks)
    assert repeats._equal_blocks(model, choose_units(model, None)) == ([], [])
