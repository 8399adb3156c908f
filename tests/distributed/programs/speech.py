"""Programs: recognition and synthesis of speech."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.distributed.programs.models import SIZE, Block, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

LETTERS = 5  # and a blank, which is 0


def utterances(run: Run, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Frames with their lengths, and letters with theirs; the rank's own."""
    frames, letters = run.tensor(4, 12, SIZE, key=step), 1 + run.tokens(LETTERS, 4, 3, key=step)
    lengths = (8 + run.tokens(5, 4, key=10 + step)).sort(descending=True)[0]
    return frames, lengths, letters, 1 + run.tokens(3, 4, key=20 + step)


class Listener(nn.Module):
    """A packed bidirectional LSTM over masked frames (SpecAugment)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, SIZE // 2, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, LETTERS + 1)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            frames = frames.clone()
            start, band = torch.randint(6, ()), torch.randint(SIZE - 2, ())
            frames[:, start : start + 2] = 0.0
            frames[:, :, band : band + 2] = 0.0
        packed = pack_padded_sequence(frames, lengths, batch_first=True)
        features = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        return self.head(self.norm(features)).log_softmax(-1)


@program("CTC: a packed bidirectional LSTM, lengths by rank, SpecAugment, greedy decoding")
def ctc(run: Run) -> None:
    model = run.shard(Listener(), [nn.LSTM])
    optimizer = adamw(model.parameters())
    for step in range(3):
        frames, lengths, letters, sizes = utterances(run, step)
        scores = model(frames, lengths)
        loss = F.ctc_loss(scores.transpose(0, 1), letters, lengths, sizes, zero_infinity=True)
        update(run, model, optimizer, loss)
        model.eval()
        with torch.no_grad():
            best = model(frames, lengths).argmax(-1)
            run.record([row.unique_consecutive().tolist() for row in best])
        model.train()


class Transducer(nn.Module):
    """An encoder of frames, a predictor of letters, and what joins each pair of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(SIZE, SIZE, batch_first=True)
        self.embed = nn.Embedding(LETTERS + 1, SIZE)
        self.predictor = nn.GRU(SIZE, SIZE, batch_first=True)
        self.joiner = nn.Sequential(nn.Tanh(), nn.Linear(SIZE, LETTERS + 1))

    def forward(self, frames: Tensor, letters: Tensor) -> Tensor:
        heard = self.encoder(frames)[0]
        said = self.predictor(self.embed(F.pad(letters, (1, 0))))[0]
        return self.joiner(heard[:, :, None] + said[:, None]).log_softmax(-1)


def transducer_loss(scores: Tensor, letters: Tensor) -> Tensor:
    """Minus the log of the sum over all alignments, by rows of frames."""
    blank = scores[..., 0]
    emit = scores[:, :, :-1].gather(3, letters[:, None, :, None].expand(-1, scores.shape[1], -1, 1))
    row = F.pad(emit[:, 0, :, 0].cumsum(-1), (1, 0))
    for t in range(1, scores.shape[1]):
        stay = row + blank[:, t - 1]
        cells = [stay[:, 0]]
        for u in range(1, stay.shape[1]):
            cells.append(torch.logaddexp(stay[:, u], cells[-1] + emit[:, t, u - 1, 0]))
        row = torch.stack(cells, 1)
    return -(row[:, -1] + blank[:, -1, -1]).mean()


@program("RNN-T: encoder, predictor and joiner, a loss over all alignments, an auxiliary CTC head")
def transducer(run: Run) -> None:
    model = run.shard(Transducer(), [nn.GRU])
    optimizer = adamw(model.parameters())
    for step in range(3):
        frames, _, letters, _ = utterances(run, step)
        scores = model(frames[:, :5], letters)
        update(run, model, optimizer, transducer_loss(scores, letters))


class ScaledGradient(torch.autograd.Function):
    """The input, with a part of its gradient (fairseq's GradMultiply)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.scale, None


class Wav2Vec(nn.Module):
    """Masked frames in context against codes of a Gumbel quantiser."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, SIZE, 4, 2), nn.GroupNorm(2, SIZE), nn.GELU())
        self.mask = nn.Parameter(torch.rand(SIZE))
        self.choose, self.codes = nn.Linear(SIZE, 6), nn.Parameter(torch.randn(6, SIZE))
        self.context = nn.ModuleList(Block() for _ in range(2))

    def forward(self, wave: Tensor, masked: Tensor, heat: float) -> tuple[Tensor, Tensor, Tensor]:
        x = ScaledGradient.apply(self.features(wave), 0.1).transpose(1, 2)
        chosen = F.gumbel_softmax(self.choose(x), heat, hard=True)
        share = self.choose(x).softmax(-1).mean((0, 1))
        x = torch.where(masked[..., None], self.mask, x)
        for block in self.context:
            x = block(x) + x.mean(1, keepdim=True)
        return x, chosen @ self.codes, share


@program(
    "wav2vec 2.0: masked frames against codes of a Gumbel softmax, diversity, scaled gradients"
)
def wav2vec(run: Run) -> None:
    model = run.shard(Wav2Vec(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        wave, masked = run.tensor(2, 1, 18, key=step), torch.rand(2, 8) < 0.4
        context, codes, share = model(wave, masked, heat=max(2.0 * 0.9**step, 0.5))
        near = F.cosine_similarity(context[:, :, None], codes[:, None], dim=-1) / 0.1
        targets = torch.arange(8).expand(2, -1)[masked]
        loss = F.cross_entropy(near[masked], targets)
        diversity = (share * (share + 1e-7).log()).sum()
        update(run, model, optimizer, loss + 0.1 * diversity + 0.01 * codes.square().mean())


class Speller(nn.Module):
    """Attention over frames, letter by letter; now and then its own letter goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.listen, self.embed = nn.Linear(SIZE, SIZE), nn.Embedding(LETTERS + 1, SIZE)
        self.cell, self.query = nn.LSTMCell(2 * SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(2 * SIZE, LETTERS + 1)

    def forward(self, frames: Tensor, letters: Tensor, own: float) -> Tensor:
        keys, last = self.listen(frames), torch.zeros_like(letters[:, 0])
        hidden = cell = seen = keys.new_zeros(len(keys), SIZE)
        scores = []
        for t in range(letters.shape[1]):
            hidden, cell = self.cell(torch.cat([self.embed(last), seen], -1), (hidden, cell))
            weights = (keys @ self.query(hidden)[..., None]).softmax(1)
            seen = (weights * keys).sum(1)
            scores.append(self.head(torch.cat([hidden, seen], -1)))
            guess = scores[-1].argmax(-1)
            last = torch.where(torch.rand(len(keys)) < own, guess, letters[:, t])
        return torch.stack(scores, 1)


@program("listen, attend and spell: an LSTM cell with attention, scheduled sampling, noisy weights")
def speller(run: Run) -> None:
    model = run.shard(Speller(), [nn.LSTMCell])
    optimizer = adamw(model.parameters())
    for step in range(4):
        frames, _, letters, _ = utterances(run, step)
        with torch.no_grad():  # weight noise, as in the paper; the same on all ranks
            noise = [0.01 * torch.randn(p.shape) for p in model.parameters()]
            for param, n in zip(model.parameters(), noise, strict=True):
                param.add_(n)
        scores = model(frames, letters, own=0.2 * step)
        loss = F.cross_entropy(scores.flatten(0, 1), letters.flatten(), label_smoothing=0.1)
        loss.backward()
        with torch.no_grad():
            for param, n in zip(model.parameters(), noise, strict=True):
                param.sub_(n)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


def vocoder() -> nn.Module:
    """Frames to a wave of twice the length."""
    return nn.Sequential(
        weight_norm(nn.ConvTranspose1d(SIZE, SIZE, 4, 2, 1)),
        nn.LeakyReLU(0.1),
        weight_norm(nn.Conv1d(SIZE, 1, 3, padding=1)),
        nn.Tanh(),
    )


class Periods(nn.Module):
    """Critics of a wave that is folded by several periods; their features, too."""

    def __init__(self) -> None:
        super().__init__()
        self.critics = nn.ModuleDict(
            {
                str(period): nn.ModuleList(
                    [weight_norm(nn.Conv2d(1, 4, (3, 1))), weight_norm(nn.Conv2d(4, 1, (3, 1)))]
                )
                for period in (2, 3)
            }
        )

    def forward(self, wave: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        scores, features = [], []
        critics: Any = self.critics
        for period, (first, last) in critics.items():
            features.append(F.leaky_relu(first(wave.unflatten(-1, (-1, int(period)))), 0.1))
            scores.append(last(features[-1]))
        return scores, features


@program("HiFi-GAN: weight norm, critics of several periods, matched features, a decay for both")
def vocoder_gan(run: Run) -> None:
    model, critics = run.shard(vocoder()), run.shard(Periods(), [nn.Conv2d])
    optimizers = [adamw(m.parameters(), betas=(0.8, 0.99)) for m in (model, critics)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    for step in range(3):
        frames, wave = run.tensor(2, SIZE, 12, key=step), run.tensor(2, 1, 24, key=10 + step)
        made = model(frames)
        true, false = critics(wave)[0], critics(made.detach())[0]
        pairs = zip(true, false, strict=True)
        loss = sum((1 - t).square().mean() + f.square().mean() for t, f in pairs)
        update(run, critics, optimizers[1], torch.as_tensor(loss))
        with torch.no_grad():
            wanted = critics(wave)[1]
        scores, features = critics(made)
        loss = sum((1 - score).square().mean() for score in scores)
        loss += sum(F.l1_loss(f, w) for f, w in zip(features, wanted, strict=True))
        update(run, model, optimizers[0], loss + F.l1_loss(made, wave))
        critics.zero_grad()
        for schedule in schedules:
            schedule.step()
