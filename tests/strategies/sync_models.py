"""Models to train on several ranks: one for each way in which a parameter can be used.

A `Net` wraps one body of `BODIES`. Its weights and its batches differ from rank to rank, so that a rank that misses
what the others say is found out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

NUM_WORDS = 11
TOTAL_STEPS = 80
"""Of the scheduler: more than any training here takes."""


def numbers(generator: torch.Generator, size: int) -> Any:
    """Rows of 8 numbers, and 4 to predict."""
    return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)


def images(generator: torch.Generator, size: int) -> Any:
    """Images, and 4 numbers to predict."""
    return torch.randn(size, 3, 6, 6, generator=generator), torch.randn(size, 4, generator=generator)


def words(generator: torch.Generator, size: int) -> Any:
    """Sentences of 5 words, and the words to predict."""
    return tuple(torch.randint(0, NUM_WORDS, (size, 5), generator=generator) for _ in range(2))


class Body(nn.Module):
    """What all bodies have; at first a network of three layers."""

    make_batch: Callable[[torch.Generator, int], Any] = staticmethod(numbers)

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.layers(x)

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error."""
        x, y = batch
        return (self(x).float() - y).square().mean()


class Reader(Body):
    """Predicts words."""

    make_batch = staticmethod(words)

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The cross-entropy."""
        x, y = batch
        return functional.cross_entropy(self(x).float().flatten(0, 1), y.flatten())


class Block(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, channels: int, out: int) -> None:
        """Layers."""
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.second, self.other = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.around = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Both ways."""
        return (self.other(self.second(self.norm(self.first(x)).relu())) + self.around(x)).relu()


class Residual(Body):
    """A small ResNet: buffers of batch norms, which all ranks take from rank 0."""

    make_batch = staticmethod(images)

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), Block(6, 6), Block(6, 8), nn.Flatten(), nn.Linear(128, 4)
        )


class ChannelsLast(Residual):
    """The same with weights in another layout."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.layers(x.to(memory_format=torch.channels_last))


class Frozen(Residual):
    """Some layers are not trained."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        for part in (self.layers[0], self.layers[3].first, self.layers[4].norm):
            part.requires_grad_(False)


class AttentionLayer(nn.Module):
    """A layer of a transformer. `out_proj` of its attention is used as a function, its module is never called."""

    def __init__(self, width: int) -> None:
        """Layers."""
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.other = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then feed."""
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.feed(self.other(x))


class Attention(Reader):
    """A transformer of two layers."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(NUM_WORDS, 12), AttentionLayer(12), AttentionLayer(12), nn.Linear(12, NUM_WORDS)
        )


class Tied(Reader):
    """The embedding's weight is that of the head too."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(NUM_WORDS, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, NUM_WORDS, bias=False)
        )
        self.layers[3].weight = self.layers[0].weight


class TiedFunction(Tied):
    """The head is no module."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers = self.layers[:3]

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return functional.linear(self.layers(x), self.layers[0].weight)


class Branches(Body):
    """Parts that are used on both ranks, on one, on none, and in other steps others."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.left, self.right, self.rare, self.never = (nn.Linear(24, 24) for _ in range(4))

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error, by other ways in other steps."""
        x, y = batch
        hidden = self.layers[:2](x)
        if (step + rank) % 2:
            hidden = hidden + self.left(hidden)
        if step % 3 == 1:
            hidden = hidden + self.right(hidden)
        if step == 4 and rank == 1:
            hidden = hidden + self.rare(hidden)
        return (self.layers[2:](hidden).float() - y).square().mean()


class OneSided(Body):
    """A layer that one rank leaves out once."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error."""
        x, y = batch
        return super().loss((x if (step, rank) == (2, 1) else self.extra(x), y), step, rank)


class Recomputed(Body):
    """Blocks whose activations are computed again in backward, with the same random numbers."""

    use_reentrant = False

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 16), nn.LayerNorm(16))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        x = self.stem(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class RecomputedReentrant(Recomputed):
    """In the old way: a backward within the backward."""

    use_reentrant = True


class Recurrent(Body):
    """An LSTM: its parameters are used in a list that its module keeps."""

    make_batch = staticmethod(images)

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers = nn.LSTM(18, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Read the rows of an image."""
        rows = x.transpose(1, 2).flatten(2)
        return self.head(self.layers(rows)[0][:, -1])


class Listed(Body):
    """Parameters in lists and dictionaries, used as functions, and read in a strange order."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 3) for _ in range(4))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(8)), "shift": nn.Parameter(torch.zeros(()))})
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        for weight in reversed(list(self.layers)):
            x = (x @ weight * self.named["scale"]).tanh() + self.named["shift"]
        return functional.linear(x, self.head.weight) + self.head.bias


class Penalty(Body):
    """The loss looks at each weight beside."""

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error, and the weights' squares."""
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().loss(batch, step, rank) + 1e-2 * penalty


class Repeated(Body):
    """One layer, used three times."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        x = self.stem(x)
        for _ in range(3):
            x = self.layers(x).tanh()
        return self.head(x)


class Deepening(Repeated):
    """In some steps the layer is used once, in others twice."""

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error."""
        x, y = batch
        x = self.stem(x)
        for _ in range(1 + (step in (2, 3))):
            x = self.layers(x).tanh()
        return (self.head(x).float() - y).square().mean()


class SometimesPenalty(Penalty):
    """The loss looks at each weight beside, but not always."""

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error, and in some steps the weights' squares."""
        return super().loss(batch, step, rank) if step in (2, 3) else Body.loss(self, batch, step, rank)


class GradientPenalty(Body):
    """The loss looks at a gradient, so backward goes through a backward."""

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error, and that of the gradient with regard to the input."""
        x, y = batch
        x = x.clone().requires_grad_()
        if not torch.is_grad_enabled():
            return super().loss(batch, step, rank)
        predicted = self(x)
        (gradient,) = torch.autograd.grad(predicted.sum(), x, create_graph=True)
        return (predicted.float() - y).square().mean() + 0.1 * gradient.square().sum(1).mean()


class Inner(Body):
    """A backward inside of a training step, whose gradients are read: a rank's own, and more often on one rank."""

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error at a point that was moved, times what gradients there were."""
        if not torch.is_grad_enabled():
            return super().loss(batch, step, rank)
        x, y = batch
        size = torch.zeros(())
        for _ in range(1 + (rank + step) % 2):
            x = x.detach().clone().requires_grad_()
            super().loss((x, y), step, rank).backward()
            assert x.grad is not None
            x = x + 0.01 * x.grad.sign()
            size = size + sum(one.grad.abs().sum() for one in self.parameters() if one.grad is not None)
            self.zero_grad()
        return super().loss((x.detach(), y), step, rank) * (1 + size.tanh().detach())


class Momentum(Body):
    """Beside it a slow copy, which follows at the begin of each step and gives a target."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.slow = copy.deepcopy(self.layers).requires_grad_(False)

    def loss(self, batch: Any, step: int, rank: int) -> Tensor:
        """The mean squared error."""
        x, y = batch
        with torch.no_grad():
            for slow, quick in zip(self.slow.parameters(), self.layers.parameters(), strict=True):
                slow.lerp_(quick, 0.3)
            target = self.slow(x).float() + y
        return (self(x).float() - target).square().mean()


class Functional(Body):
    """Its parameters are handed to it."""

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return torch.func.functional_call(self.layers, dict(self.layers.named_parameters()), (x,))


class Special(nn.Parameter):
    """A parameter of a class of its own."""


class Strange(Body):
    """A weight of a class of its own, one in other strides, and hooks of all kinds."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers[0].weight = Special(self.layers[0].weight.detach())
        self.layers[2].weight.data = self.layers[2].weight.data.t().contiguous().t()
        self.layers[4].weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        self.layers[4].register_full_backward_hook(lambda module, inputs, outputs: None)
        self.layers[2].register_forward_hook(lambda module, inputs, output: 1.5 * output)


class Strided(Body):
    """A parameter and a buffer with gaps in memory."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.wide = nn.Parameter(torch.randn(4, 16)[:, ::2])
        self.register_buffer("gaps", torch.randn(8, 2)[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.layers(x) + functional.linear(x * self.gaps, self.wide)


class Complex(Body):
    """A layer of complex numbers."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.turn = nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.layers(self.turn(x.to(torch.complex64)).abs())


class Parametrized(Body):
    """Weights that are computed from other ones."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        parametrizations.weight_norm(self.layers[0])
        parametrizations.spectral_norm(self.layers[2])


class Sparse(Reader):
    """An embedding with sparse gradients, one without."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.table, self.dense = nn.Embedding(NUM_WORDS, 8, sparse=True), nn.Embedding(NUM_WORDS, 8)
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, NUM_WORDS))

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.layers(self.table(x) + self.dense(x))


class TwoTypes(Body):
    """Layers of float64 and of float32; one module with both."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.layers[2].double()
        self.layers[4].bias.data = self.layers[4].bias.data.double()

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        hidden = self.layers[2:4](self.layers[:2](x).double()).float()
        return functional.linear(hidden, self.layers[4].weight).double() + self.layers[4].bias


class Empty(Body):
    """A parameter without elements, one without dimensions, and buffers of several types."""

    def __init__(self) -> None:
        """Layers."""
        super().__init__()
        self.nothing, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_odd", torch.zeros(2, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Predict, and count."""
        self.count += 1
        self.is_odd.logical_not_()
        return self.layers(x) * self.scale + self.nothing.sum()


BODIES: dict[str, type[Body]] = {
    "mlp": Body,
    "residual": Residual,
    "attention": Attention,
    "tied": Tied,
    "branches": Branches,
    "recomputed": Recomputed,
    "recomputed reentrant": RecomputedReentrant,
    "one-sided": OneSided,
    "tied function": TiedFunction,
    "recurrent": Recurrent,
    "listed": Listed,
    "penalty": Penalty,
    "repeated": Repeated,
    "deepening": Deepening,
    "sometimes penalty": SometimesPenalty,
    "gradient penalty": GradientPenalty,
    "inner": Inner,
    "momentum": Momentum,
    "functional": Functional,
    "strange": Strange,
    "strided": Strided,
    "complex": Complex,
    "parametrized": Parametrized,
    "sparse": Sparse,
    "two types": TwoTypes,
    "channels last": ChannelsLast,
    "frozen": Frozen,
    "empty": Empty,
}


class Batches:
    """Batches of one rank; a loader that knows no more than their number."""

    def __init__(self, body: str, num_batches: int, rank: int, seed: int = 0) -> None:
        """Make them; the last one is smaller."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        make = BODIES[body].make_batch
        self.batches = [make(generator, 3 if i == num_batches - 1 else 4) for i in range(num_batches)]

    def __len__(self) -> int:
        """How many."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """One after the other."""
        return iter(self.batches)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices shrink, vectors do not and learn faster: two groups of parameters."""
    parameters = list(module.parameters())
    return [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.05},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer by its name here, or by torch's."""
    if name == "sgd":
        return torch.optim.SGD(groups_of(module), lr=0.05, momentum=0.9, nesterov=True)
    if name == "foreach":
        return torch.optim.AdamW(groups_of(module), lr=0.01, foreach=True, amsgrad=True)
    if name == "fused":
        return torch.optim.AdamW(groups_of(module), lr=0.01, fused=True)
    if name == "sgd for sparse":
        return torch.optim.SGD(module.parameters(), lr=0.05)
    if name == "trainable":
        return torch.optim.SGD((one for one in module.parameters() if one.requires_grad), lr=0.05, momentum=0.9)
    if name == "LBFGS":
        return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.01)
    return optimizer


class Net(pl.LightningModule):
    """Trains a body.

    Args:
        body: A name in `BODIES`.
        optimizer: See `optimizer_of`.
        scheduler: "cycle" changes the rate and the momentum in each step, "plateau" looks at the loss; or none.
        rank: This one.
        has_own: A parameter of the module itself.
        seed: Of the weights.
    """

    logs = True

    def __init__(
        self,
        body: str = "mlp",
        *,
        optimizer: str = "sgd",
        scheduler: str | None = "cycle",
        rank: int = 0,
        has_own: bool = False,
        seed: int = 3,
    ) -> None:
        """Make weights: other ones on each rank."""
        super().__init__()
        torch.manual_seed(seed + rank)
        self.body = BODIES[body]()
        if has_own:
            self.own = nn.Parameter(torch.full((4,), 1.5))
        self.which, self.rank, self.has_own, self.scheduler = optimizer, rank, has_own, scheduler
        torch.manual_seed(seed + 10 * rank)  # for dropout

    def loss_of(self, batch: Any, step: int) -> Tensor:
        """Of a batch."""
        loss = self.body.loss(batch, step, self.rank)
        return loss * self.own.square().mean() if self.has_own else loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss, logged on each rank and over all; that takes as long as the rest, and not all have to."""
        loss = self.loss_of(batch, batch_idx)
        if self.logs:
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
            self.log("mean", loss, on_step=True, sync_dist=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The loss."""
        self.log("val", self.loss_of(batch, batch_idx), on_epoch=True, sync_dist=True, batch_size=4)

    def configure_optimizers(self) -> Any:
        """What was asked for."""
        optimizer = optimizer_of(self.which, self)
        if self.scheduler is None:
            return optimizer
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
            return [optimizer], [{"scheduler": plateau, "interval": "step", "monitor": "loss_step"}]
        rates = [0.05, 0.1] if len(optimizer.param_groups) == 2 else 0.05
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=rates,
            total_steps=TOTAL_STEPS,
            cycle_momentum=any(key in optimizer.defaults for key in ("momentum", "betas")),
        )
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class Quiet(Net):
    """Logs nothing, so that nothing is sent but gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return self.loss_of(batch, batch_idx)


class ReducedRate(Net):
    """Warms up by hand: the rate of a step is set after the step before it, as in Lightning's own example."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step, then raise the rate."""
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 5)


class ScaledGradients(Net):
    """Changes gradients before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Make them smaller, in place."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ClippedByHand(Net):
    """Has a way of its own to clip."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """By norm, to 0.2."""
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


class ClippedByTorch(Net):
    """Clips in a hook, with torch's function."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """By norm, to 0.2."""
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.2))


class Hooked(Net):
    """Hooks on the optimizer's step, which count and read."""

    def configure_optimizers(self) -> Any:
        """As before, with hooks."""
        self.sums: list[float] = []
        configured: Any = super().configure_optimizers()
        optimizer = configured[0][0]
        optimizer.register_step_pre_hook(lambda one, *_: self.sums.append(self.total_of(one)))
        optimizer.register_step_post_hook(lambda one, *_: self.sums.append(self.total_of(one)))
        return configured

    def total_of(self, optimizer: Any) -> float:
        """Of all weights."""
        return sum(float(one.detach().double().sum()) for group in optimizer.param_groups for one in group["params"])


class TensorRate(Net):
    """A learning rate that is a tensor: a scheduler changes it in place."""

    def configure_optimizers(self) -> Any:
        """Adam, with a rate that falls."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.02), foreach=False)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


class Rated(Net):
    """Has a rate that can be found."""

    def __init__(self, **options: Any) -> None:
        """Begin with a bad one."""
        super().__init__(**options)
        self.lr = 1e-5

    def configure_optimizers(self) -> Any:
        """With the rate."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class OwnBackward(Net):
    """Calls the loss's backward itself, and keeps the graph."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Of the loss."""
        loss.backward(retain_graph=True)


class Skipping(Net):
    """Leaves batches out, as on every rank."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Leave the rest of an epoch out."""
        return -1 if batch_idx == 3 else None


class Zeroing(Net):
    """Keeps gradients as zeros between steps, and looks at them."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Not None."""
        optimizer.zero_grad(set_to_none=False)


class Manual(Net):
    """Does the steps itself."""

    def __init__(self, *, calls_backward: bool = False, accumulates: bool = False, **options: Any) -> None:
        """Whether to call the loss's own backward, and whether to step every other time only."""
        super().__init__(**options)
        self.automatic_optimization = False
        self.calls_backward, self.accumulates = calls_backward, accumulates

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Forward, backward, step."""
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        if not self.accumulates or batch_idx % 2 == 0:
            optimizer.zero_grad()
        if self.calls_backward:
            loss.backward()
        else:
            self.manual_backward(loss)
        if not self.accumulates or batch_idx % 2 == 1:
            optimizer.step()
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        return loss


class Gan(pl.LightningModule):
    """Two networks with an optimizer each, in manual optimization.

    Args:
        rank: This one.
        toggles: Whether the other one's parameters are frozen meanwhile.
    """

    def __init__(self, *, rank: int = 0, toggles: bool = True) -> None:
        """Make weights: other ones on each rank."""
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3 + rank)
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        self.toggles = toggles

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """A step of each."""
        real, noise = batch
        makers, judges = self.optimizers()  # type: ignore[misc]
        target = torch.ones(len(real), 1)
        if self.toggles:
            self.toggle_optimizer(makers)
        loss = functional.binary_cross_entropy_with_logits(self.judge(self.maker(noise)), target)
        self.log("maker", loss, prog_bar=True)
        makers.zero_grad()
        self.manual_backward(loss)
        makers.step()
        if self.toggles:
            self.untoggle_optimizer(makers)
            self.toggle_optimizer(judges)
        loss = functional.binary_cross_entropy_with_logits(self.judge(real), target)
        made = self.judge(self.maker(noise).detach())
        loss = loss + functional.binary_cross_entropy_with_logits(made, 1 - target)
        self.log("judge", loss)
        judges.zero_grad()
        self.manual_backward(loss)
        judges.step()
        if self.toggles:
            self.untoggle_optimizer(judges)

    def configure_optimizers(self) -> Any:
        """Two."""
        return [torch.optim.Adam(part.parameters(), lr=0.01, betas=(0.5, 0.9)) for part in (self.maker, self.judge)]


MODULES: dict[str, type[pl.LightningModule]] = {
    one.__name__: one
    for one in (
        Net,
        Quiet,
        ReducedRate,
        ScaledGradients,
        ClippedByHand,
        ClippedByTorch,
        Hooked,
        TensorRate,
        Rated,
        OwnBackward,
        Skipping,
        Zeroing,
        Manual,
        Gan,
    )
}
