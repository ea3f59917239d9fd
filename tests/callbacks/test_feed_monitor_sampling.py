"""`FeedMonitor` where steps are so short that it watches only some of them in full."""

from __future__ import annotations

import copy
import pickle
import random
import time
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_gpufeed import BatchEcho, FeedMonitor, OOMRecovery
from lightning_gpufeed.callbacks.feed_monitor import _UNUSED_HOOKS
from lightning_gpufeed.diagnose import sampling
from tests.callbacks.test_feed_monitor import Counting, FetchesItself, GivesUp, Manual, fit, hooks_in, quiet, samples
from tests.callbacks.test_feed_monitor import Endless as Stream
from tests.datamodules.models import MemoryLogger, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")

NUM_BATCHES = 60
PARTS = {
    "_on_before_fetch": lambda trainer: trainer.fit_loop.epoch_loop,
    "_on_after_fetch": lambda trainer: trainer.fit_loop.epoch_loop,
    "run": lambda trainer: trainer.fit_loop.epoch_loop.automatic_optimization,
    "get_instance": lambda trainer: trainer._data_connector._datahook_selector,
    "convert_input": lambda trainer: trainer.precision_plugin,
}


@pytest.fixture(autouse=True)
def few_are_watched(monkeypatch):
    """As on a machine where watching costs much."""
    monkeypatch.setattr(sampling, "watched_share", lambda *_: 0.2)
    monkeypatch.setattr(sampling, "_FIRST_RUNS", 1)


class Places(Counting):
    """Notes in each step who is in which place."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[dict[str, Any]] = []
        self.monitor: FeedMonitor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noted = {name: vars(owner(self.trainer)).get(name) for name, owner in PARTS.items()}
        self.noted.append(noted | {"end": vars(self.monitor).get("on_train_batch_end", "method")})
        return super().training_step(batch, batch_idx)


TRAININGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "default": (Counting, samples, {}),
    "validation between": (Counting, samples, {"val_check_interval": 7, "num_sanity_val_steps": 1}),
    "accumulate_grad_batches": (Counting, samples, {"accumulate_grad_batches": 3}),
    "limited": (Counting, samples, {"limit_train_batches": 41}),
    "max_steps": (Counting, samples, {"max_epochs": -1, "max_steps": 77}),
    "manual": (Manual, samples, {}),
    "echoed": (Counting, samples, {"callbacks": lambda: [BatchEcho(echo_factor=2, scale_lr="keep")]}),
    "recovering": (Counting, samples, {"callbacks": lambda: [OOMRecovery()]}),
    "stream": (Counting, lambda num: torch.utils.data.DataLoader(Stream(2 * num), batch_size=2), {}),
}


@pytest.mark.filterwarnings("ignore:The given 'max_steps|Using `max_time`:UserWarning")
@pytest.mark.parametrize("name", TRAININGS)
def test_every_step_is_counted_in_its_epoch_though_only_some_are_watched(name):
    model_of, loader_of, settings = TRAININGS[name]
    model, monitor = model_of(), quiet()
    settings = settings | {"callbacks": settings.get("callbacks", list)()}
    trainer, counted = fit(monitor, model, loader_of(NUM_BATCHES), samples(1), **settings)
    assert counted == dict(model.counted)
    watched = [one.counters.steps.num_watched for one in monitor.records]
    assert watched[0] is not None
    assert watched[0] >= 8
    assert any(one is not None for one in watched)
    assert hooks_in(trainer) == set()
    assert not set(vars(monitor)) & {*_UNUSED_HOOKS, "on_train_batch_end"}


def test_a_batch_that_ends_the_epoch_is_no_step_where_it_is_not_watched_either(monkeypatch):
    monkeypatch.setattr(sampling, "RUN", 2)
    monkeypatch.setattr(sampling.StepSampler, "_gap", lambda self: 1000)
    monitor, model = quiet(), GivesUp()
    _, counted = fit(monitor, model, samples(NUM_BATCHES), samples(1))
    assert counted == dict(model.counted) == {0: 3, 1: 3}
    assert [one.counters.steps.num_watched for one in monitor.records] == [2, 2]


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument|You are using the `dataloader_iter`:UserWarning")
def test_steps_that_fetch_their_batches_by_themselves_are_all_watched():
    monitor, model = quiet(), FetchesItself()
    _, counted = fit(monitor, model, samples(NUM_BATCHES), samples(1))
    assert counted == dict(model.counted)
    assert [one.counters.steps.num_watched for one in monitor.records] == [None, None]


def test_between_the_steps_that_are_watched_nothing_is_hooked_in_but_the_fetch():
    monitor, model = quiet(), Places()
    model.monitor = monitor
    fit(monitor, model, samples(NUM_BATCHES), samples(1))
    ways = {tuple(name for name, value in noted.items() if value is not None) for noted in model.noted}
    assert ways == {("_on_before_fetch", "_on_after_fetch"), (*PARTS, "end")}
    full = [noted["run"] is not None for noted in model.noted]
    assert full[:8] == full[NUM_BATCHES : NUM_BATCHES + 8] == [True] * 8
    assert [one.counters.steps.num_watched for one in monitor.records] == [
        sum(full[:NUM_BATCHES]),
        sum(full[NUM_BATCHES:]),
    ]


# The fetch -----------------------------------------------------------------------------------------------


class Fetcher(Counting):
    """Notes in each step whom the fetcher tells of a request and of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fetcher = self.trainer.fit_loop._data_fetcher
        self.told.append((type(fetcher._start_profiler).__name__, type(fetcher._stop_profiler).__name__))
        return super().training_step(batch, batch_idx)


class Copied(Fetcher):
    """Copies its Trainer in both ways, once."""

    copies: ClassVar[list[pl.Trainer]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 20:
            self.copies += [pickle.loads(pickle.dumps(self.trainer)), copy.deepcopy(self.trainer)]
        return super().training_step(batch, batch_idx)


BRIEF, FULL = ("_Brief", "_Brief"), ("_AfterHook", "_BeforeHook")


def test_between_the_steps_that_are_watched_a_request_costs_one_call():
    monitor, model = quiet(), Fetcher()
    trainer, counted = fit(monitor, model, samples(NUM_BATCHES), samples(1))
    assert counted == dict(model.counted)
    assert set(model.told) == {BRIEF, FULL}
    watched = [sum(one == FULL for one in told) for told in (model.told[:NUM_BATCHES], model.told[NUM_BATCHES:])]
    assert watched == [one.counters.steps.num_watched for one in monitor.records]
    assert hooks_in(trainer) == set()


def test_a_trainer_that_is_copied_then_has_lightnings_own(monkeypatch):
    monkeypatch.setattr(sampling.StepSampler, "_gap", lambda self: 1000)
    monkeypatch.setattr(Copied, "copies", [])
    monitor, model = quiet(), Copied()
    fit(monitor, model, samples(NUM_BATCHES), max_epochs=1)
    assert model.told[20] == BRIEF
    assert len(Copied.copies) == 2
    for trainer in Copied.copies:
        fetcher, loop = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop
        assert fetcher._start_profiler == loop._on_before_fetch
        assert fetcher._stop_profiler == loop._on_after_fetch
        assert fetcher._start_profiler.__self__ is loop


class Requests(Profiler):
    """Notes each request for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.told.append("start")

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.told.append("stop")


class Passing(PassThroughProfiler):
    """A user's, made of the one that does nothing."""

    start = Requests.start
    stop = Requests.stop

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []


@pytest.mark.parametrize("kind", [Requests, Passing])
def test_a_profiler_is_told_of_every_request(kind):
    profiler, model, monitor = kind(), Fetcher(), quiet()
    _, counted = fit(monitor, model, samples(NUM_BATCHES), samples(1), profiler=profiler)
    assert profiler.told == ["start", "stop"] * 2 * NUM_BATCHES
    assert counted == dict(model.counted)
    assert set(model.told) == {FULL}
    assert monitor.records[0].counters.steps.num_watched < NUM_BATCHES


class Putting(pl.Callback):
    """Puts a function of its own on Lightning's loop, before a monitor comes or after it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        for name in ("_on_before_fetch", "_on_after_fetch"):
            vars(loop)[name] = self._noting(name, getattr(loop, name))

    def _noting(self, name: str, method: Any) -> Any:
        def noting() -> None:
            self.told.append(name)
            method()

        return noting


@pytest.mark.parametrize("is_first", [True, False])
def test_somebody_elses_function_in_that_place_is_called_at_every_request(is_first):
    monitor, putting, model = quiet(), Putting(), Counting()
    make_trainer(max_epochs=1, callbacks=[putting, monitor] if is_first else [monitor, putting]).fit(
        model, samples(NUM_BATCHES)
    )
    assert putting.told == ["_on_before_fetch", "_on_after_fetch"] * NUM_BATCHES
    assert monitor.records[0].counters.steps.num_steps == NUM_BATCHES
    assert monitor.records[0].counters.steps.num_watched < NUM_BATCHES


class Changes(Counting):
    """Puts something between the fetcher and whoever it tells, in the middle of an epoch."""

    num_told = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 20:
            fetcher = self.trainer.fit_loop._data_fetcher
            self.before = fetcher._start_profiler
            fetcher._start_profiler = self.start
        return super().training_step(batch, batch_idx)

    def start(self) -> None:
        self.num_told += 1
        self.before()


@pytest.mark.parametrize("is_brief", [True, False])
def test_somebody_between_the_fetcher_and_the_loop_stays_there(monkeypatch, is_brief):
    gaps = iter([0] if not is_brief else [])
    monkeypatch.setattr(sampling.StepSampler, "_gap", lambda self: next(gaps, 30))
    monkeypatch.setattr(sampling, "RUN", 8 if is_brief else 30)
    monitor, model = quiet(), Changes()
    _, counted = fit(monitor, model, samples(NUM_BATCHES), max_epochs=1)
    assert model.num_told == NUM_BATCHES - 21
    assert counted == {0: NUM_BATCHES}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_fetch_is_given_back_after_an_error_between_the_steps_that_are_watched(monkeypatch, error):
    monkeypatch.setattr(sampling.StepSampler, "_gap", lambda self: 1000)

    class Failing(Fetcher):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.fetcher = self.trainer.fit_loop._data_fetcher
            if batch_idx == 25:
                raise error("here")
            return super().training_step(batch, batch_idx)

    monitor, model = quiet(), Failing()
    trainer = make_trainer(max_epochs=1, callbacks=[monitor])
    with pytest.raises((error, SystemExit)):
        trainer.fit(model, samples(NUM_BATCHES))
    assert model.told[-1] == BRIEF
    assert hooks_in(trainer) == set()
    assert type(model.fetcher._start_profiler).__name__ == "_AfterHook"
    model.fetcher._start_profiler()  # tells nobody any more
    model.fetcher._stop_profiler()


def test_the_line_says_how_many_were_watched():
    monitor = quiet()
    fit(monitor, Counting(), samples(NUM_BATCHES), samples(1))
    for record in monitor.records:
        note = f"{record.counters.steps.num_watched} of {NUM_BATCHES} steps were watched in full"
        assert any(one.startswith(note) for one in record.verdict.notes)
        assert note in record.line


def states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_the_training_and_its_random_numbers_are_the_same_to_the_last_bit():
    class Dropping(Counting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.nn.functional.dropout(batch[0] + torch.randn(2))).sum() * random.random()

    results = []
    for callbacks in ([quiet()], []):
        pl.seed_everything(3, verbose=False)
        model = Dropping()
        trainer = make_trainer(max_epochs=2, callbacks=callbacks)
        trainer.fit(model, samples(NUM_BATCHES, shuffle=True))
        results.append(([one.tolist() for one in model.state_dict().values()], states()))
        if callbacks:
            assert callbacks[0].records[-1].counters.steps.num_watched is not None
    assert results[0] == results[1]


class Subclass(FeedMonitor):
    """A user's, with hooks of its own."""

    def __init__(self) -> None:
        super().__init__(table=False, first_seconds=None)
        self.told: list[str] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.told.append("end")
        super().on_train_batch_end(*args)

    def on_before_backward(self, *args: Any) -> None:
        self.told.append("before backward")


def test_hooks_that_a_subclass_has_made_something_of_are_called_in_every_step():
    monitor, model = Subclass(), Counting()
    _, counted = fit(monitor, model, samples(NUM_BATCHES), samples(1))
    assert monitor.told == ["before backward", "end"] * NUM_BATCHES * 2
    assert counted == dict(model.counted)
    assert monitor.records[0].counters.steps.num_watched < NUM_BATCHES


class Comes(pl.Callback):
    """Hooks into the forward pass in the middle of an epoch, and out again later."""

    def __init__(self) -> None:
        self.num_called = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        own = vars(trainer.fit_loop.epoch_loop.automatic_optimization)
        if batch_idx == 13:
            self.before, method = own.get("run"), trainer.fit_loop.epoch_loop.automatic_optimization.run

            def run(*args: Any) -> Any:
                self.num_called += 1
                return method(*args)

            own["run"] = self.run = run
        if batch_idx == 45 and own.get("run") is self.run:
            own.pop("run")
            if self.before is not None:
                own["run"] = self.before


@pytest.mark.parametrize("num_monitors", [1, 2])
@pytest.mark.parametrize("is_first", [True, False])
def test_somebody_else_who_comes_and_goes_is_called_in_every_step(num_monitors, is_first):
    monitors, other = [quiet() for _ in range(num_monitors)], Comes()
    callbacks = [other, *monitors[1:]] if is_first else [*monitors[1:], other]
    _, counted = fit(monitors[0], Counting(), samples(NUM_BATCHES), samples(1), callbacks=callbacks, max_epochs=1)
    assert other.num_called in (32, NUM_BATCHES - 14)  # it cannot go while somebody is on top of it
    for monitor in monitors:
        assert monitor.records[0].counters.steps.num_steps == NUM_BATCHES
        assert monitor.records[0].counters.steps.compute_seconds > 0
    assert counted == {0: NUM_BATCHES}


class Actions(Profiler):
    """Notes what it is told of the monitor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def start(self, action_name: str) -> None:
        if "FeedMonitor." in action_name:
            self.names.append(action_name.rpartition(".")[2])

    def stop(self, action_name: str) -> None:
        pass


def test_hooks_that_do_nothing_are_not_called():
    monitor, actions = quiet(), Actions()
    fit(monitor, Counting(), samples(NUM_BATCHES), samples(1), profiler=actions)
    assert not set(_UNUSED_HOOKS) & set(actions.names)
    assert "on_train_epoch_end" in actions.names
    assert actions.names.count("on_train_batch_end") < NUM_BATCHES


class Copying(Places):
    """Copies the monitor now and then."""

    copies: list[FeedMonitor]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 10 == 9:
            self.copies.append(copy.deepcopy(self.monitor, {id(self): self}))
        return super().training_step(batch, batch_idx)


def test_a_copy_made_while_steps_are_not_watched_has_all_its_hooks():
    monitor, model = quiet(), Copying()
    model.monitor, model.copies = monitor, []
    fit(monitor, model, samples(NUM_BATCHES), samples(1))
    assert any(noted["end"] is None for noted in model.noted[9::10])
    for one in model.copies:
        assert all(callable(getattr(one, name)) for name in (*_UNUSED_HOOKS, "on_train_batch_end"))
    _, counted = fit(model.copies[0], Counting(), samples(8), max_epochs=1)
    assert counted == {0: 8}


def test_called_by_another_callback_it_keeps_all_its_hooks():
    class Around(pl.Callback):
        def __init__(self) -> None:
            self.monitor = quiet()

        def on_fit_start(self, *args: Any) -> None:
            self.monitor.on_fit_start(*args)

        def on_train_epoch_start(self, *args: Any) -> None:
            self.monitor.on_train_epoch_start(*args)

        def on_train_batch_start(self, *args: Any) -> None:
            self.monitor.on_train_batch_start(*args)

        def on_train_batch_end(self, *args: Any) -> None:
            self.monitor.on_train_batch_end(*args)

        def on_train_epoch_end(self, *args: Any) -> None:
            self.monitor.on_train_epoch_end(*args)

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            self.monitor.teardown(trainer, module, stage)

    around = Around()
    make_trainer(max_epochs=1, callbacks=[around]).fit(Counting(), samples(NUM_BATCHES))
    assert around.monitor.records[0].counters.steps.num_steps == NUM_BATCHES


def test_loggers_are_told_how_much_was_watched():
    monitor, logger = quiet(), MemoryLogger()
    fit(monitor, Counting(), samples(NUM_BATCHES), samples(1), logger=logger)
    told = [one["gpufeed/feed/watched_share"] for _, one in logger.logged if "gpufeed/feed/wait_share" in one]
    assert told == [one.counters.steps.num_watched / NUM_BATCHES for one in monitor.records]


class SlowStart(torch.utils.data.DataLoader[Any]):
    """As one that starts workers; notes when."""

    begun = 0.0

    def __iter__(self) -> Any:
        self.begun = time.perf_counter()
        time.sleep(PAUSE_SECONDS)
        return super().__iter__()


class SlowEnd(pl.Callback):
    """Notes when an epoch begins, and when others are told of its end; computes something then."""

    started = begun = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begun = time.perf_counter()
        time.sleep(PAUSE_SECONDS)


PAUSE_SECONDS = 0.5


@pytest.mark.parametrize("has_validation", [True, False], ids=["validation", "end of the epoch"])
def test_the_last_step_before_something_else_ends_where_that_begins(monkeypatch, has_validation):
    # It was said to take as long as the loader of the validation took to start, if it was not watched in full.
    monkeypatch.setattr(sampling.StepSampler, "_gap", lambda self: 10 * NUM_BATCHES)
    monitor, other = quiet(), SlowEnd()
    validation = SlowStart(samples(1).dataset) if has_validation else None
    trainer = make_trainer(max_epochs=1, callbacks=[other, monitor])
    trainer.fit(Counting(), samples(NUM_BATCHES), validation)
    steps = monitor.records[0].counters.steps
    assert (steps.num_steps, steps.num_watched) == (NUM_BATCHES, 8)
    assert steps.elapsed_seconds <= (other if validation is None else validation).begun - other.started
    assert not hooks_in(trainer)
    assert "run" not in vars(trainer.fit_loop.epoch_loop.val_loop)


@pytest.mark.parametrize("name", ["_on_before_fetch", "_on_after_fetch"])
def test_somebody_elses_function_on_lightnings_class_is_called_at_every_request(monkeypatch, name):
    told: list[str] = []
    monkeypatch.setattr(_TrainingEpochLoop, name, lambda self: told.append(name))
    fit(quiet(), Counting(), samples(NUM_BATCHES), max_epochs=1)
    assert told == [name] * NUM_BATCHES


def test_a_silent_profiler_that_somebody_listens_to_is_told_of_every_request():
    told: list[str] = []
    profiler = PassThroughProfiler()
    vars(profiler)["start"] = told.append
    fit(quiet(), Counting(), samples(NUM_BATCHES), profiler=profiler, max_epochs=1)
    assert told.count("[_TrainingEpochLoop].train_dataloader_next") == NUM_BATCHES
