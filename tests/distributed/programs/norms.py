"""Programs: what training scripts log and check about parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import Block, Net, mean_square, train
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def log_parameters(run: Run, measure: Callable[[Any], Any]) -> None:
    """Trains, then records a number of each parameter."""
    model = run.shard(Net(), [Block])
    train(run, model)
    for p in model.parameters():
        run.record(measure(p))


def log_gradients(run: Run, measure: Callable[[Any], Any]) -> None:
    """One backward, then a number of each gradient."""
    model = run.shard(Net(), [Block])
    mean_square(model(run.tensor(4, 8))).backward()
    run.average(model)
    for p in model.parameters():
        run.record(measure(p.grad))


@program("p.norm() of each parameter logged")
def log_weight_norms(run: Run) -> None:
    log_parameters(run, lambda p: p.norm())


@program("p.norm().item() of each parameter logged")
def log_weight_norm_items(run: Run) -> None:
    log_parameters(run, lambda p: p.norm().item())


@program("p.detach().norm() and p.data.norm() logged")
def log_detached_norms(run: Run) -> None:
    log_parameters(run, lambda p: p.detach().norm() + p.data.norm())


@program("p.abs().mean() of each parameter logged")
def log_weight_means(run: Run) -> None:
    log_parameters(run, lambda p: p.abs().mean())


@program("p.min(), p.max() and p.std() of each parameter logged")
def log_weight_range(run: Run) -> None:
    log_parameters(run, lambda p: (p.max() - p.min()) / p.std())


@program("a histogram of each parameter")
def log_weight_histogram(run: Run) -> None:
    log_parameters(run, lambda p: torch.histc(p.detach(), 5, -1, 1))


@program("torch.isfinite(p).all() of each parameter")
def check_weights_finite(run: Run) -> None:
    log_parameters(run, lambda p: bool(torch.isfinite(p).all()))


@program("the fraction of weights that are positive")
def log_weight_sparsity(run: Run) -> None:
    log_parameters(run, lambda p: (p > 0).float().mean())


@program("the largest singular value of each matrix")
def log_singular_values(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    for block in run.module(model).blocks:
        run.record(torch.linalg.matrix_norm(block.up.weight.detach(), 2))


@program("w @ w.t() of a weight, between steps")
def log_gram(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    w = run.module(model).out.weight
    run.record((w @ w.t()).trace())


@program("cosine similarity of a weight with its value at the start")
def log_cosine_to_start(run: Run) -> None:
    model = run.shard(Net(), [Block])
    start = [p.detach().clone() for p in model.parameters()]
    train(run, model)
    for p, s in zip(model.parameters(), start, strict=True):
        run.record(F.cosine_similarity(p.detach().flatten(), s.flatten(), dim=0))


@program("parameters_to_vector, and its norm")
def vector_norm(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    run.record(nn.utils.parameters_to_vector(model.parameters()).norm())


@program("parameters_to_vector moved, and vector_to_parameters")
def vector_round_trip(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())
    train(run, model)


@program("torch.nn.utils.get_total_norm of the gradients")
def total_norm(run: Run) -> None:
    model = run.shard(Net(), [Block])
    mean_square(model(run.tensor(4, 8))).backward()
    run.average(model)
    run.record(nn.utils.get_total_norm([p.grad for p in model.parameters()]))


@program("torch.nn.utils.get_total_norm of the parameters")
def total_weight_norm(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    run.record(nn.utils.get_total_norm([p.detach() for p in model.parameters()]))


@program("p.grad.norm() of each gradient")
def log_grad_norms(run: Run) -> None:
    log_gradients(run, lambda g: g.norm())


@program("p.grad.data.norm(2).item() ** 2, summed by hand")
def log_grad_norm_by_hand(run: Run) -> None:
    model = run.shard(Net(), [Block])
    mean_square(model(run.tensor(4, 8))).backward()
    run.average(model)
    total = 0.0
    for p in model.parameters():
        total += p.grad.data.norm(2).item() ** 2
    run.record(total**0.5)


@program("p.grad.detach().norm() of each gradient")
def log_grad_detached_norms(run: Run) -> None:
    log_gradients(run, lambda g: g.detach().norm())


@program("p.grad.abs().mean() of each gradient")
def log_grad_means(run: Run) -> None:
    log_gradients(run, lambda g: g.abs().mean())


@program("p.grad.abs().max() of each gradient")
def log_grad_max(run: Run) -> None:
    log_gradients(run, lambda g: g.abs().max())


@program("(p.grad ** 2).sum() of each gradient")
def log_grad_square(run: Run) -> None:
    log_gradients(run, lambda g: (g**2).sum())


@program("g.flatten() @ g.flatten() of each gradient")
def log_grad_dot(run: Run) -> None:
    log_gradients(run, lambda g: g.flatten() @ g.flatten())


@program("torch.inner and torch.vdot of gradients")
def log_grad_inner(run: Run) -> None:
    log_gradients(run, lambda g: torch.inner(g.reshape(-1), g.reshape(-1)))


@program("torch.vdot of a gradient with itself")
def log_grad_vdot(run: Run) -> None:
    log_gradients(run, lambda g: torch.vdot(g.view(-1), g.view(-1)))


@program("einsum of a gradient with itself")
def log_grad_einsum(run: Run) -> None:
    log_gradients(run, lambda g: torch.einsum("i,i->", g.flatten(), g.flatten()))


@program("var_mean and std_mean of gradients")
def log_grad_var_mean(run: Run) -> None:
    log_gradients(run, lambda g: sum(torch.var_mean(g)) + sum(torch.std_mean(g)))


@program("mode, kthvalue and cumprod of gradients")
def log_grad_mode(run: Run) -> None:
    log_gradients(run, lambda g: g.flatten().kthvalue(2)[0] + g.flatten().mode()[0])


@program("the cumulative product of a gradient")
def log_grad_cumprod(run: Run) -> None:
    log_gradients(run, lambda g: (1 + g.flatten()).cumprod(0)[-1])


@program("F.normalize of gradients")
def log_grad_normalize(run: Run) -> None:
    log_gradients(run, lambda g: F.normalize(g.flatten(), dim=0).abs().max())


@program("cosine_similarity of a gradient and its sign")
def log_grad_cosine(run: Run) -> None:
    log_gradients(run, lambda g: F.cosine_similarity(g.flatten(), g.sign().flatten(), dim=0))


@program("mse_loss between a gradient and zeros")
def log_grad_mse(run: Run) -> None:
    log_gradients(run, lambda g: F.mse_loss(g, torch.zeros_like(g)))


@program("torch.dist of a gradient and its half")
def log_grad_dist(run: Run) -> None:
    log_gradients(run, lambda g: torch.dist(g, g / 2))


@program("g.view(1, -1).sum() of each gradient")
def log_grad_view_sum(run: Run) -> None:
    log_gradients(run, lambda g: g.view(1, -1).sum())


@program("g.sum().item(), and g.numel()")
def log_grad_item(run: Run) -> None:
    log_gradients(run, lambda g: g.sum().item() / g.numel())


@program("a list of all values: g.flatten().tolist()")
def log_grad_list(run: Run) -> None:
    log_gradients(run, lambda g: sum(g.flatten().tolist()))


@program("g.numpy() of each gradient")
def log_grad_numpy(run: Run) -> None:
    log_gradients(run, lambda g: float(g.detach().cpu().numpy().sum()))


@program("torch.cat of all gradients, and its norm")
def log_grad_cat(run: Run) -> None:
    model = run.shard(Net(), [Block])
    mean_square(model(run.tensor(4, 8))).backward()
    run.average(model)
    run.record(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


@program("torch.stack of the norms of gradients, and its norm")
def log_grad_stacked_norms(run: Run) -> None:
    model = run.shard(Net(), [Block])
    mean_square(model(run.tensor(4, 8))).backward()
    run.average(model)
    norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters()]
    run.record(torch.linalg.vector_norm(torch.stack(norms)))


@program("the ratio of update and weight: lr * g.norm() / p.norm()")
def log_update_ratio(run: Run) -> None:
    model = run.shard(Net(), [Block])
    mean_square(model(run.tensor(4, 8))).backward()
    run.average(model)
    for p in model.parameters():
        ratio: Tensor = 0.1 * p.grad.norm() / (p.norm() + 1e-3)
        run.record(ratio)


@program("the norm of the update, from copies before and after the step")
def log_update_norm(run: Run) -> None:
    model = run.shard(Net(), [Block])
    before = [p.detach().clone() for p in model.parameters()]
    train(run, model)
    for old, p in zip(before, model.parameters(), strict=True):
        run.record((p.detach() - old).norm())


@program("the angle between the gradients of two batches")
def log_grad_angle(run: Run) -> None:
    model = run.shard(Net(), [Block])
    grads: list[list[Any]] = []
    for x in run.batches(2):
        mean_square(model(x)).backward()
        run.average(model)
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    run.record(sum((a * b).sum() for a, b in zip(*grads, strict=True)))
