"""The shards a run may publish, and what is known of where each of them begins."""

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from outbox_tasks.deadline import Deadline


@dataclass(slots=True)
class Lease:
    """Leased shards with their floors, until `end`: nothing of a shard is pending at its floor, an id, or below.

    A floor is not just the last id that was published: a transaction may draw its first id before that one, commit
    later, and its first event must not be passed over. So it rises no higher than the horizon.
    `shaken` are the shards an earlier run died with, `deadly` those that may have been the cause; `batches` is how
    many were published of it.
    """

    token: UUID
    floors: dict[int, int]
    end: Deadline
    shaken: frozenset[int] = frozenset()
    deadly: frozenset[int] = frozenset()
    batches: int = 0

    def keep(self, shards: Collection[int]) -> None:
        """Forget all shards but these."""
        self.floors = {shard: floor for shard, floor in self.floors.items() if shard in shards}

    def part(self, shards: Collection[int]) -> "Lease":
        """Return the lease of some of the shards."""
        floors = {shard: floor for shard, floor in self.floors.items() if shard in shards}
        return Lease(self.token, floors, self.end, self.shaken.intersection(shards))
