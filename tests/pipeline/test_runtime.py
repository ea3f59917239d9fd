"""The pipeline on real ranks (gloo, on the CPU) against a plain loop over the same microbatches, to the last bit.

Ranks are started once for each size of a group and do everything; the tests read what they wrote down. The names of
cases are those of the functions in pipeline_rank_worker.py, with what they are given.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpufeed.backprop.split import splittable_layers
from lightning_gpufeed.pipeline import generators
from lightning_gpufeed.pipeline.search import balanced
from lightning_gpufeed.pipeline.simulate import StageCosts, simulate
from tests.doubles import run_ranks
from tests.pipeline.pipeline_models import batches, build, loss_of, parts, plain_backward, plain_forward, sizes_of
from tests.pipeline.pipeline_rank_worker import LOSSES, halved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

WORKER = Path(__file__).with_name("pipeline_rank_worker.py")
LIMIT_SECONDS = 150
TIMEOUT_SECONDS = 10
"""How long a rank waits for another one before it fails, where none is expected to."""
PROMPT_SECONDS = 5
"""What has ended sooner has not waited for that."""

FUSED = ("one_f_one_b", "interleaved", "zero_bubble", "zbv")
SCHEDULES = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("fast_forward", 1),
    ("fast_forward", 2),
    ("one_f_one_b", 1),
    ("interleaved", 2),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
]
# Each schedule with one of the models on two ranks and with the other one on four: what a layer's gradients need
# (buffers, weight gradients of their own) has to do with the schedule, and not with the number of ranks. So each number
# of stages of a rank, and both kinds of phases, have both models on two and on four.
MATRIX = [
    *((("cnn", "transformer")[(i + i // 2) % 2], *one) for i, one in enumerate(SCHEDULES)),
    ("cnn", "fast_forward", 4),
]
MATRIX_OF_FOUR = [(("transformer", "cnn")[(i + i // 2) % 2], *one) for i, one in enumerate(SCHEDULES)]
IDS = "{0[0]}, {0[1]}, {0[2]}".format
EVALUATED = [1, 3, 8, 7]
"""Samples of batches of validation; there are 4 microbatches."""

TRAININGS: dict[str, dict[str, Any]] = {
    **{
        f"uneven, {name}": {"model": "mlp", "schedule": name, "num_virtual": number, "num_samples": 10}
        for name, number in (("fast_forward", 2), ("one_f_one_b", 1), ("zero_bubble", 2))
    },
    "one microbatch": {"model": "mlp", "schedule": "fast_forward", "num_virtual": 1, "num_microbatches": 1},
    "eval, fast_forward": {"model": "cnn", "schedule": "fast_forward", "num_virtual": 2, "is_eval": True},
    **{
        f"bf16, {name}": {"model": "mlp", "schedule": name, "num_virtual": 2, "dtype": "bfloat16"}
        for name in ("fast_forward", "zero_bubble")
    },
    **{
        f"autocast, {name}": {"model": model, "schedule": name, "num_virtual": 2, "is_autocast": True}
        for name, model in (("fast_forward", "transformer"), ("zero_bubble", "transformer"), ("interleaved", "cnn"))
    },
    **{
        f"checkpointed, {name}": {"model": "transformer", "schedule": name, "num_virtual": 2, "is_checkpointed": True}
        for name in ("fast_forward", "zero_bubble")
    },
}
DROPPED = [("fast_forward", 1), ("fast_forward", 4), ("one_f_one_b", 1), ("zero_bubble", 2), ("zbv", 2)]
DROPPED_BY_FOUR = [("fast_forward", 2), ("zbv", 2)]
WHOLE_BATCH = [
    (loss, name, number)
    for loss in ("root mean square", "contrastive")
    for name, number in (("one_f_one_b", 1), ("zbv", 2))
]
OTHER_BATCHES = [("values", 0), ("order", 2), ("number", 0), ("number", 2), ("smaller", 0)]
"""What is different, after so many steps with the same."""


NO_MEANS = [(loss, dtype) for loss in ("nearly a mean", "coupled") for dtype in ("float32", "bfloat16")]
BOTH_WAYS = ("fast_forward", "one_f_one_b")
LAYOUTS = [(model, *one) for model in ("turned", "channels last") for one in (("fast_forward", 4), ("zero_bubble", 2))]
IN_BOTH_WAYS = (
    "all_frozen",
    "before_it",
    "siamese",
    "let_go",
    "changed_output",
    "two_losses",
    "shared_factor",
    "precise",
)
LAST = [(model, *one) for model in ("cnn", "mlp") for one in (("fast_forward", 2), ("one_f_one_b", 1))]


def case(name: str, function: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "function": function, "arguments": arguments}


def trainings(matrix: list[tuple[str, str, int]], evaluated: list[int]) -> list[dict[str, Any]]:
    return [
        case(IDS(one), "training", model=one[0], schedule=one[1], num_virtual=one[2], evaluated=evaluated)
        for one in matrix
    ]


def cases_of_two() -> list[dict[str, Any]]:
    fused, noted = "one_f_one_b", {"num_samples": 64, "model": "mlp"}
    return [
        *trainings(MATRIX, EVALUATED),
        *(case(name, "training", **arguments) for name, arguments in TRAININGS.items()),
        *(case(f"nested, {one}", "nested", schedule=one, num_virtual=2) for one in ("fast_forward", "zero_bubble")),
        *(case(f"freezing, {one}", "freezing", schedule=one, num_virtual=2) for one in ("fast_forward", "interleaved")),
        *(case(f"dropping out, {one}, {v}", "dropping_out", schedule=one, num_virtual=v) for one, v in DROPPED),
        case("dropping out, checkpointed", "dropping_out", schedule="zbv", num_virtual=2, is_checkpointed=True),
        *(
            case(f"{model}, last, {one}", "smaller_last", model=model, schedule=one, num_virtual=v)
            for model, one, v in LAST
        ),
        *(case(f"{name}, {one}", name, schedule=one) for name in IN_BOTH_WAYS for one in BOTH_WAYS),
        *trainings(LAYOUTS, []),
        *(case(f"adversarial, {how}", "adversarial", schedule="fast_forward", how=how) for how in ("grad", "inputs")),
        case("adversarial, second", "adversarial", schedule="fast_forward", how="grad", is_second=True),
        case("hooked", "hooked", schedule="fast_forward"),
        *(case(name, name) for name in ("abandoned", "unused_head", "twice", "without_grad", "other_modes")),
        *(case(name, name) for name in ("too_small", "no_samples")),
        *(case(f"note, {kind}", "notes", kind=kind) for kind in ("texts", "nan", "array")),
        *(
            case(f"{loss}, {one}", "falling_back", loss=loss, schedule=one, num_virtual=v)
            for loss, one, v in WHOLE_BATCH
        ),
        *(case(f"mean, {one}", "falling_back", loss="mean", schedule=one, num_virtual=2) for one in FUSED[1:]),
        case("mean, autocast", "falling_back", loss="mean", schedule=fused, is_autocast=True, model="mlp"),
        case("rms, autocast", "falling_back", loss="root mean square", schedule=fused, is_autocast=True, model="mlp"),
        case("averaged", "falling_back", loss="root mean square", schedule=fused, model="averaged"),
        *(case(f"{a}, {b}", "falling_back", loss=a, schedule=fused, dtype=b, **noted) for a, b in NO_MEANS),
        case(
            "few left out",
            "falling_back",
            loss="few left out",
            schedule=fused,
            dtype="bfloat16",
            model="mlp",
            num_samples=256,
        ),
        case("coupled, autocast", "falling_back", loss="coupled", schedule=fused, is_autocast=True, **noted),
        *(case(f"{loss}, parts", "falling_back", loss=loss, schedule=fused) for loss in ("raising", "without graph")),
        *(case(name, name, schedule=fused) for name in ("augmented", "masked_words", "scaled", "not_a_number")),
        case("not a number, everywhere", "not_a_number", schedule=fused, loss="with nothing"),
        case("unused lane", "unused_head", model="two lanes"),
        case("in place", "in_place", model="in place", num_virtual=4),
        case("changes its input", "in_place", model="changes its input"),
        *(
            case(f"other {what}, {number}", "other_batches", what=what, num_before=number)
            for what, number in OTHER_BATCHES
        ),
        case("other_shapes", "other_shapes"),
        case("infinite", "other_batches", what="infinite", num_before=0),
        *(case(f"failing, {rank}", "failing_layer", schedule="fast_forward", failing_rank=rank) for rank in (0, 1)),
    ]


def cases_of_four() -> list[dict[str, Any]]:
    return [
        *trainings(MATRIX_OF_FOUR, [1, 7]),
        *(
            case(f"dropping out, {one}, 2", "dropping_out", schedule=one, num_virtual=2)
            for one in ("fast_forward", "zbv")
        ),
        case("before_it, zbv", "before_it", schedule="zbv", num_virtual=2),
        case("replicas", "replicas"),
        case("failing, 2", "failing_layer", schedule="fast_forward", failing_rank=2),
    ]


# What ranks wrote down ---------------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """What each rank wrote down, by the name of the case."""

    folder: Path
    log: str
    num_ranks: int

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        files = [self.folder / f"{name}.{rank}.pt" for rank in range(self.num_ranks)]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise LookupError(f"{missing} were never written:\n{self.log[-4000:]}")
        results = [torch.load(file, weights_only=False) for file in files]
        for rank, result in enumerate(results):
            if "failed" in result:
                raise RuntimeError(f"rank {rank} failed in {name!r}: {result['failed']}")
        return results

    def whole(self, name: str) -> list[dict[str, Any]]:
        """Where no error was noted."""
        results = self[name]
        for rank, result in enumerate(results):
            assert result.get("error", {}).get("type") is None, f"rank {rank} in {name!r}: {result['error']}"
        return results

    def errors(self, name: str) -> list[tuple[str | None, str]]:
        """Types and texts, by rank."""
        return [(result["error"]["type"], result["error"]["text"]) for result in self[name]]


def run(folder: Path, cases: list[dict[str, Any]], num_ranks: int, **more: Any) -> Ranks:
    plan = {"world_size": num_ranks, "cases": cases, "out": str(folder), "timeout_seconds": TIMEOUT_SECONDS, **more}
    text = run_ranks(WORKER, plan, folder, num_processes=num_ranks, limit_seconds=LIMIT_SECONDS)
    return Ranks(folder, text, num_ranks)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(tmp_path_factory.mktemp("two"), cases_of_two(), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(tmp_path_factory.mktemp("four"), cases_of_four(), 4)


# What they are compared with ---------------------------------------------------------------------------------------


@cache
def trained(
    name: str,
    is_fused: bool,
    accumulations: tuple[int, ...] = (1, 2),
    num_samples: int = 8,
    num_microbatches: int = 4,
    is_eval: bool = False,
    dtype: str = "float32",
    is_autocast: bool = False,
    loss: str = "mean",
) -> tuple[nn.Sequential, list[float]]:
    """The same steps in this process, without a pipeline."""
    kind = getattr(torch, dtype)
    model = build(name).to(kind).train(not is_eval)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = iter(batches(name, sum(accumulations), num_samples))
    losses = []
    for accumulation in accumulations:
        for _ in range(accumulation):
            x, y = (one.to(kind) if one.is_floating_point() else one for one in next(data))
            context = torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext()
            with context:
                losses.append(
                    plain_backward(
                        model, x, y, num_microbatches, scale=1 / accumulation, is_fused=is_fused, loss=LOSSES[loss]
                    )
                )
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


@cache
def graded(name: str, first: int = 0, num_batches: int = 1, **options: Any) -> nn.Sequential:
    """Gradients of a batch or more, added up."""
    model = build(name)
    for x, y in batches("mlp" if name == "two heads" else name, first + num_batches, 8)[first:]:
        plain_backward(model, x, y, 4, **options)
    return model


def assert_state(results: list[dict[str, Any]], model: nn.Module) -> None:
    """Weights and buffers of all ranks together are those of the model."""
    found = {name: one for result in results for name, one in result["state"].items()}
    assert {name for name, one in model.state_dict().items() if not torch.equal(found[name], one)} == set()
    assert len(found) == sum(len(result["state"]) for result in results)


def assert_grads(results: list[dict[str, Any]], model: nn.Module) -> None:
    """Gradients likewise; None where there is none."""
    found = {name: one for result in results for name, one in result["grads"].items()}
    for name, parameter in model.named_parameters():
        assert (found[name] is None) == (parameter.grad is None), name
        assert parameter.grad is None or torch.equal(found[name], parameter.grad), name


def assert_losses(results: list[dict[str, Any]], losses: list[float]) -> None:
    """The same on all ranks. A mean of means is rounded in another way than a mean: 1e-6 of it."""
    for result in results:
        assert [float(one) for one in result["losses"]] == pytest.approx(losses, rel=1e-6)
        assert all(map(torch.equal, result["losses"], results[0]["losses"]))


def peaks(name: str, schedule: str, num_virtual: int, num_ranks: int, num_microbatches: int = 4) -> tuple[int, ...]:
    """What the simulator says. A stage whose layers cannot wait keeps nothing for its weight gradients."""
    made = getattr(generators, schedule)(num_ranks, num_microbatches, num_virtual)
    layers = list(build(name))
    stages = balanced([1.0] * len(layers), made.num_stages)
    is_waiting = [bool(splittable_layers(nn.ModuleList(layers[one.start : one.stop]))[0]) for one in stages]
    return simulate(made, [StageCosts(deferred_bytes=int(one)) for one in is_waiting]).peak_activations


def check_training(ranks: Ranks, cell: tuple[str, str, int], evaluated: list[int]) -> None:
    name, schedule, num_virtual = cell
    results = ranks.whole(IDS(cell))
    model, losses = trained(name, schedule in FUSED)
    assert_state(results, model.train())
    assert_losses(results, losses)
    assert [result["why_split"] for result in results] == [None] * ranks.num_ranks
    assert tuple(result["peak"] for result in results) == peaks(name, schedule, num_virtual, ranks.num_ranks)
    assert [(result["live"], result["pending"]) for result in results] == [(0, 0)] * ranks.num_ranks
    model.eval()
    for place, number in enumerate(evaluated):
        expected = plain_forward(model, batches(name, 1, number)[0][0], number, 4)
        assert all(torch.equal(result["outputs"][place], expected) for result in results), number


# The matrix --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", MATRIX, ids=IDS)
def test_two_ranks_train_as_one_device_does_on_the_same_microbatches_and_hold_what_is_simulated(two, cell):
    check_training(two, cell, EVALUATED)


@pytest.mark.parametrize("cell", MATRIX_OF_FOUR, ids=IDS)
def test_four_ranks_train_as_one_device_does_on_the_same_microbatches_and_hold_what_is_simulated(four, cell):
    check_training(four, cell, [1, 7])


@pytest.mark.parametrize("name", TRAININGS)
def test_other_sizes_types_and_modes_train_as_one_device_does_to_the_last_bit(two, name):
    options = {
        key: value for key, value in TRAININGS[name].items() if key not in ("model", "num_virtual", "is_checkpointed")
    }
    schedule = options.pop("schedule")
    model, losses = trained(TRAININGS[name]["model"], schedule in FUSED, **options)
    results = two.whole(name)
    assert_state(results, model)
    # In bf16 a mean of means is rounded twice more, each time to one of 256.
    rel = 2 / 256 if "dtype" in options else 1e-6
    assert [float(one) for one in results[0]["losses"]] == pytest.approx(losses, rel=rel)
    assert results[0]["why_split"] is None


@pytest.mark.parametrize("schedule", ["fast_forward", "zero_bubble"])
def test_dicts_with_masks_and_numbers_go_through_and_a_tuple_comes_out_on_every_rank(two, schedule):
    results = two.whole(f"nested, {schedule}")
    model, losses = nested(schedule in FUSED)
    assert_state(results, model)
    assert_losses(results, losses)
    assert [result["kind"] for result in results] == ["tuple", "tuple"]
    assert torch.equal(results[0]["classes"], results[1]["classes"])
    assert results[0]["classes"].dtype == torch.int64


def nested(is_fused: bool, num_steps: int = 2) -> tuple[nn.Sequential, list[float]]:
    """Steps in this process."""
    model = build("nested")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, y in batches("nested", num_steps, 8):
        losses.append(plain_backward(model, x, y, 4, is_fused=is_fused))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


@pytest.mark.parametrize("schedule", ["fast_forward", "interleaved"])
def test_frozen_layers_stay_as_they_are_and_learn_once_they_are_not_frozen(two, schedule):
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(batches("mlp", 3, 8)):
        model[:5].requires_grad_(step > 0)
        plain_backward(model, x, y, 4, is_fused=schedule in FUSED)
        optimizer.step()
        optimizer.zero_grad()
    assert_state(two.whole(f"freezing, {schedule}"), model)


# Random numbers ----------------------------------------------------------------------------------------------------


def test_what_is_dropped_out_depends_neither_on_ranks_nor_on_the_schedule_nor_on_checkpointing(two, four):
    names = [*(f"dropping out, {name}, {number}" for name, number in DROPPED), "dropping out, checkpointed"]
    results = [two.whole(name)[0] for name in names]
    results += [four.whole(f"dropping out, {name}, {number}")[0] for name, number in DROPPED_BY_FOUR]
    assert len({tuple(map(float, result["losses"])) for result in results}) == 1


def test_random_numbers_outside_of_the_pipeline_do_not_notice_it(two, four):
    for name in ("dropping out, fast_forward, 1", "dropping out, zbv, 2", "dropping out, checkpointed"):
        assert all(result["is_untouched"] for result in two.whole(name))
    assert all(result["is_untouched"] for result in four.whole("dropping out, zbv, 2"))


def test_pipelines_beside_each_other_have_their_own_batches_and_drop_out_something_else(four):
    results = four.whole("replicas")
    assert [result["ranks"] for result in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [result["replicas"] for result in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    for replica in (0, 1):
        assert_grads(results[2 * replica : 2 * replica + 2], graded("mlp", replica))
    dropped = [float(result["dropped"]) for result in results]
    assert dropped[0] == dropped[1] != dropped[2] == dropped[3]


# Around the pipeline -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "schedule"), [("two", "fast_forward"), ("two", "one_f_one_b"), ("four", "zbv")])
def test_a_layer_before_the_pipeline_gets_the_same_gradient_on_every_rank(request, size, schedule):
    results = request.getfixturevalue(size).whole(f"before_it, {schedule}")
    model = build("mlp")
    torch.manual_seed(11)
    first = nn.Linear(8, 8)
    for x, y in batches("mlp", 2, 8):
        hidden = first(x)
        leaf = hidden.detach().requires_grad_()
        plain_backward(model, leaf, y, 4, is_fused=schedule in FUSED)
        hidden.backward(leaf.grad)
    assert_grads(results, model)
    for result in results:
        assert torch.equal(result["first"][0], first.weight.grad)
        assert torch.equal(result["first"][1], first.bias.grad)


@pytest.mark.parametrize("schedule", BOTH_WAYS)
def test_a_layer_before_a_frozen_pipeline_gets_its_gradient_with_detect_anomaly_too(two, schedule):
    results = two.whole(f"all_frozen, {schedule}")
    model = build("mlp").requires_grad_(False)
    torch.manual_seed(11)
    first = nn.Linear(8, 8)
    (x, y), *_ = batches("mlp", 1, 8)
    hidden = first(x)
    leaf = hidden.detach().requires_grad_()
    plain_backward(model, leaf, y, 4)
    hidden.backward(leaf.grad)
    for result in results:
        assert torch.equal(result["first"][0], first.weight.grad)
        assert torch.equal(result["first"][1], first.bias.grad)
        assert set(result["grads"].values()) == {None}


@pytest.mark.parametrize("schedule", BOTH_WAYS)
def test_an_input_without_samples_gets_the_gradient_of_all_microbatches(two, schedule):
    results = two.whole(f"shared_factor, {schedule}")
    model = build("nested")
    (x, y), *_ = batches("nested", 1, 8)
    factor = torch.full((1,), 0.7, requires_grad=True)
    outputs = [model({**one, "factor": factor})[0] for one in parts(x, sizes_of(8, 4))]
    loss_of(torch.cat(outputs), y).backward()
    for result in results:
        # Four gradients are added up in another order.
        torch.testing.assert_close(result["factor"], factor.grad, rtol=1e-5, atol=1e-6)
        assert result["why_split"] is None


@pytest.mark.parametrize("schedule", BOTH_WAYS)
def test_layers_that_leave_autocast_have_gradients_in_full_precision(two, schedule):
    results = two.whole(f"precise, {schedule}")
    assert_grads(results, graded("precise", is_fused=schedule in FUSED))  # without any autocast
    assert results[0]["why_split"] is None


def test_types_of_activations_may_be_others_in_evaluation(two):
    model = build("rounded")
    (x, y), other = batches("mlp", 2, 8)
    plain_backward(model, x, y.bfloat16(), 4)
    plain_backward(model.eval(), *other, 4)
    assert_grads(two.whole("other_modes"), model)


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_the_gradient_of_the_input_alone_adds_nothing_to_parameters(two, how):
    (x, y), *_ = batches("mlp", 1, 8)
    leaf = x.clone().requires_grad_()
    plain_backward(build("mlp"), leaf, y, 4)
    model = build("mlp")
    plain_backward(model, x + 0.1 * leaf.grad.sign(), y, 4)
    assert_grads(two.whole(f"adversarial, {how}"), model)


def test_nor_does_it_take_away_what_an_earlier_batch_has_added(two):
    (x, y), other = batches("mlp", 2, 8)
    leaf = x.clone().requires_grad_()
    plain_backward(build("mlp"), leaf, y, 4)
    model = build("mlp")
    plain_backward(model, *other, 4)
    plain_backward(model, x + 0.1 * leaf.grad.sign(), y, 4)
    assert_grads(two.whole("adversarial, second"), model)


def test_hooks_of_parameters_are_called_as_in_a_loop_over_microbatches(two):
    results = two.whole("hooked")
    model = build("mlp")
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    plain_backward(model, *batches("mlp", 1, 8)[0], 4)
    assert_grads(results, model)
    for result in results:
        assert {result["calls"].count(name) for name in result["grads"]} == {4}


@pytest.mark.parametrize("cell", LAYOUTS, ids=IDS)
def test_layouts_of_memory_change_no_more_than_roundings(two, cell):
    results = two.whole(IDS(cell))
    model, losses = trained(cell[0], cell[1] in FUSED)
    found = {name: one for result in results for name, one in result["state"].items()}
    for name, one in model.state_dict().items():
        # Where kernels for another layout are taken: a few units in the last place of a weight of about 1.
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-6)
    assert_losses(results, losses)


def test_layouts_of_images_are_kept_from_rank_to_rank(two):
    for cell in LAYOUTS[2:]:
        assert_state(two.whole(IDS(cell)), trained(cell[0], cell[1] in FUSED)[0])


@pytest.mark.parametrize("schedule", ["fast_forward", "one_f_one_b"])
def test_three_calls_before_one_backward_add_up(two, schedule):
    results = two.whole(f"siamese, {schedule}")
    model = build("mlp")
    (x, y), (other, _) = batches("mlp", 2, 8)

    def through(value):
        return torch.cat([model(one) for one in parts(value, sizes_of(8, 4))])

    one, two_ = through(x), through(other)
    loss = loss_of(one, y) + loss_of(through(one), two_)
    loss.backward()
    found = {name: grad for result in results for name, grad in result["grads"].items()}
    for name, parameter in model.named_parameters():
        # Twelve gradients are added up in another order: a few units in the last place of the largest.
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0]["loss"], loss.detach())
    if schedule in FUSED:
        assert results[0]["why_split"] == "training_step calls the model more than once"


@pytest.mark.parametrize("schedule", BOTH_WAYS)
def test_a_stage_is_told_to_be_complete_after_the_last_of_three_calls_alone(two, schedule):
    assert [result["told"] for result in two.whole(f"siamese, {schedule}")] == [[0], [1]]


def test_a_loss_without_gradients_leaves_nothing_behind(two):
    results = two.whole("without_grad")
    (x, y), *_ = batches("mlp", 1, 8)
    expected = loss_of(plain_forward(build("mlp"), x, 8, 4), y)
    for result in results:
        assert torch.equal(result["loss"], expected)
        assert result["peak"] == result["live"] == 0
        assert all(grad is None for grad in result["grads"].values())


def test_backward_a_second_time_is_refused_and_the_next_step_is_right(two):
    assert {(kind, text.split(";")[0]) for kind, text in two.errors("twice")} == {
        ("ScheduleError", "backward came to the pipeline's output a second time")
    }
    assert_grads(two["twice"], graded("mlp"))


def test_a_first_batch_smaller_than_the_microbatches_is_refused_with_numbers_and_later_ones_are_not(two):
    assert {(kind, text.split(";")[0]) for kind, text in two.errors("too_small")} == {
        ("ScheduleError", "The batch has 3 samples, and num_microbatches is 4")
    }
    model = build("mlp")
    (x, y), *_ = batches("mlp", 1, 8)
    plain_backward(model, x, y, 4)
    plain_backward(model, x[:3], y[:3], 4)
    assert_grads(two["too_small"], model)


def test_an_input_without_samples_is_refused(two):
    assert all(kind == "ScheduleError" and "no tensor with samples" in text for kind, text in two.errors("no_samples"))


def test_a_step_after_forwards_that_were_given_up_is_right(two):
    assert_grads(two.whole("abandoned"), graded("mlp"))


def test_after_forwards_that_were_given_up_every_rank_is_told_its_stages(two):
    assert [result["told"] for result in two.whole("abandoned")] == [[0], [1]]


def test_forwards_that_were_given_up_do_not_count_as_activations(two):
    assert [(result["live"], result["peak"]) for result in two.whole("abandoned")] == [(0, 4), (0, 4)]


@pytest.mark.parametrize("schedule", ["fast_forward", "one_f_one_b"])
def test_a_batch_is_let_go_as_soon_as_its_step_is_over(two, schedule):
    assert not any(alive for result in two.whole(f"let_go, {schedule}") for alive in result["alive"])


def test_parameters_that_the_loss_does_not_use_have_no_gradient(two):
    assert_grads(two.whole("unused_head"), graded("two heads"))


def test_nor_have_those_on_ranks_before_the_last_one_that_lead_to_what_is_not_used(two):
    assert_grads(two.whole("unused lane"), graded("two lanes"))


@pytest.mark.parametrize("schedule", BOTH_WAYS)
def test_the_output_may_be_changed_in_place(two, schedule):
    assert_grads(two.whole(f"changed_output, {schedule}"), graded("mlp", loss=halved))


def test_an_output_that_is_changed_in_place_does_not_end_fusing(two):
    assert two["changed_output, one_f_one_b"][0]["why_split"] is None


def test_layers_may_change_their_input_in_place_where_stages_meet(two):
    assert_grads(two.whole("in place"), graded("in place"))


@pytest.mark.parametrize("kind", ["texts", "nan"])
def test_other_texts_and_numbers_in_each_step_go_through(two, kind):
    assert_state(two.whole(f"note, {kind}"), nested(False, 3)[0])


def test_other_arrays_in_each_step_go_through(two):
    assert_state(two.whole("note, array"), nested(False, 3)[0])


@pytest.mark.parametrize(("model", "schedule", "num_virtual"), LAST)
def test_a_smaller_last_batch_is_that_of_a_plain_loop_with_two_samples_for_statistics_at_least(
    two, model, schedule, num_virtual
):
    plain = build(model)
    (x, y), *_ = batches(model, 1, 8)
    plain_backward(plain, x, y, 4, is_fused=schedule in FUSED)
    plain_backward(plain, x[:5], y[:5], 2 if model == "cnn" else 4, is_fused=schedule in FUSED)
    results = two.whole(f"{model}, last, {schedule}")
    assert_grads(results, plain)
    assert_state(results, plain)


# Fused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zbv"])
def test_a_mean_over_samples_stays_fused(two, schedule):
    results = two.whole(f"mean, {schedule}")
    model, losses = trained("batch norm", True, (1, 1))
    assert_state(results, model)
    assert_losses(results, losses)
    assert [result["why_split"] for result in results] == [None, None]
    assert tuple(result["peak"] for result in results) == peaks("batch norm", schedule, 2, 2)


@pytest.mark.parametrize(("loss", "schedule", "num_virtual"), WHOLE_BATCH)
def test_a_loss_of_the_whole_batch_is_exact_in_the_same_step_and_so_are_statistics(two, loss, schedule, num_virtual):
    results = two.whole(f"{loss}, {schedule}")
    model, losses = trained("batch norm", False, (1, 1), loss=loss)
    assert_state(results, model)
    assert_losses(results, losses)
    assert {result["why_split"] for result in results} == {"the loss of a batch is not the mean of those of its parts"}


def test_random_augmentation_falls_back_in_the_same_step_and_says_why(two):
    results = two.whole("augmented")
    model = build("batch norm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(13)
    for x, y in batches("batch norm", 2, 8):
        plain_backward(model, x + torch.randn_like(x), y, 4)
        optimizer.step()
        optimizer.zero_grad()
    assert_state(results, model)
    assert {float(result["drawn"]) for result in results} == {float(torch.rand(1))}
    assert all("as if drawn anew" in result["why_split"] for result in results)


def test_words_that_are_left_out_at_random_fall_back_in_the_same_step_and_it_is_said_why(two):
    results = two.whole("masked_words")
    model = build("transformer")
    (x, y), *_ = batches("transformer", 1, 8)
    torch.manual_seed(13)
    plain_backward(model, torch.where(torch.rand(x.shape) < 0.5, 0, x), y, 4)
    assert_grads(results, model)
    assert all("as if drawn anew" in result["why_split"] for result in results)


@pytest.mark.parametrize("loss", ["raising", "without graph"])
def test_a_training_step_that_cannot_do_with_a_part_falls_back_in_the_same_step_and_says_why(two, loss):
    results = two.whole(f"{loss}, parts")
    assert_state(results, trained("batch norm", False, (1, 1))[0])
    assert all(result["why_split"] for result in results)


def test_autocast_stays_fused(two):
    results = two.whole("mean, autocast")
    assert_state(results, trained("mlp", True, (1, 1), is_autocast=True)[0])
    assert results[0]["why_split"] is None


def test_a_loss_of_the_whole_batch_is_exact_under_autocast_too(two):
    results = two.whole("rms, autocast")
    assert_state(results, trained("mlp", False, (1, 1), is_autocast=True, loss="root mean square")[0])


def test_buffers_that_are_new_tensors_each_time_are_as_after_one_pass(two):
    results = two.whole("averaged")
    assert_state(results, trained("averaged", False, (1, 1), loss="root mean square")[0])


@pytest.mark.parametrize(("loss", "dtype"), NO_MEANS)
def test_a_loss_that_is_nearly_a_mean_is_not_taken_for_one(two, loss, dtype):
    results = two.whole(f"{loss}, {dtype}")
    assert all(result["why_split"] for result in results)
    model, _ = trained("mlp", False, (1, 1), num_samples=64, dtype=dtype, loss=loss)
    assert_state(results, model)


def test_nor_is_one_whose_parts_have_gradients_that_are_a_little_larger_as_a_whole(two):
    results = two.whole("few left out")
    assert {result["why_split"] for result in results} == {"the loss of a batch is not the mean of those of its parts"}
    model, _ = trained("mlp", False, (1, 1), num_samples=256, dtype="bfloat16", loss="few left out")
    assert_state(results, model)


def test_nor_under_autocast(two):
    results = two.whole("coupled, autocast")
    assert all(result["why_split"] for result in results)
    model, _ = trained("mlp", False, (1, 1), num_samples=64, is_autocast=True, loss="coupled")
    assert_state(results, model)


def test_a_loss_that_is_scaled_behind_its_back_is_exact(two):
    assert_grads(two.whole("scaled"), graded("mlp", scale=1024))


def test_one_batch_that_overflows_does_not_end_fusing(two):
    results = two.whole("not_a_number")
    assert_grads(results, graded("mlp", 1, is_fused=True))
    assert results[0]["why_split"] is None


def test_nor_does_one_that_overflows_in_the_whole_batch_and_in_one_part_of_it(two):
    results = two.whole("not a number, everywhere")
    assert_grads(results, graded("mlp", 1, is_fused=True))
    assert [result["why_split"] for result in results] == [None, None]


@pytest.mark.parametrize("schedule", ["fast_forward", "one_f_one_b"])
def test_one_backward_of_two_losses_has_the_gradients_of_both(two, schedule):
    found = {name: one for result in two.whole(f"two_losses, {schedule}") for name, one in result["grads"].items()}
    for name, parameter in graded("mlp", 0, 2).named_parameters():
        # The second one's gradients come first, so they are added up in another order.
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


# What goes wrong ---------------------------------------------------------------------------------------------------


def test_a_first_layer_that_changes_the_batch_in_place_is_refused_by_name(two):
    kind, text = two.errors("changes its input")[0]
    assert kind == "ScheduleError"
    assert "(Centred) changes its input in place" in text


@pytest.mark.parametrize(("what", "number"), [one for one in OTHER_BATCHES if one[0] in ("values", "order")])
def test_other_samples_on_another_rank_are_refused(two, what, number):
    kind, text = two.errors(f"other {what}, {number}")[0]
    assert (kind, text.split(";")[0]) == ("ScheduleError", "The ranks of one pipeline were given different batches")


@pytest.mark.parametrize(("what", "number"), [one for one in OTHER_BATCHES if one[0] in ("number", "smaller")])
def test_another_number_of_samples_on_another_rank_is_refused_at_once(two, what, number):
    errors = two.errors(f"other {what}, {number}")
    expected = "different batches|has 3 samples, and num_microbatches is 4"
    assert any(kind == "ScheduleError" and re.search(expected, text) for kind, text in errors), errors


def test_activations_of_another_shape_for_a_batch_of_the_same_are_refused_with_both_shapes(two):
    kind, text = two.errors("other_shapes")[0]
    assert kind == "ScheduleError"
    assert text.startswith("Stage 0 gives (2, 4, 2) float32 where it gave (2, 2, 4) float32")


def test_infinite_values_are_no_difference(two):
    two.whole("infinite")


@pytest.mark.parametrize(("size", "failing"), [("two", 0), ("two", 1), ("four", 2)])
def test_a_layer_that_raises_on_one_rank_ends_the_others_within_the_timeout(request, size, failing):
    ranks = request.getfixturevalue(size)
    results = ranks[f"failing, {failing}"]
    for rank, (kind, text) in enumerate(ranks.errors(f"failing, {failing}")):
        if rank == failing:
            assert (kind, text) == ("ValueError", "this layer fails")
        else:
            assert kind == "SyncError"
            assert text.startswith(f"Rank {rank} failed in waiting for ")
            assert "another rank is gone" in text
        assert results[rank]["error"]["seconds"] < PROMPT_SECONDS


def test_a_rank_that_is_killed_ends_the_others_at_once_with_a_word_on_what_they_were_at(tmp_path):
    ranks = run(tmp_path, [case("dying", "dying", schedule="fast_forward")], 3, ends_badly=True)
    for rank in (0, 2):
        error = torch.load(tmp_path / f"dying.{rank}.pt", weights_only=False)["error"]
        assert error["type"] == "SyncError", ranks.log
        assert re.search(rf"^Rank {rank} failed in (waiting for .*|sending): another rank is gone", error["text"])
        assert error["seconds"] < PROMPT_SECONDS
    assert not (tmp_path / "dying.1.pt").exists()
