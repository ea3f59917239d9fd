"""What is written down is true: examples run, pages name what exists, and every public name is documented.

Examples run in a folder that holds `train.h5`, `val.h5`, `floats.h5` (0 to 1), `digits.npy` and `photos/`, and, beside
what their module has, a `trainer` and a `model` that takes any batch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import doctest
import importlib
import inspect
import io
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import h5py
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch import Callback
from lightning.pytorch.strategies import Strategy
from PIL import Image

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
from lightning_gpufeed.cli.options import build_parser
from lightning_gpufeed.strategies.pipeline import PipelineStrategy
from tests.datamodules.models import make_trainer
from tests.docstring_texts import argument_names, argument_texts

ROOT = Path(__file__).parents[1]
PACKAGE = Path(lightning_gpufeed.__file__).parent
DOCS = ROOT / "docs"
WITHOUT_MEANING = {"static_graph", "gradient_as_bucket_view"}
"""Arguments of DDP that `OutOfOrderStrategy` takes without an effect."""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Examples in docstrings ----------------------------------------------------------------------------------------------

WITH_EXAMPLES = sorted(module_name(path) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text())


class AnyBatch(pl.LightningModule):
    """Trains on whatever a DataModule gives."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images = batch["images"] if isinstance(batch, dict) else batch[0]
        return self.scale * images.float().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files that examples speak of; `train.h5` also under memory://bucket."""
    folder = tmp_path_factory.mktemp("examples")
    random = np.random.default_rng(0)
    for name, count in (("train", 300), ("val", 60)):
        with h5py.File(folder / f"{name}.h5", "w") as h5_file:
            h5_file["images"] = random.integers(0, 256, (count, 3, 16, 16), dtype=np.uint8)
            h5_file["labels"] = random.permutation(np.arange(count) % 10)
            h5_file["labels"].attrs["class_names"] = list("abcdefghij")
            h5_file["patient"] = np.arange(count) // 4
    with h5py.File(folder / "floats.h5", "w") as h5_file:
        h5_file["images"] = random.integers(0, 256, (300, 3, 16, 16)).astype(np.float32) / np.float32(255)
    np.save(folder / "digits.npy", random.integers(0, 256, (20, 28, 28), dtype=np.uint8))
    for number in range(4):
        (folder / "photos" / f"kind{number % 2}").mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"kind{number % 2}" / f"{number}.png")
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/train.h5", (folder / "train.h5").read_bytes())
    yield folder
    store.rm("/bucket", recursive=True)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    module = importlib.import_module(name)
    found = [one for one in doctest.DocTestFinder(exclude_empty=True).find(module, name) if one.examples]
    assert found
    texts: list[str] = []
    for one in found:
        if re.search(r"\bmodel\b", one.docstring or ""):
            one.globs |= {"trainer": make_trainer(max_epochs=1), "model": AnyBatch()}
        doctest.DocTestRunner(verbose=False).run(one, out=texts.append)
        assert not [example.source for example in one.examples if doctest.SKIP in example.options]
    assert "".join(texts) == ""


# Pages ---------------------------------------------------------------------------------------------------------------

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("**/*.md")])


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclasses.dataclass(frozen=True)
class Block:
    """Code in a page.

    Attributes:
        line: Where it begins.
        language: As the fence says; "" for none, and for code that is indented.
        text: Without the fence.
    """

    line: int
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """Fenced blocks, and those that are indented after an empty line."""
    found, lines, number = [], page.splitlines(), 0
    while number < len(lines):
        fence = re.match(r"( *)(```+|~~~+)\s*(\w*)", lines[number])
        begin = number
        if fence:
            number += 1
            while number < len(lines) and not lines[number].strip().startswith(fence[2]):
                number += 1
            found.append(Block(begin + 2, fence[3], textwrap.dedent("\n".join(lines[begin + 1 : number]))))
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            found.append(Block(begin + 1, "", textwrap.dedent("\n".join(lines[begin:number]))))
            continue
        number += 1
    return found


def outside_of_blocks(page: str) -> str:
    return re.sub(r"^ *(```+|~~~+).*?^ *\1", "", page, flags=re.MULTILINE | re.DOTALL)


def public_classes() -> dict[str, Any]:
    names = [name for name in lightning_gpufeed.__all__ if inspect.isclass(getattr(lightning_gpufeed, name))]
    return {name: getattr(lightning_gpufeed, name) for name in names}


def problems_of_python(text: str) -> list[str]:
    """Names that do not exist, and calls that would be refused."""
    problems, known = [], public_classes()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning_gpufeed":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    problems.append(f"{node.module} has no {alias.name}")
                else:
                    known[alias.asname or alias.name] = getattr(module, alias.name)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "lightning_gpufeed":
                    importlib.import_module(alias.name)
    for node in ast.walk(tree):
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in known and callable(known[name]):
            problems += problems_of_call(name, known[name], node)
    return problems


def problems_of_call(name: str, called: Any, node: ast.Call) -> list[str]:
    """A keyword that is none, too many arguments, or a value that a part refuses."""
    keywords = {one.arg: one.value for one in node.keywords if one.arg is not None}
    signature = inspect.signature(called)
    extra = WITHOUT_MEANING if called is OutOfOrderStrategy else set()
    problems = [
        f"{name} has no argument {keyword}" for keyword in keywords if keyword not in {*signature.parameters, *extra}
    ]
    if not any(isinstance(one, ast.Starred) for one in node.args):
        try:
            signature.bind_partial(*node.args, **keywords)
        except TypeError as error:
            problems.append(f"{name}: {error}")
    if problems or not (inspect.isclass(called) and issubclass(called, (Callback, Strategy, pl.LightningDataModule))):
        return problems
    try:
        arguments = [ast.literal_eval(one) for one in node.args]
        values = {keyword: ast.literal_eval(value) for keyword, value in keywords.items()}
    except ValueError:  # an argument is no literal: nothing is known of it
        return []
    try:
        called(*arguments, **values)
    except ValueError as error:
        return [f"{name}: {error}"]
    return []


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_python_on_a_page_compiles_and_names_only_what_exists(path):
    problems = {}
    for block in blocks_of(path.read_text()):
        if block.language in ("python", "py"):
            found = problems_of_python(block.text)
            problems |= {f"line {block.line}": found} if found else {}
    assert problems == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from lightning_gpufeed import BatchEchoes", "lightning_gpufeed has no BatchEchoes"),
        ("BatchEcho(echo_factors=2)", "BatchEcho has no argument echo_factors"),
        ("x = [BatchEcho('auto', 3)]", "BatchEcho: too many positional arguments"),
        ("gpufeed.OOMRecovery(mode='half')", "OOMRecovery: mode is 'half'; expected 'microbatch' or 'shrink_loader'."),
        ("from lightning_gpufeed.hdf5.writer import pack as p\np(1, 2, kyes=3)", "p has no argument kyes"),
        ("OutOfOrderStrategy(bucket_cap_mb=25)", "OutOfOrderStrategy has no argument bucket_cap_mb"),
    ],
    ids=lambda value: value if "(" in value and " has " not in value else "",
)
def test_python_that_is_wrong_is_found(text, problem):
    assert problem in problems_of_python(text)


def test_python_that_is_right_is_not():
    text = "H5Loader(path, 3, shuffle=kind)\nOutOfOrderStrategy(static_graph=True)\nBatchEcho(*given, **more)"
    assert problems_of_python(text) == []


def yaml_problems(value: Any) -> list[str]:
    """Classes of this package that do not exist, or do not have such arguments."""
    if isinstance(value, list):
        return [problem for one in value for problem in yaml_problems(one)]
    if not isinstance(value, dict):
        return []
    problems = [problem for one in value.values() for problem in yaml_problems(one)]
    name = str(value.get("class_path", ""))
    if name.startswith("lightning_gpufeed.") or name in public_classes():
        called = getattr(lightning_gpufeed, name.rpartition(".")[2], None)
        names = set(inspect.signature(called).parameters) if called is not None else set()
        problems += [f"{name} has no {one}" for one in value.get("init_args") or {} if one not in names]
        problems += [] if called is not None else [f"there is no {name}"]
    return problems


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_yaml_on_a_page_names_only_what_exists(path):
    found = [
        yaml_problems(yaml.safe_load(b.text)) for b in blocks_of(path.read_text()) if b.language in ("yaml", "yml")
    ]
    assert [problem for problems in found for problem in problems] == []


def test_yaml_that_is_wrong_is_found():
    echo = "{class_path: lightning_gpufeed.BatchEcho, init_args: {factor: 2}}"
    text = f"trainer: {{callbacks: [{echo}, {{class_path: BatchEcho}}]}}"
    assert yaml_problems(yaml.safe_load(text)) == ["lightning_gpufeed.BatchEcho has no factor"]
    assert yaml_problems({"class_path": "lightning_gpufeed.Echo"}) == ["there is no lightning_gpufeed.Echo"]


# The command line on a page ------------------------------------------------------------------------------------------

COMMANDS = ("pack", "repack", "inspect", "doctor", "bench", "plan")


def command_lines(page: str) -> list[str]:
    """Lines of code that begin with the command, after a prompt if there is one; joined where a `\\` says so."""
    lines = [
        line
        for block in blocks_of(page)
        if block.language not in ("python", "py", "yaml")
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()
    ]
    return [match[1] for line in lines if (match := re.match(r"\s*(?:\$ )?gpufeed (\S.*)", line))]


def mentioned_commands(page: str) -> list[str]:
    """Code within a sentence or a table that begins with the command."""
    return [" ".join(text.split()) for text in re.findall(r"`gpufeed\s+([^`]+)`", outside_of_blocks(page))]


def command_error(line: str) -> str | None:
    """What the command would say of its arguments, without doing anything."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            build_parser("0").parse_args(shlex.split(line, comments=True))
    except SystemExit as end:  # --help
        return f"{line}: {said.getvalue()}" if end.code else None
    except ArgumentError as error:
        return f"{line}: {error}"
    return None


def options_of(command: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        build_parser("0").parse_args([command, "--help"])
    return said.getvalue()


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_commands_on_a_page_are_understood(path):
    page = path.read_text()
    assert [error for line in command_lines(page) if (error := command_error(line))] == []
    unknown = []
    for text in mentioned_commands(page):
        command, *words = text.replace("/", " ").split()
        options = [word.split("=")[0].strip(",.[]") for word in words if word.strip("[").startswith("--")]
        if command not in COMMANDS and command not in ("…", "..."):
            unknown.append(text)
        elif options:
            said = options_of(command)
            unknown += [f"{text}: no {option}" for option in options if option not in said]
    assert unknown == []


def test_a_wrong_command_is_found():
    page = "Say `gpufeed inspect FILE`:\n\n    gpufeed bench train.h5 --step-s 3\n\n"
    page += "```\n$ gpufeed pack a \\\n    b.h5\n```\n"
    assert command_lines(page) == ["bench train.h5 --step-s 3", "pack a  b.h5"]
    assert mentioned_commands(page) == ["inspect FILE"]
    assert "--step-s" in str(command_error("bench train.h5 --step-s 3"))
    assert command_error("pack a  b.h5  # a comment") is None
    assert command_error("unpack a") is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_command_has_a_description(command):
    [commands] = [action.choices for action in build_parser("0")._actions if isinstance(action.choices, dict)]
    assert set(commands) == set(COMMANDS)
    actions = [action for action in commands[command]._actions if action.help != argparse.SUPPRESS]
    assert [action.dest for action in actions if not (action.help or "").strip()] == []


def anchors_of(page: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", outside_of_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_within_the_repository_lead_somewhere(path):
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", outside_of_blocks(path.read_text())):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if re.match(r"\w+://|mailto:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target.read_text())):
            lost.append(link)
    assert lost == []


# Every public name ---------------------------------------------------------------------------------------------------


def public_things() -> dict[str, Any]:
    """What the package and its parts export, and what one of them turns into."""
    things = {f"{PipelineStrategy.__module__}.PipelineStrategy": PipelineStrategy}
    for path in sorted(PACKAGE.rglob("__init__.py")):
        module = importlib.import_module(module_name(path))
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                things[f"{thing.__module__}.{thing.__qualname__}"] = thing
    return things


THINGS = public_things()
HOOKED = {
    name: thing for name, thing in THINGS.items() if isinstance(thing, type) and issubclass(thing, (Callback, Strategy))
}


@pytest.mark.parametrize("name", THINGS)
def test_every_public_name_says_what_it_is_and_what_each_argument_is(name):
    thing = THINGS[name]
    first = inspect.cleandoc(vars(thing).get("__doc__") or thing.__doc__ or "").splitlines()[0]
    assert first.endswith(".")
    if inspect.isfunction(thing) or ("__init__" in vars(thing) and not getattr(thing, "_is_protocol", False)):
        texts = argument_texts(thing)
        names = [one for one in inspect.signature(thing).parameters if one != "self"]
        assert {one: texts.get(one, "") for one in names if len(texts.get(one, "")) < 8} == {}
        assert set(texts) <= set(names)


@pytest.mark.parametrize("name", [one for one in THINGS if not one.startswith("lightning_gpufeed.errors.")])
def test_every_public_name_that_is_no_error_has_an_example(name):
    assert ">>> " in (THINGS[name].__doc__ or "")


def hooks_written(cls: type) -> set[str]:
    """Public methods of Lightning's that the class has itself."""
    [base] = [one for one in (Callback, Strategy) if issubclass(cls, one)]
    return {name for name in vars(cls) if not name.startswith("_") and callable(getattr(base, name, None))}


@pytest.mark.parametrize("name", HOOKED)
def test_callbacks_and_strategies_have_a_table_of_their_hooks(name):
    text = inspect.cleandoc(HOOKED[name].__doc__ or "")
    table = re.search(r"^=+ +=+\nHook +what it does\n=+ +=+\n(.*?)^=+ +=+$", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert sorted(one for one in hooks_written(HOOKED[name]) if not re.search(rf"\b{one}\b", text)) == []


@pytest.mark.parametrize("name", HOOKED)
def test_callbacks_and_strategies_say_what_stays_bitwise_equal(name):
    assert "What stays bitwise equal" in (HOOKED[name].__doc__ or "")


def test_every_public_name_is_on_a_page():
    text = "\n".join(path.read_text() for path in DOCS.glob("**/*.md"))
    assert [name for name in lightning_gpufeed.__all__ if not re.search(rf"\b{re.escape(name)}\b", text)] == []


def test_the_list_of_pages_is_complete():
    listed = {link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", (DOCS / "README.md").read_text())}
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= listed


# Tables of arguments -------------------------------------------------------------------------------------------------

PAGE_OF: dict[str, list[Any]] = {
    "echo.md": [BatchEcho],
    "oom_recovery.md": [OOMRecovery],
    "feed_monitor.md": [FeedMonitor],
    "h5_datamodules.md": [H5ImageDataModule, H5DataModule, H5Loader],
    "out_of_order.md": [OutOfOrderStrategy],
    "pipeline.md": [OutOfOrderStrategy],
}
HEADINGS = [
    "What it does",
    "One line to use it",
    "When to use it",
    "When not",
    "What it costs",
    "What stays bitwise equal",
    "Options",
    "Figures",
    "How it works",
    "What goes wrong, and what is said then",
    "Source",
]


def option_rows(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """Names and defaults of each row of the tables of arguments."""
    [section] = re.findall(r"^## Options\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    column: int | None = None
    for line in section.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[:1] == ["argument"]:
            column = cells.index("default")
        elif not cells or cells[0] == "verdict":  # another table
            column = None
        elif column is not None and "`" in cells[0]:
            defaults = [] if "…" in cells[column] else re.findall(r"`([^`]+)`", cells[column])
            yield re.findall(r"`([^`]+)`", cells[0]), defaults


def parameters_of(parts: list[Any], name: str) -> list[Any]:
    """Defaults of an argument in each of the parts that has it."""
    found = [inspect.signature(part).parameters for part in parts]
    return [parameters[name].default for parameters in found if name in parameters]


@pytest.mark.parametrize("name", PAGE_OF)
def test_the_arguments_on_the_page_of_a_part_are_its_own_with_their_defaults(name):
    parts = PAGE_OF[name]
    page = (DOCS / name).read_text()
    missing = {one for part in parts for one in argument_names(part)}
    wrong = []
    for names, defaults in option_rows(page):
        missing -= set(names)
        wrong += [one for one in names if not parameters_of(parts, one) and one not in WITHOUT_MEANING]
        for one, default in zip(names, defaults * len(names) if len(defaults) == 1 else defaults, strict=False):
            with contextlib.suppress(ValueError):  # a sentence in place of a value
                found = parameters_of(parts, one)
                if ast.literal_eval(default) not in found:
                    wrong.append(f"{one}={default}")
    assert wrong == []
    assert missing == set() or name == "pipeline.md"  # which leaves those of data parallel training to the other page


@pytest.mark.parametrize("name", [*PAGE_OF, "gpufeed.md", "lightning_cli.md"])
def test_the_page_of_a_part_answers_the_same_questions_in_the_same_order(name):
    assert re.findall(r"^## (.*)$", outside_of_blocks((DOCS / name).read_text()), re.MULTILINE) == HEADINGS
