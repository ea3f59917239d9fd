"""A loss that does not follow from those of its parts is found out before a batch is split, and nothing else is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpufeed.errors import OOMRecoveryError
from lightning_gpufeed.recover.plan import RetryPlan
from lightning_gpufeed.recover.split_batch import BatchSplitter
from lightning_gpufeed.recover.split_check import Finding, check_split
from tests.recover.hand_loop import (
    CPU,
    Faults,
    HandLogs,
    HandLoop,
    Net,
    Step,
    cross_entropy_step,
    device_error,
    make_batches,
)


def check(
    module: nn.Module,
    step: Step = cross_entropy_step,
    batch: Any = None,
    *,
    num_microbatches: int = 2,
    weight_fn: Callable[[Any], Any] | None = None,
    is_half: bool = False,
    **options: Any,
) -> tuple[Finding, HandLoop]:
    splitter = BatchSplitter(weight_fn=weight_fn)
    loop = HandLoop(module, step, splitter=splitter, **options)
    batch = make_batches(1)[0] if batch is None else batch
    work = loop.work()
    work.save()
    return check_split(work, splitter.split(batch, num_microbatches), splitter, CPU, is_half=is_half), loop


def is_fine(finding: Finding) -> bool:
    return (finding.mismatch, finding.unknown) == (None, None)


# Losses that are means over samples -----------------------------------------------------------------------------


def mse_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(module(x)[:, 0], y.float())


def regularised_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    """A penalty on weights does not depend on the batch, and counts once."""
    return cross_entropy_step(module, batch, logs) + 0.1 * sum(p.square().sum() for p in module.parameters())


def two_losses_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    return cross_entropy_step(module, batch, logs) + 3 * mse_step(module, batch, logs)


def nothing_step(module: nn.Module, batch: Any, logs: HandLogs) -> None:
    """Skips the batch, as a step of Lightning may."""


MEANS = {
    "cross entropy": cross_entropy_step,
    "squared error": mse_step,
    "with a penalty": regularised_step,
    "two losses": two_losses_step,
    "no loss": nothing_step,
}


@pytest.mark.parametrize("num_samples", [8, 13, 16])
@pytest.mark.parametrize("name", MEANS)
def test_means_over_samples_pass(name, num_samples):
    finding, _ = check(Net(), MEANS[name], make_batches(1, num_samples)[0])
    assert is_fine(finding)


# Losses that are not ---------------------------------------------------------------------------------------------


def info_nce_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    """Every sample is compared with every other."""
    x, _ = batch
    one, other = F.normalize(module(x)), F.normalize(module(x + 0.1))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))


def batch_norm_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    """Standardises by statistics of the batch, by hand."""
    x, y = batch
    out = module(x)
    return F.cross_entropy((out - out.mean(0)) / (out.std(0) + 1e-3), y)


def sum_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(module(x), y, reduction="sum")


def root_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    return mse_step(module, batch, logs).sqrt()


def hardest_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(module(x), y, reduction="none").topk(2).values.mean()


WHOLES = [info_nce_step, batch_norm_step, sum_step, hardest_step]


@pytest.mark.parametrize(
    ("step", "is_half"),
    [(root_step, False), *[(step, is_half) for step in WHOLES for is_half in (False, True)]],
    ids=lambda value: getattr(value, "__name__", "half" if value else "full"),
)
def test_losses_that_need_the_whole_batch_or_are_sums_are_found_out(step, is_half):
    finding, _ = check(Net(), step, is_half=is_half)
    assert finding.mismatch is not None
    assert "the loss of a batch does not follow from the losses of its parts" in finding.mismatch


def test_a_sum_over_samples_passes_when_it_is_said_to_be_one_and_a_mean_does_not():
    assert is_fine(check(Net(), sum_step, loss_reduction="sum")[0])
    assert check(Net(), cross_entropy_step, loss_reduction="sum")[0].mismatch is not None


def token_batch(seed: int = 3) -> dict[str, torch.Tensor]:
    """Sentences of very different length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 8, 9, 1, 2, 1, 1, 9, 3, 9, 1, 1, 9, 9, 2, 1])
    mask = torch.arange(9) < lengths[:, None]
    return {"x": torch.randn(16, 9, 6, generator=generator), "y": torch.where(mask, 1, -100), "mask": mask}


def token_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    """A mean over the tokens that are there."""
    return F.cross_entropy(module(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100)


def count_tokens(batch: Any) -> torch.Tensor:
    count: torch.Tensor = batch["mask"].sum()
    return count


@pytest.mark.parametrize("is_half", [False, True])
def test_a_mean_over_tokens_is_found_out_and_cured_by_weighing_with_their_number(is_half):
    assert check(Net(), token_step, token_batch(), is_half=is_half)[0].mismatch is not None
    assert is_fine(check(Net(), token_step, token_batch(), weight_fn=count_tokens, is_half=is_half)[0])
    wrong = check(Net(), token_step, token_batch(), weight_fn=lambda batch: batch["mask"].sum() ** 2)[0]
    assert wrong.mismatch is not None


# No false alarms -------------------------------------------------------------------------------------------------


def functional_dropout_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(module(F.dropout(x, 0.3, training=module.training)), y)


class Attending(nn.Module):
    """Attention inside of each sample, with dropout on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.view(len(x), 4, 2))
        return out.flatten(1)


class Recurrent(nn.Module):
    """Drops out inside of a layer that is not called so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.GRU(2, 5, 2, batch_first=True, dropout=0.5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.layers(x.view(len(x), 3, 2))[0][:, -1])
        return out


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(between=nn.Dropout(0.5)),
        lambda: Net(between=nn.AlphaDropout(0.5)),
        lambda: Net(between=nn.BatchNorm1d(8)),
        lambda: Net(between=nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2), nn.RReLU())),
        lambda: Net(between=nn.LayerNorm(8)),
        lambda: Net(between=nn.BatchNorm1d(8, track_running_stats=False)),
        lambda: Net(between=nn.BatchNorm1d(8).eval()),
        lambda: Net(between=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
        lambda: Net(between=Attending()),
        Recurrent,
    ],
    ids=[
        *("dropout", "alpha dropout", "batch norm", "batch norm, dropout, random relu", "layer norm"),
        *("batch norm without statistics", "frozen batch norm", "spectral norm", "transformer", "recurrent"),
    ],
)
def test_layers_that_are_random_or_look_at_the_batch_by_nature_raise_no_alarm(make):
    finding, _ = check(make())
    if finding.unknown is None:
        assert is_fine(finding)
    else:  # evaluation would not run: that is no reason to refuse
        assert finding.mismatch is None


@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.BatchNorm1d(8)], ids=["dropout", "batch norm"])
def test_a_loss_that_compares_samples_is_found_out_behind_such_layers_too(between):
    assert check(Net(between=between), info_nce_step)[0].mismatch is not None


def test_dropout_by_a_function_that_asks_the_module_raises_no_alarm_and_hides_nothing():
    assert is_fine(check(Net(), functional_dropout_step)[0])

    def both(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        return functional_dropout_step(module, batch, logs) + info_nce_step(module, batch, logs)

    assert check(Net(), both)[0].mismatch is not None


OWN = torch.Generator()


@pytest.mark.parametrize(
    "noise",
    [
        torch.randn_like,
        lambda x: torch.from_numpy(np.random.randn(*x.shape)).float(),
        lambda x: x * random.random(),
        lambda x: torch.randn(x.shape, generator=OWN),
        lambda x: F.dropout(x, 0.5),
    ],
    ids=["torch", "numpy", "random", "a generator of its own", "dropout that is always on"],
)
def test_a_step_that_is_random_by_itself_cannot_be_judged(noise):
    OWN.manual_seed(0)

    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(module(x + noise(x)), y)

    finding, loop = check(Net(), step)
    assert finding.mismatch is None
    assert finding.unknown is not None
    assert "random" in finding.unknown
    assert loop.rules == {}


def test_a_step_with_a_memory_of_its_own_cannot_be_judged():
    seen: list[int] = []

    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        seen.append(1)
        return cross_entropy_step(module, batch, logs) * len(seen)

    finding, _ = check(Net(), step)
    assert finding.mismatch is None
    assert finding.unknown is not None


@pytest.mark.parametrize("error", [ValueError, RuntimeError, NotImplementedError, KeyError, ZeroDivisionError])
def test_a_step_that_does_not_run_in_evaluation_or_on_few_samples_cannot_be_judged(error):
    def training_only(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        if not module.training:
            raise error("RNN backward can only be called in training mode")
        return functional_dropout_step(module, batch, logs)

    def many_only(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        if len(batch[0]) < 8:
            raise error("too few")
        return cross_entropy_step(module, batch, logs)

    for step in (training_only, many_only):
        finding, _ = check(Net(), step)
        assert finding.mismatch is None
        assert error.__name__ in str(finding.unknown)


def test_memory_that_runs_out_in_the_comparison_is_no_verdict():
    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        raise device_error()

    with pytest.raises(torch.OutOfMemoryError):
        check(Net(), step)


@pytest.mark.parametrize(("num_samples", "num_microbatches"), [(4, 4), (5, 5), (1, 1)])
def test_a_single_sample_has_no_parts_to_compare(num_samples, num_microbatches):
    finding, _ = check(Net(), batch=make_batches(1, num_samples)[0], num_microbatches=num_microbatches)
    assert finding.unknown == "a microbatch is one sample, which has no parts to compare it with"


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_loss_that_is_not_finite_says_nothing(value):
    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        return cross_entropy_step(module, batch, logs) * value

    assert check(Net(), step)[0].mismatch is None


def test_a_loss_near_zero_by_cancellation_is_judged_by_its_gradients():
    """As that of a critic: its rounding is as large as itself."""
    x, y = make_batches(1)[0]
    net = Net(between=nn.Identity())
    with torch.no_grad():
        for _ in range(3):
            net.last.bias -= net(x[:8]).mean(0)

    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        return module(batch[0]).mean()

    assert abs(step(net, (x[:8], y[:8]), HandLogs())) < 1e-6
    assert is_fine(check(net, step, (x, y))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_its_own_tolerance(dtype):
    x, y = make_batches(1, 64)[0]
    finding, _ = check(Net().to(dtype), batch=(x.to(dtype), y), is_half=True)
    assert is_fine(finding)


def test_parameters_without_gradients_in_some_part_are_no_alarm_by_themselves():
    class Choosing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.table = nn.Linear(2, 2), nn.Embedding(20, 6, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(len(x)) % 4
            return super().forward(x + self.table(rows + (x[:, 0] > 0).long()))

    assert is_fine(check(Choosing())[0])


# What is logged --------------------------------------------------------------------------------------------------


class Measured(Net):
    """With metrics that are called with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean, self.hits = MulticlassAccuracy(4), MeanMetric(), SumMetric()
        self.losses = SumMetric()


def logging_step(module: Any, batch: Any, logs: HandLogs) -> torch.Tensor:
    x, y = batch
    out = module(x)
    loss = F.cross_entropy(out, y)
    hits = (out.argmax(1) == y).sum().float()
    logs.log("loss", loss, "sum", batch_size=len(x))
    logs.log("hits", hits, "mean")
    logs.log("largest", out.max(), "mean")
    logs.log("smallest", out.min(), "mean")
    logs.log("rate", torch.tensor(0.1), "sum", batch_size=16)
    logs.log("spread", out.std(), "mean")
    logs.log("nothing", torch.tensor(0.0), "sum")
    if isinstance(module, Measured):
        module.accuracy(out, y)
        module.mean.update(loss, weight=len(x))
        module.hits.update(hits)
        module.losses.update(loss)
        logs.log("accuracy", module.accuracy)
    return loss


RULES = {
    **{"loss": "mean", "hits": "sum", "largest": "max", "smallest": "min", "rate": "mean", "spread": "mean"},
    **{"loss#batch_size": "sum", "rate#batch_size": "max"},
}


def test_how_each_logged_value_stands_for_a_batch_is_found():
    finding, loop = check(Net(), logging_step)
    assert is_fine(finding)
    assert finding.unmerged == ("spread",)
    assert finding.open == ("nothing",)
    assert loop.rules == RULES


def test_how_numbers_that_metrics_are_called_with_stand_for_a_batch_is_found():
    finding, loop = check(Measured(), logging_step)
    found = [rule for key, rule in loop.rules.items() if key not in RULES and not key.endswith("#batch_size")]
    # mean(loss, weight), hits(hits), losses(loss)
    assert (finding.unmerged, sorted(found)) == (("spread",), ["mean", "mean", "sum", "sum"])


def test_evaluation_has_no_loss_but_rules():
    module = Net()
    loop = HandLoop(module, logging_step)
    work = loop.work()
    work._backward = None
    work.save()
    splitter = BatchSplitter()
    finding = check_split(work, splitter.split(make_batches(1)[0], 2), splitter, CPU)
    assert is_fine(finding)
    assert loop.rules == RULES


def test_buffers_that_a_pass_changes_are_named_but_for_those_of_batch_normalisation():
    class Counting(nn.BatchNorm1d):
        def __init__(self) -> None:
            super().__init__(8)
            self.inner = nn.Module()
            self.inner.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner.count += float(x.detach().abs().sum())
            return super().forward(x)

    finding, _ = check(Net(between=Counting()))
    assert finding.buffers == ("between.inner.count",)
    assert check(Net(between=nn.BatchNorm1d(8)))[0].buffers == ()


# All as before ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("gradients", ["none", "stale", "accumulated"])
def test_everything_is_as_before_also_when_the_comparison_breaks_off(gradients, fails):
    module = Measured()
    module.between = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
    loop = HandLoop(module, logging_step, accumulate=2)
    if gradients != "none":
        loop.train(make_batches(1))
    places = [parameter.grad for parameter in module.parameters()]
    values = [None if place is None else place.clone() for place in places]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    modes, rows = [part.training for part in module.modules()], list(loop.logs.rows)
    x, y = make_batches(1)[0]
    expected = x.clone(), y.clone()
    counts, drawn = (module.accuracy._update_count, module.mean._update_count), torch.get_rng_state()

    work = loop.work(is_first=gradients != "accumulated")
    work.save()
    if fails:
        number_of_calls = 0

        def step(*args: Any) -> torch.Tensor:
            nonlocal number_of_calls
            number_of_calls += 1
            loss = logging_step(*args)
            torch.rand(3)
            if number_of_calls > 1:
                raise device_error()
            return loss

        loop.step = step
    splitter = BatchSplitter()
    split = splitter.split((x, y), 2)
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            check_split(work, split, splitter, CPU)
    else:
        assert is_fine(check_split(work, split, splitter, CPU))

    assert all(parameter.grad is place for parameter, place in zip(module.parameters(), places, strict=True))
    assert all(a is None or torch.equal(a, b) for a, b in zip(places, values, strict=True))
    assert [name for name, value in module.state_dict().items() if not torch.equal(value, state[name])] == []
    assert [part.training for part in module.modules()] == modes
    assert loop.logs.rows == rows
    assert loop.logs._held is None
    assert (module.accuracy._update_count, module.mean._update_count) == counts
    assert torch.equal(torch.get_rng_state(), drawn)
    assert "forward" not in module.accuracy.__dict__
    assert torch.equal(x, expected[0])
    assert torch.equal(y, expected[1])


def test_a_step_that_takes_entries_out_of_its_batch_or_edits_it_finds_it_whole_each_time():
    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        y = batch.pop("y")
        x = batch["x"].sub_(1)
        batch["more"] = x
        return F.cross_entropy(module(x), y)

    x, y = make_batches(1)[0]
    expected = x.clone()
    splitter = BatchSplitter()
    split = splitter.split({"x": x, "y": y}, 2)
    work = HandLoop(Net(), step).work()
    work.save()
    assert is_fine(check_split(work, split, splitter, CPU))
    assert torch.equal(x, expected)
    assert [sorted(microbatch) for microbatch in split.microbatches] == [["x", "y"]] * 2


# In a training -----------------------------------------------------------------------------------------------------

TWICE = {(0, 0): ("forward", 0, device_error), (0, 1): ("forward", 0, device_error)}


def train(step: Step, **options: Any) -> tuple[HandLoop, list[Any]]:
    faults = Faults(TWICE)
    loop = HandLoop(Net(faults), step, faults=faults, **options)
    return loop, make_batches(2)


def test_a_loss_that_cannot_be_split_is_refused_at_the_first_split_with_its_cures():
    loop, batches = train(info_nce_step)
    before = loop.weights()
    with pytest.raises(OOMRecoveryError) as caught:
        loop.train(batches)
    text = str(caught.value)
    for part in (
        "does not follow",
        "weight_fn",
        "loss_reduction='sum'",
        "split_check='warn'",
        "A checkpoint was written",
    ):
        assert part in text
    assert loop.log.events == ["save", "run 1", "undo", "run 1", "undo", "give up"]
    assert all(torch.equal(one, other) for one, other in zip(before, loop.weights(), strict=True))


def test_it_is_not_looked_at_as_long_as_no_batch_is_split():
    faults = Faults({(0, 0): ("forward", 0, device_error)})
    loop = HandLoop(Net(faults), info_nce_step, faults=faults)
    loop.train(make_batches(2))
    assert loop.log.events == ["save", "run 1", "undo", "run 1", "finish", "save", "run 1", "finish"]


def test_a_warning_is_said_once_and_the_batch_is_split():
    loop, batches = train(info_nce_step, split_check="warn")
    loop.train(batches)
    [note] = loop.notes
    assert "does not follow" in note
    assert "split_check='warn'" in note
    assert loop.plan.num_microbatches == 2


def test_who_skips_the_look_is_told_nothing():
    loop, batches = train(info_nce_step, split_check="skip")
    loop.train(batches)
    assert loop.notes == []
    assert loop.plan.num_microbatches == 2


@pytest.mark.parametrize("loss", [sum_step, cross_entropy_step])
def test_the_cures_train_as_the_whole_batch_would_have(loss):
    loop, batches = train(loss, loss_reduction="sum" if loss is sum_step else "mean")
    whole = HandLoop(Net(), loss)
    loop.train(batches)
    whole.train(batches)
    for one, other in zip(loop.weights(), whole.weights(), strict=True):
        # gradients of 16 samples, up to 10, in another order of summation
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_a_mean_over_tokens_trains_as_the_whole_batch_would_have():
    faults = Faults(TWICE)
    loop = HandLoop(Net(faults), token_step, faults=faults, splitter=BatchSplitter(weight_fn=count_tokens))
    whole = HandLoop(Net(), token_step)
    batches = [token_batch(1), token_batch(2)]
    loop.train(batches)
    whole.train(batches)
    assert loop.plan.num_microbatches == 2
    for one, other in zip(loop.weights(), whole.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # rounding of sums in another order


def test_a_step_that_edits_its_batch_in_place_trains_on_what_was_edited_once():
    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(module(x.mul_(0.5)), y)

    x, y = make_batches(1)[0]
    half = x * 0.5
    loop = HandLoop(Net(), step, plan=RetryPlan(2))
    [loss] = loop.train([(x, y)])
    assert torch.equal(x, half)  # once, as without us
    with torch.no_grad():
        assert math.isclose(loss, F.cross_entropy(Net()(half), y), rel_tol=1e-6)  # rounding
