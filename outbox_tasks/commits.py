"""Knows which transactions of a Session hold new events, and wakes the relay once the outermost has committed."""

from functools import cache
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from outbox_tasks import waker

# A mark lives on the innermost transaction that has the events. A savepoint that is released hands it to the one
# around it; one that is rolled back takes it along, and so does a transaction: no mark is ever stale.
_marked: WeakKeyDictionary[SessionTransaction, Connection] = WeakKeyDictionary()


def mark(session: Session, connection: Connection) -> None:
    """Have the relay woken once what this session wrote over this connection has committed, if it does."""
    if waker.installed() is None:
        return
    _listen()
    transaction = session.get_nested_transaction() or session.get_transaction()
    if transaction is not None:
        _marked[transaction] = connection


@cache
def _listen() -> None:
    """Hear of commits, for all sessions at once: a listener for each would cost 11 µs, as much as a small INSERT."""
    event.listen(Session, "after_commit", _on_commit)


def _on_commit(session: Session) -> None:
    if not _marked:
        return
    savepoint = session.get_nested_transaction()
    if savepoint is None:
        _on_outermost_commit(session)
    elif (connection := _marked.pop(savepoint, None)) is not None:
        _marked[_around(savepoint)] = connection


def _on_outermost_commit(session: Session) -> None:
    transaction = session.get_transaction()
    connection = None if transaction is None else _marked.pop(transaction, None)
    # A session that joined a transaction of its connection's has not ended it: whoever does wakes the relay.
    if connection is not None and not connection.in_transaction():
        waker.wake()


def _around(savepoint: SessionTransaction) -> SessionTransaction:
    """Return the next savepoint or transaction around one; a flush in between is none."""
    around = savepoint.parent
    assert around is not None
    while not around.nested and around.parent is not None:
        around = around.parent
    return around
