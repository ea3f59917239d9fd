"""Models for the pipeline's tests, and what they are compared with: a plain loop over the same microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NUM_LAYERS = 8
VOCABULARY = 11
LENGTH = 5


class Residual(nn.Module):
    """x + a convolution of x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Masked(nn.Module):
    """A nest of a tensor, a mask of whole numbers and a number goes in and out; the mask is passed on as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, nest: dict[str, Any]) -> dict[str, Any]:
        hidden = torch.tanh(self.linear(nest["hidden"])) * nest["mask"] * nest["factor"]
        return {**nest, "hidden": hidden, "factor": nest["factor"] + 1}


class Turned(nn.Module):
    """Its output is no contiguous tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).transpose(1, 2)


class Opened(nn.Module):
    """The end of such layers: a tuple, whose second part has no gradient."""

    def forward(self, nest: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return nest["hidden"] * nest["factor"], nest["hidden"].argmax(1)


class Rounded(nn.Module):
    """Gives bfloat16 in training and float32 otherwise; takes both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x.float()))
        return x.bfloat16() if self.training else x


class Precise(nn.Module):
    """Computes in float32 under autocast too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.linear(x.float()))


class TwoHeads(nn.Module):
    """A tuple of two outputs, from different parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.other(x)


class Lanes(nn.Module):
    """Two tensors go in and out, each through a layer of its own; the first one begins both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pair: Any) -> tuple[Tensor, Tensor]:
        main, other = pair if isinstance(pair, tuple) else (pair, pair)
        return torch.tanh(self.main(main)), torch.tanh(self.other(other))


class Centred(nn.Module):
    """Changes its input, as layers with `inplace=True` do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(1)


class Averaged(nn.Module):
    """Has a buffer that is a new tensor after each forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + x.detach().mean(0)
        return self.linear(x) - self.mean


class Failing(nn.Module):
    """Fails when told to."""

    is_failing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_failing:
            raise ValueError("this layer fails")
        return x


def transformer() -> list[nn.Module]:
    """Embedding first, head last."""
    encoders = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(NUM_LAYERS - 2)]
    return [nn.Embedding(VOCABULARY, 8), *encoders, nn.Linear(8, VOCABULARY)]


def cnn() -> list[nn.Module]:
    """Convolutions, layers without weights, statistics of the batch."""
    return [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        Residual(4),
        nn.MaxPool2d(2),
        Residual(4),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(16, VOCABULARY),
    ]


def mlp(*, norm: type[nn.Module] | None = nn.LayerNorm) -> list[nn.Module]:
    """Eight times the same."""
    return [nn.Sequential(nn.Linear(8, 8), *([norm(8)] if norm else []), nn.Tanh()) for _ in range(NUM_LAYERS)]


def dropout() -> list[nn.Module]:
    """A transformer and an mlp that drop out."""
    encoders = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True) for _ in range(3)]
    return [nn.Embedding(VOCABULARY, 8), *encoders, nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "transformer": transformer,
    "cnn": cnn,
    "mlp": mlp,
    "dropout": dropout,
    "nested": lambda: [*(Masked(8) for _ in range(NUM_LAYERS - 1)), Opened()],
    "noted": lambda: [*(Masked(8) for _ in range(NUM_LAYERS - 1)), Opened()],
    "rounded": lambda: [Rounded(8) for _ in range(NUM_LAYERS)],
    "precise": lambda: [Precise(8) for _ in range(NUM_LAYERS)],
    "turned": lambda: [Turned(8) for _ in range(NUM_LAYERS)],
    "channels last": lambda: [layer.to(memory_format=torch.channels_last) for layer in cnn()],
    "two heads": lambda: [*mlp()[1:], TwoHeads(8)],
    "two lanes": lambda: [Lanes(8) for _ in range(NUM_LAYERS)],
    "batch norm": lambda: mlp(norm=nn.BatchNorm1d),
    "averaged": lambda: [Averaged(8) for _ in range(NUM_LAYERS)],
    "in place": lambda: [layer for _ in range(NUM_LAYERS // 2) for layer in (nn.Linear(8, 8), nn.ReLU(inplace=True))],
    "changes its input": lambda: [Centred(), *mlp()[1:]],
}


def build(name: str) -> nn.Sequential:
    """The same weights in every process."""
    torch.manual_seed(5)
    return nn.Sequential(*MODELS[name]())


def batches(name: str, num_batches: int, num_samples: int) -> list[tuple[Any, Tensor]]:
    """Input and target, the same in every process."""
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=generator)

    def batch() -> tuple[Any, Tensor]:
        if name in ("transformer", "dropout"):
            target = tokens(num_samples, LENGTH) if name == "transformer" else numbers(num_samples, LENGTH, 8)
            return tokens(num_samples, LENGTH), target
        if name == "cnn":
            return numbers(num_samples, 3, 6, 6), tokens(num_samples)
        if name == "channels last":
            return numbers(num_samples, 3, 6, 6).to(memory_format=torch.channels_last), tokens(num_samples)
        if name == "turned":
            return numbers(num_samples, 8, 8), numbers(num_samples, 8, 8)
        if name == "nested":
            mask = torch.randint(0, 2, (num_samples, 1), generator=generator)
            return {"hidden": numbers(num_samples, 8), "mask": mask, "factor": 1}, numbers(num_samples, 8)
        return numbers(num_samples, 8), numbers(num_samples, 8)

    return [batch() for _ in range(num_batches)]


def loss_of(output: Any, target: Tensor) -> Tensor:
    """The mean over samples of what suits the target."""
    output = output[0] if isinstance(output, tuple) else output
    if target.dtype == torch.int64:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
    return nn.functional.mse_loss(output, target)


def part(value: Any, begin: int, end: int) -> Any:
    """Samples of a batch."""
    if isinstance(value, dict):
        return {key: part(one, begin, end) for key, one in value.items()}
    return value[begin:end] if isinstance(value, Tensor) else value


def parts(value: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """Microbatches of a batch."""
    begin = 0
    for size in sizes:
        yield part(value, begin, begin + size)
        begin += size


def sizes_of(num_samples: int, num_microbatches: int) -> list[int]:
    """Of microbatches, the larger ones first."""
    return [len(one) for one in torch.arange(num_samples).tensor_split(min(num_samples, num_microbatches))]


def plain_backward(
    model: nn.Module,
    x: Any,
    y: Tensor,
    num_microbatches: int,
    *,
    scale: float = 1.0,
    is_fused: bool = False,
    loss: Callable[[Any, Tensor], Tensor] = loss_of,
) -> float:
    """Forward and backward of a batch, microbatch after microbatch.

    Fused: the loss of each microbatch counts as its share of samples, and all gradients of a batch are added up before
    they are added to those of the batches before. Otherwise: the loss is that of the whole output.
    """
    sizes = sizes_of(len(y), num_microbatches)
    before = [one.grad for one in model.parameters()]
    if is_fused:
        for one in model.parameters():
            one.grad = None
        total = 0.0
        for x_part, y_part in zip(parts(x, sizes), parts(y, sizes), strict=True):
            value = loss(model(x_part), y_part) * (len(y_part) / len(y)) * scale
            value.backward()
            total += float(value.detach()) / scale
        for one, grad in zip(model.parameters(), before, strict=True):
            if grad is not None and one.grad is not None:
                one.grad = grad.add_(one.grad)
            elif grad is not None:
                one.grad = grad
        return total
    outputs = [model(x_part) for x_part in parts(x, sizes)]
    firsts = [output[0] if isinstance(output, tuple) else output for output in outputs]
    whole = torch.cat(firsts).detach().requires_grad_()
    value = loss(whole.clone(), y)  # which may be changed in place
    (value * scale).backward()
    for first, grad in zip(firsts, torch.split(whole.grad, sizes), strict=True):
        first.backward(grad)
    return float(value.detach())


@torch.no_grad()
def plain_forward(model: nn.Module, x: Any, num_samples: int, num_microbatches: int) -> Tensor:
    """The output, microbatch after microbatch."""
    outputs = [model(one) for one in parts(x, sizes_of(num_samples, num_microbatches))]
    return torch.cat([output[0] if isinstance(output, tuple) else output for output in outputs])
