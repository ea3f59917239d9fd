"""`ScaledRate` divides the rate of the very step, and leaves no trace of it anywhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed import BatchEcho
from lightning_gpufeed.callbacks.scaled_rate import ScaledRate
from tests.callbacks.echo_models import EchoModel, fit
from tests.datamodules.models import same_bits


def parameters(number: int = 2) -> list[torch.nn.Parameter]:
    """Some, with gradients."""
    made = [torch.nn.Parameter(torch.arange(3.0) + i) for i in range(number)]
    for parameter in made:
        parameter.grad = torch.ones(3)
    return made


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class Nested(torch.optim.SGD):
    """Steps by way of its parent, so that torch runs the hooks twice, one inside the other."""

    def step(self, closure: Any = None) -> Any:
        """Step."""
        return super().step(closure)


class ClosureFirst(torch.optim.SGD):
    """Runs the closure itself."""

    def step(self, closure: Any = None) -> Any:
        """Step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


KINDS = [torch.optim.SGD, torch.optim.AdamW, Nested, ClosureFirst]


@given(
    factors=st.lists(st.sampled_from([1.0, 0.5, 0.25, 0.1, 1 / 3]), min_size=1, max_size=6),
    lrs=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    has_closure=st.booleans(),
)
def test_every_step_is_one_at_the_scaled_rate_and_the_rates_are_whole_before_and_after(factors, lrs, kind, has_closure):
    mine, other = parameters(len(lrs)), parameters(len(lrs))
    optimizer = kind([{"params": [p], "lr": lr} for p, lr in zip(mine, lrs, strict=True)], lr=1.0)
    reference = kind([{"params": [p], "lr": lr} for p, lr in zip(other, lrs, strict=True)], lr=1.0)
    ScaledRate(optimizer, lambda: factor)
    for factor in factors:

        def closure() -> float:
            assert rates(optimizer) == lrs  # a training step sees its own rates
            return 1.0

        optimizer.step(closure) if has_closure else optimizer.step()
        assert rates(optimizer) == lrs
        for group, lr in zip(reference.param_groups, lrs, strict=True):
            group["lr"] = lr * factor
        reference.step()
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_that_is_set_while_the_training_step_runs_is_scaled_and_kept(kind):
    mine, other = parameters(1), parameters(1)
    optimizer, reference = kind(mine, lr=0.5), kind(other, lr=0.025)
    ScaledRate(optimizer, lambda: 0.25)

    def closure() -> float:
        optimizer.param_groups[0]["lr"] = 0.1
        return 1.0

    optimizer.step(closure)
    reference.step()
    assert torch.equal(mine[0], other[0])
    assert rates(optimizer) == [0.1]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    [parameter] = mine = parameters(1)
    lr = torch.tensor(0.5)
    optimizer = torch.optim.SGD(mine, lr=lr)
    ScaledRate(optimizer, lambda: 0.5)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5
    assert parameter.tolist() == [-0.25, 0.75, 1.75]


def test_a_step_that_raised_leaves_nothing_that_the_next_one_builds_on():
    optimizer = torch.optim.SGD(parameters(1), lr=0.5)
    ScaledRate(optimizer, lambda: 0.5)

    def closure() -> float:
        raise RuntimeError("on purpose")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="on purpose"):
            optimizer.step(closure)
    optimizer.step()
    assert rates(optimizer) == [0.5]


class Failing(torch.optim.SGD):
    """Raises when it is about to change the parameters."""

    def step(self, closure: Any = None) -> Any:
        """Raise."""
        assert rates(self) == [0.25]
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("kind", [torch.optim.SGD, Failing])
def test_removing_it_puts_the_rates_back_and_takes_its_hooks_away(kind):
    optimizer = kind(parameters(1), lr=0.5)
    hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    scaled = ScaledRate(optimizer, lambda: 0.5)

    def closure() -> float:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.step(closure)
    scaled.remove()
    assert rates(optimizer) == [0.5]
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == hooks


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_called_as_often_as_the_optimizer_calls_it_and_its_result_arrives(by_name):
    optimizer = torch.optim.LBFGS(parameters(1), lr=0.5, max_iter=4)
    ScaledRate(optimizer, lambda: 0.5)
    seen: list[list[float]] = []

    def closure() -> torch.Tensor:
        seen.append(rates(optimizer))
        [parameter] = optimizer.param_groups[0]["params"]
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss.item() == 5.0
    assert len(seen) > 1
    assert seen == [[0.5]] * len(seen)
    assert rates(optimizer) == [0.5]


def test_the_factor_is_asked_anew_for_each_step():
    factors = iter([0.5, 0.25])
    [parameter] = mine = parameters(1)
    optimizer = torch.optim.SGD(mine, lr=1.0)
    ScaledRate(optimizer, lambda: next(factors))
    optimizer.step()
    assert parameter.tolist() == [-0.5, 0.5, 1.5]
    optimizer.step()
    assert parameter.tolist() == [-0.75, 0.25, 1.25]


def test_schedules_compute_from_the_rates_they_know():
    def scheduled(is_scaled: bool) -> tuple[list[list[float]], Any]:
        optimizer = torch.optim.SGD(parameters(1), lr=0.1, momentum=0.9)
        if is_scaled:
            ScaledRate(optimizer, lambda: 0.2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
        exponential = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen = []
        for _ in range(7):
            optimizer.step()
            cosine.step()
            exponential.step()
            seen.append(rates(optimizer))
        return seen, [cosine.state_dict(), exponential.state_dict()]

    assert scheduled(True) == scheduled(False)


def test_the_rate_of_an_optimizer_that_reads_it_before_the_closure_is_scaled_too():
    class Second(EchoModel):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.lr = lr

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=self.lr, max_iter=3)

    scaled, trainer = fit(BatchEcho(4, scale_lr="inverse"), model=Second(0.4), max_epochs=1)
    reference, _ = fit(BatchEcho(4, scale_lr="keep"), model=Second(0.1), max_epochs=1)
    assert rates(trainer.optimizers[0]) == [0.4]
    assert same_bits(scaled.state_dict(), reference.state_dict())


@pytest.mark.parametrize(
    ("is_automatic", "given"),
    [(False, {}), (True, {}), (True, {"accumulate_grad_batches": 3}), (True, {"gradient_clip_val": 0.05})],
    ids=str,
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_in_a_trainer_it_is_a_training_at_the_divided_rate(is_automatic, precision, given):
    class Quarter(EchoModel):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.param_groups[0]["lr"] /= 4
            return optimizer

    scaled, _ = fit(
        BatchEcho(4, scale_lr="inverse"), model=EchoModel(is_automatic=is_automatic), precision=precision, **given
    )
    quarter, _ = fit(
        BatchEcho(4, scale_lr="keep"), model=Quarter(is_automatic=is_automatic), precision=precision, **given
    )
    assert scaled.rates == quarter.rates == [0.025] * len(scaled.rates)
    assert same_bits(scaled.state_dict(), quarter.state_dict())


def test_nobody_in_the_training_sees_a_scaled_rate_but_the_optimizer():
    seen: dict[str, set[float]] = {}

    class Looking(EchoModel):
        def look(self, where: str) -> None:
            seen.setdefault(where, set()).update(rates(self.trainer.optimizers[0]))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.look("start")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.look("step")
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.look("zero_grad")

        def on_after_backward(self) -> None:
            self.look("backward")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.look("end")

        def on_validation_start(self) -> None:
            self.look("validation")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.look("checkpoint")

    model, trainer = fit(BatchEcho(4, scale_lr="inverse"), model=Looking())
    checkpoint = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint())
    assert seen == {where: {0.1} for where in ("start", "step", "zero_grad", "backward", "end", "checkpoint")}
    assert [group["lr"] for state in checkpoint["optimizer_states"] for group in state["param_groups"]] == [0.1]
    assert set(model.rates) == {0.025}
