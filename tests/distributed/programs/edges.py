"""Programs: backwards that begin or end at edges of the graph, and what `inputs` may be."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from tests.distributed.programs.models import Block, Net, mean_square, sgd, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


class Features(Net):
    """Also returns what comes out of its first block."""

    def forward(self, x: Tensor) -> Any:
        x = first = self.blocks[0](self.inp(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.out(self.norm(x)), first


@program("torch.autograd.grad of an edge: inputs=get_gradient_edge(features)")
def grad_of_edge(run: Run) -> None:
    model = run.shard(Features(3), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        output, features = model(x)
        loss, edge = mean_square(output), get_gradient_edge(features)
        for inputs in (edge, [edge], (edge, get_gradient_edge(output)), [features]):
            run.record(torch.autograd.grad(loss, inputs, retain_graph=True))
        run.record(torch.autograd.grad(loss, inputs=edge, retain_graph=True))
        update(run, model, optimizer, loss)


@program("a backward that begins at an edge of the output, with a gradient given")
def backward_from_edge(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        output = model(x)
        edge = get_gradient_edge(output)
        loss, slope = mean_square(output).detach(), output.detach() * 2 / output.numel()
        del output
        torch.autograd.backward(edge, slope)
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss)


@program("a backward whose inputs are an edge of the features, then one through the rest")
def backward_to_edge(run: Run) -> None:
    model = run.shard(Features(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        output, features = model(x)
        slope = torch.autograd.grad(mean_square(output), [get_gradient_edge(features)])[0]
        run.record(slope)
        loss = (features * slope.detach()).sum()
        loss.backward(inputs=list(run.module(model).inp.parameters()))
        run.average(run.module(model).inp)
        optimizer.step()
        optimizer.zero_grad()


@program("backward(inputs=...) of parameters in a tuple, a generator, a dict, and a single one")
def backward_inputs_forms(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net, optimizer = run.module(model), sgd(model)
    forms = (
        lambda: tuple(net.inp.parameters()),
        lambda: (p for p in net.blocks.parameters()),
        lambda: dict(net.out.named_parameters()),
        lambda: net.inp.weight,
    )
    for x, form in zip(run.batches(4), forms, strict=True):
        loss = mean_square(model(x))
        loss.backward(inputs=form())
        run.average(model)
        run.record(loss, *(p.grad is None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()


@program("torch.autograd.grad of parameters in all forms, averaged by hand, unused ones as zero")
def grad_inputs_forms(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net = run.module(model)
    unused = torch.zeros(3, requires_grad=True)
    train(run, model, steps=1)
    for x in run.batches():
        loss = mean_square(model(x))
        weight, bias = net.out.weight, net.out.bias
        found = [
            torch.autograd.grad(loss, weight, retain_graph=True)[0],
            *torch.autograd.grad(loss, (p for p in (weight, bias)), retain_graph=True),
            torch.autograd.grad(loss, {"w": weight, "b": bias}, retain_graph=True)["w"],
            torch.autograd.grad(loss, (weight, unused), retain_graph=True, allow_unused=True)[0],
            *torch.autograd.grad(loss, [bias, unused], retain_graph=True, materialize_grads=True),
        ]
        run.record(*found)
        for grad in found:
            dist.all_reduce(grad)
        run.record(*found)
        loss.backward()
        run.average(model)
        model.zero_grad()


@program("a Jacobian of the output by is_grads_batched, between steps")
def grads_batched(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = sgd(model)
    for x in run.batches():
        given = x.clone().requires_grad_()
        output = model(given)
        rows = torch.eye(8)[:, None, :].expand(8, 4, 8)
        run.record(torch.autograd.grad(output, given, rows, is_grads_batched=True)[0])
        update(run, model, optimizer, mean_square(model(x)))


@program("the edge of a parameter, and torch.autograd.grad with respect to it")
def edge_of_parameter(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net, optimizer = run.module(model), sgd(model)
    for x in run.batches():
        loss = mean_square(model(x))
        edge = get_gradient_edge(net.out.weight)
        run.record(torch.autograd.grad(loss, edge, retain_graph=True)[0])
        update(run, model, optimizer, loss)


@program("register_multi_grad_hook over the features, the output and a parameter")
def multi_grad_hook(run: Run) -> None:
    model = run.shard(Features(), [Block])
    net, optimizer = run.module(model), sgd(model)
    for x in run.batches():
        output, features = model(x)
        seen: list[Any] = []
        tensors = (features, output, net.out.weight)
        handle = register_multi_grad_hook(tensors, lambda grads, seen=seen: seen.extend(grads))
        update(run, model, optimizer, mean_square(output))
        handle.remove()
        run.record(*seen)
