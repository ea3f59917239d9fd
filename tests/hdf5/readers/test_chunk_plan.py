"""When blocks are needed, by the obvious way."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.readers.chunk_plan import NEVER, SamplePlan, UsePlan

orders = st.lists(st.integers(0, 12), max_size=80)


@given(orders)
def test_uses_are_those_of_a_search_through_the_list(blocks):
    plan = UsePlan.of(np.array(blocks, dtype=np.int64))
    for position, block in enumerate(blocks):
        later = [other for other in range(position + 1, len(blocks)) if blocks[other] == block]
        assert plan.next_use[position] == (later[0] if later else NEVER)
    assert plan.first_uses.tolist() == [n for n, block in enumerate(blocks) if block not in blocks[:n]]


@given(orders, st.integers(1, 90))
def test_blocks_in_play_are_counted_from_first_to_last_use(blocks, batch_samples):
    batches = range(0, len(blocks), batch_samples)
    live = [
        sum(block in blocks[: at + batch_samples] and block in blocks[at:] for block in set(blocks)) for at in batches
    ]
    assert UsePlan.of(np.array(blocks, dtype=np.int64)).most_live(batch_samples) == max(live, default=0)


def test_a_plan_covers_what_comes_next_only():
    plan = UsePlan.of(np.array([3, 1, 3, 2]))
    assert plan.covers(1, np.array([1, 3]))
    assert not plan.covers(1, np.array([3, 1]))
    assert not plan.covers(3, np.array([2, 2]))


@given(orders, st.integers(1, 5), st.integers(1, 90))
def test_samples_are_kept_from_the_first_use_of_their_block_to_their_own_last_use(samples, rows, batch_samples):
    blocks = [sample // rows for sample in samples]
    plan = SamplePlan.of(np.array(samples, dtype=np.int64), np.array(blocks, dtype=np.int64))
    assert plan.blocks.tolist() == list(dict.fromkeys(blocks))
    assert plan.first_uses.tolist() == [blocks.index(block) for block in plan.blocks]
    for number, block in enumerate(plan.blocks.tolist()):
        members = plan.members[plan.starts[number] : plan.starts[number + 1]].tolist()
        assert members == sorted({sample for sample in samples if sample // rows == block})
    assert plan.is_last.tolist() == [sample not in samples[n + 1 :] for n, sample in enumerate(samples)]
    kept = [
        sum(sample // rows in blocks[: at + batch_samples] and sample in samples[at:] for sample in set(samples))
        for at in range(0, len(samples), batch_samples)
    ]
    assert plan.most_kept(batch_samples) == max(kept, default=0)
