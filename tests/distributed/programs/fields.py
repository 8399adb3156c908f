"""Programs: coordinates, equations and solvers, with derivatives of outputs by inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, Block, Net, adamw, sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Waves(nn.Module):
    """Sines of coordinates, layer by layer (SIREN)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(inputs, SIZE), nn.Linear(SIZE, 1)
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(3 * self.inp(x))
        for block in self.blocks:
            x = torch.sin(block(x))
        return self.out(x)


def slope(value: Tensor, at: Tensor) -> Tensor:
    """The derivative by each input."""
    return torch.autograd.grad(value.sum(), at, create_graph=True)[0]


@program("a PINN: Burgers' equation with second derivatives by inputs, AdamW first and LBFGS then")
def burgers(run: Run) -> None:
    model = run.shard(Waves(2), [nn.Linear])

    def residual(step: int) -> Tensor:
        points = run.tensor(6, 2, key=step).tanh().requires_grad_()
        u = model(points)
        first = slope(u, points)
        second = slope(first[:, 1], points)[:, 1]
        edge = run.tensor(4, 2, key=10 + step).tanh() * torch.tensor([0.0, 1.0])
        start = model(edge)[:, 0] + torch.sin(torch.pi * edge[:, 1])
        equation = first[:, 0] + u[:, 0] * first[:, 1] - 0.01 * second
        return equation.square().mean() + start.square().mean()

    optimizer = adamw(model.parameters())
    for step in range(2):
        update(run, model, optimizer, residual(step))
    solver = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2, history_size=3)

    def closure() -> Tensor:
        solver.zero_grad()
        loss = residual(2)
        loss.backward()
        run.average(model)
        run.record(loss)
        return loss

    for _ in range(2):
        solver.step(closure)


class Radiance(nn.Module):
    """Hash tables of several scales, a density and a colour, and a grid of what is occupied."""

    grid: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Parameter(1e-1 * torch.randn(2, 16, 4))
        self.density = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 1))
        self.colour = nn.Sequential(nn.Linear(SIZE + 1, SIZE), nn.ReLU(), nn.Linear(SIZE, 3))
        self.register_buffer("grid", torch.ones(8))

    def encoded(self, points: Tensor) -> Tensor:
        features = []
        for level, scale in enumerate((4, 8)):
            scaled = points.clamp(0, 1) * scale
            low = scaled.floor()
            first, second = ((low + corner).long() * 31 % 16 for corner in (0, 1))
            rows = self.tables[level][first], self.tables[level][second]
            features.append(torch.lerp(*rows, (scaled - low)[..., None]))
        return torch.cat(features, -1)

    def sigma(self, points: Tensor) -> Tensor:
        return F.softplus(self.density(self.encoded(points)))[..., 0]

    def forward(self, origins: Tensor, angles: Tensor) -> Tensor:
        depths = (torch.arange(6) + torch.rand(len(origins), 6)) / 6
        points = origins[:, None] + depths * angles[:, None]
        sigma = self.sigma(points) * self.grid[(points.clamp(0, 0.99) * 8).long()]
        alpha = 1 - (-sigma / 6).exp()
        passed = F.pad((1 - alpha + 1e-6).cumprod(-1)[:, :-1], (1, 0), value=1.0)
        sight = torch.cat([self.encoded(points), angles[:, None, None].expand(-1, 6, 1)], -1)
        return ((alpha * passed)[..., None] * self.colour(sight).sigmoid()).sum(1)

    @torch.no_grad()
    def update_grid(self) -> None:
        """A decaying maximum of the density in each cell."""
        self.grid = torch.maximum(0.9 * self.grid, self.sigma((torch.arange(8) + 0.5) / 8))


@program("a NeRF: hash tables, volumes rendered, a grid of occupied cells renewed by a method")
def radiance(run: Run) -> None:
    model = run.shard(Radiance(), [nn.Sequential])
    module = run.module(model)
    tables: dict[str, Any] = {"params": [module.tables], "lr": 0.05, "weight_decay": 0.0}
    nets = [*module.density.parameters(), *module.colour.parameters()]
    optimizer = torch.optim.Adam([tables, {"params": nets}], lr=5e-3, betas=(0.9, 0.99), eps=1e-5)
    for step in range(4):
        if step % 2 == 1:
            run.module(model).update_grid()
        colours = model(run.tensor(5, key=step).sigmoid(), run.tensor(5, key=10 + step).tanh())
        loss = F.huber_loss(colours, run.tensor(5, 3, key=20 + step).sigmoid())
        update(run, model, optimizer, loss)
        run.record(-10 * loss.detach().log10())


class Hamiltonian(nn.Module):
    """Motion from the derivatives of a learned energy; integrated by leapfrog."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Waves(2)

    def motion(self, state: Tensor) -> Tensor:
        with torch.enable_grad():
            state = state if state.requires_grad else state.requires_grad_()
            dq, dp = slope(self.energy(state), state).unbind(-1)
        return torch.stack([dp, -dq], -1)

    def forward(self, state: Tensor, steps: int) -> Tensor:
        path = [state]
        for _ in range(steps):
            middle = path[-1] + 0.05 * self.motion(path[-1])
            path.append(path[-1] + 0.1 * self.motion(middle))
        return torch.stack(path[1:], 1)


@program(
    "a Hamiltonian network: a path through gradients of an energy, rolled out under no_grad, too",
    unused=True,
)
def hamiltonian(run: Run) -> None:
    model = run.shard(Hamiltonian(), [nn.Linear])
    optimizer = adamw(model.parameters())
    for step in range(3):
        start = run.tensor(4, 2, key=step)
        path = model(start, 2)
        update(run, model, optimizer, F.mse_loss(path, start[:, None] * torch.ones(2, 1)))
        with torch.no_grad():
            run.record(model(run.tensor(2, 2, key=10 + step), 3))


class Adjoint(torch.autograd.Function):
    """Euler's method; its backward solves the adjoint equation and keeps no states."""

    @staticmethod
    def forward(ctx: Any, move: Any, y: Tensor, *params: Tensor) -> Tensor:
        ctx.move = move
        for step in range(3):
            y = y + move(torch.tensor(step / 3), y) / 3
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, *params = ctx.saved_tensors
        adjoint, sums = grads[0], [torch.zeros_like(p) for p in params]
        for step in reversed(range(3)):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                speed = ctx.move(torch.tensor(step / 3), y)
                by_y, *by_params = torch.autograd.grad(speed, (y, *params), adjoint)
            y = y - speed.detach() / 3
            adjoint = adjoint + by_y / 3
            sums = [total + grad / 3 for total, grad in zip(sums, by_params, strict=True)]
        return None, adjoint, *sums


class Speed(nn.Module):
    """How fast the state moves at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE + 1, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, time: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(F.pad(y, (0, 1), value=float(time)))))


class Flow(nn.Module):
    """Layers around the solution of an equation."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.speed, self.out = nn.Linear(SIZE, SIZE), Speed(), nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Adjoint.apply(self.speed, self.inp(x), *self.speed.parameters()))


@program(
    "a neural ODE: a Function whose backward calls the network again, with gradients of parameters"
)
def adjoint_equation(run: Run) -> None:
    model = run.shard(Flow())
    optimizer = adamw(model.parameters())
    for step in range(3):
        loss = F.cross_entropy(model(run.tensor(4, SIZE, key=step)), run.tokens(3, 4, key=step))
        update(run, model, optimizer, loss)


@program("the same, the network of the speed a unit of its own")
def adjoint_unit(run: Run) -> None:
    model = run.shard(Flow(), [Speed])
    optimizer = adamw(model.parameters())
    for step in range(3):
        loss = F.cross_entropy(model(run.tensor(4, SIZE, key=step)), run.tokens(3, 4, key=step))
        update(run, model, optimizer, loss)


def settled(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """A fixed point, or what is near."""
    for _ in range(4):
        z = function(z)
    return z


class Equilibrium(nn.Module):
    """The fixed point of a block; a hook in the backward solves for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.cell, self.out = nn.Linear(SIZE, SIZE), Cell(), nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        with torch.no_grad():
            z = settled(lambda z: self.cell(z, x), torch.zeros_like(x))
        z = self.cell(z, x)
        if self.training:
            z0 = z.clone().detach().requires_grad_()
            f0 = self.cell(z0, x)

            def solve(grad: Tensor) -> Tensor:
                def pulled(g: Tensor) -> Tensor:
                    return torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad

                return settled(pulled, grad)

            z.register_hook(solve)
        return self.out(z)


class Cell(nn.Module):
    """Contracts the state a little, and adds the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = Half(), Half(), nn.LayerNorm(SIZE)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(x + self.last(torch.relu(self.first(z)))))


class Half(nn.Linear):
    """A linear layer of small weights."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        nn.init.normal_(self.weight, std=0.05)


@program("a deep equilibrium: a fixed point under no_grad, and a hook that solves in the backward")
def equilibrium(run: Run) -> None:
    model = run.shard(Equilibrium(), [Cell])
    optimizer = adamw(model.parameters())
    for step in range(3):
        loss = F.cross_entropy(model(run.tensor(4, SIZE, key=step)), run.tokens(3, 4, key=step))
        update(run, model, optimizer, loss)
        model.eval()
        with torch.no_grad():
            run.record(model(run.tensor(2, SIZE, key=10 + step)))
        model.train()


class Coupled(nn.Module):
    """Two halves that are added to each other in turn, and can be taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        first = first + self.f(second)
        return torch.cat([first, second + self.g(first)], -1)

    def backward_pass(self, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The input and its gradient; adds to those of the parameters."""
        (y1, y2), (d1, d2) = y.chunk(2, -1), grad.chunk(2, -1)
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            g = self.g(y1)
            torch.autograd.backward(g, d2)
        assert y1.grad is not None
        x2, d1 = y2 - g.detach(), d1 + y1.grad
        with torch.enable_grad():
            x2 = x2.detach().requires_grad_()
            f = self.f(x2)
            torch.autograd.backward(f, d1)
        assert x2.grad is not None
        x1, d2 = y1.detach() - f.detach(), d2 + x2.grad
        return torch.cat([x1, x2.detach()], -1), torch.cat([d1, d2], -1)


class Reversed(torch.autograd.Function):
    """Blocks whose inputs the backward computes from their outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Any) -> Tensor:
        for block in blocks:
            x = block(x)
        ctx.y, ctx.blocks = x.detach(), blocks
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, grad = ctx.y, grads[0]
        for block in reversed(ctx.blocks):
            y, grad = block.backward_pass(y, grad)
        return grad, None


class Reversible(nn.Module):
    """A reversible network between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.blocks = nn.ModuleList(Coupled() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Reversed.apply(self.inp(x), self.blocks))


@program(
    "reversible blocks: a Function recomputes inputs from outputs, a backward within a backward"
)
def reversible(run: Run) -> None:
    model = run.shard(Reversible(), [Coupled])
    optimizer = sgd(model)
    for step in range(3):
        update(run, model, optimizer, model(run.tensor(4, SIZE, key=step)).square().mean())


class Hyper(nn.Module):
    """Makes the weights of a small network for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks, self.body = nn.Embedding(3, SIZE), Net(1)
        self.shapes = {"0.weight": (6, 2), "0.bias": (6,), "2.weight": (1, 6), "2.bias": (1,)}
        self.heads = nn.ModuleList(
            nn.Linear(SIZE, torch.Size(shape).numel()) for shape in self.shapes.values()
        )

    def forward(self, task: Tensor) -> dict[str, Tensor]:
        x = self.body(self.tasks(task))
        made = zip(self.shapes.items(), self.heads, strict=True)
        return {name: head(x).view(shape) for (name, shape), head in made}


@program("a hypernetwork: functional_call of a small network with weights that another one makes")
def hypernetwork(run: Run) -> None:
    model = run.shard(Hyper(), [Block])
    small = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).requires_grad_(False)
    optimizer = adamw(model.parameters())
    for step in range(3):
        x, task = run.tensor(6, 2, key=step), run.tokens(3, 1, key=step)[0]
        y = torch.func.functional_call(small, model(task), (x,))
        loss = F.mse_loss(y, x.prod(-1, keepdim=True) * task)
        update(run, model, optimizer, loss)
