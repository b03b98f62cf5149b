"""A script: pgbench as a service in another language, `python -m bench.pgbench`; a transaction each, plain INSERTs.

It answers with the moment of each commit, by event id: pgbench logs when a transaction's last answer came. A client
counts its transactions, as the log does, and writes the number into the payload.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from bench.script import answer, await_go
from bench.shop import PADDING
from bench.sizes import KEYS

TRANSACTION = f"""
\\set i :i + 1
\\set key :client_id + :clients * (:i % :keys)
BEGIN;
INSERT INTO bench_order (customer, total) VALUES (:client_id, :i);
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
VALUES ('order', :key, 'placed',
        format('{{"client": %s, "i": %s, "pad": "{PADDING}"}}', :client_id::int, :i::int)::jsonb);
COMMIT;
"""

EVENTS = "SELECT event_id::text, (payload ->> 'client')::int, (payload ->> 'i')::int FROM outbox"

PROCESSED = re.compile(r"^number of transactions actually processed: (\d+)", re.MULTILINE)

Number = tuple[int, int]
"""A client, and which of its transactions it is, from 1 on."""


def main() -> None:
    """Write for so long, and tell what was committed when, but for the seconds of warming up."""
    given = _parser().parse_args()
    await_go()
    with tempfile.TemporaryDirectory() as directory:
        ended = _run(given, Path(directory))
    counted_from = min(ended.values()) + given.warm_seconds
    committed = {event: ended[number] for event, number in _events(given.database_url, ended).items()}
    counted = {event: at for event, at in committed.items() if at >= counted_from}
    seconds = max(ended.values()) - counted_from
    answer({"warm": len(committed) - len(counted), "committed": counted, "rate": len(counted) / seconds})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.pgbench", description=__doc__)
    for name in ("--program", "--database-url"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rate", type=int, required=True, help="transactions a second")
    parser.add_argument("--clients", type=int, required=True, help="connections; they share no key")
    for name in ("--seconds", "--warm-seconds"):
        parser.add_argument(name, type=int, required=True)
    return parser


def _run(given: argparse.Namespace, directory: Path) -> dict[Number, float]:
    """Have pgbench write, and return when each transaction ended, in seconds of the epoch."""
    (directory / "transaction.sql").write_text(TRANSACTION)
    done = subprocess.run(_command(given, directory), check=True, stdout=subprocess.PIPE, text=True)
    ended = dict(_read(line) for log in directory.glob("log.*") for line in log.read_text().splitlines())
    _agree("transactions", int(PROCESSED.findall(done.stdout)[0]), ended)
    return ended


def _command(given: argparse.Namespace, directory: Path) -> list[str]:
    values = {"i": 0, "clients": given.clients, "keys": KEYS // given.clients}
    return [
        *(given.program, "--no-vacuum", "--protocol=prepared", "--jobs=1", f"--client={given.clients}"),
        *(f"--rate={given.rate}", f"--time={given.warm_seconds + given.seconds}"),
        *(f"--define={name}={value}" for name, value in values.items()),
        *("--log", f"--log-prefix={directory / 'log'}", f"--file={directory / 'transaction.sql'}"),
        given.database_url,
    ]


def _read(line: str) -> tuple[Number, float]:
    """Read a line of the log: client, transaction, µs it took, script, and when it ended, in s and µs."""
    client, number, _, _, seconds, microseconds, *_ = map(int, line.split())
    return (client, number), seconds + microseconds / 1e6


def _events(database_url: str, ended: dict[Number, float]) -> dict[str, Number]:
    """Return which transaction wrote an event."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(EVENTS).fetchall()
    _agree("events", len(rows), ended)
    return {event: (client, number) for event, client, number in rows}


def _agree(what: str, count: int, ended: dict[Any, float]) -> None:
    if count != len(ended):
        raise SystemExit(f"{count} {what}, but {len(ended)} transactions in pgbench's log")


if __name__ == "__main__":
    main()
