"""Where a broker knows a producer of librdkafka: only there nothing can pass a record that failed."""

from collections.abc import Mapping, Sequence

from outbox_tasks.deadline import Deadline
from outbox_tasks.publishing.partitions import key_hash
from outbox_tasks.publishing.publisher import Record

_BELIEVED_SECONDS = 3600.0
"""How long a broker is taken to know a producer: it forgets one after `producer.id.expiration.ms`, a day by itself."""


class Started:
    """The partitions a producer has begun to write to; for a new producer, a new one.

    Brokers refuse what comes after a gap, but of a producer that is new to a partition they take any record for the
    first one. So until the first has been acknowledged no other may be on its way; from then on gapless is what client
    and broker see to (docs/decisions.md).
    """

    def __init__(self) -> None:
        self._begun: set[tuple[str, int]] = set()
        self._believed = Deadline.after(_BELIEVED_SECONDS)

    def first_places(self, records: Sequence[Record], partitions: Mapping[str, int]) -> list[int]:
        """Return the places of the records that begin a partition; those partitions count as begun from now on.

        `partitions` is how many each topic has.
        """
        if self._believed.passed:
            self._begun.clear()
            self._believed = Deadline.after(_BELIEVED_SECONDS)
        if all((topic, number) in self._begun for topic, count in partitions.items() for number in range(count)):
            return []
        return [place for place, record in enumerate(records) if self._begins(record, partitions)]

    def _begins(self, record: Record, partitions: Mapping[str, int]) -> bool:
        if record.key is None:  # it goes anywhere, and has no order
            return False
        partition = (record.topic, key_hash(record.key) % partitions[record.topic])
        begins = partition not in self._begun
        self._begun.add(partition)
        return begins
