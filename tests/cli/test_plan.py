"""`gpufeed plan`: what it reads, what it finds, what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_gpufeed.cli.plan import plan_model, read_layers, transformer_layers
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.validate import validate
from lightning_gpufeed.sync.costs import LinkCosts
from lightning_gpufeed.sync.plan import SyncPlan
from tests.cli.commands import error_of

HEADER = "name,forward_ms,input_grad_ms,weight_grad_ms,gradient_mb,activation_mb\n"


def write_layers(count: int = 8) -> Path:
    path = Path("layers.csv")
    path.write_text(HEADER + "".join(f"layer {i},10,10,10,4,2\n" for i in range(count)))
    return path


def test_layers_are_read_in_seconds_and_bytes():
    first, *rest = read_layers(write_layers(3))
    assert len(rest) == 2
    costs = first.costs
    assert (costs.name, costs.forward_seconds, costs.input_grad_seconds, costs.weight_grad_seconds) == (
        "layer 0",
        0.01,
        0.01,
        0.01,
    )
    assert (costs.gradient_bytes, costs.deferred_bytes, first.activation_bytes) == (4_000_000, 2_000_000, 2_000_000)


def test_a_transformer_by_its_sizes_has_two_operations_for_each_weight_and_token():
    (block,) = transformer_layers(1, hidden=100, num_tokens=50, teraflops=1.0)
    assert block.costs.forward_seconds == pytest.approx(2 * 12 * 100 * 100 * 50 / 1e12)
    assert block.costs.gradient_bytes == 12 * 100 * 100 * 2


def test_a_pipeline_is_a_table_of_schedules_the_fastest_first_and_a_drawing(run):
    code, out, err = run("plan", write_layers(), "--ranks", 2, "--microbatches", 4)
    assert (code, err) == (0, "")
    assert out.startswith("8 layers, microbatches: 4, 960 ms of compute in a step on one device\n")
    rows = re.findall(r"^(\w+) +(\d+) +([\d.]+) ms +([\d.]+)% +[\d.]+ GB$", out, re.MULTILINE)
    assert {"gpipe", "one_f_one_b", "interleaved", "fast_forward", "zero_bubble", "zbv"} == {row[0] for row in rows}
    steps = [float(row[2]) for row in rows]
    assert steps == sorted(steps)
    gpipe = next(row for row in rows if row[:2] == ("gpipe", "1"))
    assert float(gpipe[2]) == 480 + 120  # ideal, and (P - 1)(F + I + W) of a stage of four layers
    assert len(re.findall(r"^rank \d", out, re.MULTILINE)) == 2


def test_every_schedule_of_the_report_can_be_carried_out(run):
    _, out, _ = run("plan", write_layers(), "--ranks", 2, "--microbatches", 4, "--json")
    report = json.loads(out)
    for one in report["schedules"]:
        validate(Schedule.parse(one["schedule"]))


def test_data_parallel_orders_are_compared_with_the_best_buckets_of_ddp(run):
    code, out, _ = run("plan", write_layers(12), "--link-gbit", 1.2, "--latency-us", 0)
    assert code == 0
    assert "data parallel: all gradients take 320 ms on the link" in out
    found = dict(re.findall(r"^(DDP|reverse|searched)[^\n]*? ([\d.]+)x$", out, re.MULTILINE))
    assert found["DDP"] == "1.00"
    assert 1.0 < float(found["reverse"]) <= float(found["searched"])


def test_the_best_order_of_the_report_is_a_plan():
    report = plan_model(read_layers(write_layers()), link=LinkCosts(0.0, 1e8))
    best = report.as_dict()["orders"][-1]
    assert SyncPlan.parse(best["plan"]) == report.orders[-1].plan


def test_earlier_microbatches_do_not_help_as_the_first_of_them_needs_all_parameters():
    layers = read_layers(write_layers())
    one, many = (plan_model(layers, num_microbatches=n, link=LinkCosts(0.0, 1e8)) for n in (1, 4))
    waiting = [report.orders[-1].seconds - report.compute_seconds for report in (one, many)]
    assert waiting[1] == pytest.approx(waiting[0])


def test_a_memory_limit_leaves_schedules_out(run):
    _, out, _ = run("plan", write_layers(), "--ranks", 2, "--microbatches", 8, "--memory-gb", 0.03)
    assert "gpipe " not in out
    assert "one_f_one_b" in out


def test_the_picture_is_an_svg(run):
    run("plan", write_layers(), "--ranks", 2, "--microbatches", 2, "--svg", "plan.svg")
    assert ElementTree.parse("plan.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either LAYERS.csv or --layers, and not both"),
        (["layers.csv", "--layers", "3"], "expected either LAYERS.csv or --layers, and not both"),
        (["--layers", "0"], "--layers is 0; expected at least 1"),
        (["--layers", "4", "--ranks", "8"], "num_ranks is 8; expected 1 to 4, the number of layers"),
        (["--layers", "4", "--ranks", "2", "--memory-gb", "0"], "No schedule keeps activations below 0 bytes"),
        (
            ["--layers", "4", "--svg", "x.svg"],
            "There is no pipeline to draw; expected --ranks of 2 or more with --svg.",
        ),
        (["--layers", "4", "--tflops", "0"], "--tflops is 0; expected more than 0"),
        (["missing.csv"], "missing.csv: No such file or directory"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_said_in_one_line(run, arguments, message):
    write_layers()
    assert message in error_of(run, "plan", *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,forward_ms\na,1\n", "has no column input_grad_ms, weight_grad_ms, gradient_mb, activation_mb"),
        (HEADER + "a,1,1,fast,1,1\n", "line 2: expected a number in each of"),
        (HEADER, "has no line but the names of the columns"),
        (HEADER + "a,1,-1,1,1,1\n", "input_grad_seconds of layer 'a' is -0.001"),
    ],
    ids=["a column is missing", "no number", "empty", "negative"],
)
def test_a_file_that_is_no_table_of_layers_is_refused(run, text, message):
    Path("layers.csv").write_text(text)
    assert message in error_of(run, "plan", "layers.csv")
