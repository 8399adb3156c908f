"""Programs: encoders for search."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.contrast import Gather, gathered
from tests.distributed.programs.models import SIZE, Block, Words, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

WORDS = 15


class Encoder(Words):
    """Unit vectors of texts, or of each of their tokens."""

    def __init__(self) -> None:
        super().__init__(WORDS)
        self.head = nn.Linear(SIZE, SIZE, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, each: bool = False) -> Tensor:
        x = self.dropout(super().forward(tokens))
        return F.normalize(x if each else x.mean(1), dim=-1)


@program("a bi-encoder: hard negatives mined from an index that the ranks encode in parts")
def hard_negatives(run: Run) -> None:
    model = run.shard(Encoder(), [Block])
    optimizer = adamw(model.parameters())
    generator = torch.Generator().manual_seed(run.seed)
    corpus = torch.randint(WORDS, (12, 5), generator=generator)
    for step in range(3):
        model.eval()
        with torch.no_grad():
            part = model(corpus.chunk(run.world_size)[run.rank])
            index: list[Any] = [None] * run.world_size
            dist.all_gather_object(index, part)
            right = run.tokens(12, 4, key=step)
            queries = corpus[right][:, :3]
            near = model(queries) @ torch.cat(index).t()
            hard = near.scatter(1, right[:, None], -2.0).argmax(1)
        model.train()
        own = model(corpus[torch.cat([right, hard])])
        parts = enumerate(gathered(own).chunk(run.world_size))
        documents = torch.cat([own, *(part for rank, part in parts if rank != run.rank)])
        scores = model(queries) @ documents.t() / 0.1
        update(run, model, optimizer, F.cross_entropy(scores, torch.arange(4)))
        run.record(hard)


@program("ColBERT: late interaction of all tokens, lengths by rank, scores of a teacher")
def late_interaction(run: Run) -> None:
    model = run.shard(Encoder().eval(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        queries = model(run.tokens(WORDS, 3, 3 + run.rank, key=step), each=True)
        tokens = run.tokens(WORDS, 3, 2, 6 - run.rank, key=10 + step)
        documents = model(tokens.flatten(0, 1), each=True).unflatten(0, (3, 2))
        near = torch.einsum("bqd,bntd->bnqt", queries, documents)
        near = near.masked_fill((tokens == 0)[:, :, None], -1e4)
        scores = near.max(-1)[0].sum(-1)
        teacher = run.tensor(3, 2, key=20 + step)
        loss = F.kl_div(scores.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
        update(run, model, optimizer, loss + F.cross_entropy(scores, torch.zeros(3).long()))


@program(
    "GradCache: features without gradient, gradients of features, then parts with the same dropout"
)
def grad_cache(run: Run) -> None:
    model = run.shard(Encoder(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = run.tokens(WORDS, 6, 5, key=step)
        parts = [*tokens[:, :3].chunk(2), *tokens.chunk(2)]
        features, states = [], []
        with torch.no_grad():
            for part in parts:
                states.append(torch.get_rng_state())
                features.append(model(part))
        leaves = [feature.detach().requires_grad_() for feature in features]
        queries = torch.cat(Gather.apply(torch.cat(leaves[:2])))
        documents = torch.cat(Gather.apply(torch.cat(leaves[2:])))
        loss = F.cross_entropy(queries @ documents.t() / 0.1, torch.arange(len(queries)))
        loss.backward()
        after = torch.get_rng_state()
        for number, (part, leaf) in enumerate(zip(parts, leaves, strict=True)):
            with run.no_sync(model) if number < 3 else nullcontext():
                torch.set_rng_state(states[number])
                (model(part) * leaf.grad).sum().backward()
        torch.set_rng_state(after)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


class Sparse(Words):
    """The largest weight of each word of the vocabulary, by the tied table (SPLADE)."""

    def __init__(self) -> None:
        super().__init__(WORDS, tied=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(tokens)
        return (F.relu(logits).log1p() * mask[..., None]).amax(1)


@program(
    "SPLADE: maxima over tokens by a tied head, a FLOPS penalty that grows, sparse features logged"
)
def sparse_words(run: Run) -> None:
    model = run.shard(Sparse(), [Block])
    optimizer = adamw(model.parameters())
    for step in range(3):
        tokens = run.tokens(WORDS, 6, 5, key=step)
        mask = (tokens > 0).float()
        queries, documents = model(tokens[:3], mask[:3]), model(tokens[3:], mask[3:])
        loss = F.cross_entropy(queries @ documents.t(), torch.arange(3))
        flops = queries.mean(0).square().sum() + documents.mean(0).square().sum()
        update(run, model, optimizer, loss + 0.1 * (step / 3) ** 2 * flops)
        run.record((documents > 0).float().mean())


@program("a reranker teaches a bi-encoder its margins; both are trained, each behind its own clock")
def margins(run: Run) -> None:
    student, teacher = run.shard(Encoder().eval(), [Block]), run.shard(Words(WORDS), [Block])
    s_optimizer, t_optimizer = adamw(student.parameters()), adamw(teacher.parameters())
    for step in range(4):
        query, right, wrong = run.tokens(WORDS, 3, 4, 5, key=step)

        def score(document: Tensor, query: Tensor = query) -> Tensor:
            return teacher(torch.cat([query, document], 1)).mean((1, 2))

        if step % 2 == 0:
            margin = score(right) - score(wrong)
            update(run, teacher, t_optimizer, -F.logsigmoid(margin).mean())
        with torch.no_grad():
            aim = score(right) - score(wrong)
        texts = student(torch.cat([query, right, wrong])).chunk(3)
        margin = (texts[0] * texts[1]).sum(-1) - (texts[0] * texts[2]).sum(-1)
        update(run, student, s_optimizer, F.mse_loss(margin, aim))
