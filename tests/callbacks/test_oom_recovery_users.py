"""What modules of real users do in a step, next to plain Lightning: teachers, counters, guards, odd optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_gpufeed import OOMRecovery, OOMRecoveryError
from tests.datamodules.models import make_trainer, same_bits
from tests.doubles import KeptList

ROUNDING = 1e-6
NUM_BATCHES, SIZE = 4, 8


class Base(pl.LightningModule):
    """A classifier that fails in some attempts of some batches, after its step has done what it does."""

    def __init__(self, failures: tuple[tuple[int, str, int], ...] = ()) -> None:
        """Note (batch, phase, how often)."""
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(6, 4)
            self.other = torch.nn.Linear(6, 4)
        self.left: list[tuple[int, str]] = KeptList(
            (batch, phase) for batch, phase, number in failures for _ in range(number)
        )

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        return F.cross_entropy(self.layer(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = (batch.x, batch.y) if hasattr(batch, "x") else batch
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        loss = self.loss_of(x, y)
        if (number, "forward") in self.left:
            self.left.remove((number, "forward"))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if (number, "backward") in self.left and loss is not None:
            self.left.remove((number, "backward"))
            loss.register_hook(run_out)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


def run_out(gradient: torch.Tensor) -> torch.Tensor:
    """A hook in backward."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


def loader(collate: Callable[[Any], Any] | None = None) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(NUM_BATCHES * SIZE, 6, generator=generator),
        torch.randint(0, 4, (NUM_BATCHES * SIZE,), generator=generator),
    )
    return DataLoader(data, batch_size=SIZE, collate_fn=collate)


def fit(model: Base, *callbacks: pl.Callback, collate: Any = None, **settings: Any) -> Base:
    torch.manual_seed(1)
    make_trainer(callbacks=list(callbacks), **{"max_epochs": 2, **settings}).fit(model, loader(collate))
    assert model.left == []
    return model


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


class Teacher(Base):
    """A teacher that follows at the head of the step."""

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.other.requires_grad_(False)
        with torch.no_grad():
            for own, followed in zip(self.other.parameters(), self.layer.parameters(), strict=True):
                own.mul_(0.5).add_(followed, alpha=0.5)
        return F.cross_entropy(self.layer(x), y) + F.mse_loss(self.layer(x), self.other(x))


class Counters(Base):
    """Plain counters, a list of outputs, metrics in a helper, a generator of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.total, self._correct, self.outputs = 0, 0, list[torch.Tensor]()
        self.helper = type("Helper", (), {})()
        self.helper.mean = MeanMetric()
        self.generator = torch.Generator().manual_seed(4)

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.layer(x)
        self.total += len(y)
        self._correct += int((scores.argmax(1) == y).sum())
        self.outputs.append(scores.detach())
        loss = F.cross_entropy(scores, y)
        self.helper.mean.update(loss.detach(), weight=len(y))
        return loss


class Noisy(Counters):
    """Augments with its own generator."""

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().loss_of(x + torch.randn(x.shape, generator=self.generator), y)


class Growing(Base):
    """Gets a layer in the middle of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and not hasattr(self, "extra"):
            self.extra = torch.nn.Linear(6, 4, bias=False)
            torch.nn.init.ones_(self.extra.weight)
            self.trainer.optimizers[0].add_param_group({"params": self.extra.parameters()})

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x) + (self.extra(x) if hasattr(self, "extra") else 0), y)


BOTH = [((1, "backward", 1), (3, "forward", 1)), ((2, "backward", 2), (7, "backward", 1))]


@pytest.mark.parametrize("kind", [Teacher, Counters, Noisy, Growing])
@pytest.mark.parametrize("failures", [BOTH[0], ((3, "backward", 1),)])
def test_done_again_whole_it_is_the_same_to_the_last_bit(kind, failures):
    plain, ours = fit(kind()), fit(kind(failures), OOMRecovery())
    assert same_bits(ours.state_dict(), plain.state_dict())
    if isinstance(plain, Counters):
        assert (ours.total, ours._correct) == (plain.total, plain._correct)
        assert same_bits(ours.outputs, plain.outputs)
        assert ours.helper.mean.compute() == plain.helper.mean.compute()


@pytest.mark.parametrize("kind", [Teacher, Counters])
def test_in_microbatches_it_is_the_same_up_to_rounding(kind):
    plain, ours = fit(kind()), fit(kind(BOTH[1]), OOMRecovery())
    assert distance(ours, plain) < ROUNDING
    if isinstance(plain, Counters):
        assert (ours.total, ours._correct) == (plain.total, plain._correct)
        assert torch.allclose(torch.cat(ours.outputs), torch.cat(plain.outputs), atol=ROUNDING)
        assert torch.allclose(ours.helper.mean.compute(), plain.helper.mean.compute())


class Graphs:
    """A batch of a class of its own, with a pointer to its parent."""

    def __init__(self, samples: Any) -> None:
        self.x = torch.stack([x for x, _ in samples])
        self.y = torch.stack([y for _, y in samples])
        self.parents = [self]

    def to(self, *args: Any, **kwargs: Any) -> Graphs:
        return self


class Edits(Base):
    """Normalises the batch, as code for graphs does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.x = batch.x * 2 + 1
        return super().training_step(batch, batch_idx)


def test_a_batch_object_that_the_step_edits_is_done_again_as_it_was():
    plain = fit(Edits(), collate=Graphs)
    ours = fit(Edits(((1, "backward", 1),)), OOMRecovery(), collate=Graphs)
    assert same_bits(ours.state_dict(), plain.state_dict())


class Clamped(Base):
    """Changes a trained weight in the step."""

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return super().loss_of(x, y)  # type: ignore[return-value]


def test_a_step_that_changes_trained_weights_is_not_done_again_and_the_weight_is_named(tmp_path):
    model = Clamped(((1, "backward", 1),))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(model, OOMRecovery(), default_root_dir=tmp_path)
    assert "the step itself changes weights (layer.weight)" in raised.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []  # nothing is saved that was not before the batch


@pytest.mark.parametrize("split_check", ["refuse", "warn"])
def test_a_step_that_changes_trained_weights_is_not_split_and_nothing_is_saved(tmp_path, split_check):
    recovery = OOMRecovery(num_microbatches=2, split_check=split_check)
    with pytest.raises(OOMRecoveryError, match=r"the step itself changes weights \(layer.weight\)"):
        fit(Clamped(), recovery, default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Guarded(Base):
    """Skips what is not finite."""

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        scores = self.layer(x)
        is_bad = self.trainer.fit_loop.epoch_loop.total_batch_idx == 2
        loss = F.cross_entropy(scores * torch.where(x[:, :1] > 1.0, torch.nan, 1.0) if is_bad else scores, y)
        return loss if torch.isfinite(loss) else None


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_a_batch_that_is_skipped_for_one_sample_is_skipped_in_microbatches_too():
    plain, ours = fit(Guarded()), fit(Guarded(), OOMRecovery(num_microbatches=4))
    assert distance(ours, plain) < ROUNDING


class Lookahead(torch.optim.Optimizer):
    """Written without the constructor of its base, as such wrappers often are."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class Wrapped(Base):
    """Trains with it."""

    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.SGD(self.layer.parameters(), lr=0.1))


def test_an_optimizer_that_cannot_be_watched_is_used_as_it_is():
    plain = fit(Wrapped())
    ours = fit(Wrapped(((1, "backward", 1),)), OOMRecovery())
    assert same_bits(ours.state_dict(), plain.state_dict())


def test_an_epoch_without_backward_is_left_alone():
    averaging = {"swa_lrs": 0.05, "swa_epoch_start": 1}
    model = Base()
    model.norm = torch.nn.BatchNorm1d(6)
    twin = Base()
    twin.norm = torch.nn.BatchNorm1d(6)
    for one in (model, twin):
        one.loss_of = lambda x, y, one=one: F.cross_entropy(one.layer(one.norm(x)), y)  # type: ignore[method-assign]
    plain = fit(twin, StochasticWeightAveraging(**averaging), max_epochs=3)
    ours = fit(model, StochasticWeightAveraging(**averaging), OOMRecovery(), max_epochs=3)
    assert same_bits(ours.state_dict(), plain.state_dict())


class Averaged(Base):
    """With statistics, which averaging weights computes anew in an epoch without backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = torch.nn.BatchNorm1d(6)

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(self.norm(x)), y)


def test_an_error_in_an_epoch_without_backward_comes_out_and_is_not_taken_for_one_of_an_earlier_batch():
    recovery = OOMRecovery()
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    with pytest.raises(torch.OutOfMemoryError):
        fit(Averaged(((4 * NUM_BATCHES - 1, "forward", 1),)), averaging, recovery, max_epochs=3)
    assert recovery.events == []


class Spectral(Base):
    """A layer whose buffers move in every pass, whatever the batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.layer = torch.nn.utils.parametrizations.spectral_norm(self.layer)


def test_buffers_that_move_in_every_pass_move_once_per_batch():
    plain, ours = fit(Spectral()), fit(Spectral(), OOMRecovery(num_microbatches=2))
    assert distance(ours, plain) < ROUNDING


def test_nothing_of_a_batch_is_held_after_its_step():
    held: list[bool] = []

    class Looking(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            recovery = trainer.callbacks[0]  # type: ignore[attr-defined]
            held.append(recovery._closure is None and recovery._work is None)

    fit(Base(), OOMRecovery(), Looking())
    assert held == [True] * (2 * NUM_BATCHES)


def test_a_callback_of_a_running_trainer_is_refused_by_another():
    recovery = OOMRecovery()

    class Nested(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            with pytest.raises(ValueError, match="serves another Trainer"):
                make_trainer(max_epochs=1, callbacks=[recovery]).fit(Base(), loader())

    fit(Base(((6, "backward", 1),)), recovery, Nested())
    assert len(recovery.events) == 1
