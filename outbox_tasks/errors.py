"""Everything that can go wrong, as one tree; each message says what, with which value, and what to do."""


class OutboxError(Exception):
    """Root of every error raised by outbox_tasks."""


class SettingsError(OutboxError):
    """A setting is unknown, of the wrong type, or contradicts another one."""


class PoolError(OutboxError):
    """The worker's pool has green threads, in which the outbox's tasks do not run."""


class InvalidEventError(OutboxError, ValueError):
    """An event cannot be written as it is; `field` names the part that is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class NoTransactionError(OutboxError):
    """`append` was called on a connection that has no transaction to be part of."""


class NoRouteError(OutboxError):
    """Neither the event nor the routes name a topic."""

    def __init__(self, *, event_type: str, aggregate_type: str) -> None:
        super().__init__(
            f"no topic for event type {event_type!r} of aggregate type {aggregate_type!r}: "
            f"give the event a topic, or add {event_type!r} or {aggregate_type!r} to outbox_routes"
        )


class SchemaVersionError(OutboxError):
    """The tables in the database are not those of this version of the package."""

    def __init__(self, *, found: str | None, expected: str) -> None:
        what = "has no outbox schema" if found is None else f"is at outbox schema {found!r}"
        super().__init__(
            f"the database {what}, this version of outbox_tasks works with {expected!r}: "
            "run `celery -A outbox_tasks outbox migrate` with the version you deploy"
        )
        self.found = found
        self.expected = expected


class PublisherError(OutboxError):
    """The publisher could not do what it was asked."""


class BrokerUnavailableError(PublisherError):
    """No broker answered in time; nothing was sent."""


class MisconfiguredError(PublisherError):
    """The brokers answer, but will not have this client: its credentials, rights or settings are wrong."""


class TopicMissingError(PublisherError):
    """The topic does not exist, or may not be described."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic!r} does not exist (or may not be described): create it, then it goes on by itself"
        )
        self.topic = topic


class TopicAilingError(PublisherError):
    """The topic is there and the brokers answer, but it has taken nothing for a while."""

    def __init__(self, topic: str, problem: str) -> None:
        super().__init__(f"topic {topic!r} {problem}: bring its brokers back, then it goes on by itself")
        self.topic = topic


class InvalidRecordError(PublisherError):
    """A record cannot be sent to its topic: found out before anything was sent."""


class InvalidFilterError(OutboxError, ValueError):
    """It is not clear which events are meant."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"which events? {problem}")


class NotBlockedError(OutboxError):
    """A key cannot be tried now."""


class NoSuchEventError(OutboxError):
    """There is no event with this id, neither in the outbox nor among the dead letters."""

    def __init__(self, event_id: object) -> None:
        super().__init__(
            f"there is no event {event_id}: it was rolled back, or published and dropped with its partition since"
        )


class NoSuchReplayError(OutboxError):
    """There is no such replay, or it is over."""
