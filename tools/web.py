"""Reading web pages of listed hosts.

A model's URL may be an attack on the network the agent runs in. So: listed hosts only, also after every redirect;
http and https, on their own ports unless listed; a name is resolved once, all its addresses must be public, and the
connection is made to the address that was checked. Bytes and time are bounded as a whole, and the page is turned into
text in a confined process.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field

from dlite_agent.errors import ConfigError
from dlite_agent.tools.factory import make_tool
from dlite_agent.tools.process import Limits, run_worker

MAX_URL_CHARS = 2_000
MAX_PAGE_BYTES = 1 << 20
MAX_RESULT_CHARS = 8_000
MAX_REDIRECTS = 5
FETCH_S = 20.0
PAGE_LIMITS = Limits(seconds=5, cpu_seconds=2, output_bytes=4 << 20)
_READ_TYPES = ("text/", "application/json", "application/xml", "application/xhtml+xml")
_HEADERS = {"User-Agent": "dlite-agent", "Accept": "text/html, text/*, application/json", "Accept-Encoding": "identity"}
_PORTS = {"http": 80, "https": 443}

Resolver = Callable[[str, int], Sequence[str]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host, as the system knows them."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class FetchPageArgs(BaseModel):
    """Arguments of `fetch_page`."""

    url: str = Field(description="Address of the page, for example https://example.org/news")
    start: int = Field(default=0, ge=0, description="Character to start from, for long pages")


def web_tool(
    hosts: Sequence[str],
    *,
    networks: Sequence[str] = (),
    resolver: Resolver = resolve,
    timeout_s: float = FETCH_S,
    tls: ssl.SSLContext | None = None,
) -> BaseTool:
    """Return the tool `fetch_page` for the given hosts.

    Args:
        hosts: Names such as "example.org", "*.example.org" (what is below it, not itself) or "example.org:8080".
        networks: Networks that are not public but may be read all the same, such as "10.1.0.0/16".
        resolver: Names to addresses; the default asks the system.
        timeout_s: For one call with its redirects, in seconds; looking up a name comes on top.
        tls: Which certificates are trusted; the system's by default.

    Raises:
        ConfigError: A host or network is not of these forms.
    """
    reader = PageReader(_HostList(hosts), _networks(networks), resolver, timeout_s, tls or ssl.create_default_context())

    def fetch_page(url: str, start: int = 0) -> str:
        """Read the text of a web page."""
        page = reader.fetch(url)
        arguments = {"data": base64.b64encode(page.data).decode(), "type": page.type, "charset": page.charset}
        text = run_worker("page_worker", arguments, limits=PAGE_LIMITS).strip()
        if not text:
            return "(no text)"
        if start >= len(text):
            raise ToolException(f"the page has {len(text)} characters; start is {start}")
        end = start + MAX_RESULT_CHARS
        notes = [f"(characters {start}-{end} of {len(text)}; read on with start {end})"] if end < len(text) else []
        notes += [f"(the page is longer; only its first {MAX_PAGE_BYTES} bytes were read)"] if page.is_cut else []
        return "\n".join([text[start:end], *notes])

    return make_tool(fetch_page, FetchPageArgs)


@dataclass(frozen=True, slots=True)
class Page:
    """What a server sent: at most `MAX_PAGE_BYTES`, its media type, and its character set."""

    data: bytes
    type: str
    charset: str
    is_cut: bool


@dataclass(frozen=True, slots=True)
class _Location:
    scheme: str
    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class PageReader:
    """Fetches pages; everything a URL, a name server or a web server says is distrusted."""

    hosts: _HostList
    networks: Sequence[Network]
    resolver: Resolver
    timeout_s: float
    tls: ssl.SSLContext

    def fetch(self, url: str) -> Page:
        """Return the page at `url`.

        Raises:
            ToolException: It may not be read, or cannot.
        """
        with _Deadline(self.timeout_s) as deadline:
            for _ in range(MAX_REDIRECTS + 1):
                location = _parse(url)
                self.hosts.check(location)
                try:
                    answer = self._get(location, deadline)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    problem = f"took longer than {self.timeout_s:g} seconds" if deadline.is_over else _reason(error)
                    raise ToolException(f"cannot read {location.host}: {problem}") from error
                if isinstance(answer, Page):
                    return answer
                if location.scheme == "https" and not urljoin(url, answer).startswith("https:"):
                    raise ToolException(f"{location.host} leads from https to http; that is not followed")
                url = urljoin(url, answer)
        raise ToolException(f"more than {MAX_REDIRECTS} redirects")

    def _address(self, location: _Location) -> str:
        addresses = list(self.resolver(location.host, location.port))
        for text in addresses:
            address = _embedded(ipaddress.ip_address(text.partition("%")[0]))
            is_public = address.is_global and not address.is_multicast
            if not is_public and not any(address in network for network in self.networks):
                raise ToolException(f"{location.host} is not on the public internet; it may not be read")
        if not addresses:
            raise ToolException(f"{location.host} has no address")
        return addresses[0]

    def _get(self, location: _Location, deadline: _Deadline) -> Page | str:
        """Return the page at a location, or where the server says to look instead."""
        tls = self.tls if location.scheme == "https" else None
        connection = _Connection(location, self._address(location), deadline, tls)
        try:
            connection.request("GET", location.path, headers=_HEADERS)
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308) and (target := answer.getheader("Location")):
                return target
            return _page(location, answer, deadline)
        finally:
            connection.close()


def _page(location: _Location, answer: http.client.HTTPResponse, deadline: _Deadline) -> Page:
    if answer.status != 200:
        raise ToolException(f"{location.host} answered {answer.status} {answer.reason[:80]}")
    kind = answer.headers.get_content_type()
    if not kind.startswith(_READ_TYPES):
        raise ToolException(f"the page is {kind[:80]}, not text")
    if (answer.getheader("Content-Encoding") or "identity").strip().lower() != "identity":
        raise ToolException("the page is compressed, though that was not asked for; it cannot be read")
    data = answer.read(MAX_PAGE_BYTES + 1)
    if deadline.is_over:  # closed by us, so what was read may be a part
        raise OSError("timed out")
    charset = answer.headers.get_content_charset() or "utf-8"
    return Page(data[:MAX_PAGE_BYTES], kind, charset, len(data) > MAX_PAGE_BYTES)


class _Deadline:
    """Shuts the watched connection down when the time is over: a socket's own timeout begins again with every byte."""

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._watched: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._unwatch()

    def left(self) -> float:
        """Return how many seconds are left; a little, where none are."""
        return max(self._end - time.monotonic(), 0.001)

    def watch(self, connection: socket.socket) -> None:
        """Shut this connection down in time; TLS takes the socket itself over, so a second descriptor is kept."""
        with self._lock:
            self._unwatch()
            if self.is_over:
                raise TimeoutError("timed out")
            self._watched = connection.dup()

    def _expire(self) -> None:
        with self._lock:
            self.is_over = True
            if self._watched:
                with contextlib.suppress(OSError):
                    self._watched.shutdown(socket.SHUT_RDWR)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched.close()
            self._watched = None


class _Connection(http.client.HTTPConnection):
    """Connects to the address that was checked, whatever the name means by now; TLS still checks the name."""

    def __init__(self, location: _Location, address: str, deadline: _Deadline, tls: ssl.SSLContext | None) -> None:
        super().__init__(location.host, location.port)
        self.default_port = _PORTS[location.scheme]  # so that the Host header names a port only where it must
        self._address = address
        self._deadline = deadline
        self._tls = tls

    def connect(self) -> None:
        """Open the connection, within the deadline."""
        raw = socket.create_connection((self._address, self.port), self._deadline.left())
        try:
            self._deadline.watch(raw)
            self.sock = self._tls.wrap_socket(raw, server_hostname=self.host) if self._tls else raw
        except BaseException:
            raw.close()
            raise


class _HostList:
    """The hosts, with their ports, that may be read."""

    def __init__(self, hosts: Sequence[str]) -> None:
        if isinstance(hosts, str) or not hosts:
            raise ConfigError(f"hosts is {hosts!r}; expected a list such as ['example.org', '*.example.org']")
        self._entries: list[tuple[str, int | None]] = []
        for entry in hosts:
            match = re.fullmatch(r"(\*\.)?([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?", entry)
            if not match:
                raise ConfigError(f"host {entry!r} cannot be listed; give a name such as example.org or *.example.org")
            host = (match[1] or "") + _canonical(match[2].strip("[]"))
            self._entries.append((host, int(match[3][1:]) if match[3] else None))

    def check(self, location: _Location) -> None:
        """Refuse a location that is not listed.

        Raises:
            ToolException: With the hosts that are.
        """
        for host, port in self._entries:
            is_host = location.host.endswith(host[1:]) if host.startswith("*.") else location.host == host
            if is_host and location.port == (port or _PORTS[location.scheme]):
                return
        listed = ", ".join(host if port is None else f"{host}:{port}" for host, port in self._entries)
        raise ToolException(f"{location.host} port {location.port} may not be read; these hosts may: {listed[:500]}")


def _networks(networks: Sequence[str]) -> list[Network]:
    try:
        return [ipaddress.ip_network(text) for text in networks]
    except ValueError as error:
        raise ConfigError(f"{error}; give networks such as 10.1.0.0/16") from error


def _canonical(host: str) -> str:
    """Return a host as name servers are asked for it: lower case, ASCII, without the last dot."""
    text = host.lower().removesuffix(".")
    return text if ":" in text else text.encode("idna").decode("ascii").lower()


def _parse(url: str) -> _Location:
    """Take a URL apart; what programs read in different ways is refused.

    Raises:
        ToolException: It is no plain http or https URL.
    """
    if len(url) > MAX_URL_CHARS or re.search(r"[\s\\\x00-\x20\x7f]", url):
        raise ToolException(f"the URL has spaces, backslashes or more than {MAX_URL_CHARS} characters")
    try:
        parts = urlsplit(url)
        host, port = _canonical(parts.hostname or ""), parts.port
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = quote(parts.query, safe="/?%:@!$&'()*+,;=~-._")
    except ValueError as error:
        raise ToolException(f"cannot read the URL: {error}") from error
    if parts.scheme not in _PORTS or not host:
        raise ToolException("the URL must be like https://example.org/page")
    if "@" in parts.netloc:
        raise ToolException("a user name in the URL is not allowed")
    return _Location(parts.scheme, host, port or _PORTS[parts.scheme], f"{path}?{query}" if query else path)


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, or the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64 or address in _COMPATIBLE:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)
    return address


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0][:200] if text else type(error).__name__
