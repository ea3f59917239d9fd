"""All parts under LightningCLI: one YAML with every argument, the configuration it saves, its help, its errors.

What each part does with each form of an argument is tested beside the part (`test_*_yaml.py`).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
import runpy
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy

import lightning_gpufeed
from lightning_gpufeed import (
    BatchEcho,
    FeedMonitor,
    H5DataModule,
    H5ImageDataModule,
    H5Loader,
    OOMRecovery,
    OutOfOrderStrategy,
)
from lightning_gpufeed.pipeline.generators import zero_bubble
from lightning_gpufeed.strategies.pipeline import PipelineStrategy
from tests.datamodules.models import make_trainer, same_bits, state_of
from tests.docstring_texts import argument_names, argument_texts
from tests.doubles import run_ranks
from tests.lightning_cli_parts import EveryPart, Net, end_of, run_program, write_files

pytestmark = [
    pytest.mark.timeout(200),
    # Lightning 2.6 registers its instantiators under a name that jsonargparse is going to drop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore:batch_size .* is more than the dataset has:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),  # checkpoints go elsewhere here
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning"),
]

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
WORKER = Path(__file__).with_name("lightning_cli_worker.py")
EVERYTHING: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("every_argument.yaml").read_text())
CALLBACKS = [BatchEcho, FeedMonitor, OOMRecovery]
PARTS: list[Any] = [*CALLBACKS, OutOfOrderStrategy, H5ImageDataModule, H5DataModule, H5Loader]
LIMIT_SECONDS = 150


def with_trainer(**changes: Any) -> dict[str, Any]:
    """The configuration with other settings of the Trainer."""
    return EVERYTHING | {"trainer": EVERYTHING["trainer"] | changes}


def but(part: type) -> list[dict[str, Any]]:
    return [one for one in EVERYTHING["trainer"]["callbacks"] if not one["class_path"].endswith(part.__name__)]


CONFIGS = {
    "recovery": with_trainer(strategy="auto"),
    "out of order": with_trainer(callbacks=but(OOMRecovery)),
}
"""What excludes each other is left out of one of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("lightning_cli"))


@pytest.fixture(autouse=True)
def _beside_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def run(command: str, config: Any, *arguments: str, **settings: Any) -> LightningCLI:
    """Run `train.py COMMAND --config CONFIG ARGUMENTS`; a value is written to a file before."""
    if not isinstance(config, Path):
        text, config = yaml.safe_dump(config, sort_keys=False), Path("config_given.yaml")
        config.write_text(text)
    return run_program([command, f"--config={config}", *arguments], EveryPart, **settings)


# One YAML with every argument ----------------------------------------------------------------------------------------


def written_of(part: type) -> dict[str, Any]:
    """Arguments of a part in the YAML."""
    places = [EVERYTHING["data"], EVERYTHING["arrays"], EVERYTHING["trainer"]["strategy"]]
    places += EVERYTHING["trainer"]["callbacks"]
    found = {place["class_path"]: place["init_args"] for place in places}
    found["lightning_gpufeed.H5Loader"] = EVERYTHING["loader"]
    return found[f"lightning_gpufeed.{part.__name__}"]


def test_every_public_class_is_in_the_yaml():
    public = {getattr(lightning_gpufeed, name) for name in lightning_gpufeed.__all__}
    assert set(PARTS) == {one for one in public if inspect.isclass(one) and not issubclass(one, Exception)}


@pytest.mark.parametrize("part", PARTS)
def test_the_yaml_names_every_argument(part):
    assert list(written_of(part)) == argument_names(part)


def object_of(written: Any) -> Any:
    """What a value of the YAML stands for, made without LightningCLI."""
    if isinstance(written, dict) and "class_path" in written:
        module, _, name = written["class_path"].rpartition(".")
        return getattr(importlib.import_module(module), name)(**object_of(written.get("init_args", {})))
    if isinstance(written, dict):
        return {name: object_of(value) for name, value in written.items()}
    if isinstance(written, list):
        return [object_of(value) for value in written]
    if isinstance(written, str) and written.startswith("tests."):
        module, _, name = written.rpartition(".")
        return getattr(importlib.import_module(module), name)
    if isinstance(written, str) and re.fullmatch(r"\d+:\d\d:\d\d", written):
        hours, minutes, seconds = map(int, written.split(":"))
        return timedelta(hours=hours, minutes=minutes, seconds=seconds)
    return written


def state(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """All that an object of ours holds, as plain values; of the objects of others their type."""
    if id(value) in seen:
        return "itself"
    if isinstance(value, Mapping):
        return {key: state(one, (*seen, id(value))) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [state(one, (*seen, id(value))) for one in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bool | int | float | str | Path | timedelta | torch.device | torch.dtype | None):
        return value
    if inspect.isroutine(value) or inspect.isclass(value):
        return getattr(value, "__qualname__", repr(value))
    name = type(value).__qualname__
    if type(value).__module__.startswith(("lightning_gpufeed", "lightning.pytorch.strategies")):
        return name, {key: state(one, (*seen, id(value))) for key, one in getattr(value, "__dict__", {}).items()}
    return name


@pytest.fixture(scope="module")
def built(folder: Path) -> LightningCLI:
    """All parts, made from the YAML by LightningCLI."""
    with contextlib.chdir(folder):
        return run_program(
            [f"--config={Path(__file__).with_name('every_argument.yaml')}"],
            EveryPart,
            run=False,
            save_config_callback=None,
        )


def part_of(cli: LightningCLI, part: type) -> Any:
    parts = [*cli.trainer.callbacks, cli.trainer.strategy, cli.datamodule]
    parts += [cli.config_init.arrays, cli.config_init.loader]
    [found] = [one for one in parts if type(one) is part]
    return found


@pytest.mark.parametrize("part", [one for one in PARTS if one is not OutOfOrderStrategy])
def test_every_argument_arrives_as_it_is_written(built, part):
    expected = part(**object_of(written_of(part)))
    assert state(part_of(built, part)) == state(expected)


def test_every_argument_of_the_strategy_arrives_as_it_is_written(built):
    """The Trainer has given it its devices since."""
    expected = OutOfOrderStrategy(**object_of(written_of(OutOfOrderStrategy)))
    found = part_of(built, OutOfOrderStrategy)
    names = ["_options", "_pipeline_options", "_verify_every", "_find_unused_parameters", "_broadcast_buffers"]
    names += ["_timeout", "_start_method", "_process_group_backend", "checkpoint_io", "cluster_environment"]
    assert state([getattr(found, name) for name in names]) == state([getattr(expected, name) for name in names])


def test_a_second_datamodule_and_a_loader_from_the_yaml_can_be_read(built):
    arrays, loader = built.config_init.arrays, built.config_init.loader
    arrays.setup("fit")
    assert {len(batch["state"]) for batch in arrays.train_dataloader()} == {6}
    arrays.teardown("fit")
    with loader:
        images, labels = next(iter(loader))
        assert (len(images), len(labels), loader.num_samples) == (8, 8, 10)


# Training, and going on from what it saved ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_goes_on_from_its_saved_configuration_and_a_checkpoint_to_the_same_bits(folder, name):
    root = name.replace(" ", "_")
    whole = run("fit", CONFIGS[name], f"--trainer.default_root_dir={root}")
    assert whole.trainer.global_step == 40
    checkpoints = sorted((folder / root / "checkpoints").glob("*.ckpt"))
    assert len(checkpoints) == 8
    middle = next(one for one in checkpoints if one.stem == "step-25")  # after one of the four steps of a batch
    saved = Path(root, "config.yaml")
    again = run("fit", saved, f"--ckpt_path={middle}", f"--trainer.default_root_dir={root}_again")
    assert len(again.model.losses) < len(whole.model.losses)
    assert same_bits(end_of(again), end_of(whole))
    first, second = (yaml.safe_load(Path(one, "config.yaml").read_text()) for one in (root, f"{root}_again"))
    assert second["ckpt_path"] == str(middle)
    second["ckpt_path"], second["trainer"]["default_root_dir"] = None, root
    assert second == first
    evaluated = run("validate", saved, f"--ckpt_path={checkpoints[-1]}", save_config_callback=None)
    assert same_bits(evaluated.trainer.callback_metrics, whole.trainer.callback_metrics)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_from_the_yaml_is_bitwise_that_of_the_same_objects_made_by_hand(name):
    settings = {one: object_of(value) for one, value in CONFIGS[name]["trainer"].items()}
    trainer = make_trainer(**settings | {"default_root_dir": f"{name} by hand", "enable_checkpointing": True})
    trainer.fit(model := Net(8), datamodule=object_of(EVERYTHING["data"]))
    cli = run("fit", CONFIGS[name], f"--trainer.default_root_dir={name} by yaml", save_config_callback=None)
    assert len(set(model.losses)) > 20
    assert cli.model.losses == model.losses
    assert same_bits(end_of(cli), state_of(trainer, model))


@pytest.mark.parametrize("command", ["validate", "test"])
@pytest.mark.parametrize("name", CONFIGS)
def test_evaluation_from_the_yaml_is_that_of_a_trainer_made_by_hand(name, command):
    trainer = make_trainer()
    [expected] = getattr(trainer, command)(Net(8), datamodule=object_of(EVERYTHING["data"]), verbose=False)
    assert list(expected) == [f"{command.replace('validate', 'val')}_loss"]
    cli = run(command, CONFIGS[name], "--trainer.default_root_dir=evaluated", save_config_callback=None)
    assert {metric: value.item() for metric, value in cli.trainer.callback_metrics.items()} == expected


def test_parts_that_exclude_each_other_say_so(folder):
    with pytest.raises(ValueError, match="OOMRecovery cannot work here: OutOfOrderStrategy sends gradients"):
        run("fit", EVERYTHING, save_config_callback=None)


# Options that choose an algorithm, as text ----------------------------------------------------------------------------

SHUFFLES = ["full", "window", "window:6", "none", None, True, False]
SCHEDULES = ["fast_forward", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "auto", str(zero_bubble(2, 4, 2))]
FORMS: dict[str, list[Any]] = {
    "data.shuffle": SHUFFLES,
    "data.image_layout": ["auto", "NCHW", "NHWC", "NHW"],
    "data.mean": ["auto", None, 0.5],
    "data.sample_weights": ["balanced", "importance", None],
    "arrays.shuffle": SHUFFLES,
    "loader.shuffle": SHUFFLES,
    "loader.path": ["train.h5", ["train.h5", "more.h5"]],
    "loader.keys": [["images", "labels"], "images", {"x": "images"}, None],
    "loader.indices": [[3, 1, 2], None],
    "loader.weights": [None, [0.5, 1.0, 0.25]],
    "data.train": ["train.h5", ["train.h5", "more.h5"]],
    "data.val": [None, 0.25, "used", [1, 3], [True, False, True], ["test.h5", "more.h5"]],
    "BatchEcho.echo_factor": ["auto", 2],
    "BatchEcho.scale_lr": ["inverse", "keep", None],
    "BatchEcho.replay": ["last.ckpt", {0: [1, 2, 1]}, None],
    "OOMRecovery.mode": ["microbatch", "shrink_loader"],
    "OOMRecovery.loss_reduction": ["mean", "sum"],
    "OOMRecovery.split_check": ["refuse", "warn", "skip"],
    "OOMRecovery.scale_lr": ["linear", "sqrt", "keep", None],
    "strategy.reverse_first_k": ["auto", 12],
    "strategy.cross_iteration": ["auto", True, False],
    "strategy.bucket_bytes": ["auto", 4096],
    "strategy.start_method": ["popen", "spawn", "fork", "forkserver"],
    "strategy.process_group_backend": ["gloo", "nccl", None],
    "strategy.schedule": SCHEDULES,
    "strategy.layers_per_stage": ["auto", 3],
    "strategy.timeout": ["0:05:00", None],
}


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with other values of arguments."""
    config = copy.deepcopy(EVERYTHING)
    for place, value in changes.items():
        arguments_in(config, place)[place.partition(".")[2]] = value
    return config


def arguments_in(config: dict[str, Any], place: str) -> dict[str, Any]:
    """Those of the part that the first word names."""
    part, trainer = place.partition(".")[0], config["trainer"]
    if part == "loader":
        return config["loader"]
    if part in ("data", "arrays"):
        return config[part]["init_args"]
    [found] = (
        [trainer["strategy"]] if part == "strategy" else [c for c in trainer["callbacks"] if part in c["class_path"]]
    )
    return found["init_args"]


def rounds() -> list[dict[str, Any]]:
    """Every value of every option in one of a few configurations."""
    count = max(map(len, FORMS.values()))
    return [{name: values[number % len(values)] for name, values in FORMS.items()} for number in range(count)]


@pytest.fixture(scope="module")
def parser(built: LightningCLI) -> Any:
    """Reads and writes configurations as `fit` does, and raises in place of ending the program."""
    built.parser.exit_on_error = False
    return built.parser


@pytest.mark.parametrize("changes", rounds(), ids=range(len(rounds())))
def test_every_form_survives_being_saved_and_read_as_the_text_it_is(parser, changes):
    config = parser.parse_object(changed(changes))
    text = parser.dump(config, skip_none=False)
    saved = yaml.safe_load(text)
    found = {place: arguments_in(saved, place)[place.partition(".")[2]] for place in changes}
    assert found == {place: as_saved(value) for place, value in changes.items()}
    again = parser.parse_string(text)
    assert again.as_dict() == config.as_dict()
    assert parser.dump(again, skip_none=False) == text


def as_saved(value: Any) -> Any:
    """Numbers that are keys are saved as text, and are numbers again when they are read."""
    if isinstance(value, dict):
        return {str(key) if isinstance(key, int) else key: as_saved(one) for key, one in value.items()}
    return value


def test_what_is_printed_as_the_configuration_is_the_same_again_when_it_is_read(capsys):
    texts = []
    config: Any = EVERYTHING
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            run("fit", config, "--print_config")
        texts.append(capsys.readouterr().out)
        config = yaml.safe_load(texts[-1])
    assert texts[0] == texts[1]
    for part in ("BatchEcho.", "OOMRecovery.", "FeedMonitor.", "strategy.", "data.", "arrays.", "loader."):
        assert arguments_in(config, part) == as_saved(arguments_in(EVERYTHING, part)) | transforms(config, part)


def transforms(config: dict[str, Any], part: str) -> dict[str, Any]:
    """Those that are classes: saved with arguments that they have not been given."""
    saved = arguments_in(config, part)
    return {
        name: one for name, one in saved.items() if isinstance(one, dict) and one.keys() == {"class_path", "init_args"}
    }


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("data.shuffle", "random", "expected 'full', 'window', 'window:N' (N samples) or None"),
        ("loader.shuffle", "window:x", "expected 'full', 'window', 'window:N' (N samples) or None"),
        ("arrays.shuffle", "window:0", "window_samples is 0; expected at least 1"),
        ("data.image_layout", "CHW", "['auto', 'NCHW', 'NHWC', 'NHW']"),
        ("data.mean", "zero", "Literal['auto']"),
        ("BatchEcho.echo_factor", "often", "Literal['auto']"),
        ("BatchEcho.scale_lr", "sqrt", "Literal['inverse', 'keep']"),
        ("OOMRecovery.mode", "half", "Literal['microbatch', 'shrink_loader']"),
        ("OOMRecovery.loss_reduction", "max", "Literal['mean', 'sum']"),
        ("OOMRecovery.split_check", "no", "Literal['refuse', 'warn', 'skip']"),
        ("OOMRecovery.scale_lr", "cubic", "Literal['linear', 'sqrt', 'keep']"),
        ("strategy.reverse_first_k", "all", "Literal['auto']"),
        ("strategy.cross_iteration", "never", "Literal['auto']"),
        ("strategy.schedule", "fastest", "expected one of 'fast_forward', 'gpipe', '1f1b', 'interleaved'"),
        ("strategy.start_method", "thread", "Literal['popen', 'spawn', 'fork', 'forkserver']"),
        ("strategy.timeout", "soon", 'Expected a string with form "h:m:s"'),
        ("strategy.static_graph", True, "Option 'static_graph' is not accepted"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_a_wrong_value_is_an_error_that_says_which_there_are(parser, place, value, said):
    with pytest.raises((ArgumentError, ValueError)) as refused:
        parser.instantiate_classes(parser.parse_object(changed({place: value})))
    assert said in str(refused.value)


# Help ----------------------------------------------------------------------------------------------------------------


def said_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the program prints before it ends well, in one line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit, match="0"):
            run_program(arguments, EveryPart)
    return " ".join(capsys.readouterr().out.split())


HELP_OF = {
    BatchEcho: "trainer.callbacks",
    FeedMonitor: "trainer.callbacks",
    OOMRecovery: "trainer.callbacks",
    OutOfOrderStrategy: "trainer.strategy",
    H5ImageDataModule: "data",
    H5DataModule: "arrays",
    H5Loader: "loader",
}


def without_help(part: Any, said: str) -> list[str]:
    """Arguments that are not there, or not with the text of their docstring."""
    texts = {name: " ".join(argument_texts(part).get(name, "").split()) for name in argument_names(part)}
    place = HELP_OF[part]
    missing = []
    for name, text in texts.items():
        value = r"(?: \S+| \{[^}]*\}|(?: \[[A-Z]+,\.\.\.\]))"
        names = rf"--{place}\.{name}(?:{value})?(?:, --{place}\.{name}\+(?:{value})?)?"
        if not text or not re.search(rf"{names} {re.escape(text)} \((?:type|required, type): ", said):
            missing.append(name)
    return missing


@pytest.mark.parametrize("part", PARTS)
def test_help_has_every_argument_with_its_own_description(part, capsys):
    """By the name alone, as a user types it once `lightning_gpufeed` is imported."""
    options = ["--help"] if part is H5Loader else [f"--{HELP_OF[part]}.help={part.__name__}"]
    assert without_help(part, said_by(["fit", *options], capsys)) == []


@pytest.mark.parametrize("part", PARTS)
def test_each_description_says_something_of_its_own(part):
    texts = [argument_texts(part)[name] for name in argument_names(part)]
    assert len(set(texts)) == len(texts)
    assert [text for text in texts if re.search(r"^(The same|Likewise|As in)\b|\babove\b|\bbelow\b(?! `)", text)] == []
    assert [text for text in texts if not text.endswith(".")] == []


def test_the_printed_configuration_has_the_descriptions_as_comments(capsys):
    pytest.importorskip("ruamel.yaml", reason="jsonargparse writes comments with ruamel.yaml alone")
    Path("config_given.yaml").write_text(yaml.safe_dump(EVERYTHING))
    with pytest.raises(SystemExit, match="0"):
        run_program(["fit", "--config=config_given.yaml", "--print_config=comments"], EveryPart)
    printed = capsys.readouterr().out
    said = " ".join(re.sub(r"^\s*#", "", printed, flags=re.MULTILINE).split())
    for part in PARTS:
        texts = [" ".join(argument_texts(part).get(name, "").split()) for name in argument_names(part)]
        assert [text for text in texts if text not in said] == []
    assert yaml.safe_load(printed)["data"]["class_path"] == "lightning_gpufeed.H5ImageDataModule"


# What DDP takes, and names -------------------------------------------------------------------------------------------


def test_arguments_of_ddp_without_an_effect_have_a_place_and_stay_in_what_is_saved(parser):
    config = copy.deepcopy(EVERYTHING)
    config["trainer"]["strategy"]["dict_kwargs"] = {"static_graph": True}
    parsed = parser.parse_object(config)
    assert isinstance(parser.instantiate_classes(parsed).trainer.strategy, OutOfOrderStrategy)
    saved = yaml.safe_load(parser.dump(parsed, skip_none=False))
    assert saved["trainer"]["strategy"]["dict_kwargs"] == {"static_graph": True}


def test_arguments_of_ddp_that_have_no_place_say_what_to_use(parser):
    config = copy.deepcopy(EVERYTHING)
    config["trainer"]["strategy"]["dict_kwargs"] = {"bucket_cap_mb": 25}
    with pytest.raises(ValueError, match="bucket_cap_mb is given; expected bucket_bytes, in bytes, or 'auto'"):
        parser.instantiate_classes(parser.parse_object(config))


def test_a_class_can_be_named_without_its_package(parser):
    text = yaml.safe_dump(EVERYTHING).replace("class_path: lightning_gpufeed.", "class_path: ")
    assert "lightning_gpufeed" not in text
    assert parser.parse_string(text).as_dict() == parser.parse_object(copy.deepcopy(EVERYTHING)).as_dict()


# The example ---------------------------------------------------------------------------------------------------------

OVERLAYS = sorted(EXAMPLES.glob("lightning_cli_*.yaml"))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_each_addition_to_the_example_is_what_it_says(overlay):
    arguments = [f"--config={EXAMPLES / 'lightning_cli.yaml'}", f"--config={overlay}", "--trainer.accelerator=cpu"]
    model = runpy.run_path(str(EXAMPLES / "lightning_cli.py"))["Classifier"]
    cli = run_program(arguments, LightningCLI, model_class=model, run=False, save_config_callback=None)
    parts = {type(one) for one in cli.trainer.callbacks} & set(CALLBACKS)
    assert (cli.trainer.num_devices, type(cli.trainer.strategy), parts) == {
        "lightning_cli_oom_recovery": (2, DDPStrategy, {OOMRecovery, FeedMonitor}),
        "lightning_cli_out_of_order": (2, OutOfOrderStrategy, {BatchEcho, FeedMonitor}),
        "lightning_cli_pipeline": (2, PipelineStrategy, {FeedMonitor}),
    }[overlay.stem]


# On two ranks --------------------------------------------------------------------------------------------------------

WITH_PIPELINE = {
    "pipeline_size": 2,
    "num_microbatches": 2,
    "pipeline_module": "layers",
    "schedule": "zero_bubble",
    "layers_per_stage": 2,
    "process_group_backend": "gloo",
    "timeout": "0:01:00",
}
ON_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "recovery": ("DDPStrategy", with_trainer(devices=2, strategy="ddp")),
    "out_of_order": ("OutOfOrderStrategy", with_trainer(devices=2, callbacks=but(OOMRecovery))),
    "pipeline": (
        "PipelineStrategy",
        with_trainer(
            devices=2,
            callbacks=but(OOMRecovery),
            strategy={"class_path": "lightning_gpufeed.OutOfOrderStrategy", "init_args": WITH_PIPELINE},
        ),
    ),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Run all trainings on two ranks, started once; gives what each rank has of one of them."""
    out, folder = tmp_path_factory.mktemp("out"), write_files(tmp_path_factory.mktemp("ranks"))
    trainings: dict[str, dict[str, Any]] = {}
    for name, (_, config) in ON_RANKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        trainings[name] = {"config": f"{name}.yaml"}
    example = EXAMPLES / "lightning_cli.py"
    example_files(folder / "example")
    for overlay in OVERLAYS:
        configs = [str(example.with_suffix(".yaml")), str(overlay), str(folder / "example" / "here.yaml")]
        trainings[overlay.stem] = {"script": str(example), "configs": configs}
    plan = {"world_size": 2, "out": str(out), "folder": str(folder), "trainings": trainings}
    log = run_ranks(WORKER, plan, out, num_processes=2, limit_seconds=LIMIT_SECONDS)

    def results(name: str) -> list[dict[str, Any]]:
        files = [out / f"{name}.{rank}.pt" for rank in range(2)]
        assert all(file.exists() for file in files), log[-4000:]
        found = [torch.load(file, weights_only=False) for file in files]
        assert not [result["error"] for result in found if "error" in result]
        return [result | {"folder": folder} for result in found]

    return results


def example_files(folder: Path) -> None:
    """Small files for the example, and a configuration that names them."""
    folder.mkdir()
    write_images = runpy.run_path(str(EXAMPLES / "lightning_cli.py"))["write_images"]
    for name in ("train", "test"):
        write_images(folder / f"{name}.h5", 300, seed=0)
    init_args = {name: str(folder / f"{name}.h5") for name in ("train", "test")}
    (folder / "here.yaml").write_text(yaml.safe_dump({"data": {"init_args": init_args}}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks_go_on_from_what_they_saved_to_the_same_bits(ranks, name):
    for result in ranks(name):
        assert result["strategy"] == ON_RANKS[name][0]
        assert same_bits(result["again"], result["whole"])
        assert 0 < result["losses_again"] < result["losses"]
    first, second = ranks(name)
    assert same_bits(first["whole"]["weights"], second["whole"]["weights"])
    saved = yaml.safe_load((first["folder"] / name / "config.yaml").read_text())
    given = ON_RANKS[name][1]["trainer"]["strategy"]
    assert saved["trainer"]["devices"] == 2
    if isinstance(given, dict):
        assert saved["trainer"]["strategy"]["init_args"].items() >= given["init_args"].items()


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_two_ranks_train_with_each_addition_to_the_example(ranks, overlay):
    first, second = ranks(overlay.stem)
    assert first["whole"]["global_step"] > 0
    assert same_bits(first["whole"]["weights"], second["whole"]["weights"])
