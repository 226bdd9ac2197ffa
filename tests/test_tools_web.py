"""Reading web pages: what comes back, and that neither a model's URL nor a hostile server gets anywhere else."""

from __future__ import annotations

import gzip
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from dlite_agent.errors import ConfigError
from dlite_agent.tools import web as web_module
from dlite_agent.tools import web_tool

GOOD = "127.0.0.2"
"""Where the allowed server listens; 127.0.0.1, where the other one does, stands for the inside of a network."""

PAGE = """<!doctype html><html><head><title>News &amp; more</title><style>p {}</style><script>alert(1)</script></head>
<body><h1>Today</h1><p>Rain in <b>Kiel</b>,
sun in Ulm.</p><ul><li>one<li>two</ul><script>steal()</script></body></html>"""


class Handler(BaseHTTPRequestHandler):
    """A server that plays every trick a page may play; what it was asked is kept."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Host"]))
        name = self.path.split("?")[0].strip("/") or "page"
        play = getattr(self, f"play_{name}", None)
        if play is None:
            self.send_error(404)
            return
        try:
            play()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def answer(self, body: bytes, kind: str = "text/html; charset=utf-8", **headers: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def redirect(self, target: str) -> None:
        self.send_response(302)
        self.send_header("Location", target)
        self.end_headers()

    def play_page(self) -> None:
        self.answer(PAGE.encode())

    def play_plain(self) -> None:
        self.answer("".join(f"line {number}\n" for number in range(3000)).encode(), "text/plain")

    def play_latin(self) -> None:
        self.answer("Größe".encode("latin-1"), "text/plain; charset=latin-1")

    def play_moved(self) -> None:
        self.redirect("/page")

    def play_inside(self) -> None:
        self.redirect(f"http://127.0.0.1:{self.server.inside_port}/")

    def play_private(self) -> None:
        self.redirect(f"http://private.test:{self.server.server_port}/")

    def play_unlisted(self) -> None:
        self.redirect(f"http://unlisted.test:{self.server.server_port}/")

    def play_file(self) -> None:
        self.redirect("file:///etc/passwd")

    def play_to_http(self) -> None:
        self.redirect("http://good.test/")

    def play_loop(self) -> None:
        self.redirect("/loop")

    def play_endless(self) -> None:
        self.answer(b"")
        while True:
            self.wfile.write(b"words " * 10_000)

    def play_drip(self) -> None:
        self.answer(b"", "text/plain")
        while True:
            self.wfile.write(b"x")
            time.sleep(0.05)

    def play_drip_headers(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
        while True:
            self.wfile.write(b"x")
            time.sleep(0.05)

    def play_many_headers(self) -> None:
        self.answer(b"", **{f"X_{number}": "x" for number in range(500)})

    def play_long_header(self) -> None:
        self.answer(b"", X="x" * 100_000)

    def play_bomb(self) -> None:
        self.answer(gzip.compress(bytes(1 << 24)), Content_Encoding="gzip")

    def play_binary(self) -> None:
        self.answer(b"\0" * 100, "application/octet-stream")

    def play_slow_markup(self) -> None:
        self.answer(b"<![a" * 200_000)

    def play_slow_charset(self) -> None:
        self.answer(b"a" * 400_000 + b"-" + b"zz9" * 100_000, "text/plain; charset=punycode")

    def play_no_charset(self) -> None:
        self.answer(b"hello", "text/plain; charset=zip")

    def play_nothing(self) -> None:
        self.answer(b"")


class Server(ThreadingHTTPServer):
    """The server and what it was asked."""

    daemon_threads = True

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        super().__init__((address, 0), Handler)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.asked: list[tuple[str, str]] = []
        self.inside_port = 0
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    try:
        good = Server(GOOD)
    except OSError:
        pytest.skip(f"{GOOD} is no address of this system")
    inside = Server("127.0.0.1")
    good.inside_port = inside.server_port
    yield good, inside
    for server in (good, inside):
        server.shutdown()
        server.server_close()


NAMES = {
    "good.test": [GOOD],
    "private.test": ["10.0.0.1"],
    "mixed.test": [GOOD, "127.0.0.1"],
    "mapped.test": ["::ffff:127.0.0.1"],
    "nat64.test": ["64:ff9b::7f00:1"],
    "sixtofour.test": ["2002:7f00:1::"],
    "zone.test": ["fe80::1%lo"],
    "shared.test": ["100.64.0.1"],
    "multicast.test": ["224.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "nowhere.test": [],
}


def resolve(host: str, port: int) -> Sequence[str]:
    return NAMES[host] if host in NAMES else web_module.resolve(host, port)


def tool_for(good: Server, inside: Server, **options: Any) -> BaseTool:
    """Return a tool with a careless list of hosts, so that the addresses are what is checked."""
    hosts = [f"{host}:{good.server_port}" for host in (*NAMES, "*.wild.test")]
    hosts += [
        f"{host}:{inside.server_port}" for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "0177.0.0.1")
    ]
    hosts += [f"{host}:{inside.server_port}" for host in ("127.1", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]")]
    options = {"networks": [f"{GOOD}/32"], "resolver": resolve, **options}
    return web_tool(hosts, **options)


def fetch(tool: BaseTool, url: str, **more: Any) -> ToolMessage:
    message = tool.invoke({"type": "tool_call", "id": "1", "name": "fetch_page", "args": {"url": url, **more}})
    assert isinstance(message, ToolMessage)
    return message


NOT_PUBLIC = "not on the public internet"
NOT_LISTED = "may not be read; these hosts may"

ATTACKS: list[tuple[str, str, str]] = [
    # name, URL ({g}: port of the good server, {i}: of the inner one), what the answer holds
    ("loopback", "http://127.0.0.1:{i}/", NOT_PUBLIC),
    ("localhost", "http://localhost:{i}/", NOT_PUBLIC),
    ("last-dot", "http://localhost.:{i}/", NOT_PUBLIC),
    ("upper-case", "HTTP://LOCALHOST:{i}/", NOT_PUBLIC),
    ("lookalike", "http://\u24db\u24deca\uff4chost:{i}/", NOT_PUBLIC),
    ("decimal", "http://2130706433:{i}/", NOT_PUBLIC),
    ("hexadecimal", "http://0x7f.1:{i}/", NOT_PUBLIC),
    ("octal", "http://0177.0.0.1:{i}/", NOT_PUBLIC),
    ("short", "http://127.1:{i}/", NOT_PUBLIC),
    ("zero", "http://0.0.0.0:{i}/", NOT_PUBLIC),
    ("ipv6-loopback", "http://[::1]:{i}/", NOT_PUBLIC),
    ("ipv6-any", "http://[::]:{i}/", NOT_PUBLIC),
    ("ipv6-mapped", "http://[::ffff:127.0.0.1]:{i}/", NOT_PUBLIC),
    ("ipv6-mapped-hexadecimal", "http://[::ffff:7f00:1]:{i}/", NOT_LISTED),
    ("name-of-private", "http://private.test:{g}/", NOT_PUBLIC),
    ("name-of-good-and-private", "http://mixed.test:{g}/", NOT_PUBLIC),
    ("name-of-mapped", "http://mapped.test:{g}/", NOT_PUBLIC),
    ("name-of-nat64", "http://nat64.test:{g}/", NOT_PUBLIC),
    ("name-of-6to4", "http://sixtofour.test:{g}/", NOT_PUBLIC),
    ("name-with-zone", "http://zone.test:{g}/", NOT_PUBLIC),
    ("name-of-shared", "http://shared.test:{g}/", NOT_PUBLIC),
    ("name-of-multicast", "http://multicast.test:{g}/", NOT_PUBLIC),
    ("name-of-metadata", "http://metadata.test:{g}/latest/meta-data", NOT_PUBLIC),
    ("name-of-nothing", "http://nowhere.test:{g}/", "no address"),
    ("redirect-inside", "http://good.test:{g}/inside", NOT_PUBLIC),
    ("redirect-to-private", "http://good.test:{g}/private", NOT_PUBLIC),
    ("redirect-to-unlisted", "http://good.test:{g}/unlisted", NOT_LISTED),
    ("redirect-to-file", "http://good.test:{g}/file", "must be like https"),
    ("redirect-loop", "http://good.test:{g}/loop", "more than 5 redirects"),
    ("unlisted", "http://example.org/", NOT_LISTED),
    ("unlisted-port", "http://good.test/", NOT_LISTED),
    ("longer-name", "http://good.test.evil.test:{g}/", NOT_LISTED),
    ("name-ends-alike", "http://evilgood.test:{g}/", NOT_LISTED),
    ("wildcard-ends-alike", "http://evilwild.test:{g}/", NOT_LISTED),
    ("wildcard-itself", "http://wild.test:{g}/", NOT_LISTED),
    ("user", "http://good.test:{g}@127.0.0.1:{i}/", "user name"),
    ("user-and-password", "http://a:b@good.test:{g}/", "user name"),
    ("empty-user", "http://@127.0.0.1:{i}/", "user name"),
    ("backslash", "http://good.test:{g}\\@127.0.0.1:{i}/", "backslashes"),
    ("fragment", "http://127.0.0.2:{g}#@good.test:{g}/", NOT_LISTED),
    ("line-feed", "http://good.test:{g}/\r\nHost: inside", "spaces"),
    ("tab", "ht\ttp://good.test:{g}/", "spaces"),
    ("file", "file:///etc/passwd", "must be like https"),
    ("gopher", "gopher://127.0.0.1:{i}/_GET", "must be like https"),
    ("no-scheme", "//good.test:{g}/", "must be like https"),
    ("no-host", "http:///etc/passwd", "must be like https"),
    ("large-port", "http://good.test:99999/", "cannot read the URL"),
    ("surrogate-path", "http://good.test:{g}/\ud800", "cannot read the URL"),
    ("surrogate-query", "http://good.test:{g}/?\ud800", "cannot read the URL"),
    ("broken-ipv6", "http://[::1/", "cannot read the URL"),
    ("long-name", "http://" + "a" * 300 + ".test/", "cannot read the URL"),
    ("long", "http://good.test:{g}/" + "a" * 3000, "more than 2000"),
    ("not-http", "https://good.test:{g}/", "cannot read good.test"),
    ("endless", "http://good.test:{g}/endless", "only its first 1048576 bytes"),
    ("many-headers", "http://good.test:{g}/many_headers", "cannot read good.test"),
    ("long-header", "http://good.test:{g}/long_header", "cannot read good.test"),
    ("compressed", "http://good.test:{g}/bomb", "compressed"),
    ("binary", "http://good.test:{g}/binary", "not text"),
    ("slow-markup", "http://good.test:{g}/slow_markup", "stopped after|<!|no text"),
    ("slow-charset", "http://good.test:{g}/slow_charset", "stopped after|a"),
    ("not-a-charset", "http://good.test:{g}/no_charset", "^hello$"),
]


@pytest.mark.parametrize(("url", "expected"), [pytest.param(*line[1:], id=line[0]) for line in ATTACKS])
def test_an_attack_by_url_or_server(
    servers: tuple[Server, Server], url: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, inside = servers
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{inside.server_port}")  # the environment must not matter
    tool = tool_for(good, inside)
    message = fetch(tool, url.replace("{g}", str(good.server_port)).replace("{i}", str(inside.server_port)))
    assert re.search(expected, str(message.content)), message.content
    assert len(str(message.content)) < 9_000
    assert inside.asked == []
    assert fetch(tool, f"http://good.test:{good.server_port}/").status == "success"


@pytest.mark.parametrize("name", ["drip", "drip_headers"])
def test_a_server_that_drips_is_left_in_the_end(servers: tuple[Server, Server], name: str) -> None:
    good, _ = servers
    message = fetch(tool_for(*servers, timeout_s=0.5), f"http://good.test:{good.server_port}/{name}")
    assert (message.status, message.content) == ("error", "cannot read good.test: took longer than 0.5 seconds")


def test_a_server_that_never_ends_a_handshake_is_left(servers: tuple[Server, Server]) -> None:
    with socket.create_server((GOOD, 0)) as listener:
        tool = web_tool(
            [f"good.test:{listener.getsockname()[1]}"], networks=[f"{GOOD}/32"], resolver=resolve, timeout_s=0.5
        )
        message = fetch(tool, f"https://good.test:{listener.getsockname()[1]}/")
    assert message.status == "error"
    assert "cannot read good.test" in str(message.content)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a certificate for good.test."""
    if not shutil.which("openssl"):
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=good.test"
    command += " -addext subjectAltName=DNS:good.test -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


def test_the_name_is_what_a_certificate_must_be_for(certificate: tuple[Path, Path]) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    server = Server(GOOD, tls)
    hosts = [f"{name}:{server.server_port}" for name in ("good.test", "other.test")]
    options: dict[str, Any] = {"networks": [f"{GOOD}/32"], "resolver": lambda host, port: [GOOD]}
    trusting = ssl.create_default_context(cafile=certificate[0])
    try:
        tool = web_tool(hosts, tls=trusting, **options)
        assert str(fetch(tool, f"https://good.test:{server.server_port}/").content).startswith("News & more")
        assert server.asked == [("/", f"good.test:{server.server_port}")]
        assert "from https to http" in str(fetch(tool, f"https://good.test:{server.server_port}/to_http").content)
        for name, context in (("other.test", trusting), ("good.test", None)):
            message = fetch(web_tool(hosts, tls=context, **options), f"https://{name}:{server.server_port}/")
            assert message.status == "error"
            assert "certificate verify failed" in str(message.content).lower()
        late = web_tool(hosts, tls=trusting, timeout_s=0.5, **options)
        assert "took longer" in str(fetch(late, f"https://good.test:{server.server_port}/drip").content)
    finally:
        server.shutdown()
        server.server_close()


def test_a_name_is_looked_up_once_and_the_checked_address_used(servers: tuple[Server, Server]) -> None:
    good, inside = servers
    answers = iter([[GOOD], ["127.0.0.1"]])  # a name server that answers differently the second time
    tool = tool_for(good, inside, resolver=lambda host, port: next(answers))
    assert fetch(tool, f"http://good.test:{good.server_port}/").status == "success"
    assert good.asked == [("/", f"good.test:{good.server_port}")]


def test_a_page_is_read_as_text(servers: tuple[Server, Server]) -> None:
    good, _ = servers
    tool = tool_for(*servers)
    for name in ("page", "moved"):
        message = fetch(tool, f"http://good.test:{good.server_port}/{name}?a=1&b=%20#part")
        assert message.content == "News & more\nToday\nRain in Kiel, sun in Ulm.\none\ntwo"
    assert good.asked[0][0] == "/page?a=1&b=%20"
    assert fetch(tool, f"http://good.test:{good.server_port}/latin").content == "Größe"
    assert fetch(tool, f"http://good.test:{good.server_port}/nothing").content == "(no text)"
    missing = fetch(tool, f"http://good.test:{good.server_port}/missing")
    assert (missing.status, missing.content) == ("error", "good.test answered 404 Not Found")


def test_a_long_page_is_read_in_pieces_that_join_to_the_whole(servers: tuple[Server, Server]) -> None:
    tool, url = tool_for(*servers), f"http://good.test:{servers[0].server_port}/plain"
    text, start = "", 0
    while True:
        piece, _, note = str(fetch(tool, url, start=start).content).rpartition("\n(characters ")
        if not piece:
            text += note
            break
        text, start = text + piece, start + len(piece)
        assert note.endswith(f"read on with start {start})")
    assert text == "".join(f"line {number}\n" for number in range(3000)).strip()
    assert fetch(tool, url, start=10**9).status == "error"


async def test_a_page_is_read_without_blocking_the_event_loop(servers: tuple[Server, Server]) -> None:
    call = {"type": "tool_call", "id": "1", "name": "fetch_page"}
    arguments = {"url": f"http://good.test:{servers[0].server_port}/page"}
    message = await tool_for(*servers).ainvoke({**call, "args": arguments})
    assert message.content.startswith("News & more")


@pytest.mark.parametrize(
    "hosts", [[], "example.org", ["*"], ["http://example.org"], ["exa mple.org"], ["*.*.org"], [""]]
)
def test_hosts_that_list_too_much_or_nothing_are_refused(hosts: Any) -> None:
    with pytest.raises(ConfigError, match=r"example\.org"):
        web_tool(hosts)
    with pytest.raises(ConfigError, match="give networks"):
        web_tool(["example.org"], networks=["inside"])
