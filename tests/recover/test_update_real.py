"""Updates that run out of memory under a real ceiling."""

from __future__ import annotations

from tests.doubles import run_forked

REAL_SETUP = """
import copy, ctypes, gc, os, resource, torch
from lightning_gpufeed.recover.classify import Kind, classify
from lightning_gpufeed.recover.update import GuardedStep, UpdateFailed

torch.set_num_threads(1)
# Every tensor in a mapping of its own, given back when it is dropped: the limit means what it says.
ctypes.CDLL(None).mallopt(-3, 2**18)
CPU = torch.device("cpu")
MIB = 2**20

def make(subclass=False, **options):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(512, 1024)) for _ in range(4)]  # 2 MiB each
    base = type("Other", (torch.optim.AdamW,), {}) if subclass else torch.optim.AdamW
    optimizer = base(weights, lr=0.1, **options)
    return weights, optimizer

def set_gradients(weights, seed):
    torch.manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(512, 1024)

def forget(error):
    error.__traceback__ = None

def guarded(optimizer):
    is_oom = lambda error: classify(error, "cpu").kind is Kind.HOST
    return GuardedStep(optimizer, CPU, is_out_of_memory=is_oom, forget=forget)

def mapped():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))

def ceiling(mib):
    gc.collect()
    resource.setrlimit(resource.RLIMIT_AS, (mapped() + int(mib * MIB), resource.RLIM_INFINITY))

def lift():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def contents(weights, optimizer):
    return [weight.detach().clone() for weight in weights], copy.deepcopy(optimizer.state_dict()["state"])

def same(one, other):
    pairs = [*zip(one[0], other[0])]
    assert list(one[1]) == list(other[1])
    for key in one[1]:
        assert list(one[1][key]) == list(other[1][key])
        pairs += zip(one[1][key].values(), other[1][key].values())
    return all(torch.equal(a, b) for a, b in pairs)

def expected(num_steps, **options):
    weights, optimizer = make(**options)
    for seed in range(num_steps):
        set_gradients(weights, seed)
        optimizer.step()
    return contents(weights, optimizer)

def starving(mib, num_steps, **options):
    weights, optimizer = make(**options)
    for seed in range(num_steps - 1):
        set_gradients(weights, seed)
        optimizer.step()
    before = contents(weights, optimizer)
    set_gradients(weights, num_steps - 1)
    guard = guarded(optimizer)
    ceiling(mib)
    return weights, optimizer, guard, before

def fails(optimizer):
    try:
        optimizer.step()
    except UpdateFailed as failed:
        lift()
        assert "DefaultCPUAllocator" in str(failed), failed
        return failed
    raise AssertionError("it fitted")

def done():
    print("held", flush=True)
    os._exit(0)

# Warm: code is loaded and mapped before any ceiling.
expected(1)
expected(1, foreach=True)
weights, optimizer = make()
set_gradients(weights, 0)
guard = guarded(optimizer)
import lightning_gpufeed.device.headroom as headroom
ask, headroom.can_allocate = headroom.can_allocate, lambda *_: False
optimizer.step()
headroom.can_allocate = ask
del weights, optimizer, guard
gc.collect()
gc.freeze()  # what is there now need not be searched for cycles in every case
"""

# The first step needs 16 MiB for its state, and 4 MiB at once, 8 with foreach; the bounds are 24 with 12 or 24.
REAL = {
    "the first step has room once cycles are collected": """
gc.disable()
want = expected(1)
cycle = [torch.empty(50 * MIB, dtype=torch.uint8)]
cycle.append(cycle)
weights, optimizer, guard, before = starving(4, 1)
del cycle
optimizer.step()
lift()
assert guard.num_careful_steps == 0
assert same(contents(weights, optimizer), want)
done()
""",
    "the first step fits parameter by parameter": """
want = expected(1)
weights, optimizer, guard, before = starving(25, 1)
optimizer.step()
lift()
assert guard.num_careful_steps == 1
assert same(contents(weights, optimizer), want)
done()
""",
    "the first step of foreach fits parameter by parameter": """
want = expected(1, foreach=False)
weights, optimizer, guard, before = starving(25, 1, foreach=True)
optimizer.step()
lift()
assert guard.num_careful_steps == 1
assert same(contents(weights, optimizer), want)
done()
""",
    "a first step whose state does not fit leaves nothing half born": """
weights, optimizer, guard, before = starving(11, 1)
failed = fails(optimizer)
assert failed.is_clean
assert not optimizer.state
assert same(contents(weights, optimizer), before)
optimizer.step()
assert same(contents(weights, optimizer), expected(1))
done()
""",
    "a later step fits parameter by parameter": """
want = expected(2, foreach=False)
weights, optimizer, guard, before = starving(7, 2, foreach=True)
optimizer.step()
lift()
assert guard.num_careful_steps == 1
assert same(contents(weights, optimizer), want)
done()
""",
    "a later step where not even one parameter fits is undone": """
weights, optimizer, guard, before = starving(3, 2, foreach=True)
failed = fails(optimizer)
assert failed.is_clean
assert same(contents(weights, optimizer), before)
done()
""",
    "without the guard the same step is done in part": """
weights, optimizer, guard, before = starving(7, 2, foreach=True)
guard.remove()
try:
    optimizer.step()
except RuntimeError:
    lift()
else:
    raise AssertionError("it fitted")
assert not same(contents(weights, optimizer), before)
done()
""",
    "an unknown class is undone as a whole": """
weights, optimizer, guard, before = starving(3, 2, subclass=True)
failed = fails(optimizer)
assert failed.is_clean
assert same(contents(weights, optimizer), before)
done()
""",
}


def test_under_a_real_ceiling_a_step_is_whole_or_undone() -> None:
    ended = run_forked(REAL_SETUP, REAL)
    assert {name: end.text.strip() for name, end in ended.items()} == dict.fromkeys(REAL, "held")
