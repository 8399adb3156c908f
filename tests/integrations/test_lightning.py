"""Lightning's Trainer and Fabric over a sharded model do what they do over DDP."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.harness import run_ranks
from tests.integrations.lightning_training import MICRO_BATCHES, make_trainer, quiet_trainer

# Collecting the tests does not import it, which takes a second.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")

STEPS = 5


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def micro_batches() -> list[Tensor]:
    """Of both ranks; a sampler deals them out."""
    draw = torch.Generator().manual_seed(1)
    return list(torch.randn(2 * STEPS * MICRO_BATCHES, 4, 8, generator=draw))


def make_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build_net()
            self.scale = nn.Parameter(torch.ones(1))  # of the module itself
            self.losses: list[float] = []
            self.dtypes: set[torch.dtype] = set()  # of what layers compute
            self.net[1].register_forward_pre_hook(self.note)

        def note(self, layer: nn.Module, inputs: tuple[Tensor]) -> None:
            self.dtypes.add(inputs[0].dtype)

        def forward(self, batch: Tensor) -> Tensor:
            return self.net(batch) * self.scale

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("held_out", self(batch[0]).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)

    return Module()


def fit(folder: Path, strategy: Any, steps: int, resume: Path | None = None, **options: Any) -> Any:
    """The module and trainer after some steps; the checkpoint lies in ``folder``."""
    trainer = make_trainer(folder, strategy, steps, **options)
    module = make_module()
    loader = torch.utils.data.DataLoader(micro_batches())
    trainer.fit(module, loader, torch.utils.data.DataLoader(micro_batches()[:4]), ckpt_path=resume)
    return module, trainer


def train_in_halves(folder: Path, first: Any, second: Any) -> tuple[list[float], Any]:
    """Losses of all steps, the second strategy resumes; held-out ones; the last checkpoint."""
    held_out = torch.utils.data.DataLoader(micro_batches()[:4])
    module, trainer = fit(folder, first, 3)
    trainer.save_checkpoint(folder / "first.ckpt")
    (figures,) = trainer.validate(module, held_out, verbose=False)
    resumed, again = fit(folder, second, STEPS, folder / "first.ckpt")
    again.save_checkpoint(folder / "second.ckpt")
    assert len(module.losses) == 3 * MICRO_BATCHES
    held = [figures["held_out"], again.callback_metrics["held_out"].item()]
    return [*module.losses, *resumed.losses, *held], torch.load(folder / "second.ckpt")


def train_alike(directory: str) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from zerocore.integrations.lightning import ShardedStrategy

    folder = Path(directory)
    expected, files = train_in_halves(folder / "ddp", "ddp", "ddp")
    for stage, other_stage in ((0, 1), (3, 2)):
        strategies = ShardedStrategy(stage=stage), ShardedStrategy(stage=other_stage)
        found, saved = train_in_halves(folder / str(stage), *strategies)
        torch.testing.assert_close(found, expected)
        for key in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(saved[key], files[key])
    narrow, _ = fit(folder, ShardedStrategy(stage=3), STEPS, precision="bf16-mixed")
    assert narrow.dtypes == {torch.bfloat16}
    torch.testing.assert_close(narrow.losses[:6], expected[:6], rtol=0.05, atol=0.02)
    with pytest.raises(ValueError, match="'16-mixed' does not work sharded"):
        ShardedStrategy().precision_plugin = MixedPrecision("16-mixed", "cpu")


def test_a_trainer_does_what_it_does_over_ddp(tmp_path: Path) -> None:
    run_ranks(train_alike, 2, str(tmp_path), launch="torchrun", timeout=120)


def gan_loss(gan: Any, number: int, batch: Tensor) -> Tensor:
    """The generator's, or the critic's."""
    fake = gan.generator(batch)
    if number == 0:
        return nn.functional.softplus(-gan.critic(fake)).mean()
    wrong = nn.functional.softplus(gan.critic(fake.detach()))
    return (wrong + nn.functional.softplus(-gan.critic(batch))).mean()


def build_gan() -> Any:
    """A GAN that trains its critic twice and its generator once for a batch."""
    import lightning

    class Gan(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
            self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
            self.losses: list[float] = []

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.AdamW(self.generator.parameters(), lr=1e-2, eps=1e-5),
                torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.5),
            ]

        def training_step(self, batch: Tensor, index: int) -> None:
            optimizers: Any = self.optimizers()
            for number in (1, 1, 0):
                self.toggle_optimizer(optimizers[number])
                loss = gan_loss(self, number, batch[0])
                self.manual_backward(loss)
                self.clip_gradients(optimizers[number], gradient_clip_val=0.5)
                optimizers[number].step()
                optimizers[number].zero_grad()
                self.untoggle_optimizer(optimizers[number])
                self.losses.append(loss.item())
            with torch.no_grad():
                self.losses.append(gan_loss(self, 0, batch[0]).item())

    return Gan()


def plain_gan() -> tuple[list[list[float]], dict[str, Tensor]]:
    """One process that does both ranks' parts: losses of each, and the weights."""
    gan, losses = build_gan(), [[], []]  # type: ignore[var-annotated]
    optimizers = gan.configure_optimizers()
    pairs = list(zip(micro_batches()[::2], micro_batches()[1::2], strict=True))
    for pair in pairs[:STEPS]:
        for number in (1, 1, 0):
            both = [gan_loss(gan, number, batch) for batch in pair]
            (sum(both) / 2).backward()
            own = (gan.generator, gan.critic)[number]
            nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            optimizers[number].step()
            gan.zero_grad()
            for rank, loss in enumerate(both):
                losses[rank].append(loss.item())
        for rank, batch in enumerate(pair):
            losses[rank].append(gan_loss(gan, 0, batch).item())
    return losses, gan.state_dict()


def gans_alike(directory: str, strategies: tuple[Any, ...]) -> None:
    import zerocore
    from zerocore.integrations.lightning import ShardedStrategy

    losses, weights = plain_gan()
    rank = int(os.environ["RANK"])
    for each in strategies:
        strategy = ShardedStrategy(stage=each) if isinstance(each, int) else each
        trainer = quiet_trainer(
            directory,
            strategy,
            use_distributed_sampler=False,
            limit_train_batches=STEPS,
            max_epochs=1,
        )
        gan = build_gan()
        trainer.fit(gan, torch.utils.data.DataLoader(micro_batches()[rank::2]))
        is_ours = isinstance(each, int)
        found = zerocore.full_state_dict(gan, rank0_only=False) if is_ours else gan.state_dict()
        torch.testing.assert_close(gan.losses, losses[rank], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(found), dict(weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategies", [("ddp_find_unused_parameters_true", 0, 1), (2, 3)])
def test_manual_optimization_of_two_optimizers(tmp_path: Path, strategies: tuple[Any, ...]) -> None:
    run_ranks(gans_alike, 2, str(tmp_path), strategies, launch="torchrun", timeout=120)


def launch_fabric(strategy: Any) -> Any:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(build_net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5))
    return fabric, model, optimizer


def train_fabric(run: Any, first: int, last: int) -> list[float]:
    fabric, model, optimizer = run
    losses = []
    for step in range(first, last):
        for index in range(MICRO_BATCHES):
            number = MICRO_BATCHES * (2 * step + fabric.global_rank) + index
            with fabric.no_backward_sync(model, enabled=index < MICRO_BATCHES - 1):
                loss = model(micro_batches()[number]).square().mean() / MICRO_BATCHES
                fabric.backward(loss)
            losses.append(loss.item())
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def fabric_alike(directory: str) -> None:
    import lightning

    from zerocore.integrations.lightning import ShardedFabricStrategy

    expected = train_fabric(launch_fabric("ddp"), 0, STEPS)
    for stage, other_stage in ((0, 1), (3, 2)):
        run = launch_fabric(ShardedFabricStrategy(stage=stage))
        losses = train_fabric(run, 0, 3)
        path = os.path.join(directory, f"{stage}.ckpt")
        run[0].save(path, {"model": run[1], "optimizer": run[2]})
        losses += train_fabric(run, 3, STEPS)
        torch.testing.assert_close(losses, expected)
        resumed = launch_fabric(ShardedFabricStrategy(stage=other_stage))
        resumed[0].load(path, {"model": resumed[1], "optimizer": resumed[2]})
        torch.testing.assert_close(train_fabric(resumed, 3, STEPS), losses[3 * MICRO_BATCHES :])
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=ShardedFabricStrategy())
    fabric.launch()
    net = build_net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters()))
    assert zerocore.is_sharded(next(model.parameters()))
    assert optimizer.param_groups[0]["params"][0] is next(net.parameters())


@pytest.mark.nightly
def test_fabric_does_what_it_does_over_ddp(tmp_path: Path) -> None:
    run_ranks(fabric_alike, 2, str(tmp_path), launch="torchrun")
