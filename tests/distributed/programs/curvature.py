"""Programs: curvature, privacy, influence, and training without a backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.distributed.programs.models import SIZE, Block, Net, adamw, mean_square, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def batch(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    return run.tensor(6, SIZE, key=step), run.tokens(SIZE, 6, key=step)


def mean_of_ranks(value: Tensor) -> Tensor:
    """The mean over the ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


class Shampoo(torch.optim.Optimizer):
    """Preconditions matrices from both sides by roots of sums of outer products."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                slope, state = param.grad, self.state[param]
                if slope.ndim < 2:
                    param.add_(slope, alpha=-group["lr"])
                    continue
                if not state:
                    state["left"] = 1e-1 * torch.eye(slope.shape[0])
                    state["right"] = 1e-1 * torch.eye(slope.shape[1])
                state["left"] += slope @ slope.t()
                state["right"] += slope.t() @ slope
                roots = []
                for side in ("left", "right"):
                    values, vectors = torch.linalg.eigh(state[side])
                    roots.append(vectors @ torch.diag(values**-0.25) @ vectors.t())
                param.add_(roots[0] @ slope @ roots[1], alpha=-group["lr"])


@program("Shampoo: roots of both sides' sums of outer products, which are the optimizer's state")
def shampoo(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = Shampoo(model.parameters(), lr=0.02)
    for step in range(3):
        x, truth = batch(run, step)
        update(run, model, optimizer, F.cross_entropy(model(x), truth))


@program("K-FAC: factors from hooks of inputs and gradients, summed over ranks, gradients replaced")
def kfac(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model, lr=0.02)
    layers = [m for m in run.module(model).modules() if isinstance(m, nn.Linear)]
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def seen(layer: nn.Module, args: tuple[Tensor]) -> None:
        x = F.pad(args[0].detach(), (0, 1), value=1.0)
        inputs[layer] = x.t() @ x / len(x)

    def pulled(layer: nn.Module, into: Any, grads: Any) -> None:
        outputs[layer] = grads[0].t() @ grads[0] * len(grads[0])

    for layer in layers:
        layer.register_forward_pre_hook(seen)
        layer.register_full_backward_hook(pulled)
    for step in range(3):
        x, truth = batch(run, step)
        loss = F.cross_entropy(model(x), truth)
        loss.backward()
        run.average(model)
        for layer in layers:
            sides = [mean_of_ranks(factor[layer]) for factor in (outputs, inputs)]
            sides = [side + 0.1 * torch.eye(len(side)) for side in sides]
            weight, bias = layer.weight, layer.bias
            slope = torch.cat([weight.grad, bias.grad[:, None]], 1)  # type: ignore[index, list-item]
            slope = torch.linalg.solve(sides[0], slope)
            slope = torch.linalg.solve(sides[1], slope, left=False)
            weight.grad.copy_(slope[:, :-1])  # type: ignore[union-attr]
            bias.grad.copy_(slope[:, -1])  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program(
    "TRPO: products with the Fisher matrix by double backward, conjugate gradients, a line search"
)
def trust_region(run: Run) -> None:
    policy = run.shard(Net(1), [Block])
    params = list(policy.parameters())
    for step in range(2):
        x, action = batch(run, step)
        gain = run.tensor(6, key=10 + step)
        with torch.no_grad():
            old = policy(x).log_softmax(-1)

        def surrogate(x: Tensor = x, action: Any = action, gain: Any = gain, old: Any = old) -> Any:
            new = policy(x).log_softmax(-1)
            ratio = (new - old).gather(1, action[:, None])[:, 0].exp()
            return -(ratio * gain).mean(), (old.exp() * (old - new)).sum(-1).mean()

        slope = flat_gradient(surrogate()[0], params)
        slope = mean_of_ranks(slope)

        def product(vector: Tensor, surrogate: Any = surrogate) -> Tensor:
            first = flat_gradient(surrogate()[1], params, create_graph=True)
            second = flat_gradient(first @ vector, params)
            return mean_of_ranks(second) + 0.1 * vector

        direction = conjugate(product, -slope)
        start = parameters_to_vector(params).detach().clone()
        before = mean_of_ranks(surrogate()[0])
        for size in (1.0, 0.5, 0.25):
            vector_to_parameters(start + 0.1 * size * direction, params)
            with torch.no_grad():
                loss, distance = (mean_of_ranks(value) for value in surrogate())
            if loss < before and distance < 0.01:
                break
        run.record(loss, distance, size)


def flat_gradient(value: Tensor, params: list[nn.Parameter], create_graph: bool = False) -> Tensor:
    """The gradient as one vector."""
    grads = torch.autograd.grad(value, params, create_graph=create_graph, retain_graph=True)
    return torch.cat([grad.flatten() for grad in grads])


def conjugate(product: Any, b: Tensor) -> Tensor:
    """Solves by a few conjugate gradients."""
    x, r, p = torch.zeros_like(b), b.clone(), b.clone()
    for _ in range(3):
        ap = product(p)
        alpha = r @ r / (p @ ap + 1e-8)
        x, after = x + alpha * p, r - alpha * ap
        p, r = after + (after @ after) / (r @ r) * p, after
    return x


@program(
    "Sophia: at times a backward of sampled labels, whose squared gradients scale and clip steps"
)
def sophia(run: Run) -> None:
    model = run.shard(Net(), [Block])
    params = list(model.parameters())
    first, curve = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for step in range(4):
        x, truth = batch(run, step)
        if step % 2 == 0:
            logits = model(x)
            sampled = torch.distributions.Categorical(logits=logits.detach()).sample()
            F.cross_entropy(logits, sampled).backward()
            run.average(model)
            for param, c in zip(params, curve, strict=True):
                assert param.grad is not None
                c.mul_(0.9).addcmul_(param.grad, param.grad, value=0.1 * 6)
            model.zero_grad()
        loss = F.cross_entropy(model(x), truth)
        loss.backward()
        run.average(model)
        with torch.no_grad():
            for param, m, c in zip(params, first, curve, strict=True):
                assert param.grad is not None
                m.lerp_(param.grad, 0.1)
                param.mul_(1 - 0.01)
                ratio = (m.abs() / (0.04 * c + 1e-4)).clamp(max=1)
                param.addcmul_(m.sign(), ratio, value=-0.01)
        model.zero_grad()
        run.record(loss)


@program("DP-SGD: gradients of each sample by hooks, clipped, summed over ranks, noise, assigned")
def private(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)))
    optimizer = sgd(model)
    inputs: dict[Any, Tensor] = {}
    by_sample: dict[nn.Parameter, Tensor] = {}

    def seen(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        inputs[layer] = args[0].detach()

    def pulled(layer: Any, into: Any, grads: Any) -> None:
        by_sample[layer.weight] = 6 * torch.einsum("no,ni->noi", grads[0], inputs[layer])
        by_sample[layer.bias] = 6 * grads[0]

    for layer in (run.module(model)[0], run.module(model)[2]):
        layer.register_forward_hook(seen)
        layer.register_full_backward_hook(pulled)
    for step in range(3):
        x, truth = batch(run, step)
        loss = F.cross_entropy(model(x), truth)
        loss.backward()
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in by_sample.values()]).norm(dim=0)
        factor = (0.5 / (norms + 1e-6)).clamp(max=1.0)
        for param, grads in by_sample.items():
            total = torch.einsum("n,n...", factor, grads)
            dist.all_reduce(total)
            total = total + 0.1 * torch.randn(param.shape)
            param.grad = total / (6 * run.world_size)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss, norms)


@program(
    "TracIn: products of a test sample's gradient with those of training samples, at checkpoints"
)
def influence(run: Run) -> None:
    model = run.shard(Net(1), [Block])
    optimizer = sgd(model)
    params = list(model.parameters())
    scores = torch.zeros(3)
    for step in range(3):
        x, truth = batch(run, step)
        update(run, model, optimizer, F.cross_entropy(model(x), truth))
        test = torch.autograd.grad(F.cross_entropy(model(x[:1]), truth[:1]), params)
        for sample in range(3):
            one = slice(sample + 1, sample + 2)
            grads = torch.autograd.grad(F.cross_entropy(model(x[one]), truth[one]), params)
            scores[sample] += sum((a * b).sum() for a, b in zip(test, grads, strict=True))
    run.record(scores)


@program(
    "MeZO: weights moved by noise of a seed, two forwards without gradient, a step along the noise"
)
def mezo(run: Run) -> None:
    model = run.shard(Net(), [Block]).eval()

    def moved(seed: int, scale: float) -> None:
        torch.manual_seed(seed)
        for param in model.parameters():
            z = torch.normal(0.0, 1.0, size=param.data.size())
            param.data = param.data + scale * z

    for step in range(3):
        x, truth = batch(run, step)
        losses = []
        for scale in (0.1, -0.2):
            moved(step, scale)
            with torch.inference_mode():
                losses.append(F.cross_entropy(model(x), truth))
        moved(step, 0.1)
        slope = mean_of_ranks((losses[0] - losses[1]) / 0.2)
        moved(step, -0.05 * float(slope))
        run.record(*losses, slope)


@program("evolution strategies: each rank tries its own noise, and p.grad is made of all returns")
def evolution(run: Run) -> None:
    net = Net(1)
    twin = copy.deepcopy(net).requires_grad_(False)
    model = run.shard(net, [Block])
    optimizer = adamw(model.parameters(), weight_decay=0.0)
    for step in range(3):
        state, values = run.full_state(model), torch.zeros(run.world_size)
        noise = [
            {
                name: torch.randn(
                    value.shape, generator=torch.Generator().manual_seed(10 * step + r)
                )
                for name, value in state.items()
            }
            for r in range(run.world_size)
        ]
        tried = {name: value + 0.1 * noise[run.rank][name] for name, value in state.items()}
        twin.load_state_dict(tried)
        values[run.rank] = -mean_square(twin(run.tensor(4, SIZE, key=step, shared=True)))
        dist.all_reduce(values)
        values = (values - values.mean()) / (values.std() + 1e-6)
        for name, param in run.module(model).named_parameters():
            param.grad = -sum(v * n[name] for v, n in zip(values, noise, strict=True)) / 0.2
        optimizer.step()
        optimizer.zero_grad()
        run.record(values)


@program("forward gradients: functional_call with dual parameters, a step along their direction")
def forward_gradients(run: Run) -> None:
    model = run.shard(Net(1), [Block])
    module = run.module(model)
    for step in range(3):
        x, truth = batch(run, step)
        state = run.full_state(model)
        tangents = {name: torch.randn_like(value) for name, value in state.items()}
        with torch.no_grad(), forward_ad.dual_level():
            dual = {n: forward_ad.make_dual(value, tangents[n]) for n, value in state.items()}
            loss = F.cross_entropy(functional_call(module, dual, (x,)), truth)
            value, along = forward_ad.unpack_dual(loss)
        slope = mean_of_ranks(along)
        with torch.no_grad():
            for name, param in module.named_parameters():
                param.sub_(tangents[name], alpha=0.01 * float(slope))
        run.record(value, slope)


@program("A-GEM: the gradient of new samples projected where it disagrees with that of a memory")
def episodic_memory(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        x, truth = batch(run, step)
        old = None
        if memory:
            old_x, old_truth = (torch.cat(part) for part in zip(*memory, strict=True))
            F.cross_entropy(model(old_x), old_truth).backward()
            run.average(model)
            old = torch.cat([p.grad.flatten() for p in model.parameters()])
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), truth)
        loss.backward()
        run.average(model)
        if old is not None:
            new = torch.cat([p.grad.flatten() for p in model.parameters()])
            dot = new @ old
            if dot < 0:
                new = new - dot / (old @ old) * old
                place = 0
                for param in model.parameters():
                    param.grad.copy_(new[place : place + param.numel()].view_as(param))
                    place += param.numel()
            run.record(dot)
        optimizer.step()
        optimizer.zero_grad()
        memory.append((x[:2], truth[:2]))
        run.record(loss)
