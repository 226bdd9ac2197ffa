"""Opens a client to what a URL names: one server, the primary of a Sentinel service, or a Cluster.

    redis://[user:password@]host[:port][/database]           TCP
    rediss://...                                             TCP with TLS
    unix://[user:password@]/path/of/socket[?db=database]     unix socket
    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/database]
    redis+cluster://[user:password@]host[:port][,host[:port]...]

`rediss+sentinel` and `rediss+cluster` use TLS for every connection. Text that has a meaning in URLs is percent-encoded.
Options follow a question mark: see `OPTIONS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from dlite_agent.errors import ConfigError, StoreUnavailableError
from dlite_agent.sessions.client import RedisClient, translated

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0
"""How long a server may be silent in the middle of an answer."""

_DEFAULT_PORTS = {"sentinel": 26379}
_REDIS_PORT = 6379
_MAX_SECONDS = 3600.0
_FORMS = "redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster:// or rediss+cluster://"
_URL = re.compile(
    r"(?P<scheme>rediss?|unix|rediss?\+sentinel|rediss?\+cluster)://"
    r"(?:(?P<user>[^@/?]*)@)?(?P<hosts>[^@/?]*)(?P<path>/[^?]*)?(?:\?(?P<query>.*))?"
)
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s]*)(?::(?P<port>[0-9]{1,5}))?")


def _seconds(text: str) -> float:
    if not 0 < float(text) <= _MAX_SECONDS:
        raise ValueError
    return float(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _one_of(*values: Any) -> tuple[Callable[[str], Any], str]:
    known = {str(value).lower(): value for value in values}
    return known.__getitem__, f"one of {', '.join(known)}"


_TEXT: tuple[Callable[[str], Any], str] = (str, "text")
_SECONDS: tuple[Callable[[str], Any], str] = (_seconds, "seconds, for example 2.5")
_NUMBER: tuple[Callable[[str], Any], str] = (_whole, "a whole number")

OPTIONS = {
    "db": _NUMBER,
    "protocol": _one_of(2, 3),
    "socket_timeout": _SECONDS,
    "socket_connect_timeout": _SECONDS,
    "max_connections": _NUMBER,
    "client_name": _TEXT,
    "ssl_ca_certs": _TEXT,
    "ssl_certfile": _TEXT,
    "ssl_keyfile": _TEXT,
    "ssl_password": _TEXT,
    "ssl_cert_reqs": _one_of("none", "optional", "required"),
    "ssl_check_hostname": _one_of(True, False),
    "sentinel_username": _TEXT,
    "sentinel_password": _TEXT,
}
"""Options a URL may have, how each is read and what it may be: redis-py's, and user and password of the Sentinels."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """What a URL names.

    Attributes:
        kind: "tcp", "unix", "sentinel" or "cluster".
        hosts: Pairs of host and port; none for a unix socket.
        socket: Path of the unix socket, or None.
        service: What the Sentinels call the primary, or None.
        options: Arguments of redis-py connections: database, user, password, TLS, and what the URL's query says.
        sentinel_options: Those of connections to the Sentinels.
    """

    kind: str
    hosts: tuple[tuple[str, int], ...]
    socket: str | None
    service: str | None
    options: dict[str, Any] = field(repr=False)
    sentinel_options: dict[str, Any] = field(repr=False)


def parse_url(url: str) -> ServerAddress:
    """Read a URL; see the module for its forms.

    Raises:
        ConfigError: If it has none of them. The message never repeats user or password.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(
            f"REDIS_URL is no Redis URL; expected {_FORMS}, special characters of user and password percent-encoded"
        )
    family, _, kind = match["scheme"].partition("+")
    kind = kind or ("unix" if family == "unix" else "tcp")
    options = _read_options(match["query"] or "", is_tls=family == "rediss", is_sentinel=kind == "sentinel")
    sentinel_options = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    user, _, password = (match["user"] or "").partition(":")
    options |= {name: unquote(text) for name, text in (("username", user), ("password", password)) if text}
    path = unquote(match["path"] or "")
    if kind == "unix":
        if match["hosts"] or not path:
            raise ConfigError("REDIS_URL names no socket; expected unix:///path/of/socket")
        return ServerAddress(kind, (), path, None, options, {})
    hosts = tuple(_read_host(text, kind) for text in match["hosts"].split(","))
    service, database = _read_path(path, kind)
    if database is not None:
        options.setdefault("db", database)
    if kind == "tcp" and len(hosts) > 1:
        raise ConfigError("REDIS_URL names several servers; expected redis+sentinel:// or redis+cluster:// for that")
    if kind == "cluster" and options.pop("db", 0):
        raise ConfigError("REDIS_URL names a database of a Cluster; a Cluster has only number 0, so leave it out")
    return ServerAddress(kind, hosts, None, service, options, sentinel_options if kind == "sentinel" else {})


def open_client(url: str) -> RedisClient:
    """Open a client to what a URL names, and have it answered.

    Commands are tried again a few times when a connection fails, for longer where another server may take over.

    Args:
        url: See the module.

    Returns:
        A binary client.

    Raises:
        ConfigError: If the URL is none, or the Sentinels do not know the service.
        StoreUnavailableError: If nothing answers, or not to this user.
    """
    address = parse_url(url)
    _check_files(address)
    with translated("connecting to REDIS_URL"):
        if address.service is not None:
            _find_primary(address)
        client = _open(address)
        client.ping()
    return client


def socket_client(path: str) -> redis.Redis:
    """Make a binary client for the server at a unix socket."""
    return redis.Redis(unix_socket_path=path, decode_responses=False, **_patience(2))


def _open(address: ServerAddress) -> RedisClient:
    if address.kind == "cluster":
        node: Any = ClusterNode  # these classes have no annotations
        nodes = [node(host, port) for host, port in address.hosts]
        return redis.RedisCluster(startup_nodes=nodes, **_patience(8) | address.options)
    if address.kind == "sentinel":
        primary: redis.Redis = _sentinel(address).master_for(address.service, **_patience(4) | address.options)
        return primary
    if address.kind == "unix":
        return redis.Redis(unix_socket_path=address.socket, **_patience(2) | address.options)
    ((host, port),) = address.hosts
    return redis.Redis(host, port, **_patience(2) | address.options)


def _sentinel(address: ServerAddress) -> Any:
    shared = {name: value for name, value in address.options.items() if name.startswith(("ssl", "socket_", "protocol"))}
    own = {name: value for name, value in address.sentinel_options.items() if value is not None}
    timeouts = {"socket_timeout": CONNECT_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S}
    sentinel: Any = Sentinel
    return sentinel(
        list(address.hosts),
        sentinel_kwargs=timeouts | shared | own | {"retry": _retry(0)},
        redis_connect_func=_connect_to_primary,
    )


def _check_files(address: ServerAddress) -> None:
    """Refuse a missing file here: redis-py would take it for a server that does not answer."""
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        path = address.options.get(name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"the option {name} of REDIS_URL is {path!r}; expected a file that can be read")


def _connect_to_primary(connection: Any) -> None:
    """Greet a server and ask for its role: a Sentinel may name one that has just been demoted and lacks data."""
    connection.on_connect()
    connection.send_command("ROLE", check_health=False)
    role: bytes = connection.read_response()[0]
    if role != b"master":
        raise redis.ConnectionError(f"the server that Sentinel names as primary is a {role.decode()}")


def _find_primary(address: ServerAddress) -> None:
    """Ask once, without patience, so that a wrong service is told from one whose primary is down."""
    with _sentinel(address) as manager:
        try:
            manager.discover_master(address.service)
        except MasterNotFoundError as error:
            known = _services(manager)
            if address.service in known:
                raise StoreUnavailableError(
                    f"the primary of service {address.service!r} in REDIS_URL is down; try again after the failover"
                ) from error
            raise ConfigError(
                f"the Sentinels in REDIS_URL know no service {address.service!r}; expected one of: {', '.join(known)}"
            ) from error


def _services(manager: Any) -> list[str]:
    """List what the Sentinels watch; raises the last error if none of them answers."""
    found: set[str] = set()
    errors: list[redis.RedisError] = []
    for sentinel in manager.sentinels:
        try:
            found |= set(sentinel.sentinel_masters())
        except (redis.ConnectionError, redis.TimeoutError) as error:
            errors.append(error)
    if len(errors) == len(manager.sentinels):
        raise errors[-1]
    return sorted(found)


def _read_options(query: str, *, is_tls: bool, is_sentinel: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"ssl": True} if is_tls else {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name == "decode_responses":
            raise ConfigError("REDIS_URL sets decode_responses; leave it out, what is stored is binary")
        is_known = name in OPTIONS and (is_tls or not name.startswith("ssl_"))
        if not is_known or (name.startswith("sentinel_") and not is_sentinel):
            raise ConfigError(
                f"REDIS_URL has an option {name[:40]!r}; expected some of {', '.join(OPTIONS)} "
                "(ssl_* with rediss, sentinel_* with Sentinel)"
            )
        read, expected = OPTIONS[name]
        try:
            options[name] = read(text)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"the option {name} of REDIS_URL is {text[:40]!r}; expected {expected}") from error
    return options


def _read_host(text: str, kind: str) -> tuple[str, int]:
    match = _HOST.fullmatch(unquote(text))
    port = int(match["port"] or _DEFAULT_PORTS.get(kind, _REDIS_PORT)) if match else 0
    name = match["name"].strip("[]") if match else ""
    if not 0 < port < 2**16 or not (name or kind == "tcp"):
        raise ConfigError("a host in REDIS_URL cannot be read; expected host, host:port or [IPv6]:port")
    return name or "localhost", port


def _read_path(path: str, kind: str) -> tuple[str | None, int | None]:
    """Split the path of a URL into service and database."""
    parts = [part for part in path.split("/") if part]
    service = parts.pop(0) if kind == "sentinel" and parts else None
    if kind == "sentinel" and not service:
        raise ConfigError("REDIS_URL names no service; expected redis+sentinel://host:port/service")
    if len(parts) > 1 or not all(part.isdecimal() for part in parts):
        raise ConfigError("the path of REDIS_URL cannot be read; expected the number of a database, or nothing")
    return service, int(parts[0]) if parts else None


def _retry(attempts: int) -> Retry:
    return Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), attempts)


def _patience(attempts: int) -> dict[str, Any]:
    return {
        "socket_timeout": READ_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": _retry(attempts),
    }
