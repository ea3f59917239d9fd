"""The queue counts what it keeps alive and computes each task exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpufeed.backprop.kernels import Kernels
from lightning_gpufeed.backprop.tasks import Call, Task, TaskQueue
from lightning_gpufeed.errors import DeferredGradientError


@dataclass
class Noting(Kernels):
    """Gradient of ones, and a note of each computation."""

    notes: list[tuple[bool, bool]]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError

    def input_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> Tensor:
        raise AssertionError

    def weight_grad(
        self, grad_output: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        self.notes.append(mask)
        grads = torch.ones_like(weight), torch.ones(weight.shape[0], dtype=weight.dtype)
        return (grads[0] if mask[0] else None, grads[1] if mask[1] else None)


def make_call(
    kernels: Kernels, x: Tensor, weight: Tensor, grad: Tensor | None = None, *, is_cast_shared: bool = False
) -> Call:
    grad = torch.ones(x.shape[0], weight.shape[0]) if grad is None else grad
    return Call(kernels, grad, x, weight, (x._version, grad._version), is_cast_shared)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def test_calls_of_one_backward_are_one_task_and_of_another_backward_another():
    queue, weight, notes = TaskQueue(), parameter(2, 3), []
    for number in (1, 1, 2):
        queue.add("a", weight, None, number, make_call(Noting(notes), torch.ones(4, 3), weight))
    assert [(task.name, task.number, len(task.calls)) for task in queue] == [("a", 1, 2), ("a", 2, 1)]
    queue.run(["a"])
    assert (len(queue), len(notes)) == (0, 3)
    assert torch.equal(weight.grad, torch.full((2, 3), 3.0))


def test_running_again_computes_nothing_again():
    queue, weight, notes = TaskQueue(), parameter(2, 3), []
    queue.add("a", weight, None, 1, make_call(Noting(notes), torch.ones(4, 3), weight))
    for _ in range(3):
        queue.run(["a"])
        queue.run()
    assert len(notes) == 1


def test_all_tasks_run_in_the_order_asked_for_else_oldest_first():
    done: list[str] = []
    for names, expected in ((["c", "a", "b"], ["c", "a", "b"]), (None, ["a", "b", "c"]), (["b"], ["b"])):
        queue = TaskQueue()
        for name in "abc":
            weight = parameter(2, 3)
            weight.register_post_accumulate_grad_hook(lambda _, name=name: done.append(name))
            queue.add(name, weight, None, 1, make_call(Noting([]), torch.ones(4, 3), weight))
        done.clear()
        queue.run(names)
        assert done == expected


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "none"])
def test_only_what_is_not_frozen_is_computed(frozen):
    weight, bias, notes = parameter(2, 3), parameter(2), []
    queue = TaskQueue()
    queue.add("a", weight, bias, 1, make_call(Noting(notes), torch.ones(4, 3), weight))
    weight.requires_grad_(frozen not in ("weight", "both"))
    bias.requires_grad_(frozen not in ("bias", "both"))
    queue.run()
    assert notes == ([] if frozen == "both" else [(weight.requires_grad, bias.requires_grad)])
    assert (weight.grad is not None, bias.grad is not None) == (weight.requires_grad, bias.requires_grad)
    assert queue.num_bytes == 0


@pytest.mark.parametrize("what", ["input", "gradient of the output"])
def test_what_was_changed_in_place_meanwhile_is_an_error_that_names_the_layer(what):
    queue, weight = TaskQueue(), parameter(2, 3)
    call = make_call(Noting([]), torch.ones(4, 3), weight)
    queue.add("encoder.layer", weight, None, 1, call)
    (call.x if what == "input" else call.grad_output).add_(1)
    with pytest.raises(DeferredGradientError, match=f"^The {what} of encoder.layer was changed in place"):
        queue.run()
    assert weight.grad is None


@pytest.mark.parametrize("is_shared", [True, False])
def test_several_calls_under_autocast_are_added_where_autograd_adds_them(is_shared):
    """1 and 2^-9: their sum needs more digits than bfloat16 has."""
    weight, grads = parameter(1, 1), iter([1.0, 2**-9])

    class Given(Noting):
        def weight_grad(self, grad_output, x, weight, mask):
            return torch.full((1, 1), next(grads), dtype=torch.bfloat16), None

    task = Task("a", weight, None, 1)
    for _ in range(2):
        task.calls.append(make_call(Given([]), torch.ones(1, 1), weight, is_cast_shared=is_shared))
    total, _ = task.grads()
    assert total.dtype == torch.float32
    assert total.item() == (1.0 if is_shared else 1 + 2**-9)


def test_a_sum_so_far_takes_the_place_of_what_it_was_computed_from():
    queue, weight, notes = TaskQueue(), parameter(2, 3), []
    queue.add("a", weight, None, 1, make_call(Noting(notes), torch.ones(4, 3), weight))
    (task,) = queue
    queue.fold(task)
    assert (queue.num_bytes, len(queue), task.calls, weight.grad) == (0, 1, [], None)
    queue.add("a", weight, None, 1, make_call(Noting(notes), torch.ones(4, 3), weight))
    queue.run()
    assert torch.equal(weight.grad, torch.full((2, 3), 2.0))
    assert len(notes) == 2


# Bytes -------------------------------------------------------------------------------------------------------


def test_shared_memory_is_counted_once_and_until_its_last_user_has_run():
    queue, x = TaskQueue(), torch.ones(4, 3)
    weights = {name: parameter(2, 3) for name in "qkv"}
    for name, weight in weights.items():
        queue.add(name, weight, None, 1, make_call(Noting([]), x, weight))
    assert queue.num_bytes == 4 * 3 * 4 + 3 * (4 * 2 * 4)
    queue.run(["k"])
    assert queue.num_bytes == 4 * 3 * 4 + 2 * (4 * 2 * 4)
    queue.run()
    assert queue.num_bytes == 0


def test_a_view_counts_as_all_that_it_keeps_alive():
    queue, weight, base = TaskQueue(), parameter(2, 3), torch.ones(100, 3)
    queue.add("a", weight, None, 1, make_call(Noting([]), base[:4], weight))
    assert queue.num_bytes == 100 * 3 * 4 + 4 * 2 * 4


def test_a_cast_weight_counts_and_the_weight_itself_does_not():
    queue, weight = TaskQueue(), parameter(2, 3)
    queue.add("a", weight, None, 1, make_call(Noting([]), torch.ones(4, 3), weight))
    plain = queue.num_bytes
    queue.clear()
    queue.add("a", weight, None, 1, make_call(Noting([]), torch.ones(4, 3), weight.detach().bfloat16()))
    assert queue.num_bytes == plain + 2 * 3 * 2


def test_clear_forgets_everything():
    queue, weight = TaskQueue(), parameter(2, 3)
    queue.add("a", weight, None, 1, make_call(Noting([]), torch.ones(4, 3), weight))
    queue.clear()
    assert (len(queue), queue.num_bytes, list(queue)) == (0, 0, [])
    queue.run()
    assert weight.grad is None


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.integers(0, 2), st.integers(0, 2))))
def test_bytes_are_those_of_the_distinct_memory_of_what_waits(adds):
    queue = TaskQueue()
    weights = {name: parameter(2, 3) for name in "abc"}
    inputs, grads = [torch.ones(n + 1, 3) for n in range(3)], [torch.ones(n + 1, 2) for n in range(3)]
    for name, number, x, grad in adds:
        call = make_call(Noting([]), inputs[x], weights[name], grads[grad])
        queue.add(name, weights[name], None, number, call)
    for run in (None, "a", "b", "c"):
        if run:
            queue.run([run])
        left = {id(t): t for task in queue for call in task.calls for t in (call.x, call.grad_output)}
        assert queue.num_bytes == sum(tensor.untyped_storage().nbytes() for tensor in left.values())
    assert (len(queue), queue.num_bytes) == (0, 0)
