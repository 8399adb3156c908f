"""Programs: layers of torch.nn and what they do with their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.programs.models import SIZE, Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def layers(run: Run, *modules: nn.Module) -> None:
    """Trains a sequence of layers, then evaluates it."""
    model = run.shard(nn.Sequential(*modules))
    train(run, model)
    model.eval()
    with torch.no_grad():
        run.record(model(run.tensor(4, 8)))


class Sequences(nn.Module):
    """Makes (4, 8) a sequence (4, 3, 8) for the layer inside."""

    def __init__(self, inner: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, torch.stack([x, x * 0.5, -x], 1))


@program("BatchNorm1d in training, then in eval")
def batch_norm(run: Run) -> None:
    layers(run, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


@program("BatchNorm frozen in eval mode while the rest trains")
def batch_norm_frozen(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    run.module(model)[1].eval()
    train(run, model)


@program("LayerNorm with a frozen affine part")
def layer_norm_frozen(run: Run) -> None:
    norm = nn.LayerNorm(8)
    norm.requires_grad_(False)
    layers(run, nn.Linear(8, 8), norm, nn.Linear(8, 8))


@program("GroupNorm, PReLU and Bilinear")
def group_norm(run: Run) -> None:
    class Product(nn.Bilinear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x)

    layers(run, nn.GroupNorm(2, 8), nn.PReLU(), Product(8, 8, 8))


@program("an embedding with padding_idx")
def embedding_padding(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.Embedding(7, 8, padding_idx=0), nn.Linear(8, 8)))
    optimizer = sgd(model)
    for step in range(3):
        update(run, model, optimizer, mean_square(model(run.tokens(7, 4, key=step))))


@program("an embedding with max_norm, which writes its weight in forward")
def embedding_max_norm(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.Embedding(7, 8, max_norm=1.0), nn.Linear(8, 8)))
    optimizer = sgd(model)
    tokens = torch.arange(7)
    for _ in range(3):
        update(run, model, optimizer, mean_square(model(tokens)))


@program("EmbeddingBag")
def embedding_bag(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.EmbeddingBag(7, 8), nn.Linear(8, 8)))
    optimizer = sgd(model)
    for step in range(3):
        update(run, model, optimizer, mean_square(model(run.tokens(7, 4, 3, key=step))))


@program("convolutions in channels_last")
def channels_last(run: Run) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model = run.shard(net.to(memory_format=torch.channels_last))
    optimizer = sgd(model)
    for x in run.batches(3, 2, 3, 8, 8):
        image = x.to(memory_format=torch.channels_last)
        update(run, model, optimizer, mean_square(model(image)))


@program("MultiheadAttention, training and eval")
def multihead_attention(run: Run) -> None:
    inner = nn.MultiheadAttention(8, 2, batch_first=True)
    layers(run, Sequences(inner, lambda m, x: m(x, x, x)[0].mean(1)), nn.Linear(8, 8))


@program("TransformerEncoderLayer, training and its fast path in eval")
def encoder_layer(run: Run) -> None:
    inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layers(run, Sequences(inner, lambda m, x: m(x).mean(1)), nn.Linear(8, 8))


@program("TransformerEncoder of two layers, each a unit, training and eval")
def encoder(run: Run) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    inner = nn.TransformerEncoder(layer, 2)
    net = nn.Sequential(Sequences(inner, lambda m, x: m(x).mean(1)), nn.Linear(8, 8))
    model = run.shard(net, [nn.TransformerEncoderLayer])
    train(run, model)
    model.eval()
    with torch.no_grad():
        run.record(model(run.tensor(4, 8)))


@program("nn.Transformer with encoder and decoder")
def transformer(run: Run) -> None:
    inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    layers(run, Sequences(inner, lambda m, x: m(x, x).mean(1)), nn.Linear(8, 8))


@program("an LSTM, whose weights are flattened")
def lstm(run: Run) -> None:
    inner = nn.LSTM(8, 8, num_layers=2, batch_first=True)
    layers(run, Sequences(inner, lambda m, x: m(x)[0][:, -1]), nn.Linear(8, 8))


@program("an LSTM with its hidden state carried and detached (truncated)")
def lstm_truncated(run: Run) -> None:
    class Carried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

        def forward(self, x: Tensor, state: Any) -> Any:
            y, state = self.lstm(x, state)
            return self.out(y), state

    model = run.shard(Carried())
    optimizer = sgd(model)
    state = None
    for x in run.batches(3, 2, 5, 8):
        y, state = model(x, state)
        update(run, model, optimizer, mean_square(y))
        state = tuple(part.detach() for part in state)


@program("a GRUCell called for each element of a sequence")
def gru_cell(run: Run) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros_like(x[:, 0])
            for item in x.unbind(1):
                state = self.cell(item, state)
            return state

    layers(run, Sequences(Loop(), lambda m, x: m(x)), nn.Linear(8, 8))


@program("parametrizations.weight_norm")
def weight_norm(run: Run) -> None:
    layers(run, nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


@program("parametrizations.spectral_norm")
def spectral_norm(run: Run) -> None:
    layers(run, nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


@program("parametrizations.orthogonal")
def orthogonal(run: Run) -> None:
    layers(run, nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 8))


@program("a parametrization of the user's own, read twice in a forward", unused=True)
def own_parametrization(run: Run) -> None:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).t()

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + x @ self.weight.t()

    inner = Twice(8, 8)
    nn.utils.parametrize.register_parametrization(inner, "weight", Symmetric())
    layers(run, inner, nn.Linear(8, 8))


@program("nn.utils.spectral_norm with its hook (the old one)")
def spectral_norm_hook(run: Run) -> None:
    layers(run, nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


@program("nn.utils.prune before sharding, masks in forward")
def prune(run: Run) -> None:
    import torch.nn.utils.prune as pruning

    inner = nn.Linear(8, 8)
    pruning.l1_unstructured(inner, "weight", amount=0.5)
    layers(run, inner, nn.Linear(8, 8))


@program("nn.utils.prune of a sharded model")
def prune_sharded(run: Run) -> None:
    import torch.nn.utils.prune as pruning

    model = run.shard(Net(), [Block])
    train(run, model)
    pruning.l1_unstructured(run.module(model).out, "weight", amount=0.5)
    train(run, model)


@program("weight_norm registered after sharding", unused=True)
def weight_norm_sharded(run: Run) -> None:
    model = run.shard(Net(), [Block])
    nn.utils.parametrizations.weight_norm(run.module(model).out)
    train(run, model)


@program("dropout with the same seed on all ranks")
def dropout(run: Run) -> None:
    torch.manual_seed(7)
    layers(run, nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))


@program("a model in float64")
def double_model(run: Run) -> None:
    model = run.shard(Net().double(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        update(run, model, optimizer, mean_square(model(x.double())))


@program("blocks in bfloat16, the rest in float32")
def mixed_dtypes(run: Run) -> None:
    class Low(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.bfloat16()).float()

    train(run, run.shard(Net(2, lambda: Low().bfloat16()), [Low]), steps=1)


@program("a trainable complex parameter")
def complex_parameter(run: Run) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=SIZE)

    layers(run, nn.Linear(8, 8), Spectral(), nn.Linear(8, 8))


@program("buffers that the forward updates")
def running_buffers(run: Run) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("seen", torch.zeros(8, dtype=torch.bool), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.5)
            self.seen |= x.detach().mean(0) > 0
            return self.l(x - self.mean) * (1 + self.seen.float())

    train(run, run.shard(Net(2, Counted), [Counted]))


@program("an autograd.Function that saves the weight and reads it in backward")
def own_function(run: Run) -> None:
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(Multiply.apply(x, self.w))

    train(run, run.shard(Net(2, Own), [Own]))


@program("an autograd.Function that keeps the weight on ctx instead of saving it")
def own_function_attribute(run: Run) -> None:
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.x, ctx.w = x, w
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad @ ctx.w.t(), ctx.x.t() @ grad

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(Multiply.apply(x, self.w))

    train(run, run.shard(Net(2, Own), [Own]))


@program("a weight standardised in forward (w - w.mean()) / w.std()")
def weight_standardised(run: Run) -> None:
    class Standard(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            w = (self.weight - self.weight.mean()) / (self.weight.std() + 1e-3)
            return x + 0.1 * nn.functional.linear(x, w, self.bias)

    train(run, run.shard(Net(2, lambda: Standard(8, 8)), [Standard]))


@program("a weight cached by a module across steps")
def weight_cached(run: Run) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(8, 8)
            self.views = [self.l.weight, self.l.bias]

        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.linear(x, *self.views)

    train(run, run.shard(Net(2, Cached), [Cached]))
