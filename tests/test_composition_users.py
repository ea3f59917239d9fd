"""Parts beside what users have already: other callbacks in any order, every way to call a Trainer, its options.

One process, one rank. The other side of each comparison is plain Lightning with the same callback, call or option.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from torch import distributed

from tests.composition_models import (
    ECHO,
    NUM_VAL,
    WHOLE,
    Net,
    Shared,
    callbacks_of,
    data_of,
    facts_of,
    found,
    strategy_of,
)
from tests.composition_models import (
    PARTS as MAKERS,
)
from tests.datamodules.models import MemoryLogger, make_trainer, same_bits, write_images
from tests.process_groups import left_as_found

NUM_SAMPLES, BATCH_SIZE = 16, 4
ONE = (1, 0)
PARTS = ["D", "E", "A", "R", "M", "S"]
ALL = ["D E R M", "D A R M", "D E M S"]
SOME = ["A", "D E R M", "D E M S"]
"""With every part in one of them."""

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def _left_as_found() -> Iterator[None]:
    with left_as_found():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("composition_users")
    return {
        "train": str(write_images(folder / "train.h5", NUM_SAMPLES)),
        "val": str(write_images(folder / "val.h5", NUM_VAL, seed=1)),
        "test": str(folder / "val.h5"),
        "folder": str(folder),
    }


class Run:
    """A Trainer, its module and its data, with parts or with what they stand for.

    Args:
        files: Names and paths.
        parts: Letters.
        is_plain: Whether the training has none of these parts, but is what they stand for.
        others: Make callbacks beside the parts.
        net: Arguments of the module.
        callbacks: In the place of all these.
        settings: Of the Trainer.
    """

    def __init__(
        self,
        files: dict[str, str],
        parts: str,
        *,
        is_plain: bool = False,
        others: Any = (),
        net: dict[str, Any] | None = None,
        callbacks: Any = None,
        **settings: Any,
    ) -> None:
        torch.manual_seed(3)
        self.logger = MemoryLogger()
        self.callbacks = ([] if is_plain else callbacks_of(parts)) if callbacks is None else callbacks
        self.data = data_of(
            "" if is_plain else parts, files, ONE, echoes=is_plain and "E" in parts, batch_size=BATCH_SIZE
        )
        if "overfit_batches" in settings and "train_dataloaders" in self.data:
            self.data["train_dataloaders"].is_training = False  # the same batches every time
            for loader in self.data.values():  # Lightning would replace a sampler; the permutations need the epoch
                del loader.sampler
                loader.batch_sampler = SimpleNamespace(sampler=loader)
        fails = "R" in parts and not is_plain
        self.model = Net(waits="A" in parts and not is_plain, **{"failures": WHOLE if fails else (), **(net or {})})
        others = [make() for make in others]
        every = [*self.callbacks, *others] if isinstance(self.callbacks, list) else []
        settings.setdefault("enable_checkpointing", any(isinstance(one, ModelCheckpoint) for one in every))
        self.trainer = make_trainer(
            strategy=strategy_of("" if is_plain else parts, 1),
            callbacks=[*self.callbacks, *others] if others else self.callbacks,
            logger=self.logger,
            use_distributed_sampler=False,
            default_root_dir=files["folder"],
            **{"max_epochs": 2, **settings},
        )

    def fit(self, **arguments: Any) -> Run:
        """Train."""
        self.trainer.fit(self.model, **self.data, **arguments)
        return self

    @property
    def seen(self) -> dict[str, Any]:
        """All that has to be the same."""
        lists = {name: getattr(self.model, name) for name in ("trained", "losses", "evaluated")}
        return found(self.trainer, self.model, self.logger) | lists

    def differences(self, other: Run | dict[str, Any]) -> list[str]:
        """Names of what is not the same to the last bit, but for figures of the parts."""
        one, other = self.seen, other.seen if isinstance(other, Run) else other
        return [name for name in one if name != "figures" and not same_bits(one[name], other[name])]


PLAIN: dict[str, dict[str, Any]] = {}
"""What trainings without parts gave, by what they do: many parts stand for the same one."""


def plain_seen(name: str, files: dict[str, str], parts: str, **settings: Any) -> dict[str, Any]:
    """What a training without parts gives; made once."""
    key = f"{name}, {'echoed' if 'E' in parts else 'fresh'}"
    if key not in PLAIN:
        PLAIN[key] = Run(files, "E" if "E" in parts else "", is_plain=True, **settings).fit().seen
    return PLAIN[key]


# Other callbacks -----------------------------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[], pl.Callback]] = {
    "EarlyStopping": lambda: EarlyStopping("val_loss", patience=1, mode="max"),
    "LearningRateMonitor": lambda: LearningRateMonitor("step", log_momentum=True),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "Timer": lambda: Timer("00:01:00:00"),
    "RichProgressBar": RichProgressBar,
    "LearningRateFinder": lambda: LearningRateFinder(num_training_steps=4, early_stop_threshold=None),
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.7),
}


# Every callback beside all parts that go together, over our data; and, over a user's loader, beside one part, in turn.
@pytest.mark.parametrize(
    ("name", "parts"), [(name, parts) for i, name in enumerate(OTHERS) for parts in ("AR"[i % 2], *ALL)]
)
def test_other_callbacks_do_beside_each_part_what_they_do_in_plain_lightning(files, name, parts):
    settings: dict[str, Any] = {"others": [OTHERS[name]], "enable_progress_bar": name == "RichProgressBar"}
    if name == "EarlyStopping":
        settings["max_epochs"] = 3
    if name == "StochasticWeightAveraging":
        settings["net"] = {"interval": "epoch"}  # it does not work with others
    if name == "LearningRateFinder" and "R" in parts:
        settings["net"] = {"failures": ((5, "forward"), (7, "backward"))}  # after its trial, which wants to see errors
    # First the plain one: the group of a strategy for several ranks stays, and Lightning takes note of it.
    plain = plain_seen(name, files, parts, **settings | {"net": {**settings.get("net", {}), "failures": ()}})
    assert Run(files, parts, **settings).fit().differences(plain) == []


# Options of the Trainer ----------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"limit_train_batches": 3},
    {"limit_train_batches": 0.5},
    {"val_check_interval": 2},
    {"val_check_interval": 0.5},
    {"accumulate_grad_batches": 2},
    {"fast_dev_run": 3},
    {"max_steps": 5},
    {"reload_dataloaders_every_n_epochs": 1},
    {"gradient_clip_val": 0.1},
    {"num_sanity_val_steps": 1},
    {"check_val_every_n_epoch": 2},
    {"overfit_batches": 2},
]


# A user's loader that may go on where an epoch ended early is not read ahead; that this is said is tested elsewhere.
@pytest.mark.filterwarnings("ignore:BatchEcho. limit_train_batches ends epochs early")
@pytest.mark.parametrize("parts", SOME)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_options_of_the_trainer_mean_beside_each_part_what_they_mean_in_plain_lightning(files, options, parts):
    plain = plain_seen(str(options), files, parts, **options)
    assert Run(files, parts, **options).fit().differences(plain) == []


# Ways to call it -----------------------------------------------------------------------------------------------------


def both(files: dict[str, str], parts: str, use: Callable[[Run], Any], **settings: Any) -> tuple[Any, Any, list[str]]:
    """Use a Trainer with parts and a plain one in the same way: what both gave, and what differs at the end."""
    plain = Run(files, parts, is_plain=True, **settings)
    of_plain = use(plain)
    ours = Run(files, parts, **settings)
    return use(ours), of_plain, ours.differences(plain)


def evaluation_data(run: Run) -> dict[str, Any]:
    """For validate, test and predict."""
    return (
        {"datamodule": run.data["datamodule"]}
        if "datamodule" in run.data
        else {"dataloaders": run.data["val_dataloaders"]}
    )


@pytest.mark.parametrize("parts", SOME)
def test_what_is_called_after_a_training_gives_what_it_gives_in_plain_lightning(files, parts):
    def use(run: Run) -> list[Any]:
        run.fit()
        data, given = evaluation_data(run), []
        for name in ("validate", "test"):
            given.append(getattr(run.trainer, name)(run.model, verbose=False, **data))
        given.append([one.clone() for one in run.trainer.predict(run.model, **data)])
        run.trainer.fit_loop.max_epochs = 3
        return [*given, run.fit().trainer.global_step]

    ours, plain, differences = both(files, parts, use)
    assert same_bits(ours, plain)
    assert differences == []


@pytest.mark.parametrize("parts", SOME)
def test_a_second_fit_goes_on_as_in_plain_lightning(files, parts):
    def use(run: Run) -> None:
        run.fit()
        run.trainer.fit_loop.max_epochs = 3
        run.fit()

    assert both(files, parts, use, max_epochs=1)[2] == []


class Stop(pl.Callback):
    """Raises an error once, at the end of a step."""

    def __init__(self, error: BaseException, batch: int) -> None:
        self.error, self.batch = error, batch

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Count."""
        self.batch -= 1
        if self.batch == 0:
            raise self.error


@pytest.mark.parametrize("parts", SOME)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fit_after_one_that_was_broken_off_goes_on_as_in_plain_lightning(files, parts, error):
    def use(run: Run) -> list[int]:
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises((RuntimeError, SystemExit)):
            run.fit()
        signal.signal(signal.SIGINT, handler)  # which Lightning has set aside
        steps = [run.trainer.global_step]
        run.fit()
        return [*steps, run.trainer.global_step]

    ours, plain, differences = both(files, parts, use, others=[lambda: Stop(error("on purpose"), 5)])
    assert ours == plain
    assert differences == []


@pytest.mark.parametrize("parts", PARTS + ALL)
def test_what_was_saved_when_a_training_broke_off_is_continued(files, parts, tmp_path):
    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "broken", save_on_exception=True, every_n_train_steps=1000)

    whole = Run(files, parts).fit()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    broken = Run(files, parts, others=[saving, lambda: Stop(RuntimeError("on purpose"), 6)])
    with pytest.raises(RuntimeError, match="on purpose"):
        broken.fit()
    [saved] = (tmp_path / "broken").iterdir()
    resumed = Run(files, parts, net={"failures": ()}).fit(ckpt_path=saved, weights_only=False)
    num_steps = len(resumed.model.trained)
    # The step that was broken off has been counted, or is done again: its update was taken.
    assert num_steps in (len(whole.model.trained) - 6, len(whole.model.trained) - 5)
    assert resumed.model.trained == whole.model.trained[-num_steps:]
    names = {"weights", "optimizers", "schedulers", "global_step", "epoch"}
    assert names & set(resumed.differences(whole)) == set()


# In the middle of the first epoch and of the second: each with all parts, and in both directions.
@pytest.mark.parametrize(
    ("parts", "batch", "is_plain_first"),
    [
        (parts, (2, 5)[(i + is_plain_first) % 2], is_plain_first)
        for i, parts in enumerate(["A", "R", "M", "S", "A R M", "A M S"])
        for is_plain_first in (True, False)
    ],
)
def test_a_checkpoint_is_continued_with_parts_or_without_them(files, parts, batch, is_plain_first, tmp_path):
    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=batch, save_top_k=-1)

    whole = Run(files, parts, is_plain=is_plain_first, others=[saving]).fit()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    path = tmp_path / f"step={batch}.ckpt"
    resumed = Run(files, parts, is_plain=not is_plain_first, net={"failures": ()}).fit(
        ckpt_path=path, weights_only=False
    )
    num_steps = len(resumed.model.trained)
    assert num_steps == 8 - batch
    assert resumed.model.trained == whole.model.trained[-num_steps:]
    names = {"weights", "optimizers", "schedulers", "global_step", "epoch", "counters"}
    assert names & set(resumed.differences(whole)) == set()


# The order of callbacks ----------------------------------------------------------------------------------------------


class Recorder(pl.Callback):
    """Writes down what a user's callback can see in each hook of a step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, hook: str, trainer: Any, module: Any) -> None:
        """Where the training is, and all numbers."""
        weights = [float(one.detach().double().sum()) for one in module.parameters()]
        gradients = [None if one.grad is None else float(one.grad.double().sum()) for one in module.parameters()]
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        place = [trainer.current_epoch, trainer.global_step, trainer.num_training_batches]
        self.seen.append([hook, *place, weights, gradients, rates, metrics])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note."""
        self.note("epoch start", trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note, with the samples."""
        self.note(f"start {batch_idx} {batch[1].tolist()}", trainer, pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Note."""
        self.note("backward", trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note."""
        self.note("update", trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note, with the samples and the loss."""
        self.note(f"end {batch_idx} {batch[1].tolist()} {float(outputs['loss'])}", trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note."""
        self.note("validated", trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Note."""
        self.note("epoch end", trainer, pl_module)


def checkpoints_in(folder: Path) -> dict[str, Any]:
    """All of them; what callbacks have kept by name, as its order is that of the callbacks."""
    found = {}
    for path in sorted(folder.iterdir()):
        checkpoint = torch.load(path, weights_only=False)
        states = checkpoint["callbacks"]
        checkpoint["callbacks"] = {name: states[name] for name in sorted(states) if "ModelCheckpoint" not in name}
        found[path.name] = {name: checkpoint[name] for name in sorted(checkpoint)}
    return found


def turned(names: list[str]) -> list[list[str]]:
    """Orders in which each is once in every place, before each other one and behind it; and their reverses."""
    turns = [[*names[i:], *names[:i]] for i in range(len(names))]
    return [*turns, *(order[::-1] for order in turns)]


IS_MEASURED = re.compile("gpufeed/(feed/(read|free_echo_factor)|echo/(load_ratio|free_share|wait_share))")


@pytest.mark.parametrize("letter", ["E", "A"])
def test_callbacks_do_the_same_in_whatever_order_they_are_listed(files, letter, tmp_path):
    expected = None
    for number, order in enumerate(turned([letter, "R", "M", "recorder"])):
        recorder = Recorder()
        callbacks = [recorder if name == "recorder" else MAKERS[name]() for name in order]
        place = number % 5  # Lightning puts it at the end
        callbacks.insert(place, ModelCheckpoint(tmp_path / str(number), "{step}", every_n_train_steps=3, save_top_k=-1))
        run = Run(files, f"{letter} R M", callbacks=callbacks, max_steps=7, val_check_interval=0.5).fit()
        seen = run.seen | {"recorded": recorder.seen, "saved": checkpoints_in(tmp_path / str(number))}
        # What is measured of readers and loaders is known only if they were looked at in time.
        seen["figures"] = [name for name in seen["figures"] if not IS_MEASURED.match(name)]
        expected = expected or seen
        assert [name for name in expected if not same_bits(seen[name], expected[name])] == [], order
    assert len(expected["figures"]) > 10
    assert len(expected["saved"]) == 2


@pytest.mark.parametrize("letter", ["E", "R"])
def test_two_of_a_stateful_callback_are_refused_by_lightning_or_by_us(files, letter):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type"):
        Run(files, letter, callbacks=[MAKERS[letter](), MAKERS[letter]()])
    late = Run(files, letter)
    late.trainer.callbacks.append(MAKERS[letter]())
    with pytest.raises(ValueError, match=r"the Trainer has more than one (BatchEcho|OOMRecovery); expected one"):
        late.fit()
    assert late.model.trained == []


def test_two_monitors_watch_the_same_training_and_both_are_right(files):
    ours = Run(files, "E", callbacks=[MAKERS["M"](), MAKERS["E"](), MAKERS["M"]()]).fit()
    assert ours.differences(plain_seen("as it is", files, "E")) == []
    for monitor in (ours.callbacks[0], ours.callbacks[2]):
        assert facts_of(monitor) == {"steps": [[0, 16], [1, 16]]}


@pytest.mark.parametrize("letter", ["E", "A", "R", "M"])
def test_one_callback_need_not_be_in_a_list(files, letter):
    run = Run(files, letter, callbacks=MAKERS[letter]())
    assert run.fit().differences(plain_seen("as it is", files, letter)) == []


class Configuring(Net):
    """Brings callbacks of its own."""

    def configure_callbacks(self) -> list[pl.Callback]:
        """All of one rank."""
        return [MAKERS[letter]() for letter in "MRE"]


@pytest.mark.parametrize("others", ["", "E", "R M"])
def test_callbacks_that_the_module_brings_take_the_place_of_the_same_ones(files, others):
    ours = Run(files, "E R", callbacks=[MAKERS[letter]() for letter in others.split()])
    ours.model = Configuring(failures=WHOLE)
    ours.fit()
    assert sorted(type(one).__name__ for one in ours.trainer.callbacks) == ["BatchEcho", "FeedMonitor", "OOMRecovery"]
    assert ours.differences(plain_seen("as it is", files, "E")) == []


@pytest.mark.parametrize("parts", ["E", "A", "R", "M", "E R M"])
def test_callbacks_of_a_training_that_is_over_serve_another_trainer(files, parts):
    plain = plain_seen("as it is", files, parts)
    callbacks = callbacks_of(parts)
    for error in (None, RuntimeError("on purpose"), None):
        stops = [] if error is None else [Stop(error, 5)]
        run = Run(files, parts, callbacks=[*callbacks, *stops])
        if error is None:
            assert run.fit().differences(plain) == []
        else:
            with pytest.raises(RuntimeError, match="on purpose"):
                run.fit()


# Finders, which set all callbacks aside for their trials -------------------------------------------------------------


class Sized(Net):
    """Makes its own loader, with a batch size that can be found; larger batches do not fit.

    Args:
        files: Names and paths.
        echo: Whether its loader gives echoes.
        most: Samples that fit.
    """

    def __init__(self, files: dict[str, str], echo: dict[str, int] | None, most: int, **options: Any) -> None:
        super().__init__(**options)
        self.batch_size, self.most = 2, most
        self.files, self.echo = files, echo

    def train_dataloader(self) -> Shared:
        """With the size of now."""
        return Shared(self.files["train"], self.batch_size, ONE, is_training=True, echo=self.echo)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Too much, or not."""
        if len(batch[1]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(  # each part in both modes
    ("parts", "mode"),
    [
        *[("E", "power"), ("A", "binsearch"), ("R", "binsearch"), ("M", "power")],
        *[("E R M", "binsearch"), ("A R M", "power")],
    ],
)
def test_a_batch_size_is_found_beside_each_part_as_in_plain_lightning(files, parts, mode):
    runs = []
    for is_plain in (True, False):
        finder = BatchSizeFinder(mode, steps_per_trial=2, init_val=2, max_trials=3)
        callbacks = [*([] if is_plain else callbacks_of(parts)), finder]
        run = Run(files, parts, is_plain=is_plain, callbacks=callbacks)
        # The pieces of an echo are half as large as the batch.
        echo = ECHO if is_plain and "E" in parts else None
        run.model = Sized(files, echo, 5 // (2 if "E" in parts else 1), waits="A" in parts and not is_plain)
        run.data = {"val_dataloaders": run.data["val_dataloaders"]}
        runs.append(run.fit())
    plain, ours = runs
    assert ours.model.batch_size == plain.model.batch_size
    assert ours.model.batch_size in {"power": (4,), "binsearch": (3, 4, 5)}[mode]
    assert ours.differences(plain) == []


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize("parts", ["D", "D E R M", "D A R M"])
def test_the_batch_size_of_our_data_is_found(files, parts, mode):
    finder = BatchSizeFinder(mode, steps_per_trial=2, init_val=2, max_trials=2)
    run = Run(files, parts, callbacks=[finder, *callbacks_of(parts)], net={"failures": ()}).fit()
    size = run.data["datamodule"].batch_size
    assert size > 2
    again = Run(files, parts, net={"failures": ()})
    again.data["datamodule"].batch_size = size
    names = ("weights", "optimizers", "schedulers", "global_step", "epoch")
    assert set(run.differences(again.fit())) & set(names) == set()


REPLACED = {"process_dataloader", "batch_to_device", "validation_step", "test_step", "predict_step", "teardown"}
"""Of a strategy, where our callbacks stand."""


@pytest.mark.parametrize(
    ("finder", "parts"),
    [
        *[(LearningRateFinder, parts) for parts in PARTS + ALL],
        *[(BatchSizeFinder, parts) for parts in ("D", "D E R M", "D A R M")],  # it refuses ranks, and loaders as such
    ],
)
def test_an_error_in_the_trial_of_a_finder_leaves_nothing_behind(files, parts, finder):
    run = Run(files, parts, others=[finder], net={"failures": ()})
    run.model.training_step = failing_step
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit()
    assert vars(run.trainer.strategy).keys() & REPLACED == set()
    assert vars(run.trainer.fit_loop).keys() & {"setup_data"} == set()
    assert vars(run.trainer.fit_loop.epoch_loop).keys() & {"_on_before_fetch", "update_lr_schedulers"} == set()
    assert "_on_before_batch_transfer" not in vars(run.model)


@pytest.mark.parametrize("parts", PARTS)
def test_after_a_training_nothing_is_hooked_into_its_module(files, parts):
    run = Run(files, parts)
    run.fit()
    for module in run.model.modules():
        assert not any((module._forward_pre_hooks, module._forward_hooks, module._backward_hooks))
        assert "forward" not in vars(module)
    assert not any(parameter._backward_hooks for parameter in run.model.parameters())


def failing_step(batch: Any, batch_idx: int) -> torch.Tensor:
    """In the place of a module's."""
    raise RuntimeError("on purpose")
