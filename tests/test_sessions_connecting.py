"""What a Redis URL may say, and what is said about one that leads nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.cluster import REDIS_ALLOWED_KEYS
from redis.crc import key_slot

from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError, DLiteError, StoreUnavailableError
from dlite_agent.sessions.client import translate
from dlite_agent.sessions.connecting import OPTIONS, ServerAddress, open_client, parse_url
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.store import SessionStore
from tests.servers import SERVICE, Place, cluster, one_server, program, sentinels, tls_server, valkey

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "options"),
    [
        ("redis://localhost", "tcp", (("localhost", 6379),), {}),
        ("redis://:7000/2", "tcp", (("localhost", 7000),), {"db": 2}),
        ("redis://[::1]:7000?db=3&protocol=2", "tcp", (("::1", 7000),), {"db": 3, "protocol": 2}),
        ("redis://me:p%40ss%2F%3A@h", "tcp", (("h", 6379),), {"username": "me", "password": "p@ss/:"}),
        ("redis://:only@h:1/", "tcp", (("h", 1),), {"password": "only"}),
        (
            "rediss://h?ssl_ca_certs=/a%20b/ca.pem&ssl_check_hostname=false",
            "tcp",
            (("h", 6379),),
            {"ssl": True, "ssl_ca_certs": "/a b/ca.pem", "ssl_check_hostname": False},
        ),
        ("redis+cluster://a:1,b,[::2]:3", "cluster", (("a", 1), ("b", 6379), ("::2", 3)), {}),
        ("rediss+cluster://u:p@a/0", "cluster", (("a", 6379),), {"ssl": True, "username": "u", "password": "p"}),
        ("redis+sentinel://a,b:1/agents/4", "sentinel", (("a", 26379), ("b", 1)), {"db": 4}),
    ],
)
def test_a_url_is_read(url: str, kind: str, hosts: tuple[tuple[str, int], ...], options: dict[str, Any]) -> None:
    address = parse_url(url)
    assert (address.kind, address.hosts, address.options) == (kind, hosts, options)


def test_a_socket_and_a_service_are_read() -> None:
    assert parse_url("unix://me:x@/a%20b/c.sock?db=1") == ServerAddress(
        "unix", (), "/a b/c.sock", None, {"db": 1, "username": "me", "password": "x"}, {}
    )
    address = parse_url("rediss+sentinel://me:x@h/agents?sentinel_username=s&sentinel_password=y&socket_timeout=2.5")
    assert address.service == "agents"
    assert address.options == {"ssl": True, "socket_timeout": 2.5, "username": "me", "password": "x"}
    assert address.sentinel_options == {"username": "s", "password": "y"}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://localhost", "expected redis://.*unix://.*redis.sentinel://.*redis.cluster://"),
        ("localhost:6379", "expected redis://"),
        ("", "expected redis://"),
        (f"redis://me:{SECRET}@x@h", "percent-encoded"),
        (f"redis://me:{SECRET}/1@h", "host"),
        ("redis://a,b", "several servers"),
        ("redis://h:0", "host:port"),
        ("redis://h:65536", "host:port"),
        ("redis://h:x", "host:port"),
        ("redis://h/x", "number of a database"),
        ("redis://h/1/2", "number of a database"),
        ("redis://h?protocol=4", "protocol .*'4'; expected one of 2, 3"),
        ("redis://h?socket_timeout=soon", "expected seconds"),
        ("redis://h?socket_timeout=-1", "expected seconds"),
        ("redis://h?socket_connect_timeout=nan", "expected seconds"),
        ("redis://h?db=-1", "expected a whole number"),
        ("redis://h?max_connections=", "expected a whole number"),
        ("redis://h?ssl_check_hostname=false", "rediss"),
        ("rediss://h?ssl_check_hostname=maybe", "expected one of true, false"),
        ("rediss://h?ssl_cert_reqs=maybe", "expected one of none, optional, required"),
        ("redis://h?nosuch=1", "'nosuch'; expected some of db, protocol"),
        ("redis://h?sentinel_password=x", "sentinel_"),
        ("redis://h?decode_responses=True", "decode_responses"),
        ("unix://host/path", "unix:///path"),
        ("unix://", "unix:///path"),
        ("redis+sentinel://h", "redis.sentinel://host:port/service"),
        ("redis+sentinel://a,,b/agents", "host:port"),
        ("redis+cluster://a,b/1", "only number 0"),
        ("redis+cluster://a?db=1", "only number 0"),
    ],
)
def test_a_url_that_is_none_says_what_to_write(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_url(url)
    assert "\n" not in str(caught.value)
    assert "REDIS_URL" in str(caught.value)
    assert SECRET not in str(caught.value)


def refusal(url: str, expected: type[DLiteError]) -> str:
    with pytest.raises(expected) as caught:
        open_client(url)
    text = str(caught.value)
    assert "\n" not in text
    assert "REDIS_URL" in text
    assert SECRET not in text
    return text


@pytest.fixture(scope="module")
def server() -> Iterator[Place]:
    with one_server(valkey()) as place:
        yield place


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1",
        "rediss://127.0.0.1:1",
        f"redis+sentinel://127.0.0.1:1,127.0.0.1:2/{SERVICE}",
        "redis+cluster://127.0.0.1:1,127.0.0.1:2",
    ],
)
def test_nobody_there_is_said(url: str) -> None:
    assert "check that the server runs" in refusal(url, StoreUnavailableError)


def test_every_option_reaches_the_nodes_of_a_cluster() -> None:
    own = {"db", "sentinel_username", "sentinel_password"}
    assert OPTIONS.keys() - own <= set(REDIS_ALLOWED_KEYS)


def test_a_wrong_password_and_a_missing_permission_are_said(server: Place, tmp_path: Path) -> None:
    server.command(0, "ACL SETUSER", "poor", "on", f">{SECRET}", "~*", "-@all", "+ping", "+hmget")
    wrong = server.url.replace("://", f"://poor:{SECRET}2@")
    assert "check user and password" in refusal(wrong, StoreUnavailableError)
    client = connect(Settings(home=tmp_path, redis_url=server.url.replace("://", f"://poor:{SECRET}@")))
    store = SessionStore(client)
    assert store.head("0" * 32) is None
    for call in (lambda: store.acquire("0" * 32), store.usage):
        with pytest.raises(StoreUnavailableError, match=r"docs/SESSIONS\.md"):
            call()
    client.close()


@pytest.mark.parametrize("command", ["GETEX", "HMGET"])
def test_a_command_that_the_server_lacks_is_said(command: str) -> None:
    with (
        one_server(program("redis-server"), "--rename-command", command, "") as place,
        closing(open_client(place.url)) as client,
    ):
        store = SessionStore(client)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=r"Redis 6\.2 or newer"):
                store.get_snapshot("0" * 32, "0" * 64) if command == "GETEX" else store.acquire("0" * 32)


def test_what_redis_before_7_says_of_rights_in_scripts_is_understood() -> None:
    error = redis.ResponseError("@user_script: 19: The user executing the script can't run this command or subcommand")
    assert "docs/SESSIONS.md" in str(translate(error, "acquiring the session"))


def test_a_server_without_cluster_mode_is_said(server: Place) -> None:
    text = refusal(server.url.replace("redis://", "redis+cluster://"), StoreUnavailableError)
    assert "luster" in text


def test_a_node_of_a_cluster_is_not_taken_for_a_server(tmp_path: Path) -> None:
    with cluster(valkey()) as place:
        client = connect(Settings(home=tmp_path, redis_url=f"redis://127.0.0.1:{place.ports[0]}"))
        store = SessionStore(client)
        sid = next(sid for sid in map("{:032x}".format, range(100)) if key_slot(sid.encode()) > 12000)  # elsewhere
        with pytest.raises(StoreUnavailableError, match=r"redis\+cluster://"):
            store.acquire(sid)
        client.close()


def test_a_service_that_sentinels_do_not_know_is_said() -> None:
    with sentinels(valkey(), valkey()) as place:
        assert f"expected one of: {SERVICE}" in refusal(place.url.replace(SERVICE, "other"), ConfigError)
        some_down = place.url.replace("sentinel://", "sentinel://127.0.0.1:1,")
        open_client(some_down).close()
        for process in place.processes[2:]:
            process.kill()
        assert "check that the server runs" in refusal(place.url, StoreUnavailableError)


def test_a_certificate_that_is_not_trusted_is_said(tmp_path: Path) -> None:
    with tls_server(program("redis-server")) as place:
        plain = place.url.partition("?")[0]
        assert "ssl_ca_certs" in refusal(plain, StoreUnavailableError)
        assert "file that can be read" in refusal(f"{plain}?ssl_ca_certs={tmp_path / 'nothing.pem'}", ConfigError)
        open_client(f"{plain}?ssl_cert_reqs=none&ssl_check_hostname=false").close()
