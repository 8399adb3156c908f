"""Programs: diffusion models, what surrounds them, and what is distilled from them."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

IMAGE, CHANNELS, STEPS, CLASSES = (4, 1, 8, 8), 8, 10, 3
BETAS = torch.linspace(1e-3, 0.2, STEPS)
ALPHAS = (1 - BETAS).cumprod(0)


class Residual(nn.Module):
    """Two convolutions, shifted by an embedding of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, CHANNELS)
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.time = nn.Linear(CHANNELS, CHANNELS)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return x + self.second(F.silu(h))


class UNet(nn.Module):
    """A U-Net of one level; the class CLASSES stands for none, and hints are added to its input."""

    def __init__(self, inputs: int = 1) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.SiLU())
        self.label = nn.Embedding(CLASSES + 1, CHANNELS)
        self.inp = nn.Conv2d(inputs, CHANNELS, 3, padding=1)
        self.down, self.middle, self.up = Residual(), Residual(), Residual()
        self.narrow = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.out = nn.Conv2d(2 * CHANNELS, 1, 3, padding=1)

    def forward(
        self, x: Tensor, t: Tensor, label: Tensor | None = None, hints: Any = (0, 0)
    ) -> Tensor:
        time = self.time(sinusoids(t))
        time = time + self.label(torch.full_like(t, CLASSES) if label is None else label)
        skip = self.down(self.inp(x), time)
        h = self.middle(self.narrow(skip) + hints[1], time)
        h = self.up(F.interpolate(h, scale_factor=2), time)
        return self.out(torch.cat([h, skip + hints[0]], 1))


def sinusoids(t: Tensor) -> Tensor:
    """Sines and cosines of the time."""
    angles = t[:, None].float() * torch.logspace(0, -2, CHANNELS // 2)
    return torch.cat([angles.sin(), angles.cos()], -1)


def noised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A step of each sample, noise, and the sample with that noise."""
    t, noise = torch.randint(STEPS, (len(x),)), torch.randn_like(x)
    scale = ALPHAS[t].view(-1, 1, 1, 1)
    return t, noise, scale.sqrt() * x + (1 - scale).sqrt() * noise


@program("DDPM: a U-Net, clipping, and a warmed-up average of the weights that samples")
def ddpm(run: Run) -> None:
    model = run.shard(UNet(), [Residual])
    average = copy.deepcopy(run.module(model)).requires_grad_(False).eval()
    optimizer = adamw(model.parameters())
    for step in range(4):
        t, noise, x = noised(run.tensor(*IMAGE, key=step))
        loss = F.mse_loss(model(x, t), noise)
        loss.backward()
        run.average(model)
        run.record(loss, nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.99, (1 + step) / (10 + step))
        with torch.no_grad():
            for kept, param in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(decay).add_(param.detach(), alpha=1 - decay)
    with torch.no_grad():
        x = torch.randn(2, 1, 8, 8)
        for step in reversed(range(3)):
            noise = average(x, torch.full((2,), step))
            x = (x - BETAS[step] / (1 - ALPHAS[step]).sqrt() * noise) / (1 - BETAS[step]).sqrt()
    run.record(x)


@program("classifier-free guidance: labels dropped at random, both forwards of a sample in eval")
def guidance_free(run: Run) -> None:
    model = run.shard(UNet(), [Residual])
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for step in range(3):
        t, noise, x = noised(run.tensor(*IMAGE, key=step))
        label = run.tokens(CLASSES, 4, key=step)
        label = torch.where(torch.rand(4) < 0.3, CLASSES, label)
        update(run, model, optimizer, F.mse_loss(model(x, t, label), noise))
        schedule.step()
        model.eval()
        with torch.no_grad():
            t, label = torch.full((2,), STEPS - 1), torch.tensor([0, 2])
            x = torch.randn(2, 1, 8, 8)
            without, with_label = model(x, t), model(x, t, label)
            run.record(without + 3.0 * (with_label - without))
        model.train()


class Adaptive(nn.Module):
    """A block of a diffusion transformer: its norm is scaled and gated by the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(CHANNELS, 2, batch_first=True)
        self.modulation = nn.Linear(CHANNELS, 3 * CHANNELS)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, -1)
        h = self.norm(x) * (1 + scale) + shift
        return x + gate * self.attention(h, h, h, need_weights=False)[0]


class Transformer(nn.Module):
    """A diffusion transformer over patches, which may see its own estimate."""

    def __init__(self, inputs: int = 4) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(inputs, CHANNELS), nn.Linear(CHANNELS, 4)
        self.place = nn.Parameter(torch.randn(6, CHANNELS) * 0.1)
        self.blocks = nn.ModuleList(Adaptive() for _ in range(2))

    def forward(self, x: Tensor, t: Tensor, estimate: Tensor | None = None) -> Tensor:
        if estimate is not None:
            x = torch.cat([x, estimate], -1)
        x = self.inp(x) + self.place
        for block in self.blocks:
            x = block(x, sinusoids(10 * t))
        return self.out(x)


@program("flow matching: a diffusion transformer, logit-normal times, sampled by Heun's method")
def flow_matching(run: Run) -> None:
    model = run.shard(Transformer(), [Adaptive])
    optimizer = adamw(model.parameters(), weight_decay=0.0)
    for step in range(3):
        x, noise = run.tensor(4, 6, 4, key=step), torch.randn(4, 6, 4)
        t = torch.randn(4).sigmoid()
        path = (1 - t[:, None, None]) * noise + t[:, None, None] * x
        update(run, model, optimizer, F.mse_loss(model(path, t), x - noise))
    with torch.inference_mode():
        x = torch.randn(2, 6, 4)
        for step in range(2):
            now, then = torch.full((2,), step / 2), torch.full((2,), (step + 1) / 2)
            slope = model(x, now)
            x = x + 0.25 * (slope + model(x + 0.5 * slope, then))
    run.record(x)


@program("self-conditioning: in half of the steps a first forward without gradient is an input")
def self_conditioned(run: Run) -> None:
    model = run.shard(Transformer(8), [Adaptive])
    optimizer = adamw(model.parameters())
    for step in range(4):
        x = run.tensor(4, 6, 4, key=step)
        t, noise = torch.rand(4), torch.randn(4, 6, 4)
        path, estimate = x + t[:, None, None] * noise, torch.zeros_like(x)
        if random.random() < 0.5:
            with torch.no_grad():
                estimate = model(path, t, estimate)
        update(run, model, optimizer, F.mse_loss(model(path, t, estimate), x))


class Autoencoder(nn.Module):
    """Images to latents with a mean and a spread, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.SiLU(), nn.Conv2d(8, 4, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(2, 8, 4, 2, 1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).mean()
        return self.decoder(mean + (0.5 * spread).exp() * torch.randn_like(mean)), divergence


@program("VAE and GAN: the adversarial loss weighed by gradients of the decoder's last layer")
def vae_gan(run: Run) -> None:
    critic_net = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3)
    )
    model, critic = run.shard(Autoencoder()), run.shard(critic_net)
    last = run.module(model).decoder[-1].weight
    g_optimizer, d_optimizer = adamw(model.parameters()), adamw(critic.parameters())
    for step in range(3):
        x = run.tensor(*IMAGE, key=step)
        made, divergence = model(x)
        near, fooled = F.l1_loss(made, x), -critic(made).mean()
        near_slope = torch.autograd.grad(near, last, retain_graph=True)[0]
        fooled_slope = torch.autograd.grad(fooled, last, retain_graph=True)[0]
        weight = near_slope.norm() / (fooled_slope.norm() + 1e-4)
        weight = weight.clamp(0.0, 1e4).detach() * float(step > 0)
        run.record(weight)
        update(run, model, g_optimizer, near + 0.1 * divergence + weight * fooled)
        critic.zero_grad()
        true, false = critic(x), critic(made.detach())
        update(run, critic, d_optimizer, F.relu(1 - true).mean() + F.relu(1 + false).mean())


@program("textual inversion: one new word is trained, all other rows are put back after each step")
def textual_inversion(run: Run) -> None:
    words = run.shard(nn.Embedding(6, CHANNELS))
    unet = run.shard(UNet().requires_grad_(False), [Residual])
    run.module(unet).label = nn.Identity()
    table = run.module(words).weight
    before = table.data.clone()
    others = torch.ones(6, dtype=torch.bool)
    others[5] = False
    optimizer = adamw(words.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(3):
        t, noise, x = noised(run.tensor(*IMAGE, key=step))
        prompt = words(torch.tensor([[0, 5], [1, 5], [5, 2], [3, 5]])).mean(1)
        update(run, words, optimizer, F.mse_loss(unet(x, t, prompt), noise))
        with torch.no_grad():
            table[others] = before[others]
    run.record(words(torch.arange(6)).detach())


class Control(nn.Module):
    """The U-Net's first half with zero convolutions behind it."""

    def __init__(self, unet: UNet) -> None:
        super().__init__()
        self.time, self.down = copy.deepcopy(unet.time), copy.deepcopy(unet.down)
        self.inp, self.narrow = copy.deepcopy(unet.inp), copy.deepcopy(unet.narrow)
        self.zeros = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 1) for _ in range(2))
        for param in self.zeros.parameters():
            nn.init.zeros_(param)

    def forward(self, x: Tensor, hint: Tensor, t: Tensor) -> list[Tensor]:
        h = self.down(self.inp(x + hint), self.time(sinusoids(t)))
        return [self.zeros[0](h), self.zeros[1](self.narrow(h))]


@program("ControlNet: a copy of the encoder steers a frozen U-Net, micro-batches, min-SNR weights")
def control_net(run: Run) -> None:
    net = UNet()
    control = run.shard(Control(net), [Residual])
    unet = run.shard(net.requires_grad_(False), [Residual])
    optimizer = adamw(control.parameters())
    for step in range(3):
        for part in range(2):
            t, noise, x = noised(run.tensor(*IMAGE, key=2 * step + part))
            hint = run.tensor(*IMAGE, key=20 + 2 * step + part)
            with run.no_sync(control) if part == 0 else nullcontext():
                error = unet(x, t, hints=control(x, hint, t)) - noise
                weight = (ALPHAS[t] / (1 - ALPHAS[t])).clamp(max=5.0)
                loss = (weight * error.square().mean((1, 2, 3))).mean() / 2
                loss.backward()
            run.record(loss)
        run.average(control)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@program("consistency distillation: a frozen teacher's step, a target that follows the student")
def consistency(run: Run) -> None:
    net = Transformer()
    teacher = run.shard(copy.deepcopy(net).requires_grad_(False).eval(), [Adaptive])
    target = run.shard(copy.deepcopy(net).requires_grad_(False), [Adaptive])
    student = run.shard(net, [Adaptive])
    optimizer = torch.optim.RAdam(student.parameters(), lr=1e-2, eps=1e-5)
    for step in range(3):
        x, noise = run.tensor(4, 6, 4, key=step), torch.randn(4, 6, 4)
        now = torch.randint(1, STEPS, (4,)) / STEPS
        then = now - 1 / STEPS
        path = x + now[:, None, None] * noise
        with torch.no_grad():
            earlier = path - (path - teacher(path, now)) / now[:, None, None] / STEPS
            aim = target(earlier, then)
        loss = ((student(path, now) - aim).square() + 0.01).sqrt().mean() - 0.1
        update(run, student, optimizer, loss)
        with torch.no_grad():
            for kept, param in zip(target.parameters(), student.parameters(), strict=True):
                kept.lerp_(param.detach(), 0.2)


@program("distribution matching: a generator of one step, a score of its samples, a frozen one")
def distribution_matching(run: Run) -> None:
    net = Transformer()
    real = run.shard(copy.deepcopy(net).requires_grad_(False).eval(), [Adaptive])
    fake, generator = run.shard(copy.deepcopy(net), [Adaptive]), run.shard(net, [Adaptive])
    g_optimizer, f_optimizer = adamw(generator.parameters()), adamw(fake.parameters())
    for step in range(4):
        made = generator(run.tensor(4, 6, 4, key=step), torch.ones(4))
        t = torch.rand(4)
        path = made + t[:, None, None] * torch.randn(4, 6, 4)
        if step % 2 == 1:
            with torch.no_grad():
                slope = fake(path, t) - real(path, t)
                slope = slope / (made - real(path, t)).abs().mean((1, 2), keepdim=True)
            loss = 0.5 * F.mse_loss(made, (made - slope).detach())
            update(run, generator, g_optimizer, loss)
        update(run, fake, f_optimizer, F.mse_loss(fake(path.detach(), t), made.detach()))
