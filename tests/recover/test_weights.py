"""Weights that a step changes by itself: frozen ones come back, trained ones are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gpufeed.recover.weights import WeightStates


class Student(nn.Module):
    """A layer, and a teacher that follows it."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.teacher = nn.Linear(width, width).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.mul_(0.5).add_(other, alpha=0.5)

    @torch.no_grad()
    def follow_unseen(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.data.mul_(0.5).add_(other.data * 0.5)

    @torch.no_grad()
    def replace(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.data = own.data * 0.5 + other.data * 0.5


@pytest.mark.parametrize("how", ["follow", "follow_unseen", "replace"])
@pytest.mark.parametrize("num_batches", [1, 2, 5])
@pytest.mark.parametrize("width", [3, 2100])  # the wide one is more than is copied in every step
def test_a_teacher_that_moves_in_the_step_comes_back(how, num_batches, width):
    student = Student(width)
    states = WeightStates(student)
    for number in range(num_batches):
        states.save()
        before = [weight.clone() for weight in student.teacher.parameters()]
        getattr(student, how)()
        if number == num_batches - 1:
            assert states.put_back() == []
            assert all(map(torch.equal, student.teacher.parameters(), before))


def test_trained_weights_that_a_step_changes_are_named():
    student = Student()
    states = WeightStates(student)
    states.save()
    assert states.changed_trained() == []
    with torch.no_grad():
        student.layer.bias.clamp_(-0.1, 0.1)
    assert states.changed_trained() == ["layer.bias"]
    assert states.put_back() == ["layer.bias"]


def test_frozen_weights_that_are_left_alone_keep_their_count_of_changes():
    student = Student()
    states = WeightStates(student)
    versions = [weight._version for weight in student.teacher.parameters()]
    for _ in range(3):
        states.save()
        assert states.put_back() == []
    assert [weight._version for weight in student.teacher.parameters()] == versions


def test_where_there_is_no_memory_for_copies_the_training_goes_on(monkeypatch):
    student = Student(2100)
    states = WeightStates(student)

    def full(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        states.save()
    states.save()
    student.follow()
    assert sorted(states.put_back()) == ["teacher.bias", "teacher.weight"]
