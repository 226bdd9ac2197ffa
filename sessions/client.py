"""What the store and the saver share about a Redis client: what it must be, and what its errors mean to a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import redis
from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
)
from redis.sentinel import MasterNotFoundError

from dlite_agent.errors import ConfigError, RecordError, SessionError, StoreFullError, StoreUnavailableError

RedisClient: TypeAlias = redis.Redis | redis.RedisCluster
"""What a store or a saver works with."""

MAX_TTL_S = 10**9
"""The longest life of a key, about thirty years."""

_NO_PERMISSION = ("ACL failure", "The user executing the script can't")  # in scripts: from Redis 7 on, and before


def require_binary(client: RedisClient) -> None:
    """Refuse a client that would decode the replies.

    Args:
        client: The client a store is to use.

    Raises:
        ConfigError: If it was made with `decode_responses=True`.
    """
    if client.get_encoder().decode_responses:
        raise ConfigError("the Redis client decodes replies as text; expected one made with decode_responses=False")


def check_ttl(ttl_s: int) -> None:
    """Refuse a life that a server would not give a key.

    Args:
        ttl_s: Seconds.

    Raises:
        ConfigError: If it is no whole number from 1 to `MAX_TTL_S`.
    """
    if not isinstance(ttl_s, int) or isinstance(ttl_s, bool) or not 1 <= ttl_s <= MAX_TTL_S:
        raise ConfigError(f"ttl_s is {ttl_s}; expected whole seconds, from 1 to {MAX_TTL_S}")


def server_version(client: RedisClient) -> str:
    """Ask a server, or one of a Cluster, what it is.

    Args:
        client: The client to ask with.

    Returns:
        For example "valkey 9.1.2".

    Raises:
        StoreUnavailableError: If it does not answer, or not to this user.
    """
    with translated("asking the server for its version"):
        info: Any = client.info("server")
    name = info.get("server_name", "redis")
    return f"{name} {info.get(f'{name}_version', info['redis_version'])}"  # Valkey calls itself Redis 7.2 as well


@contextmanager
def translated(action: str) -> Iterator[None]:
    """Turn Redis errors of the body into this package's.

    Args:
        action: What is being done, for the message: "reading blocks".

    Raises:
        StoreFullError: If the server or its disk has no room.
        StoreUnavailableError: If the server does not answer, or not to this client.
        RecordError: If a key holds another type of value than this package writes.
    """
    try:
        yield
    except (redis.RedisError, RedisClusterException) as error:
        raise translate(error, action) from error


def check_replies(replies: Sequence[Any]) -> None:
    """Raise the first error among a pipeline's replies (for use inside `translated`).

    Args:
        replies: What `pipeline.execute(raise_on_error=False)` gave.

    Raises:
        redis.RedisError: The first error.
    """
    for reply in replies:
        if isinstance(reply, redis.RedisError | RedisClusterException):
            raise reply


def is_wrong_type(reply: object) -> bool:
    """Say whether a reply means that the key holds another type of value than was asked for."""
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE ")


def translate(error: redis.RedisError | RedisClusterException, action: str) -> SessionError:
    """Choose this package's error for one of the Redis client's.

    Args:
        error: What the client raised.
        action: What was being done.

    Returns:
        The error to raise from it.
    """
    text = str(error) or type(error).__name__
    said = f"{action}: Redis says {text!r}"
    if isinstance(error, OutOfMemoryError) or "OOM command" in text:
        return StoreFullError(f"{said}; raise its maxmemory, choose a volatile-* eviction policy or remove sessions")
    if "MISCONF " in text:
        return StoreFullError(f"{said}; free space on its disk or make its data folder writable")
    if "WRONGTYPE " in text:
        return RecordError(f"{said}; something else has written the key: remove it or use another database")
    if isinstance(error, ReadOnlyError):
        return StoreUnavailableError(f"{said}; point REDIS_URL at the primary")
    if isinstance(error, NoPermissionError) or any(part in text for part in _NO_PERMISSION):
        return StoreUnavailableError(f"{said}; give its user the commands and keys that docs/SESSIONS.md lists")
    if "unknown command" in text.lower() or "Unknown Redis command" in text:
        return StoreUnavailableError(f"{said}; use Redis 6.2 or newer, or Valkey, with no command renamed or left out")
    if isinstance(error, AuthenticationError):
        return StoreUnavailableError(f"{said}; check user and password in REDIS_URL")
    if isinstance(error, MovedError):
        return StoreUnavailableError(f"{said}; it belongs to a Cluster: write redis+cluster:// in REDIS_URL")
    if isinstance(error, MasterNotFoundError):
        return StoreUnavailableError(f"{action}: Sentinel names no primary ({text}); try again after the failover")
    if "SSL" in text:
        return StoreUnavailableError(f"{said}; check rediss:// and ssl_ca_certs in REDIS_URL")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | RedisClusterException):
        return StoreUnavailableError(f"{action}: Redis does not answer ({text}); check that the server runs")
    return StoreUnavailableError(said)
