from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn, optim
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.sync.awaited import ParameterTable
from lightning_gpufeed.sync.candidates import PlanOptions
from lightning_gpufeed.sync.ranks import Ranks
from lightning_gpufeed.sync.session import GradientSync
from tests.doubles import run_ranks
from tests.sync import sync_worker
from tests.sync.sync_worker import MODELS, OPTIMIZERS, OPTIONS, Branches, batch, compared, dense, first_steps

CROSSING = PlanOptions(0, True, 1)
TWO_WAIT = PlanOptions(2, True, 1)


# Two ranks.


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict[str, Any]]:
    """What two real ranks have found, each by itself."""
    folder = tmp_path_factory.mktemp("ranks")
    plan = {"world_size": 2, "folder": str(folder)}
    log = run_ranks(Path(sync_worker.__file__), plan, folder, num_processes=2, limit_seconds=100)
    found = [folder / f"said.{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in found), log
    results = [json.loads(path.read_text()) for path in found]
    assert not any("error" in result for result in results), results
    return results


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_under_sync_are_bitwise_equal_to_distributed_data_parallel(said, model, how):
    assert [result[f"{model}, {how}"] for result in said] == ["", ""]


@pytest.mark.parametrize(
    "name",
    ["found by itself", "sparse", "accumulated", "unused", "unused, as usual"],
)
def test_two_ranks_stay_equal_whatever_is_special(said, name):
    assert [result[name] for result in said] == ["", ""]


def test_ranks_with_other_models_are_told_where_they_differ(said):
    for result in said:
        assert result["other shape"] == (
            "Rank 1 has 0.weight (3, 2) float32 where rank 0 has 0.weight (2, 2) float32; expected the same model on "
            "every rank. Build it alike."
        )
        assert result["other number"] == (
            "Rank 1 has 1 parameters where rank 0 has 2; expected the same model on every rank. Build it alike."
        )


def test_ranks_agree_on_numbers(said):
    for result in said:
        assert result["mean"] == [0.5, 1.0]
        assert result["maximum"] == [1.0, 7.0]
        assert result["decided"] == 0
        assert result["same samples"]


def test_abandon_does_not_wait_for_a_rank_that_sends_nothing(said):
    assert said[0]["pending 0"] == 6
    assert said[0]["abandon 0"] == "returned"
    assert said[0]["left 0"] == 0
    assert said[0]["as before 0"]


def test_abandon_leaves_a_model_that_can_be_read_when_a_rank_is_gone(said):
    assert said[0]["all failed"]
    assert said[0]["abandon 1"] == "returned"
    assert said[0]["left 1"] == 0
    assert said[0]["as before 1"]


# One rank, in this process.


class Training:
    """A model under sync, some steps old."""

    def __init__(self, ranks: Ranks, options: PlanOptions = CROSSING, model: nn.Module | None = None, **settings: Any):
        self.model = model or dense()
        self.sync = GradientSync(self.model, ranks, options, **settings)
        self.optimizer = optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def run(self, num_steps: int = 1) -> Training:
        first_steps(self.model, self.sync, self.optimizer, num_steps)
        return self


def after(num_steps: int, model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model is after some steps without sync, momentum included."""
    model = copy.deepcopy(model)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(num_steps):
        x, y = batch(0, number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def is_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_under_sync_is_bitwise_equal_to_distributed_data_parallel(ranks, how, optimizer):
    assert compared(sync_worker.convolutional, optimizer, OPTIONS[how]) == ""


class Checkpointed(nn.Module):
    """A part of it is computed again in backward."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.is_reentrant = is_reentrant

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(checkpoint(self.again, x, use_reentrant=self.is_reentrant))

    def again(self, x):
        return torch.relu(self.inner(x) * 2.0)


class SelectivelyCheckpointed(Checkpointed):
    """Results of some operators are kept, in the order in which they are computed."""

    def __init__(self) -> None:
        super().__init__(False)

    def forward(self, x):
        kept = {torch.ops.aten.mul.Tensor, torch.ops.aten.addmm.default, torch.ops.aten.add_.Tensor}
        make = functools.partial(create_selective_checkpoint_contexts, list(kept))
        x = torch.relu(self.first(x))
        return self.last(checkpoint(self.again, x, use_reentrant=False, context_fn=make))


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(torch.relu(self.body(x))))


class Autocast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Physical(nn.Module):
    """Looks at the derivative of a part of itself, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = dense(), nn.Linear(4, 2)

    def forward(self, x):
        derivative = torch.func.vmap(torch.func.grad(lambda one: self.field(one).sum()))(x)
        return self.head(derivative)


class Weighted(nn.Module):
    """Asks for the gradient of a weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        output = self.last(torch.tanh(self.body(x)))
        (gradient,) = torch.autograd.grad(output.square().sum(), self.last.weight, retain_graph=True)
        return output * gradient.norm()


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x):
        return torch.func.functional_call(self.inner, dict(self.inner.named_parameters()), (x,))


class PastHooks(nn.Module):
    """Calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.list = nn.ParameterList([torch.ones(2)])

    def forward(self, x):
        return self.inner.forward(x) * scripted_double(x[:, :2], self.list[0])


def scripted_double(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x + scale


def normed() -> nn.Module:
    model = dense()
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return model


def partly_compiled() -> nn.Module:
    model = dense()
    model[2] = torch.compile(model[2], backend="eager")
    return nn.Sequential(*model)


SPECIAL: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "checkpointed, some operators": SelectivelyCheckpointed,
    "used twice": UsedTwice,
    "autocast": lambda: Autocast(*dense()),
    "a derivative in forward": Physical,
    "functional_call": Functional,
    "past hooks": PastHooks,
    "normed weights": normed,
    "partly compiled": partly_compiled,
    "weighted by a gradient": Weighted,
}


@pytest.mark.parametrize("options", [CROSSING, TWO_WAIT], ids=["crossing", "two wait"])
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the compiler
def test_models_that_use_parameters_in_their_own_way_are_trained_as_without_sync(ranks, name, options, monkeypatch):
    if name == "past hooks":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            monkeypatch.setitem(globals(), "scripted_double", torch.jit.script(scripted_double))
    if name == "a derivative in forward":
        options = replace(options, reverse_first_k=0)
    found = []
    for is_synced in (False, True):
        torch.manual_seed(0)
        model = SPECIAL[name]()
        optimizer = optim.Adam(model.parameters(), 0.01)
        if is_synced:
            sync = GradientSync(model, ranks, options, find_unused_parameters=name == "a derivative in forward")
            first_steps(model, sync, optimizer, 4)
            assert sync.num_pending > 0
            sync.close()
        else:
            for number in range(4):
                x, y = batch(0, number)
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        record = sync_worker.Record()
        record.add("model", model.state_dict())
        record.add("optimizer", optimizer.state_dict())
        found.append(record)
    assert found[1].difference(found[0]) == ""


def failing_forward(training: Training) -> None:
    training.sync.forward_begins()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        training.model(torch.ones(1, 5))


def failing_backward(training: Training) -> None:
    training.sync.forward_begins()
    hook = training.model[2].register_full_backward_hook(lambda *_: 1 / 0)
    loss = training.model(torch.ones(2, 4)).sum()
    training.optimizer.zero_grad()
    training.sync.backward_begins(loss)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()


def skipped_step(training: Training) -> None:
    training.sync.forward_begins()
    loss = training.model(torch.ones(2, 4)).sum()
    training.optimizer.zero_grad()
    training.sync.backward_begins(loss)
    loss.backward()
    training.sync.backward_ends()


def abandoned(training: Training) -> None:
    training.sync.forward_begins()
    training.model[0](torch.ones(1, 4))
    training.sync.abandon()


def replaced_state(training: Training) -> None:
    training.optimizer.state = defaultdict(dict)


def split_groups(training: Training) -> None:
    parameters = training.optimizer.param_groups[0]["params"]
    training.optimizer.param_groups[0]["params"] = parameters[:3]
    training.optimizer.add_param_group({"params": parameters[3:], "lr": 0.3})


def zeroed_momentum(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["momentum_buffer"].zero_()


def halved_weight(training: Training) -> None:
    training.model[2].weight.data = training.model[2].weight.data * 0.5


def frozen_layer(training: Training) -> None:
    training.model[0].requires_grad_(False)


def step_without_forward(training: Training) -> None:
    training.sync.step(training.optimizer)


STORIES: dict[str, Callable[[Training], None]] = {
    "forward fails": failing_forward,
    "backward fails": failing_backward,
    "a step is skipped": skipped_step,
    "a forward is abandoned": abandoned,
    "the state is replaced": replaced_state,
    "groups are split": split_groups,
    "momentum is zeroed": zeroed_momentum,
    "data is replaced": halved_weight,
    "a layer is frozen": frozen_layer,
    "a step without a forward": step_without_forward,
}


@pytest.mark.parametrize("options", [CROSSING, TWO_WAIT], ids=["crossing", "two wait"])
@pytest.mark.parametrize("name", STORIES)
def test_what_happens_between_two_steps_has_the_result_that_it_has_without_sync(ranks, name, options):
    found = []
    start = dense()
    for one in (PlanOptions(0, False, 1), options):
        training = Training(ranks, one, copy.deepcopy(start)).run(3)
        STORIES[name](training)
        training.run(2)
        training.sync.synchronize()
        record = sync_worker.Record()
        record.add("model", training.model.state_dict())
        record.add("optimizer", training.optimizer.state_dict())
        assert type(training.optimizer.state) is defaultdict
        training.sync.close()
        found.append(record)
    assert found[1].difference(found[0]) == ""


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_layer_that_waits_may_be_frozen_in_part(ranks, frozen):
    model = dense()
    getattr(model[0], frozen).requires_grad_(False)
    Training(ranks, TWO_WAIT, model).run(3)


def test_a_step_is_pending_until_its_parameter_is_used(ranks):
    training = Training(ranks)
    start = copy.deepcopy(training.model)
    training.run(2)
    names = [name for name, _ in start.named_parameters()]
    assert training.sync.num_pending == len(names)
    assert torch.equal(training.model[0].weight, after(2, start)["0.weight"])
    training.sync.synchronize()
    assert training.sync.num_pending == 0
    assert is_equal(training.model, after(2, start))
    training.sync.close()


def test_a_pending_step_is_that_of_when_it_was_asked_for(ranks):
    training = Training(ranks)
    start = copy.deepcopy(training.model)
    training.run(2)
    training.optimizer.param_groups[0]["lr"] = 100.0
    assert is_equal(training.model, after(2, start))
    assert training.optimizer.param_groups[0]["lr"] == 100.0
    training.sync.close()


LOOKS: dict[str, Callable[[Training], Any]] = {
    "state_dict": lambda t: t.model.state_dict(),
    "parameters": lambda t: [one.detach().clone() for one in t.model.parameters()],
    "gradients": lambda t: [one.grad.clone() for one in t.model.parameters()],
    "optimizer": lambda t: t.optimizer.state_dict(),
    "optimizer's state": lambda t: [t.optimizer.state[one] for one in t.model.parameters()],
    "a kept reference": lambda t: [one.detach().clone() for one in t.optimizer.param_groups[0]["params"]],
    "deepcopy": lambda t: copy.deepcopy(t.model).state_dict(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.model)).state_dict(),
    "both copied": lambda t: [one.state_dict() for one in copy.deepcopy((t.model, t.optimizer))],
    "both pickled": lambda t: [one.state_dict() for one in pickle.loads(pickle.dumps((t.optimizer, t.model)))],
    "forward": lambda t: t.model(batch(0, 50)[0]).detach(),
    "forward without gradients": lambda t: torch.no_grad()(t.model)(batch(0, 50)[0]),
    "forward in inference": lambda t: torch.inference_mode()(t.model)(batch(0, 50)[0]).clone(),
    "forward under autocast": lambda t: torch.autocast("cpu", torch.bfloat16)(t.model)(batch(0, 50)[0]).detach(),
    "forward of a part": lambda t: t.model[2].forward(torch.ones(1, 8)).detach(),
    "functional_call": lambda t: torch.func.functional_call(t.model, {}, (batch(0, 50)[0],)).detach(),
    "func.grad": lambda t: torch.func.grad(lambda x: t.model(x).sum())(batch(0, 50)[0]).detach(),
    "func.grad of parameters": lambda t: gradients_by_transform(t.model),
    "jvp": lambda t: torch.func.jvp(t.model, (batch(0, 50)[0],), (batch(0, 51)[0],))[1].detach(),
    "vmap": lambda t: torch.func.vmap(t.model)(batch(0, 50)[0]).detach(),
    "another thread": lambda t: in_a_thread(lambda: t.model.state_dict()),
    "norm of gradients": lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 0.1),
    "moved": lambda t: t.model.to(torch.float64).state_dict(),
}


def gradients_by_transform(model: nn.Module) -> list[torch.Tensor]:
    def loss(named: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, named, (batch(0, 50)[0],)).sum()

    return [one.detach() for one in torch.func.grad(loss)(dict(model.named_parameters())).values()]


def in_a_thread(look: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch's own, in jvp
def test_whoever_looks_sees_what_is_there_without_sync(ranks, name):
    found = []
    start = dense()
    for options in (PlanOptions(0, False, 1), CROSSING):
        training = Training(ranks, options, copy.deepcopy(start)).run(3)
        assert (training.sync.num_pending > 0) == (options is CROSSING)
        record = sync_worker.Record()
        record.add(name, LOOKS[name](training))
        record.add("afterwards", [training.model.state_dict(), training.optimizer.state_dict()])
        found.append(record)
        training.sync.close()
    assert found[1].difference(found[0]) == ""


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("options", [CROSSING, TWO_WAIT, PlanOptions()], ids=["crossing", "two wait", "auto"])
def test_close_leaves_nothing_on_the_model(ranks, options, num_steps):
    training = Training(ranks, options)
    training.sync.steps.watch_state(training.optimizer)
    training.run(num_steps).sync.close()
    for module in training.model.modules():
        assert "forward" not in module.__dict__
        assert type(module._parameters) is dict
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for parameter in training.model.parameters():
        assert type(parameter) is nn.Parameter
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks
    assert not training.optimizer._optimizer_state_dict_pre_hooks
    assert not training.optimizer._optimizer_load_state_dict_pre_hooks
    assert type(training.optimizer.state).__name__ == "defaultdict"
    assert training.sync.num_pending == 0


def saved_whole(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "save": saved_whole}


@pytest.mark.parametrize("options", [CROSSING, TWO_WAIT], ids=["crossing", "two wait"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_model_under_sync_trains_by_itself(ranks, how, options):
    training = Training(ranks, options).run(2)
    other = COPIES[how](training.model)
    assert type(other[0]._parameters) is dict
    assert isinstance(training.model[0]._parameters, ParameterTable)
    assert is_equal(other, training.model.state_dict())
    expected = after(2, other)
    optimizer = optim.SGD(other.parameters(), 0.1, momentum=0.9)
    before = {name: one.clone() for name, one in training.model.state_dict().items()}
    for number in range(2):
        x, y = batch(0, number)
        optimizer.zero_grad()
        F.cross_entropy(other(x), y).backward()
        optimizer.step()
    assert is_equal(other, expected)
    assert is_equal(training.model, before)
    training.run(1).sync.close()


def test_a_backward_that_the_loop_did_not_tell_of_leaves_this_rank_its_own_gradients(ranks):
    training = Training(ranks).run(2)
    x, y = batch(0, 2)
    training.sync.forward_begins()
    loss = F.cross_entropy(training.model(x), y)
    training.sync.synchronize()
    training.optimizer.zero_grad()
    loss.backward()
    assert training.sync.num_pending == 0
    found = [one.grad.clone() for one in training.model.parameters()]
    training.sync.close()
    training.optimizer.zero_grad()
    F.cross_entropy(training.model(x), y).backward()
    assert all(torch.equal(one.grad, own) for one, own in zip(training.model.parameters(), found, strict=True))


def test_a_backward_that_the_loop_did_not_tell_of_is_reduced_if_that_is_asked_for(ranks):
    training = Training(ranks, reduces_untold=True).run(2)
    x, y = batch(0, 2)
    training.sync.forward_begins()
    loss = F.cross_entropy(training.model(x), y)
    training.optimizer.zero_grad()
    loss.backward()
    assert training.sync.num_pending == 6
    training.sync.step(training.optimizer)
    training.sync.close()


def test_a_parameter_without_a_gradient_is_an_error_that_says_what_to_do(ranks):
    training = Training(ranks, model=Branches())
    with pytest.raises(SyncError, match=r"parameters got no gradient on rank 0.*Set find_unused_parameters=True"):
        training.run(1)
    training.sync.abandon()
    training.sync.close()


def test_a_parameter_that_is_unfrozen_later_is_trained(ranks):
    model = dense()
    for one in model[0].parameters():
        one.requires_grad_(False)
    training = Training(ranks, model=model)
    training.run(2)
    for one in model[0].parameters():
        one.requires_grad_(True)
    before = model[0].weight.detach().clone()
    training.run(3)
    training.sync.synchronize()
    assert {layer.name for layer in training.sync.layers} == {"0", "2", "4"}
    assert not torch.equal(model[0].weight, before)
    training.sync.close()


def test_abandon_takes_the_steps_whose_gradients_have_arrived(ranks):
    training = Training(ranks)
    start = copy.deepcopy(training.model)
    training.run(2)
    works = [work for works in training.sync._reducer._works for work in works]
    for work in works:
        work.wait()
    training.sync.abandon()
    assert training.sync.num_pending == 0
    assert is_equal(training.model, after(2, start))
    training.sync.abandon()
    training.sync.close()


def test_abandon_in_the_middle_of_forward_leaves_an_ordinary_model(ranks):
    training = Training(ranks, TWO_WAIT).run(2)
    training.sync.forward_begins()
    training.model[0](torch.ones(1, 4))
    training.sync.abandon()
    training.sync.close()
    assert all(type(one) is nn.Parameter for one in training.model.parameters())
    assert type(training.optimizer.state).__name__ == "defaultdict"


def test_abandon_in_the_first_forward_leaves_an_ordinary_model(ranks):
    training = Training(ranks)
    training.sync.forward_begins()
    assert training.sync.num_pending == 6
    training.sync.abandon()
    training.sync.close()
    assert all(type(one) is nn.Parameter for one in training.model.parameters())


def test_microbatches_that_are_not_the_last_send_nothing(ranks, monkeypatch):
    sent = []
    all_reduce = distributed.all_reduce
    training = Training(ranks).run(2)
    training.sync.synchronize()

    def noted(tensor, *arguments, **options):
        sent.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    monkeypatch.setattr(distributed, "all_reduce", noted)
    training.sync.is_syncing = False
    training.sync.forward_begins()
    loss = F.cross_entropy(training.model(batch(0, 1)[0]), batch(0, 1)[1])
    training.sync.backward_begins(loss)
    loss.backward()
    training.sync.backward_ends()
    assert sent == []
    assert training.sync.num_pending == 0
    training.sync.is_syncing = True
    training.run(1)
    assert sorted(sent) == [18, 40, 72]
    training.sync.close()


def test_options_that_do_not_fit_the_model_are_refused_at_once(ranks):
    with pytest.raises(ValueError, match="reverse_first_k is 4; expected at most 3"):
        GradientSync(dense(), ranks, PlanOptions(4))


def test_layers_are_in_the_order_of_forward_after_the_first_step(ranks):
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    training = Training(ranks, model=Backwards())
    assert [layer.name for layer in training.sync.layers] == ["last", "middle", "first"]
    training.run(2)
    assert [layer.name for layer in training.sync.layers] == ["first", "middle", "last"]
    training.sync.close()


def test_what_waits_is_within_the_memory_cap(ranks):
    peaks = []
    for cap in (None, 300, 0):
        training = Training(ranks, PlanOptions(2, True, 1, cap)).run(4)
        training.sync.close()
        peaks.append(training.sync.peak_deferred_bytes)
    assert peaks[0] > 300
    assert peaks[1] <= 300
    assert peaks[2] == 0


def test_evaluation_in_between_sees_what_is_there_and_changes_nothing(ranks):
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    found = []
    for options in (PlanOptions(0, False, 1), CROSSING):
        training = Training(ranks, options, copy.deepcopy(model)).run(2)
        training.model.eval()
        with torch.no_grad():
            training.sync.forward_begins()
            found.append(training.model(batch(0, 9)[0]))
        training.sync.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("crosses", [True, False])
def test_messages_keep_their_order_where_the_next_forward_waits_for_them_one_by_one(ranks, crosses):
    training = Training(ranks, options=PlanOptions(2, crosses, 1)).run(2)
    assert training.sync.plan.cross_iteration is crosses
    assert training.sync._reducer._group is (ranks.group if crosses else ranks.unordered_group)
    training.sync.close()
