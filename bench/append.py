"""What `append` costs a writer, against a hand-written INSERT of the same row."""

from functools import partial
from typing import Any

from bench.attempt import attempt
from bench.rig import Rig
from bench.script import script
from bench.shop import create_tables
from bench.sizes import Sizes


def append(rig: Rig, sizes: Sizes) -> dict[str, Any]:
    """Return median and mean milliseconds of a transaction, and their ratios, by kind of connection."""
    figures = attempt("append", partial(_measure, rig, sizes.append_transactions, wake=False))
    return figures | attempt("append, wake-up on", partial(_measure, rig, sizes.append_transactions, wake=True))


def _measure(rig: Rig, transactions: int, *, wake: bool) -> dict[str, Any]:
    with rig.database() as database_url:
        create_tables(database_url)
        arguments = ["--database-url", database_url, "--transactions", transactions, *(["--wake"] if wake else [])]
        environment = rig.environment(database_url, "nowhere")
        with script("bench.appending", arguments, environment=environment, directory=rig.directory) as child:
            child.await_ready()
            child.go()
            return child.result(seconds=60 + transactions / 10)
