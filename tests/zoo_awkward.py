"""Small models made to be awkward: wiring, calls and ties that sharding must survive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import zoo_blocks as blocks
from tests.zoo_blocks import WIDTH, Block
from tests.zoo_case import Batch, Case

NUM_BLOCKS = 3
INPUTS, OUTPUTS = 5, 3
VOCABULARY = 11


class Net(nn.Module):
    """Three blocks between an input and an output layer; subclasses change the wiring."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        x = self.run_blocks(self.embed(x), rank, flip)
        out: Tensor = self.head(self.norm(x))
        return out

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, rank)
        return x


class FrozenNet(Net):
    """Frozen beside trainable parameters, a block without any trainable one, a frozen input."""

    def __init__(self) -> None:
        super().__init__(blocks.AdaptedBlock)
        self.embed.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class SharedNet(Net):
    """A layer shared by two blocks, and a parameter tied after construction."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].linear = self.blocks[0].linear
        self.blocks[2].norm.weight = self.blocks[0].norm.weight


class LoopedNet(Net):
    """Every block called twice in a forward, the second time in another order."""

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        x = super().run_blocks(x, rank, flip)
        for block in reversed(self.blocks):
            x = block(x, rank)
        return x


class SkippingNet(Net):
    """Odd ranks leave out some blocks altogether."""

    def __init__(self, skipped: Sequence[int]) -> None:
        super().__init__()
        self.skipped = skipped

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        for index, block in enumerate(self.blocks):
            if rank % 2 == 0 or index not in self.skipped:
                x = block(x, rank)
        return x


class DiscardingNet(Net):
    """Odd ranks call a block and do not use what it returns."""

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        x = self.blocks[0](x, rank)
        y = self.blocks[1](x, rank)
        return self.blocks[2](x if rank % 2 else y, rank)


class ReorderedNet(Net):
    """The order of the blocks depends on the batch; it is the same on all ranks."""

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        for block in reversed(self.blocks) if flip else self.blocks:
            x = block(x, rank)
        return x


class InplaceNet(Net):
    """The caller changes in place what a block returns."""

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, rank).add_(0.1)
        return x


class UnusedNet(Net):
    """A block and a layer outside of the blocks that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        return self.blocks[2](self.blocks[0](x, rank), rank)


class StructuredNet(Net):
    """Blocks that take and return containers."""

    def __init__(self) -> None:
        super().__init__(blocks.StructuredBlock)

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        state, total = {"hidden": x}, x.new_zeros(())
        for block in self.blocks:
            state, (_, (_, mean)) = block(state, rank=rank)
            total = total + mean
        return state["hidden"] + total


class RootNet(Net):
    """Parameters of the root itself, used before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        x = super().run_blocks(x + self.position, rank, flip)
        return x + torch.tanh(self.temperature * x)


class EncoderDecoder(Net):
    """Two lists of blocks; what the first makes is read by every block of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(Block() for _ in range(2))

    def run_blocks(self, x: Tensor, rank: int, flip: bool) -> Tensor:
        memory = super().run_blocks(x, rank, flip)
        for block in self.decoder:
            x = block(x + memory, rank)
        return x


class TiedTokens(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, rank: int) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rank)
        logits: Tensor = self.head(x)
        return logits


class ConvNet(nn.Module):
    """channels_last convolutions, outside of the blocks too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(blocks.ConvBlock() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, images: Tensor, rank: int) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x, rank)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def _vectors(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    return {
        "x": torch.randn(num_samples, INPUTS, generator=generator),
        "rank": rank,
        # From the seed alone, so that all ranks agree.
        "flip": generator.initial_seed() // 1000 % 2 == 1,
        "target": torch.randn(num_samples, OUTPUTS, generator=generator),
    }


def _sequential_vectors(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    batch = _vectors(generator, rank, num_samples)
    return {"input": batch["x"], "target": batch["target"]}


def _tokens(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (num_samples, 4), generator=generator)
    return {"tokens": tokens, "rank": rank, "target": tokens.roll(1, 1)}


def _images(generator: torch.Generator, rank: int, num_samples: int) -> Batch:
    images = torch.randn(num_samples, 3, 6, 6, generator=generator)
    return {
        "images": images.to(memory_format=torch.channels_last),
        "rank": rank,
        "target": torch.randn(num_samples, OUTPUTS, generator=generator),
    }


def _squared_error(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "target"}
    return F.mse_loss(model(**inputs), batch["target"])


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(tokens=batch["tokens"], rank=batch["rank"])
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())


def _net(name: str, build: Callable[[], nn.Module], units: tuple[str, ...] | None = None) -> Case:
    return Case(name, build, _vectors, _squared_error, units)


def _sequential() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(INPUTS, WIDTH)]
    for _ in range(NUM_BLOCKS):
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers, nn.Linear(WIDTH, OUTPUTS))


CASES = (
    _net("plain", Net),
    _net("scalars", partial(Net, blocks.ScalarBlock)),
    _net("empty_shards", partial(Net, blocks.EmptyBlock)),
    _net("mixed_dtypes", partial(Net, blocks.MixedDtypeBlock)),
    _net("frozen", FrozenNet),
    _net("integers", partial(Net, blocks.IntegerBlock)),
    _net("parametrized", partial(Net, blocks.ParametrizedBlock)),
    _net("recurrent", partial(Net, blocks.RecurrentBlock)),
    _net("attention", partial(Net, blocks.AttentionBlock)),
    _net("strided", partial(Net, blocks.StridedBlock)),
    _net("containers", partial(Net, blocks.ContainerBlock)),
    _net("buffers", partial(Net, blocks.BufferBlock)),
    _net("branches", partial(Net, blocks.BranchBlock)),
    _net("experts", partial(Net, blocks.ExpertBlock)),
    _net("pass_through", partial(Net, blocks.PassThroughBlock)),
    _net("structured", StructuredNet),
    _net("nested_units", partial(Net, blocks.OuterBlock), ("OuterBlock", "Block")),
    _net("nested_lists", partial(Net, blocks.OuterBlock)),
    _net("shared", SharedNet),
    _net("looped", LoopedNet),
    _net("skipped_middle", partial(SkippingNet, (1,))),
    _net("skipped_ends", partial(SkippingNet, (0, 2))),
    _net("discarded", DiscardingNet),
    _net("reordered", ReorderedNet),
    _net("inplace", InplaceNet),
    _net("unused", UnusedNet),
    _net("root_parameters", RootNet),
    _net("encoder_decoder", EncoderDecoder),
    Case("tied", TiedTokens, _tokens, _cross_entropy),
    Case("channels_last", ConvNet, _images, _squared_error),
    Case("sequential", _sequential, _sequential_vectors, _squared_error),
    Case("one_layer", partial(nn.Linear, INPUTS, OUTPUTS), _sequential_vectors, _squared_error),
)
