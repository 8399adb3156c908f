"""Programs: detection and segmentation, where each image has targets of its own number."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.programs.models import SIZE, adamw, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

IMAGE, KINDS, QUERIES = (3, 1, 8, 8), 2, 3


def boxes_of(run: Run, step: int) -> list[tuple[Tensor, Tensor]]:
    """Kinds and boxes of each image; some images have none."""
    counts = run.tokens(3, IMAGE[0], key=step).tolist()
    kinds, boxes = run.tokens(KINDS, 3, 2, key=step), run.tensor(3, 2, 4, key=50 + step).sigmoid()
    return [(kinds[i, :n], boxes[i, :n]) for i, n in enumerate(counts)]


def backbone() -> nn.Sequential:
    """Images to features of half the size."""
    return nn.Sequential(
        nn.Conv2d(1, SIZE, 3, padding=1), nn.ReLU(), nn.Conv2d(SIZE, SIZE, 4, 2, 1)
    )


class Detr(nn.Module):
    """Queries that ask an image, with an answer from each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.queries = backbone(), nn.Embedding(QUERIES, SIZE)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(SIZE, 2, 2 * SIZE, 0.0, batch_first=True) for _ in range(2)
        )
        self.kind, self.box = nn.Linear(SIZE, KINDS + 1), nn.Linear(SIZE, 4)

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        memory = self.backbone(images).flatten(2).transpose(1, 2)
        x = self.queries.weight.expand(len(images), -1, -1)
        answers = []
        for layer in self.layers:
            x = layer(x, memory)
            answers.append((self.kind(x), self.box(x).sigmoid()))
        return answers


@torch.no_grad()
def matched(kinds: Tensor, boxes: Tensor, wanted: tuple[Tensor, Tensor]) -> list[int]:
    """The query of each target in the cheapest assignment."""
    cost = torch.cdist(boxes, wanted[1], p=1) - kinds.softmax(-1)[:, wanted[0]]
    ways = permutations(range(QUERIES), len(wanted[0]))
    return list(min(ways, key=lambda way: sum(float(cost[q, i]) for i, q in enumerate(way))))


def set_loss(answers: list[tuple[Tensor, Tensor]], targets: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Kinds of all queries and boxes of matched ones, divided by the mean number on a rank."""
    count = torch.tensor(float(sum(len(kinds) for kinds, _ in targets)))
    dist.all_reduce(count)
    count = (count / dist.get_world_size()).clamp(min=1)
    total = torch.zeros(())
    for kinds, boxes in answers:
        for image, wanted in enumerate(targets):
            chosen = matched(kinds[image], boxes[image], wanted)
            truth = torch.full((QUERIES,), KINDS)
            truth[chosen] = wanted[0]
            total = total + 0.1 * F.cross_entropy(kinds[image], truth)
            total = total + (boxes[image, chosen] - wanted[1]).abs().sum() / count
    return total


@program(
    "DETR: targets matched by image and layer, boxes counted over the ranks, a slower backbone"
)
def detr(run: Run) -> None:
    model = run.shard(Detr(), [nn.TransformerDecoderLayer])
    named = list(model.named_parameters())
    slow, fast = ([p for n, p in named if ("backbone" in n) == flag] for flag in (True, False))
    optimizer = adamw([{"params": slow, "lr": 1e-3}, {"params": fast}], weight_decay=1e-4)
    for step in range(3):
        loss = set_loss(model(run.tensor(*IMAGE, key=step)), boxes_of(run, step))
        loss.backward()
        run.average(model)
        run.record(loss, nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()


class Pyramid(nn.Module):
    """Two levels of features, and heads that both share."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = backbone(), nn.Conv2d(SIZE, SIZE, 4, 2, 1)
        self.lateral = nn.ModuleList(nn.Conv2d(SIZE, SIZE, 1) for _ in range(2))
        self.kind = nn.Sequential(nn.Conv2d(SIZE, SIZE, 3, padding=1), nn.ReLU())
        self.kind.append(nn.Conv2d(SIZE, KINDS, 1))
        self.box = nn.Conv2d(SIZE, 4, 1)
        nn.init.constant_(self.kind[-1].bias, -2.0)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(images)
        top = self.lateral[1](self.coarse(fine))
        levels = [self.lateral[0](fine) + F.interpolate(top, scale_factor=2), top]
        kinds = torch.cat([self.kind(level).flatten(2) for level in levels], -1)
        return kinds, torch.cat([self.box(level).flatten(2) for level in levels], -1)


def focal_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross-entropy of each anchor, less of the easy ones."""
    loss = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    near = torch.where(truth > 0, logits.sigmoid(), 1 - logits.sigmoid())
    return ((1 - near) ** 2 * loss).sum()


@program("RetinaNet: a feature pyramid, shared heads, focal loss, a running mean of positives")
def retinanet(run: Run) -> None:
    model = run.shard(Pyramid(), [nn.Sequential])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    centres = torch.cat([torch.arange(16) / 16, torch.arange(4) / 4])
    positives = 4.0
    for step in range(3):
        kinds, boxes = model(run.tensor(*IMAGE, key=step))
        truth, near = torch.zeros_like(kinds), boxes.new_zeros(())
        for image, (wanted, corners) in enumerate(boxes_of(run, step)):
            anchors = (centres[None] - corners[:, :1]).abs() < 0.1
            which, where = anchors.nonzero(as_tuple=True)
            truth[image, wanted[which], where] = 1.0
            near = near + F.l1_loss(boxes[image][:, where].t(), corners[which], reduction="sum")
        positives = 0.9 * positives + 0.1 * max(1.0, float(truth.sum()))
        update(run, model, optimizer, (focal_loss(kinds, truth) + near) / positives)


class TwoStages(nn.Module):
    """Proposals, and heads that see the features of chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.score = backbone(), nn.Conv2d(SIZE, 1, 1)
        self.kind = nn.Linear(SIZE, KINDS)
        self.mask = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 4))

    def forward(self, images: Tensor, targets: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        features = self.backbone(images).flatten(2)
        scores = self.score(features.unflatten(-1, (4, 4))).flatten(1)
        truth = torch.zeros_like(scores)
        picked, kinds, masks = [], [], []
        for image, (wanted, boxes) in enumerate(targets):
            cells = (boxes[:, 0] * 4).long() * 4 + (boxes[:, 1] * 4).long()
            truth[image, cells] = 1.0
            picked.append(features[image][:, cells].t())
            kinds.append(wanted)
            masks.append(boxes)
        losses = {"objectness": F.binary_cross_entropy_with_logits(scores, truth)}
        chosen = torch.cat(picked)
        if len(chosen):
            losses["kind"] = F.cross_entropy(self.kind(chosen), torch.cat(kinds))
            losses["mask"] = F.mse_loss(self.mask(chosen), torch.cat(masks))
        return losses


@program("Mask R-CNN: losses in a dict, heads that a rank without boxes never calls", unused=True)
def mask_rcnn(run: Run) -> None:
    model = run.shard(TwoStages(), [nn.Sequential])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for step in range(4):
        targets = boxes_of(run, step)
        if step > 0 and run.rank == step % 2:
            targets = [(kinds[:0], boxes[:0]) for kinds, boxes in targets]
        losses = model(run.tensor(*IMAGE, key=step), targets)
        run.record(sorted(losses))
        update(run, model, optimizer, torch.stack(list(losses.values())).sum())


class Segmenter(nn.Module):
    """Classes of all pixels, and in training also from an earlier layer."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = backbone(), nn.Conv2d(SIZE, SIZE, 3, padding=2, dilation=2)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(SIZE, SIZE, 1))
        self.head, self.auxiliary = nn.Conv2d(SIZE, 3, 1), nn.Conv2d(SIZE, 3, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        early = self.early(images)
        late = torch.relu(self.late(early)) + self.pool(early)
        answer = {"out": F.interpolate(self.head(late), scale_factor=2, mode="bilinear")}
        if self.training:
            answer["aux"] = F.interpolate(self.auxiliary(early), scale_factor=2, mode="bilinear")
        return answer


@program("segmentation: hard pixels, Dice loss, an auxiliary head, a confusion matrix of all ranks")
def segmentation(run: Run) -> None:
    model = run.shard(Segmenter(), [nn.Sequential])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=4, power=0.9)
    for step in range(3):
        images, truth = run.tensor(*IMAGE, key=step), run.tokens(4, 3, 8, 8, key=step)
        truth[truth == 3] = 255
        answer = model(images)
        pixels = F.cross_entropy(answer["out"], truth, ignore_index=255, reduction="none")
        hard = pixels.flatten().topk(60)[0].mean()
        share, valid = answer["out"].softmax(1), (truth != 255)[:, None]
        which = F.one_hot(truth.clamp(max=2), 3).permute(0, 3, 1, 2) * valid
        dice = 1 - 2 * (share * which).sum((0, 2, 3)) / ((share * valid + which).sum((0, 2, 3)) + 1)
        auxiliary = F.cross_entropy(answer["aux"], truth, ignore_index=255)
        update(run, model, optimizer, hard + dice.mean() + 0.4 * auxiliary)
        schedule.step()
        model.eval()
        with torch.inference_mode():
            best = model(images)["out"].argmax(1)[truth != 255]
        confusion = torch.bincount(3 * truth[truth != 255] + best, minlength=9)
        dist.all_reduce(confusion)
        run.record(confusion.tolist())
        model.train()


@program(
    "YOLO: three groups, warm-up of rates and momentum, loss times ranks, a growing accumulation"
)
def yolo(run: Run) -> None:
    net: Any = nn.Sequential(
        nn.Conv2d(1, SIZE, 3, 2, 1, bias=False), nn.BatchNorm2d(SIZE), nn.SiLU()
    )
    net.append(nn.Conv2d(SIZE, 5, 1))
    model = run.shard(net)
    average = copy.deepcopy(run.module(model)).eval().requires_grad_(False)
    groups: list[list[nn.Parameter]] = [[], [], []]  # decayed weights, norms, biases
    for module in run.module(model).modules():
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            groups[2].append(module.bias)
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            groups[1 if isinstance(module, nn.BatchNorm2d) else 0].append(module.weight)
    optimizer = torch.optim.SGD(groups[2], lr=0.05, momentum=0.9, nesterov=True)
    optimizer.add_param_group({"params": groups[0], "weight_decay": 5e-3})
    optimizer.add_param_group({"params": groups[1]})
    last = -1
    for step in range(6):
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.05 * (1.0 if index == 0 else min(1.0, (step + 1) / 4))
            group["momentum"] = 0.5 + 0.4 * min(1.0, step / 4)
        answer = model(run.tensor(*IMAGE, key=step))
        loss = F.mse_loss(answer, run.tensor(3, 5, 4, 4, key=20 + step)) * run.world_size
        loss.backward()
        run.record(loss)
        if step - last >= min(3, 1 + step // 2):
            run.average(model)
            optimizer.step()
            optimizer.zero_grad()
            last = step
            with torch.no_grad():
                state = run.module(model).state_dict()
                for name, value in average.state_dict().items():
                    if value.dtype.is_floating_point:
                        value.mul_(0.9).add_(state[name].detach(), alpha=0.1)
    with torch.no_grad():
        run.record(average(run.tensor(*IMAGE, key=30)))
