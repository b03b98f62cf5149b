"""The demo's check can fail: it finds what is missing, out of order, or never happened."""

from uuid import UUID

import pytest

from outbox_tasks.demo.checks import Judgement, Tables, Told, TopicCheck, judge
from outbox_tasks.demo.consumer import told_by


def told(number: int, *, order: str = "a", version: int | None = None, doomed: bool = False) -> Told:
    """Return an event whose id is a number."""
    return Told(event_id=UUID(int=number), order_id=order, version=version, doomed=doomed)


HISTORY = [told(1, version=1), told(2, version=2), told(3, order="b", version=1), told(4, version=3)]
TABLES = Tables(events=HISTORY, orders={"a": 3, "b": 1})


def judged(topic: list[Told], tables: Tables = TABLES) -> Judgement:
    """Judge a topic with these records."""
    check = TopicCheck()
    for event in topic:
        check.see(event)
    return judge(check, tables)


def test_everything_there() -> None:
    """A topic that has what the tables have, in order per order, has no problem."""
    first, second, other, third = HISTORY
    assert judged([other, first, second, third]).problems == []


def test_missing() -> None:
    """A committed event that is not in the topic is missing."""
    judgement = judged([HISTORY[0], HISTORY[1], HISTORY[2]])
    assert judgement.missing == [HISTORY[3]]
    assert judgement.problems == [
        "1 committed but not in the topic: 00000000-0000-0000-0000-000000000004 (order a, version 3)"
    ]


def test_out_of_order() -> None:
    """An event that comes after a later one of its order is out of order."""
    first, second, other, third = HISTORY
    judgement = judged([first, third, other, second])
    assert judgement.out_of_order == [second]
    assert len(judgement.problems) == 1


def test_duplicates_are_counted_and_allowed() -> None:
    """An event that comes again, however late, is a duplicate, and in order."""
    check = TopicCheck()
    assert [check.see(event) for event in [*HISTORY, HISTORY[0]]] == [True, True, True, True, False]
    assert check.duplicates == 1
    assert judge(check, TABLES).problems == []


def test_phantom_that_says_so() -> None:
    """An event that was doomed when it was written is a phantom at first sight."""
    phantom = told(9, version=4, doomed=True)
    check = TopicCheck()
    check.see(phantom)
    assert check.phantoms == [phantom]
    assert judge(check, Tables(events=[], orders={})).phantoms == [phantom]


def test_phantom_that_is_in_the_table() -> None:
    """An event that was to be rolled back is a phantom even where the table has it."""
    phantom = told(9, version=4, doomed=True)
    tables = Tables(events=[*HISTORY, phantom], orders={"a": 4, "b": 1})
    assert judged([*HISTORY, phantom], tables).phantoms == [phantom]


def test_phantom_that_looks_right() -> None:
    """An event in the topic that no table has is a phantom."""
    phantom = told(9, order="c", version=1)
    assert judged([*HISTORY, phantom]).phantoms == [phantom]


@pytest.mark.parametrize("orders", [{"a": 4, "b": 1}, {"a": 2, "b": 1}, {"a": 3}, {"a": 3, "b": 1, "c": 1}])
def test_orders_and_events_disagree(orders: dict[str, int]) -> None:
    """An order that changed more or less often than its events tell is a problem."""
    judgement = judged(HISTORY, Tables(events=HISTORY, orders=orders))
    assert len(judgement.untold) == 1
    assert len(judgement.problems) == 1


def test_problem_names_a_few() -> None:
    """A problem counts all events and names five of them."""
    (problem,) = judged([], Tables(events=[told(number) for number in range(7)], orders={})).problems
    assert problem.startswith("7 committed but not in the topic: ")
    assert problem.endswith(" and 2 more")


@pytest.mark.parametrize("value", [None, b"\xff\x00", b"{", b"[]", b'"text"', b'{"version": "new"}'])
def test_events_of_others(value: bytes | None) -> None:
    """A record that the shop has not made is read all the same, and has no place in an order."""
    read = told_by(key=None, value=value, headers={"event_id": str(UUID(int=7)).encode()})
    assert read == Told(event_id=UUID(int=7), order_id="", version=None, doomed=False)


def test_events_of_the_shop() -> None:
    """A record of the shop has its order from the key, and version and fate from the payload."""
    value = b'{"order_id": "a", "version": 2, "doomed": true}'
    read = told_by(key=b"a", value=value, headers={"event_id": str(UUID(int=7)).encode()})
    assert read == Told(event_id=UUID(int=7), order_id="a", version=2, doomed=True)
