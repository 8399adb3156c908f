"""Programs: time series and tables."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

PAST, FUTURE = 8, 4
LEVELS = torch.tensor([0.1, 0.5, 0.9])


class Beats(nn.Module):
    """Stacks that each explain a part of the past, within a reversible normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.stacks = nn.ModuleList(
            nn.Sequential(nn.Linear(PAST, SIZE), Block(), nn.Linear(SIZE, PAST + FUTURE))
            for _ in range(2)
        )

    def forward(self, past: Tensor) -> Tensor:
        mean = past.mean(1, keepdim=True).detach()
        spread = (past.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        x, future = (past - mean) / spread * self.scale + self.shift, torch.zeros(())
        for stack in self.stacks:
            back, ahead = stack(x).split([PAST, FUTURE], 1)
            x, future = x - back, future + ahead
        return (future - self.shift) / (self.scale + 1e-10) * spread + mean


@program("N-BEATS: stacks of residuals within RevIN, early stopping by the mean loss of all ranks")
def beats(run: Run) -> None:
    model = run.shard(Beats(), [nn.Sequential])
    optimizer = adamw(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    best, waited = float("inf"), 0
    for step in range(6):
        series = run.tensor(6, PAST + FUTURE, key=step).cumsum(1)
        update(run, model, optimizer, F.smooth_l1_loss(model(series[:, :PAST]), series[:, PAST:]))
        with torch.no_grad():
            series = run.tensor(4, PAST + FUTURE, key=30).cumsum(1)
            held_out = F.l1_loss(model(series[:, :PAST]), series[:, PAST:])
        dist.all_reduce(held_out)
        schedule.step(held_out / run.world_size)
        waited = 0 if float(held_out) < best - 1e-4 else waited + 1
        best = min(best, float(held_out))
        run.record(held_out, optimizer.param_groups[0]["lr"])
        if waited == 2:
            break


class Gated(nn.Module):
    """A gated residual, which may see a context."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.context = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.gate, self.norm = nn.Linear(SIZE, 2 * SIZE), nn.LayerNorm(SIZE)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.first(x)
        if context is not None:
            h = h + self.context(context)
        return self.norm(x + F.glu(self.gate(F.elu(h)), -1))


class Fusion(nn.Module):
    """A temporal fusion: chosen variables, an LSTM from past to future, attention, quantiles."""

    def __init__(self) -> None:
        super().__init__()
        self.static = nn.Embedding(4, SIZE)
        self.inputs = nn.ModuleList(nn.Linear(1, SIZE) for _ in range(3))
        self.choose, self.enrich = Gated(), Gated()
        self.encoder = nn.LSTM(SIZE, SIZE, batch_first=True)
        self.decoder = nn.LSTM(SIZE, SIZE, batch_first=True)
        self.attention = nn.MultiheadAttention(SIZE, 2, batch_first=True)
        self.head = nn.Linear(SIZE, len(LEVELS))

    def forward(self, x: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        context = self.static(kind)
        parts = torch.stack([layer(x[..., i : i + 1]) for i, layer in enumerate(self.inputs)], -2)
        weights = self.choose(parts.sum(-2), context[:, None])[..., :3].softmax(-1)
        x = (parts * weights[..., None]).sum(-2)
        past, state = self.encoder(x[:, :PAST], (context[None], context[None]))
        full = self.enrich(torch.cat([past, self.decoder(x[:, PAST:], state)[0]], 1))
        mask = torch.triu(torch.ones(FUTURE, PAST + FUTURE), PAST + 1).bool()
        seen, _ = self.attention(full[:, PAST:], full, full, attn_mask=mask, need_weights=False)
        return self.head(seen + full[:, PAST:]), weights


@program(
    "temporal fusion: gates that sometimes see a context, LSTMs that hand a state on, quantiles",
    unused=True,
)
def temporal_fusion(run: Run) -> None:
    model = run.shard(Fusion(), [Gated, nn.LSTM])
    optimizer = adamw(model.parameters())
    for step in range(3):
        x, aim = run.tensor(4, PAST + FUTURE, 3, key=step), run.tensor(4, FUTURE, 1, key=10 + step)
        answer, weights = model(x, run.tokens(4, 4, key=step))
        error = aim - answer
        update(
            run, model, optimizer, torch.max(LEVELS * error, (LEVELS - 1) * error).sum(-1).mean()
        )
        run.record(weights.mean((0, 1)))


class Autoregression(nn.Module):
    """A GRU cell that knows the last value, and gives a distribution of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(1, SIZE), nn.Linear(SIZE, 3)

    def forward(self, last: Tensor, state: Tensor) -> tuple[torch.distributions.StudentT, Tensor]:
        state = self.cell(last[:, None], state)
        mean, scale, freedom = self.head(state).unbind(-1)
        scale, freedom = F.softplus(scale) + 0.1, 2 + F.softplus(freedom)
        return torch.distributions.StudentT(freedom, mean, scale), state


@program("DeepAR: a model called for each time of a window, then sampled paths; windows by rank")
def sampled_paths(run: Run) -> None:
    model = run.shard(Autoregression(), [nn.GRUCell])
    optimizer = adamw(model.parameters())
    for step in range(3):
        series = run.tensor(4, 5 + step, key=step)
        state, loss = torch.zeros(4, SIZE), torch.zeros(())
        for t in range(series.shape[1] - 1):
            guess, state = model(series[:, t], state)
            loss = loss - guess.log_prob(series[:, t + 1]).mean()
        update(run, model, optimizer, loss / (series.shape[1] - 1))
    model.eval()
    with torch.no_grad():
        state, last = torch.zeros(6, SIZE), series[:1, -1].repeat(6)
        path = []
        for _ in range(3):
            guess, state = model(last, state)
            last = guess.mean + guess.scale * torch.randn(6)
            path.append(last)
    run.record(torch.stack(path).quantile(0.5, 1))


class Scan(nn.Module):
    """A selective state space: states that decay by what the input says (Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.conv = (
            nn.Linear(SIZE, 2 * SIZE, bias=False),
            nn.Conv1d(SIZE, SIZE, 3, groups=SIZE),
        )
        self.select, self.pace = nn.Linear(SIZE, 1 + 4, bias=False), nn.Linear(1, SIZE)
        self.log_decay = nn.Parameter(torch.arange(1.0, 3.0).log().repeat(SIZE, 1))
        self.skip, self.out = nn.Parameter(torch.ones(SIZE)), nn.Linear(SIZE, SIZE, bias=False)
        self.log_decay.no_decay = True  # type: ignore[attr-defined]
        with torch.no_grad():
            self.pace.bias.copy_(torch.linspace(-4, -1, SIZE))
        self.pace.bias.no_reinit = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.inp(x).chunk(2, -1)
        signal = F.silu(self.conv(F.pad(signal.transpose(1, 2), (2, 0)))).transpose(1, 2)
        pace, into, out = self.select(signal).split([1, 2, 2], -1)
        pace = F.softplus(self.pace(pace))
        decay = (pace[..., None] * -self.log_decay.exp()).exp()
        added = pace[..., None] * into[..., None, :] * signal[..., None]
        state, outputs = torch.zeros_like(added[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + added[:, t]
            outputs.append((state * out[:, t, None]).sum(-1))
        return x + self.out((torch.stack(outputs, 1) + self.skip * signal) * F.silu(gate))


@program("a state space: a selective scan in a loop, groups by marks on parameters from before")
def state_space(run: Run) -> None:
    model = run.shard(nn.Sequential(Scan(), nn.LayerNorm(SIZE), Scan()), [Scan])
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if not getattr(p, "no_decay", False) and p.ndim > 1]},
        {"params": [p for p in params if getattr(p, "no_decay", False) or p.ndim == 1]},
    ]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    run.record([len(group["params"]) for group in groups])
    optimizer = adamw(groups, weight_decay=0.1)
    for step in range(3):
        series = run.tensor(2, 7, SIZE, key=step)
        update(run, model, optimizer, F.mse_loss(model(series)[:, :-1], series[:, 1:]))


class Ghost(nn.Module):
    """Batch norm of small parts of the batch, a sparse mask, and a gate (TabNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mask = (
            nn.BatchNorm1d(SIZE, momentum=0.02),
            nn.Linear(SIZE, SIZE, bias=False),
        )
        self.step, self.mask_norm = nn.Linear(SIZE, 2 * SIZE), nn.BatchNorm1d(SIZE, momentum=0.02)

    def forward(self, x: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.cat([self.mask_norm(part) for part in self.mask(x).chunk(2)])
        mask = sparsemax(scores * prior)
        x = torch.cat([self.norm(part) for part in (mask * x).chunk(2)])
        return F.glu(self.step(x), -1), mask


def sparsemax(x: Tensor) -> Tensor:
    """The projection on the simplex."""
    ordered = x.sort(-1, descending=True)[0]
    counts = torch.arange(1, x.shape[-1] + 1)
    inside = 1 + counts * ordered > ordered.cumsum(-1)
    size = inside.sum(-1, keepdim=True)
    return (x - (ordered.cumsum(-1).gather(-1, size - 1) - 1) / size).clamp(min=0)


class TabNet(nn.Module):
    """Steps that choose features, and use each of them less again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Ghost() for _ in range(2))
        self.head = nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        prior, total, entropy = torch.ones_like(x), torch.zeros_like(x), torch.zeros(())
        for step in self.steps:
            out, mask = step(x, prior)
            prior, total = prior * (1.3 - mask), total + F.relu(out)
            entropy = entropy - (mask * (mask + 1e-10).log()).sum(-1).mean()
        return self.head(total), entropy


@program("TabNet: ghost batch norm, sparsemax, a norm in eval with statistics of many small parts")
def ghost_norms(run: Run) -> None:
    model = run.shard(TabNet(), [Ghost])
    optimizer = adamw(model.parameters())
    for step in range(3):
        answer, entropy = model(run.tensor(8, SIZE, key=step))
        loss = F.cross_entropy(answer, run.tokens(2, 8, key=step)) + 1e-3 * entropy
        update(run, model, optimizer, loss)
    model.eval()
    run.record(model(run.tensor(4, SIZE))[0].detach())


class Tokens(nn.Module):
    """A token for each column: numbers times a vector, rows of tables, and one that collects."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(0.5 * torch.randn(4, SIZE)) for _ in range(2))
        self.tables = nn.ModuleList(nn.Embedding(n, SIZE) for n in (3, 5))
        self.collect = nn.Parameter(torch.randn(1, 1, SIZE))
        self.layer = nn.TransformerEncoderLayer(
            SIZE, 2, SIZE, 0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Sequential(nn.LayerNorm(SIZE), nn.ReLU(), nn.Linear(SIZE, 1))

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        tokens = [self.weight * numbers[..., None] + self.bias]
        tokens += [table(kinds[:, i : i + 1]) for i, table in enumerate(self.tables)]
        x = torch.cat([self.collect.expand(len(numbers), -1, -1), *tokens], 1)
        return self.head(self.layer(x)[:, 0])[:, 0]


@program(
    "a transformer of table columns: a token for each, no decay for some, targets of all ranks"
)
def column_tokens(run: Run) -> None:
    model = run.shard(Tokens(), [nn.TransformerEncoderLayer])
    skipped = ("weight", "bias", "collect", "norm")
    named = list(run.module(model).named_parameters())
    groups = [
        {"params": [p for n, p in named if n in skipped or "norm" in n], "weight_decay": 0.0},
        {"params": [p for n, p in named if not (n in skipped or "norm" in n)]},
    ]
    optimizer = adamw(groups, weight_decay=0.1)
    sums = torch.stack([run.tensor(24).sum(), run.tensor(24).square().sum(), torch.tensor(24.0)])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    spread = (sums[1] / sums[2] - mean.square()).sqrt()
    for step in range(3):
        kinds = torch.stack([run.tokens(n, 8, key=step + n) for n in (3, 5)], 1)
        aim = (run.tensor(24)[8 * step :][:8] - mean) / spread
        update(run, model, optimizer, F.mse_loss(model(run.tensor(8, 4, key=step), kinds), aim))
