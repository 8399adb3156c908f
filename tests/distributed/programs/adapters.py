"""Programs: adapters that are turned off and on, as for the reference model of DPO and GRPO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, adamw, mean_square, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

VOCABULARY = 11


class Lora(nn.Module):
    """A frozen linear layer with an adapter beside it, as peft's."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        self.disabled = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.disabled else self.base(x) + self.b(self.a(x))

    def enable(self, enabled: bool) -> None:
        """Also freezes or trains the adapter, as peft does."""
        self.disabled = not enabled
        for part in (self.a, self.b):
            part.requires_grad_(enabled)


class AdaptedBlock(Block):
    """A block whose layers have adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Lora(self.up), Lora(self.down)  # type: ignore[assignment]


class AdaptedWords(nn.Module):
    """A frozen language model with adapters in its blocks."""

    def __init__(self, block: type[nn.Module] = AdaptedBlock) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, SIZE).requires_grad_(False)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@contextmanager
def disabled_adapters(model: nn.Module) -> Iterator[None]:
    """The frozen model inside of it."""
    layers = [module for module in model.modules() if isinstance(module, Lora)]
    for layer in layers:
        layer.enable(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable(True)


def sequence_logps(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each sequence."""
    logps = logits[:, :-1].log_softmax(-1)
    return logps.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)


def pairs(run: Run, step: int, count: int = 2) -> Tensor:
    """Chosen sequences, then as many rejected ones."""
    return run.tokens(VOCABULARY, 2 * count, 6, key=step)


def dpo_loss(policy: Tensor, reference: Tensor, beta: float = 0.5) -> Tensor:
    """Of chosen and rejected sequences."""
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adapted(run: Run, block: type[nn.Module] = AdaptedBlock) -> tuple[Any, torch.optim.Optimizer]:
    """A model with adapters, and an optimizer of these."""
    model = run.shard(AdaptedWords(block), [block])
    return model, adamw(trained(model))


@program("DPO with adapters: the reference, adapters off, between forward and backward")
def dpo_adapters_policy_first(run: Run) -> None:
    model, optimizer = adapted(run)
    for step in range(3):
        tokens = pairs(run, step)
        policy = sequence_logps(model(tokens), tokens)
        with torch.no_grad(), disabled_adapters(model):
            reference = sequence_logps(model(tokens), tokens)
        update(run, model, optimizer, dpo_loss(policy, reference))


@program("DPO with adapters: the reference, adapters off, before the policy's forward")
def dpo_adapters_reference_first(run: Run) -> None:
    model, optimizer = adapted(run)
    for step in range(3):
        tokens = pairs(run, step)
        with torch.no_grad(), disabled_adapters(model):
            reference = sequence_logps(model(tokens), tokens)
        policy = sequence_logps(model(tokens), tokens)
        update(run, model, optimizer, dpo_loss(policy, reference))


@program("DPO with adapters under accumulation, the reference between forward and backward")
def dpo_adapters_accumulation(run: Run) -> None:
    model, optimizer = adapted(run)

    def loss(key: int) -> Tensor:
        tokens = pairs(run, key)
        policy = sequence_logps(model(tokens), tokens)
        with torch.no_grad(), disabled_adapters(model):
            reference = sequence_logps(model(tokens), tokens)
        return dpo_loss(policy, reference) / 2

    for step in range(3):
        with run.no_sync(model):
            loss(2 * step).backward()
        update(run, model, optimizer, loss(2 * step + 1))


@program("KTO with adapters: a KL estimate under no_grad, then policy and reference in one loss")
def kto_adapters(run: Run) -> None:
    model, optimizer = adapted(run)
    for step in range(3):
        tokens = pairs(run, step)
        policy = sequence_logps(model(tokens), tokens)
        with torch.no_grad():
            mismatched = sequence_logps(model(tokens.flip(0)), tokens)
            with disabled_adapters(model):
                reference = sequence_logps(model(tokens), tokens)
        kl = (mismatched - reference).mean().clamp(min=0)
        good, bad = (policy - reference).chunk(2)
        loss = (1 - torch.sigmoid(good - kl)).mean() + (1 - torch.sigmoid(kl - bad)).mean()
        update(run, model, optimizer, loss)


@program("GRPO with adapters: rewards of a group, several passes, a KL to adapters off")
def grpo_adapters(run: Run) -> None:
    model, optimizer = adapted(run)
    for step in range(2):
        tokens = pairs(run, step)
        rewards = (tokens % 3 == 0).float().mean(-1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-2)
        with torch.no_grad():
            old = sequence_logps(model(tokens), tokens)
            with disabled_adapters(model):
                reference = sequence_logps(model(tokens), tokens)
        for _ in range(2):
            new = sequence_logps(model(tokens), tokens)
            ratio = (new - old).exp()
            kl = (reference - new).exp() - (reference - new) - 1
            clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            update(run, model, optimizer, (0.04 * kl - clipped).mean())


@program("gradients through the frozen model, adapters off, and through the adapters, in one loss")
def adapters_off_with_grad(run: Run) -> None:
    class Prompted(AdaptedWords):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.zeros(1, 3, SIZE))

        def forward(self, tokens: Tensor) -> Tensor:
            x = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.embed(tokens)], 1)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = run.shard(Prompted(), [AdaptedBlock])
    optimizer = adamw(trained(model))
    for step in range(3):
        tokens = pairs(run, step)
        loss = mean_square(model(tokens))
        with disabled_adapters(model):
            loss = loss + mean_square(model(tokens))
        update(run, model, optimizer, loss)


@program("adapters merged into the frozen weights for an evaluation, and taken out again")
def adapters_merged(run: Run) -> None:
    model, optimizer = adapted(run)
    layers = [module for module in run.module(model).modules() if isinstance(module, Lora)]
    for step in range(3):
        tokens = pairs(run, step)
        with torch.no_grad():
            kept = [layer.base.weight.detach().clone() for layer in layers]
            with run.unsharded(model):
                deltas = [layer.b.weight @ layer.a.weight for layer in layers]
            for layer, delta in zip(layers, deltas, strict=True):
                layer.base.weight.data += delta
                layer.disabled = True
            run.record(model(tokens))
            for layer, before in zip(layers, kept, strict=True):
                layer.base.weight.data.copy_(before)
                layer.disabled = False
        update(run, model, optimizer, mean_square(model(tokens)))


@program("two adapters trained in turn, the other one frozen and left out", unused=True)
def adapters_in_turn(run: Run) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Block().requires_grad_(False)
            self.adapters = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
            self.active = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.adapters[self.active](x)

        def activate(self, index: int) -> None:
            self.active = index
            for other, adapter in enumerate(self.adapters):
                adapter.requires_grad_(other == index)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Two() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = run.shard(Model(), [Two])
    optimizer = adamw(model.parameters(), weight_decay=0.1)
    for step, x in enumerate(run.batches(4)):
        for block in run.module(model).blocks:
            block.activate(step // 2)
        update(run, model, optimizer, mean_square(model(x)))


@program("DoRA: the norms of the adapted weight's rows, with the frozen weight read in forward")
def dora(run: Run) -> None:
    class Dora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(SIZE, SIZE).requires_grad_(False)
            self.a, self.b = nn.Linear(SIZE, 2, bias=False), nn.Linear(2, SIZE, bias=False)
            self.magnitude = nn.Parameter(self.base.weight.detach().norm(dim=1))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.base.weight + self.b.weight @ self.a.weight
            scale = self.magnitude / weight.norm(dim=1).detach()
            return F.linear(x, scale[:, None] * weight, self.base.bias)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Dora() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    model = run.shard(Model(), [Dora])
    optimizer = adamw(trained(model))
    for x in run.batches():
        update(run, model, optimizer, (model(x) - 1).square().mean())


@program("peft: DPO with disable_adapter between forward and backward", needs="peft")
def peft_dpo(run: Run) -> None:
    import peft

    from tests.distributed.programs.huggingface import decoder

    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = run.shard(peft.get_peft_model(decoder(), config))
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    for step in range(2):
        tokens = pairs(run, step) + 3
        policy = sequence_logps(model(input_ids=tokens).logits, tokens)
        with torch.no_grad(), run.module(model).disable_adapter():
            reference = sequence_logps(model(input_ids=tokens).logits, tokens)
        update(run, model, optimizer, dpo_loss(policy, reference))


@program("peft: two adapters, set_adapter between steps", needs="peft", unused=True)
def peft_set_adapter(run: Run) -> None:
    import peft

    from tests.distributed.programs.huggingface import decoder

    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    net = peft.get_peft_model(decoder(), config)
    net.add_adapter("second", config)
    for name, p in net.named_parameters():
        p.requires_grad_("lora" in name)
    model = run.shard(net)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    for step in range(4):
        run.module(model).set_adapter(("default", "second")[step // 2])
        tokens = run.tokens(VOCABULARY, 2, 6, key=step) + 3
        update(run, model, optimizer, model(input_ids=tokens, labels=tokens).loss)
