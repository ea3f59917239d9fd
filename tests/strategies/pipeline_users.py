"""What users of a pipeline write: LightningModules with one `nn.Sequential`, their data, and callbacks.

Weights differ from rank to rank, so that a rank that misses what the first one says is found out. Sizes of batches are
powers of two where results are compared to the last bit: then a mean over a microbatch is exactly scaled.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_gpufeed import BatchEcho, FeedMonitor, OOMRecovery

RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORDS, LENGTH, WIDTH = 11, 4, 8


# Layers --------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attends, and a way around it."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Both ways."""
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed, need_weights=False)[0]


class Feeding(nn.Module):
    """What follows on attention, and a way around it."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Both ways."""
        return x + self.second(functional.gelu(self.first(self.norm(x))))


class Convolution(nn.Module):
    """A convolution, and a way around it."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.inner, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Both ways."""
        return x + self.norm(self.inner(x)).relu()


def mlp() -> list[nn.Module]:
    """Eight layers, of which one on each of four ranks normalises: more tensors take longer to be sent."""
    norms = [nn.LayerNorm(WIDTH) if index % 2 else nn.Identity() for index in range(8)]
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh()) for norm in norms]


def normalised() -> list[nn.Module]:
    """Eight layers with statistics of batches."""
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(8)]


def dropping() -> list[nn.Module]:
    """Eight layers that draw random numbers."""
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(8)]


def transformer() -> list[nn.Module]:
    """Eight layers."""
    blocks = [kind() for _ in range(3) for kind in (Attention, Feeding)]
    return [nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)]


def tied() -> list[nn.Module]:
    """The embedding's weight is that of the head too."""
    layers = [nn.Embedding(WORDS, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, WORDS, False)]
    layers[-1].weight = layers[0].weight
    return layers


def cnn() -> list[nn.Module]:
    """Eight layers."""
    return [nn.Conv2d(3, 6, 3), *(Convolution() for _ in range(5)), nn.Flatten(), nn.Linear(96, WIDTH)]


BODIES: dict[str, Callable[[], list[nn.Module]]] = {
    one.__name__: one for one in (mlp, normalised, dropping, transformer, tied, cnn)
}


def dataset(body: str, num_samples: int, seed: int) -> TensorDataset:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    if body in ("transformer", "tied"):
        return TensorDataset(*(torch.randint(WORDS, (num_samples, LENGTH), generator=generator) for _ in range(2)))
    shape = (3, 6, 6) if body == "cnn" else (WIDTH,)
    return TensorDataset(
        torch.randn(num_samples, *shape, generator=generator), torch.randn(num_samples, WIDTH, generator=generator)
    )


class Endless(IterableDataset[Any]):
    """Samples without a length, other ones on each rank if asked for."""

    def __init__(self, body: str, num_samples: int, seed: int, *, differs: bool) -> None:
        """Note what to give."""
        self.samples = dataset(body, num_samples, seed + (RANK if differs else 0))

    def __iter__(self) -> Iterator[Any]:
        """One after the other."""
        return iter(self.samples[i] for i in range(len(self.samples)))


# Modules -------------------------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    """A body, trained and evaluated.

    Args:
        body: Name of its layers.
        optimizer: "sgd", "momentum", "adamw", "fused", "foreach", "lbfgs".
        scheduler: "step", "epoch", "plateau" or None.
        seed: Of the weights.
    """

    logs = True

    def __init__(
        self, body: str = "mlp", *, optimizer: str = "momentum", scheduler: str | None = None, seed: int = 3
    ) -> None:
        """Make weights: other ones on each rank."""
        super().__init__()
        torch.manual_seed(seed + RANK)
        self.kind, self.which, self.scheduler = body, optimizer, scheduler
        self.body = nn.Sequential(*BODIES[body]())
        self.seen: list[Any] = []
        torch.manual_seed(seed + 10 * RANK)

    def predict(self, x: Tensor) -> Tensor:
        """What comes out."""
        return self.body(x)

    def loss_of(self, batch: Any) -> Tensor:
        """The mean over samples of what is wrong."""
        x, y = batch
        out = self.predict(x)
        if self.kind in ("transformer", "tied"):
            return functional.cross_entropy(out.float().flatten(0, 1), y.flatten())
        return (out.float() - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss, logged on each rank and over all; that takes as long as the rest, and not all have to."""
        loss = self.loss_of(batch)
        if self.logs:
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The loss."""
        loss = self.loss_of(batch)
        self.log("val", loss, sync_dist=True)
        self.log("val_alone", loss)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """The loss."""
        self.log("test", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The output."""
        return self.predict(batch[0])

    def make_optimizer(self, parameters: Any) -> Any:
        """What was asked for."""
        if self.which == "adamw":
            return optim.AdamW(parameters, lr=1e-2)
        if self.which == "lbfgs":
            return optim.LBFGS(parameters)
        if self.which in ("fused", "foreach"):
            return optim.AdamW(parameters, lr=1e-2, **{self.which: True})
        if self.which == "sgd":
            return optim.SGD(parameters, lr=0.01)
        return optim.SGD(parameters, lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        """One optimizer, perhaps a scheduler."""
        optimizer = self.make_optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        if self.scheduler == "plateau":
            plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=1.0)
            return [optimizer], [{"scheduler": plateau, "interval": "epoch", "monitor": "val"}]
        falling = optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": falling, "interval": self.scheduler}]


class Around(Net):
    """Layers and parameters before and after the pipeline, in training_step."""

    def __init__(self, **options: Any) -> None:
        """One before, one after, and a parameter alone."""
        super().__init__(**options)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("num_steps", torch.zeros(()))

    def predict(self, x: Tensor) -> Tensor:
        """Through all."""
        return self.after(self.body(self.before(x)).tanh()) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss; batches are counted in a buffer."""
        self.num_steps += 1
        return super().training_step(batch, batch_idx)


class ListOfLayers(Net):
    """Its forward is its layers, which a method names; it has no Sequential for them."""

    def __init__(self, **options: Any) -> None:
        """Others have the layers."""
        super().__init__(**options)
        layers = nn.ModuleList(self.body)
        self.body = Chain(layers)

    def stages(self) -> list[nn.Module]:
        """In order."""
        return list(self.body.layers)


class Chain(nn.Module):
    """Has a method that returns its layers."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def in_order(self) -> list[nn.Module]:
        """All."""
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


class TwoSequentials(Net):
    """Has a second Sequential, which is no pipeline."""

    def __init__(self, **options: Any) -> None:
        """A head that could be taken for it."""
        super().__init__(**options)
        self.wrapped = nn.ModuleDict({"layers": self.body})
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        del self.body

    def predict(self, x: Tensor) -> Tensor:
        """Through both."""
        return self.head(self.wrapped["layers"](x))


class Counting(Net):
    """Counts in an attribute, a buffer and metrics what it is shown."""

    def __init__(self, **options: Any) -> None:
        """Nothing counted."""
        super().__init__(**options)
        self.num_samples, self.losses, self.sums = 0, [], {"y": 0.0}
        self.error, self.total = torchmetrics.MeanSquaredError(), torchmetrics.SumMetric()
        self.val_error = torchmetrics.MeanSquaredError()
        self.register_buffer("shown", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        x, y = batch
        out = self.predict(x)
        loss = (out - y).square().mean()
        self.num_samples += len(y)
        self.shown += len(y)
        self.losses.append(loss.detach())
        self.sums["y"] += float(y.sum())
        self.error(out.detach(), y)
        self.total(y.abs().sum())
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("samples", float(len(y)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("samples_alone", float(len(y)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log_dict({"largest": out.abs().max()}, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The loss."""
        self.val_error(self.predict(batch[0]), batch[1])
        self.log("val", self.val_error)
        self.log("val_samples", float(len(batch[1])), reduce_fx="sum", sync_dist=True)

    def on_train_end(self) -> None:
        """Write down what was counted."""
        self.seen.append((self.num_samples, self.losses, self.sums, float(self.shown)))


class Augmented(Net):
    """Draws noise for its input in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        x, y = batch
        loss = self.loss_of((x + 0.1 * torch.randn_like(x), y))
        self.log("loss", loss)
        return loss


class DrawnByOthers(Net):
    """Draws factors of its loss with numpy and with Python."""

    def __init__(self, **options: Any) -> None:
        """Seeds: other ones on each rank."""
        super().__init__(**options)
        np.random.seed(3 + RANK)
        random.seed(3 + RANK)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return super().training_step(batch, batch_idx) * (1 + float(np.random.rand()) + random.random())


class WholeBatch(Net):
    """A loss that is no mean over samples."""

    def loss_of(self, batch: Any) -> Tensor:
        """How far samples are from each other."""
        x, y = batch
        out = self.predict(x)
        return (out - y).square().mean() - 0.1 * (out @ out.t()).softmax(1).diagonal().log().mean()


class OneSided(Net):
    """A loss that is no mean over samples, in the second replica alone."""

    def loss_of(self, batch: Any) -> Tensor:
        """There it knows how far samples are from each other."""
        x, y = batch
        out = self.predict(x)
        return (out - y).square().mean() - (RANK // 2) * out.std(0).log().mean()


class Probe(Around):
    """Only what is outside of the layers is trained, before and after them, or after them alone."""

    def __init__(self, *, trains_before: bool = True, **options: Any) -> None:
        """Freeze."""
        super().__init__(**options)
        self.body.requires_grad_(False)
        self.before.requires_grad_(trains_before)


class FrozenHead(Around):
    """Freezes what comes after the layers while a step lasts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        self.after.requires_grad_(False)
        loss = super().training_step(batch, batch_idx)
        self.after.requires_grad_(True)
        return loss


class Dictionary(Net):
    """training_step returns a dict, with its output; hooks read it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss and more."""
        return {"loss": self.loss_of(batch), "number": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write down what came."""
        self.seen.append((outputs["loss"].clone(), outputs["number"]))


class Skipping(Net):
    """Leaves out the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss, or nothing."""
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Clipping(Net):
    """Clips in a way of its own."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """By norm, to 0.2."""
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


class ClippingByHand(Net):
    """Clips with torch's function, which knows of this rank's gradients only."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """By norm, to 0.2."""
        nn.utils.clip_grad_norm_(self.parameters(), 0.2)


class Groups(Net):
    """Parameters in two groups, one without decay; built from names, as most users do."""

    def configure_optimizers(self) -> Any:
        """AdamW."""
        named = list(self.named_parameters())
        return optim.AdamW(
            [
                {"params": [one for name, one in named if name.endswith("weight")], "weight_decay": 0.1},
                {"params": [one for name, one in named if not name.endswith("weight")], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )


class TwoOptimizers(Net):
    """By hand: one for each half of the layers."""

    def __init__(self, **options: Any) -> None:
        """Optimize by hand."""
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step both."""
        loss = self.loss_of(batch)
        self.log("loss", loss)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        """Two, with a scheduler each."""
        both = [self.make_optimizer(part.parameters()) for part in (self.body[:3], self.body[3:])]
        return both, [optim.lr_scheduler.ExponentialLR(one, 0.9) for one in both]


class Manual(Net):
    """By hand: two backwards before each step, for a batch and its first half."""

    num_backwards = 2

    def __init__(self, **options: Any) -> None:
        """Optimize by hand."""
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step."""
        optimizer = self.optimizers()
        for number in range(self.num_backwards):
            loss = self.loss_of([one[: -(-len(one) // (1 + number))] for one in batch])
            self.manual_backward(loss)
            self.log(f"loss_{number}", loss)
        optimizer.step()
        optimizer.zero_grad()


class Failing(Net):
    """Fails on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        if batch_idx == 1 and RANK == 1:
            raise RuntimeError("an ordinary error")
        return super().training_step(batch, batch_idx)


class Overflowing(Net):
    """A gradient of one layer is infinite in one step, on the rank that has it."""

    def on_fit_start(self) -> None:
        """Count calls of a hook on the last layer's weight."""
        calls: list[int] = []

        def hook(grad: Tensor) -> Tensor:
            calls.append(1)
            return grad * float("inf") if self.trainer.global_step == 1 and not self.trainer.num_skipped else grad

        self.trainer.num_skipped = 0
        self._hook = self.body[7][0].weight.register_hook(hook)

    def on_train_batch_end(self, *_: Any) -> None:
        """Write down the scale."""
        self.trainer.num_skipped += self.trainer.global_step == 2
        self.seen.append(self.trainer.precision_plugin.scaler.get_scale())


class Saved(Net):
    """Puts something of its own into checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A copy of weights from the file, and a number."""
        checkpoint["mine"] = {"sum": float(sum(one.double().sum() for one in checkpoint["state_dict"].values()))}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read it."""
        self.seen.append(checkpoint["mine"])


class TwoCalls(Net):
    """Two views of a batch, and a loss that joins them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        x, y = batch
        first, second = self.predict(x), self.predict(x.flip(1))
        return (first - y).square().mean() + (first - second).square().mean()


class WithInputGradient(Net):
    """Something trained before the layers, by hand, as adversarial noise is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss where it is worst."""
        x, y = batch
        noise = torch.zeros_like(x, requires_grad=True)
        (found,) = torch.autograd.grad((self.predict(x + noise) - y).square().mean(), noise)
        self.seen.append(found.clone())
        return (self.predict(x + 0.1 * found.sign()) - y).square().mean()


class Teacher(Net):
    """Its targets are what it says itself, without a gradient and in evaluation mode."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        x, y = batch
        self.eval()
        with torch.no_grad():
            target = self.predict(x.flip(0))
        self.train()
        return (self.predict(x) - y - 0.1 * target).square().mean()


class Gathering(Net):
    """Joins what all ranks say."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss; what came is written down."""
        loss = self.loss_of(batch)
        every = self.all_gather(loss.detach()).flatten()
        self.seen.append(every.clone())
        return loss * (1 + 0.1 * every.sum())


class Configured(Net):
    """Makes its layers when the strategy is there."""

    def __init__(self, **options: Any) -> None:
        """No layers yet."""
        super().__init__(**options)
        del self.body

    def configure_model(self) -> None:
        """Once."""
        if not hasattr(self, "body"):
            torch.manual_seed(3 + RANK)
            self.body = nn.Sequential(*BODIES[self.kind]())


class Ignoring(Net):
    """Some words count for nothing, so that the loss is the mean over other numbers of words."""

    def loss_of(self, batch: Any) -> Tensor:
        """The mean over words that count."""
        x, y = batch
        return functional.cross_entropy(self.predict(x).flatten(0, 1), y.flatten(), ignore_index=int(y[0, 0]))


class Named(Net):
    """A batch of many things: a dict with a list of names, with one value for all, with weights."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Make it."""
        if isinstance(batch, dict):
            return batch
        x, y = batch
        names = [f"sample {i}" for i in range(len(x))]
        return {"names": names, "scale": torch.arange(1.0, WIDTH + 1), "x": x, "y": y, "rate": 0.5, "none": None}

    def loss_of(self, batch: Any) -> Tensor:
        """Weighted."""
        out = self.predict(batch["x"])
        return ((out - batch["y"]) * batch["scale"] * batch["rate"]).square().mean()


class Toggling(TwoOptimizers):
    """By hand: one half of the layers after the other, each with the other frozen."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step both."""
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss_of(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class NormalisedHead(Around):
    """Statistics of batches after the pipeline, which sees whole ones."""

    def __init__(self, **options: Any) -> None:
        """Another head."""
        super().__init__(**options)
        self.before = nn.Identity()
        self.after = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))


class Rated(Net):
    """Has a rate that can be found."""

    lr = 1e-5

    def make_optimizer(self, parameters: Any) -> Any:
        """With it."""
        return optim.AdamW(parameters, lr=self.lr)


class Idle(Net):
    """Has a parameter that no loss uses, and weights that decay if they have a gradient; its ranks vote."""

    def __init__(self, **options: Any) -> None:
        """Not used."""
        super().__init__(**options)
        self.idle = nn.Parameter(torch.ones(WIDTH))

    def make_optimizer(self, parameters: Any) -> Any:
        """With decay."""
        return optim.SGD(parameters, lr=0.05, weight_decay=0.1)

    def on_train_start(self) -> None:
        """The last of four ranks says yes."""
        strategy = self.trainer.strategy
        self.seen += [strategy.reduce_boolean_decision(RANK == 3, all=is_all) for is_all in (True, False)]
        self.seen += [strategy.reduce_boolean_decision(True), strategy.reduce_boolean_decision(False, all=False)]


class AtOtherTimes(Net):
    """Uses the layers in hooks too."""

    def on_train_epoch_end(self) -> None:
        """Write down what comes out."""
        with torch.no_grad():
            self.seen.append(self.predict(torch.ones(5, WIDTH)).clone())

    def on_train_start(self) -> None:
        """The same, and how many steps are expected."""
        self.on_train_epoch_end()
        self.seen.append(float(self.trainer.estimated_stepping_batches))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Which parameters have gradients is no secret."""
        self.seen.append(len(list(self.parameters())))


MODULES: dict[str, type[Net]] = {
    one.__name__: one
    for one in (
        Net,
        Around,
        ListOfLayers,
        TwoSequentials,
        Counting,
        Augmented,
        DrawnByOthers,
        WholeBatch,
        OneSided,
        Probe,
        Dictionary,
        Skipping,
        Clipping,
        ClippingByHand,
        Groups,
        TwoOptimizers,
        Manual,
        Failing,
        Overflowing,
        Saved,
        TwoCalls,
        WithInputGradient,
        Teacher,
        Gathering,
        Configured,
        Ignoring,
        Named,
        Toggling,
        NormalisedHead,
        FrozenHead,
        Idle,
        AtOtherTimes,
        Rated,
    )
}


# Callbacks -----------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Writes down what is logged, and what the strategy has decided."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.rows: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.plan: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """After each batch."""
        self.rows.append({key: value.clone() for key, value in trainer.callback_metrics.items()})
        if outputs:
            self.losses.append(outputs["loss"].clone())
        session = getattr(trainer.strategy, "pipeline_session", None)
        if session is not None and session.plan is not None:
            plan = session.plan
            done = [action for actions in plan.schedule.ranks for action in actions if action.kind in "WB"]
            self.plan = {
                "text": str(plan),
                "names": [[session.layers.names[i] for i in stage] for stage in plan.stages],
                "orders": [
                    [action.microbatch for action in done if action.stage == stage] for stage in range(len(plan.stages))
                ],
                "why_split": session.runtime.why_split,
                "num_calls": session.runtime.num_calls,
                "peak": session.runtime.executor.peak_activations,
                "num_foreign": sum(one.is_meta for one in pl_module.parameters()),
            }


class WeightReader(Callback):
    """Reads the weights of all layers after a step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """All of them."""
        pl_module.seen.append(sum(float(one.detach().sum()) for one in pl_module.parameters()))


class Unfreeze(BaseFinetuning):
    """Some layers are trained from the second epoch on."""

    def __init__(self, first: int, last: int) -> None:
        """Which."""
        super().__init__()
        self.first, self.last = first, last

    def freeze_before_training(self, pl_module: Any) -> None:
        """At first not."""
        self.freeze(pl_module.body[self.first : self.last])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Now they are."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body[self.first : self.last], optimizer, lr=0.01)


class Death(Callback):
    """Ends a rank, or all.

    Args:
        hook: Where.
        way: "exit", as if it were killed; "error"; "interrupt".
        ranks: Which.
    """

    def __init__(self, hook: str, way: str, *ranks: int) -> None:
        """Wait for it."""
        self.way, self.ranks = way, ranks
        setattr(self, hook, self.end)

    def end(self, trainer: Any, *args: Any) -> None:
        """Now."""
        if RANK in self.ranks and trainer.global_step == 2 and not trainer.sanity_checking:
            if self.way == "exit":
                os._exit(3)
            raise KeyboardInterrupt if self.way == "interrupt" else RuntimeError("an ordinary error")


class Saver(Callback):
    """Saves by itself in each step, and where something is wrong."""

    def __init__(self, folder: Path) -> None:
        """Where to."""
        self.folder = folder

    def on_exception(self, trainer: Any, *args: Any) -> None:
        """As Lightning's OnExceptionCheckpoint."""
        trainer.save_checkpoint(self.folder / "exception.ckpt")


class Late(Callback):
    """One rank is slow, so that an order of messages that is not certain is felt."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Another one each time."""
        if (RANK + trainer.global_step) % 2:
            time.sleep(0.02)


def callbacks_of(names: list[Any], folder: Path) -> list[Callback]:
    """Made from what JSON can say: a name and arguments."""
    known: dict[str, Callable[..., Callback]] = {
        "ema": lambda: EMAWeightAveraging(decay=0.7),
        "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
        "rates": lambda: LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
        "early": lambda: EarlyStopping("val", patience=0, mode="max"),
        "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        "reader": WeightReader,
        "unfreeze": Unfreeze,
        "death": Death,
        "saver": lambda: Saver(folder),
        "late": Late,
        "echo": lambda: BatchEcho(echo_factor=2),
        "monitor": FeedMonitor,
        "recovery": OOMRecovery,
        "rate finder": lambda: LearningRateFinder(num_training_steps=6, early_stop_threshold=None),
        "checkpoint": lambda **options: ModelCheckpoint(dirpath=folder, save_top_k=-1, **options),
        "best": lambda: ModelCheckpoint(dirpath=folder, monitor="val", save_top_k=1, filename="best-{step}"),
    }
    return [known[name](*(() if options else arguments), **options) for name, arguments, options in map(_parts, names)]


def _parts(entry: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """A name, and its arguments in order or by name."""
    name, *arguments = entry
    return name, arguments, arguments[0] if arguments and isinstance(arguments[0], dict) else {}


def loader_of(body: str, sizes: tuple[int, int], seed: int, kind: str) -> DataLoader[Any]:
    """Batches.

    Args:
        body: For which layers.
        sizes: Of all, and of a batch.
        seed: Of the data.
        kind: "in order", "shuffled", "iterable", "iterable that differs", "workers", "every other": for two replicas.
    """
    num_samples, batch_size = sizes
    if kind == "every other":
        samples = dataset(body, num_samples, seed)
        return DataLoader(samples, batch_size, sampler=DistributedSampler(samples, 2, RANK // 2, shuffle=False))
    if kind.startswith("iterable"):
        return DataLoader(Endless(body, num_samples, seed, differs=kind.endswith("differs")), batch_size)
    return DataLoader(
        dataset(body, num_samples, seed), batch_size, shuffle=kind == "shuffled", num_workers=int(kind == "workers")
    )
