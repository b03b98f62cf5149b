"""Which partition a key goes to: what every Kafka client has by default."""

from functools import lru_cache

from kafka.partitioner.default import murmur2

_KEYS_REMEMBERED = 16_384
"""Of how many keys the hash is kept: some 2 MB, 20 with the longest keys there may be."""


@lru_cache(maxsize=_KEYS_REMEMBERED)
def key_hash(key: bytes) -> int:
    """Return what Kafka's default partitioner takes modulo the number of partitions: murmur2, without the sign."""
    return int(murmur2(key)) & 0x7FFFFFFF
