"""Programs: transforms of torch.func within forwards, other layouts of tensors, odd layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.distributed.programs.models import (
    SIZE,
    Block,
    Net,
    adamw,
    mean_square,
    sgd,
    train,
    update,
)
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Ensemble(nn.Module):
    """Stacked weights of members, which vmap calls at once."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)]
        stacked, _ = stack_module_state(members)
        self.names = list(stacked)
        self.stacked = nn.ParameterList(nn.Parameter(p.detach()) for p in stacked.values())
        self.base = [copy.deepcopy(members[0]).to("meta")]  # in a list: no part of this module

    def forward(self, x: Tensor) -> Tensor:
        params = dict(zip(self.names, self.stacked, strict=True))
        call = lambda p, x: functional_call(self.base[0], p, (x,))  # noqa: E731
        return vmap(call, in_dims=(0, None))(params, x)[..., 0]


@program(
    "an ensemble: stacked weights of members, called by vmap in the forward, spread as uncertainty"
)
def ensemble(run: Run) -> None:
    model = run.shard(Ensemble())
    optimizer = adamw(model.parameters())
    for step in range(3):
        answers = model(run.tensor(6, SIZE, key=step))
        run.record(answers.std(0).mean())
        update(run, model, optimizer, (answers - run.tensor(6, key=10 + step)).square().mean())


class Contractive(nn.Module):
    """An encoder with the norm of its Jacobian by inputs, from torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh())
        self.decoder = nn.Linear(4, SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slopes = vmap(jacrev(self.encoder))(x)
        return self.decoder(self.encoder(x)), slopes.square().sum((1, 2)).mean()


@program("a contractive autoencoder: vmap(jacrev(self.encoder)) by inputs within the forward")
def contractive(run: Run) -> None:
    model = run.shard(Contractive())
    optimizer = adamw(model.parameters())
    for step in range(3):
        x = run.tensor(4, SIZE, key=step)
        made, slopes = model(x)
        update(run, model, optimizer, F.mse_loss(made, x) + 0.1 * slopes)


class Quiet(nn.Module):
    """A continuous flow: the divergence by a product with noise, by torch.func.vjp."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = Net(1)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(x))
        for _ in range(2):
            speed, pull, *_ = torch.func.vjp(self.speed, x)
            volume = volume + 0.5 * (pull(noise)[0] * noise).sum(-1)
            x = x + 0.5 * speed
        return x, volume


@program("a continuous normalising flow: torch.func.vjp of the network within the forward")
def continuous_flow(run: Run) -> None:
    model = run.shard(Quiet(), [Block])
    optimizer = sgd(model)
    for step in range(3):
        noise = torch.randint(0, 2, (4, SIZE)).float() * 2 - 1
        z, volume = model(run.tensor(4, SIZE, key=step), noise)
        update(run, model, optimizer, (0.5 * z.square().sum(-1) - volume).mean())


class Dropping(nn.Module):
    """A recurrent layer whose hidden weights are dropped at random in each forward (AWD-LSTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn: Any = nn.LSTM(SIZE, SIZE, batch_first=True)
        self.raw = nn.Parameter(self.rnn.weight_hh_l0.data)
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.weight_hh_l0 = self.raw.data.clone()
        self.rnn.flatten_parameters = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.weight_hh_l0 = F.dropout(self.raw, 0.3, self.training)
        return self.rnn(x)[0]


@program(
    "AWD-LSTM: hidden weights dropped in each forward and set as attributes, penalties on outputs"
)
def weight_dropped(run: Run) -> None:
    model = run.shard(Dropping())
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, t0=1.0, lambd=0.0)
    for step in range(3):
        x = run.tensor(2, 5, SIZE, key=step)
        out = model(x)
        loss = F.mse_loss(out[:, :-1], x[:, 1:]) + 0.1 * out.square().mean()
        update(run, model, optimizer, loss + 0.1 * (out[:, 1:] - out[:, :-1]).square().mean())


@program(
    "jagged batches: nested tensors through linear layers and norms, means of rows, lengths by rank"
)
def jagged(run: Run) -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
            self.norm = nn.LayerNorm(SIZE)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.down(F.gelu(self.up(self.norm(x))))
            return torch.stack([row.mean(0) for row in x.unbind()])

    model = run.shard(Ragged())
    optimizer = adamw(model.parameters())
    for step in range(3):
        sizes = [2 + (i + step + run.rank) % 3 for i in range(3)]
        rows = [run.tensor(size, SIZE, key=10 * step + i) for i, size in enumerate(sizes)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        update(run, model, optimizer, mean_square(model(x)))


@program(
    "a graph as a sparse matrix: torch.sparse.mm with what a layer gives, of the rank's own size"
)
def sparse_graph(run: Run) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)

        def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
            return torch.sparse.mm(
                adjacency, self.last(torch.sparse.mm(adjacency, self.first(x)).relu())
            )

    model = run.shard(Layers(), [nn.Linear])
    optimizer = adamw(model.parameters())
    for step in range(3):
        nodes = 6 + run.rank + step
        dense = (
            torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(step)) < 0.3
        ).float()
        adjacency = (dense + torch.eye(nodes)).to_sparse_csr()
        loss = F.cross_entropy(
            model(adjacency, run.tensor(nodes, SIZE, key=step)), run.tokens(3, nodes)
        )
        update(run, model, optimizer, loss)


def saved_or_not(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Matrix products are saved, the rest is computed again."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


@program(
    "selective checkpoints: matrix products are saved, the rest of each block is computed again"
)
def selective_checkpoint(run: Run) -> None:
    class Selective(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(saved_or_not),
                )
            return self.out(self.norm(x))

    train(run, run.shard(Selective(), [Block]))


class Mixed(nn.Module):
    """Convolutions whose kernels a router mixes for each sample (CondConv)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(0.3 * torch.randn(3, 4, 2, 3))
        self.router = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x.mean(-1)).sigmoid()
        kernels = torch.einsum("be,eoik->boik", weights, self.kernels).flatten(0, 1)
        return F.conv1d(x.reshape(1, -1, x.shape[-1]), kernels, groups=len(x)).view(len(x), 4, -1)


@program(
    "kernels mixed for each sample and given to one grouped convolution, complex spectra beside"
)
def mixed_kernels(run: Run) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed, self.head = Mixed(), nn.Linear(4, 1)
            self.filter = nn.Parameter(torch.randn(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x, norm="ortho") * torch.view_as_complex(self.filter)
            x = x + torch.fft.irfft(spectrum, n=x.shape[-1], norm="ortho")
            return self.head(self.mixed(x).mean(-1))

    model = run.shard(Spectral(), [Mixed])
    optimizer = adamw(model.parameters())
    for step in range(3):
        loss = (model(run.tensor(4, 2, SIZE, key=step)) - 1).square().mean()
        update(run, model, optimizer, loss)


@program(
    "an ensemble of three sharded models that vote, the loss of each weighed by its last error"
)
def boosting(run: Run) -> None:
    models = [run.shard(nn.Sequential(Block(), nn.Linear(SIZE, 1)), [Block]) for _ in range(3)]
    optimizer = adamw([param for model in models for param in model.parameters()])
    errors = torch.ones(3)
    for step in range(3):
        x, aim = run.tensor(6, SIZE, key=step), run.tensor(6, 1, key=10 + step)
        answers = torch.stack([model(x) for model in models])
        losses = (answers - aim).square().mean((1, 2))
        loss = (errors.softmax(0) * losses).sum() - 0.01 * answers.var(0).mean()
        loss.backward()
        run.average(*models)
        optimizer.step()
        optimizer.zero_grad()
        errors = losses.detach()
        torch.distributed.all_reduce(errors)
        run.record(loss, errors)
