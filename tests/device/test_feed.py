"""The background thread: what it makes ahead, how its errors arrive, and that it always ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_gpufeed.device.feed as feed_module
from lightning_gpufeed.device.feed import Feed, FeedStatistics
from lightning_gpufeed.errors import FeedError
from tests.doubles import WAIT_SECONDS, EventLog, LoggedProducer, parking_condition, run_forked

READER = "gpufeed-reader"


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == READER]


def assert_no_reader_thread() -> None:
    """A thread that was only told to stop may need a moment; one that was joined is gone."""
    for thread in reader_threads():
        thread.join(WAIT_SECONDS)
    assert reader_threads() == []


@settings(max_examples=30)
@given(num_items=st.integers(0, 20), num_slots=st.integers(1, 5))
def test_items_come_in_order_and_each_once(num_items: int, num_slots: int) -> None:
    assert list(Feed(lambda number: number, num_items, num_slots)) == list(range(num_items))


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_at_most_num_slots_items_are_made_ahead(monkeypatch, num_slots):
    log = EventLog()
    monkeypatch.setattr(feed_module.threading, "Condition", parking_condition(log, READER))
    feed = Feed(LoggedProducer(log), 10, num_slots)
    for taken in range(3):
        made = num_slots + taken
        # Until the thread can go no further by itself.
        log.wait_until(lambda: f"end {made - 1}" in log.events and log.events[-1] == "parked")  # noqa: B023
        assert [event for event in log.events if event.startswith("end")] == [f"end {n}" for n in range(made)]
        assert f"begin {made}" not in log.events
        assert next(feed) == f"item {taken}"
    feed.close()


def test_an_item_is_made_while_the_consumer_works_on_the_one_before():
    log = EventLog()
    feed = Feed(LoggedProducer(log), 5, num_slots=1)
    assert next(feed) == "item 0"
    log.wait_for("end 1")  # nobody asked for it yet
    feed.close()


def test_every_item_is_made_in_one_and_the_same_thread():
    idents = list(Feed(lambda _: threading.get_ident(), 10))
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()


@pytest.mark.parametrize("item", [None, False, 0, (), ""])
def test_an_item_may_be_anything(item):
    assert list(Feed(lambda _: item, 3)) == [item] * 3


@pytest.mark.parametrize(
    "error", [FeedError("bad chunk 7"), ValueError("odd"), KeyboardInterrupt("stop"), SystemExit(3)]
)
def test_an_error_of_the_producer_arrives_itself_after_the_good_items(error):
    feed = Feed(LoggedProducer(EventLog(), errors={2: error}), 5, num_slots=4)
    assert [next(feed), next(feed)] == ["item 0", "item 1"]
    with pytest.raises(type(error)) as caught:
        next(feed)
    assert caught.value is error
    assert_no_reader_thread()


def test_the_traceback_of_an_error_reaches_into_the_producer():
    def produce(number: int) -> int:
        raise FeedError("from far below")

    with pytest.raises(FeedError, match="from far below") as caught:
        next(Feed(produce, 1))
    assert caught.traceback[-1].name == "produce"


def test_an_error_is_raised_once_and_then_the_iteration_is_over():
    feed = Feed(LoggedProducer(EventLog(), errors={0: FeedError("once")}), 2)
    with pytest.raises(FeedError):
        next(feed)
    assert next(feed, "over") == "over"


def test_nothing_is_made_after_an_error():
    log = EventLog()
    feed = Feed(LoggedProducer(log, errors={1: FeedError("stop here")}), 5)
    with pytest.raises(FeedError):
        list(feed)
    assert log.events == ["begin 0", "end 0", "begin 1"]


def test_is_ready_tells_whether_next_would_wait():
    log, gates = EventLog(), {number: threading.Event() for number in range(3)}
    error = FeedError("at the end")
    feed = Feed(LoggedProducer(log, gates=gates, errors={2: error}), 3, num_slots=1)
    log.wait_for("begin 0")
    assert not feed.is_ready()
    gates[0].set()
    log.wait_for("end 0")
    assert next(feed) == "item 0"
    log.wait_for("begin 1")  # made only now, behind its gate
    assert not feed.is_ready()
    gates[1].set()
    assert next(feed) == "item 1"
    log.wait_for("begin 2")
    assert not feed.is_ready()
    gates[2].set()
    with pytest.raises(FeedError):
        next(feed)
    assert feed.is_ready()  # `next` returns at once, with StopIteration


def test_is_ready_becomes_true_without_asking_for_the_item(monkeypatch):
    log = EventLog()
    monkeypatch.setattr(feed_module.threading, "Condition", parking_condition(log, READER))
    feed = Feed(LoggedProducer(log), 2, num_slots=1)
    log.wait_for("parked")
    assert feed.is_ready()
    feed.close()


def test_is_ready_does_not_wait_for_the_lock():
    feed = Feed(lambda number: number, 1)
    answers = []
    with feed._ring.changed:  # whatever the thread does with the lock
        asker = threading.Thread(target=lambda: answers.append(feed.is_ready()))
        asker.start()
        asker.join(WAIT_SECONDS)
        assert len(answers) == 1
    feed.close()


def test_closing_in_the_middle_ends_the_thread_and_the_iteration():
    log = EventLog()
    feed = Feed(LoggedProducer(log), 1000, num_slots=2)
    assert next(feed) == "item 0"
    feed.close()
    assert reader_threads() == []
    assert list(feed) == []
    feed.close()


def test_closing_waits_for_the_item_in_the_making():
    log, gate = EventLog(), threading.Event()
    feed = Feed(LoggedProducer(log, gates={0: gate}), 3)
    log.wait_for("begin 0")
    closer = threading.Thread(target=feed.close)
    closer.start()
    gate.set()
    closer.join(WAIT_SECONDS)
    assert log.events == ["begin 0", "end 0"]
    assert reader_threads() == []


def test_closing_drops_the_items_that_nobody_took():
    class Item:
        pass

    made: list[weakref.ref[Item]] = []
    log = EventLog()

    def produce(number: int) -> Item:
        item = Item()
        made.append(weakref.ref(item))
        log.add(f"made {number}")
        return item

    feed = Feed(produce, 10, num_slots=2)
    log.wait_for("made 1")
    feed.close()
    assert [item() for item in made] == [None] * len(made)


def test_the_thread_keeps_no_item_that_was_handed_out():
    class Item:
        pass

    log, gate = EventLog(), threading.Event()

    def produce(number: int) -> Item:
        log.add(f"begin {number}")
        if number == 1:
            gate.wait(WAIT_SECONDS)
        return Item()

    feed = Feed(produce, 2)
    handed_out = weakref.ref(next(feed))
    log.wait_for("begin 1")
    assert handed_out() is None
    gate.set()
    feed.close()


def test_dropping_the_last_reference_ends_the_thread():
    feed = Feed(lambda number: number, 1000)
    next(feed)
    del feed
    assert_no_reader_thread()


def test_a_feed_in_a_reference_cycle_ends_with_it():
    feed = Feed(lambda number: number, 1000)
    cycle: list[object] = [feed]
    cycle.append(cycle)
    del feed, cycle
    gc.collect()
    assert_no_reader_thread()


def test_collecting_a_feed_while_holding_what_its_producer_waits_for_does_not_hang():
    log, lock = EventLog(), threading.Lock()

    def produce(number: int) -> int:
        log.add(f"begin {number}")
        with lock:  # as a reader does, which is shared with the training loop
            return number

    with lock:
        feed = Feed(produce, 5)
        log.wait_for("begin 0")
        cycle: list[object] = [feed]
        cycle.append(cycle)
        del feed, cycle
        collector = threading.Thread(target=gc.collect, daemon=True)
        collector.start()
        collector.join(5.0)
        is_hanging = collector.is_alive()
    collector.join(WAIT_SECONDS)
    assert_no_reader_thread()
    assert not is_hanging


def test_a_broken_loop_leaves_no_thread():
    for number in Feed(lambda number: number, 1000):
        if number == 3:
            break
    assert_no_reader_thread()


def test_many_feeds_in_a_row_leave_no_thread():
    before = set(threading.enumerate())
    for size in range(100):
        feed = Feed(lambda number: number, 50)
        for _ in range(size % 5):
            next(feed)
        if size % 2:
            feed.close()
    del feed
    assert_no_reader_thread()
    assert set(threading.enumerate()) == before


def test_two_feeds_run_beside_each_other():
    first, second = Feed(lambda number: number, 20), Feed(lambda number: -number, 20)
    assert [(a, b) for a, b in zip(first, second, strict=True)] == [(n, -n) for n in range(20)]


def test_the_producer_is_let_go_at_the_end():
    class Producer:
        def __call__(self, number: int) -> int:
            return number

    producer = Producer()
    alive = weakref.ref(producer)
    feed = Feed(producer, 3)
    del producer
    list(feed)
    assert alive() is None


def test_the_statistics_count_what_was_handed_out():
    feed = Feed(lambda number: number, 4)
    assert feed.statistics == FeedStatistics()
    for number in range(1, 4):
        next(feed)
        assert feed.statistics.num_batches == number
    statistics = feed.statistics
    assert 0 <= statistics.wait_seconds <= statistics.elapsed_seconds
    assert statistics.produce_seconds > 0
    assert 0 <= statistics.wait_share <= 1
    feed.close()


def test_the_time_the_consumer_is_blocked_is_counted(monkeypatch):
    log, gate, times = EventLog(), threading.Event(), []
    condition = parking_condition(log, threading.current_thread().name)

    def open_gate() -> None:
        log.wait_for("parked")  # the consumer sleeps
        times.append(time.perf_counter())
        gate.set()

    producer = LoggedProducer(EventLog(), gates={0: gate})
    with monkeypatch.context() as patch:
        patch.setattr(feed_module.threading, "Condition", condition)
        feed = Feed(producer, 2)
    log.events.clear()  # it slept while the thread started, too
    opener = threading.Thread(target=open_gate)
    opener.start()
    begin = time.perf_counter()
    next(feed)
    end = time.perf_counter()
    opener.join(WAIT_SECONDS)
    assert 0 < feed.statistics.wait_seconds <= end - begin
    assert feed.statistics.wait_share == 1.0  # nothing but waiting until the first item
    assert begin < times[0] < end
    feed.close()


def test_rates_of_nothing_are_zero():
    assert FeedStatistics().wait_share == 0.0
    assert FeedStatistics().samples_per_second == 0.0
    assert FeedStatistics(num_samples=10, elapsed_seconds=2.0).samples_per_second == 5.0


def test_no_slot_is_refused():
    with pytest.raises(ValueError, match=r"^num_slots is 0; expected at least 1\.$"):
        Feed(lambda number: number, 1, num_slots=0)


EXIT_SETUP = """
import sys, threading, warnings
warnings.simplefilter("error")
from lightning_gpufeed.device.feed import Feed
"""

RUNNING = """
feed = Feed(lambda number: bytes(1000), 1_000_000)
next(feed)
"""

ENDINGS = {
    "the feed is still referred to": ("", 0, ""),
    "the feed is in a reference cycle": ("cycle = [feed]; cycle.append(cycle); del feed, cycle", 0, ""),
    "an exit code is given": ("sys.exit(5)", 5, ""),
    "the loop raises": ("raise RuntimeError('from the loop')", 1, "RuntimeError: from the loop"),
    "another thread uses it": ("threading.Thread(target=lambda: [next(feed) for _ in range(100)]).start()", 0, ""),
}


@pytest.fixture(scope="module")
def ended():
    return run_forked(EXIT_SETUP, {name: RUNNING + ending for name, (ending, _, _) in ENDINGS.items()})


@pytest.mark.parametrize("name", ENDINGS)
def test_the_interpreter_ends_beside_a_running_feed(ended, name):
    _, code, error = ENDINGS[name]
    assert (ended[name].code, ended[name].last_line) == (code, error)


def test_torch_in_the_thread_takes_one_core_and_the_consumer_keeps_its_own():
    torch.set_num_threads(3)
    assert list(Feed(lambda _: torch.get_num_threads(), 3)) == [1, 1, 1]
    assert torch.get_num_threads() == 3


# Items without a number, and ends that the producer decides -------------------------------------------------


class Iterating:
    """Makes items out of an iterator, which knows by itself when it is over."""

    def __init__(self, num_items: int) -> None:
        self.items = iter(range(num_items))
        self.numbers: list[int] = []

    def __call__(self, number: int) -> int:
        self.numbers.append(number)
        return next(self.items)


@settings(max_examples=30)
@given(num_items=st.integers(0, 20), num_slots=st.integers(1, 3))
def test_without_a_number_items_come_until_the_producer_stops(num_items: int, num_slots: int) -> None:
    produce = Iterating(num_items)
    feed = Feed(produce, None, num_slots)
    assert list(feed) == list(range(num_items))
    assert produce.numbers == list(range(num_items + 1))
    assert list(feed) == []  # and it is not asked again
    assert produce.numbers == list(range(num_items + 1))
    assert_no_reader_thread()


def test_the_producer_may_stop_before_the_number_it_was_given():
    assert list(Feed(Iterating(3), 10)) == [0, 1, 2]


def test_the_producer_is_not_asked_beyond_the_number_it_was_given():
    produce = Iterating(10)
    assert list(Feed(produce, 3)) == [0, 1, 2]
    assert produce.numbers == [0, 1, 2]


def test_an_end_that_nobody_knew_of_is_ready_once_it_is_found():
    log, gate = EventLog(), threading.Event()

    def produce(number: int) -> str:
        log.add(f"begin {number}")
        if number == 1:
            assert gate.wait(WAIT_SECONDS)
            raise StopIteration
        return f"item {number}"

    feed = Feed(produce, None, num_slots=1)
    assert next(feed) == "item 0"
    log.wait_for("begin 1")
    assert not feed.is_ready()  # an item may come yet
    gate.set()
    for thread in reader_threads():
        thread.join(WAIT_SECONDS)
    assert feed.is_ready()
    with pytest.raises(StopIteration):
        next(feed)


def test_without_a_number_nothing_is_made_far_ahead():
    log = EventLog()
    feed = Feed(LoggedProducer(log), None, num_slots=1)
    assert [next(feed) for _ in range(3)] == ["item 0", "item 1", "item 2"]
    feed.close()
    assert len([event for event in log.events if event.startswith("begin")]) <= 4


def test_an_error_after_items_without_a_number_arrives_after_them():
    error = ValueError("odd")
    feed = Feed(LoggedProducer(EventLog(), errors={2: error}), None)
    assert [next(feed), next(feed)] == ["item 0", "item 1"]
    with pytest.raises(ValueError, match="odd") as caught:
        next(feed)
    assert caught.value is error


def test_torch_in_the_thread_may_keep_the_number_of_cores_it_has():
    torch.set_num_threads(3)
    feed = Feed(lambda _: torch.get_num_threads(), 3, is_single_threaded=False)
    assert list(feed) == [3, 3, 3]
    assert torch.get_num_threads() == 3


# Closing without waiting forever -----------------------------------------------------------------------------


def test_closing_with_a_limit_does_not_wait_for_an_item_that_does_not_come():
    log, gate = EventLog(), threading.Event()
    feed = Feed(LoggedProducer(log, gates={1: gate}), 3)
    assert next(feed) == "item 0"
    log.wait_for("begin 1")
    feed.close(timeout_seconds=0.01)
    [thread] = reader_threads()
    assert list(feed) == []  # closed all the same
    gate.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert log.events == ["begin 0", "end 0", "begin 1", "end 1"]  # and no item after it


def test_closing_with_a_limit_waits_for_an_item_that_comes_in_time():
    log, gate = EventLog(), threading.Event()
    feed = Feed(LoggedProducer(log, gates={0: gate}), 3)
    log.wait_for("begin 0")
    closer = threading.Thread(target=lambda: feed.close(timeout_seconds=WAIT_SECONDS))
    closer.start()
    gate.set()
    closer.join(WAIT_SECONDS)
    assert reader_threads() == []


def test_an_item_that_comes_after_closing_is_dropped():
    class Item:
        pass

    made: list[weakref.ref[Item]] = []
    begun, gate = threading.Event(), threading.Event()

    def produce(number: int) -> Item:
        begun.set()
        assert gate.wait(WAIT_SECONDS)
        item = Item()
        made.append(weakref.ref(item))
        return item

    feed = Feed(produce, None)
    assert begun.wait(WAIT_SECONDS)
    feed.close(timeout_seconds=0.01)
    gate.set()
    assert_no_reader_thread()
    assert list(feed) == []
    del feed
    assert [item() for item in made] == [None]


# Errors and memory -------------------------------------------------------------------------------------------


def test_what_a_failed_producer_worked_with_is_let_go_when_its_error_was_handled():
    # Worker processes of a loader, say, which live as long as their iterator.
    class Resource:
        pass

    held: list[weakref.ref[Resource]] = []

    def produce(number: int) -> int:
        resource = Resource()
        held.append(weakref.ref(resource))
        raise FeedError("from far below")

    gc.collect()
    gc.disable()  # it would find a cycle, some time
    try:
        with pytest.raises(FeedError):
            next(Feed(produce, None))
        assert [resource() for resource in held] == [None]
    finally:
        gc.enable()
