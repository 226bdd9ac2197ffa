"""Turns what a web server sent into plain text; a program of its own, started by `dlite_agent.tools.web`."""

from __future__ import annotations

import base64
import json
import re
import sys
from html.parser import HTMLParser

_HIDDEN = {"script", "style", "template", "noscript", "svg", "head"}
_INLINE = {
    "a",
    "abbr",
    "b",
    "bdi",
    "cite",
    "code",
    "em",
    "i",
    "kbd",
    "mark",
    "q",
    "s",
    "small",
    "span",
    "strong",
    "sub",
} | {
    "sup",
    "time",
    "u",
    "var",
}


def main() -> None:
    """Read bytes, media type and character set from standard input as JSON; print the text."""
    arguments = json.load(sys.stdin)
    text = _decode(base64.b64decode(arguments["data"]), arguments["charset"])
    print(page_text(text) if "html" in arguments["type"] else text)


def _decode(data: bytes, charset: str) -> str:
    try:
        return data.decode(charset, errors="replace")
    except (LookupError, ValueError):  # unknown, or no character set at all, as "zip" is
        return data.decode("utf-8", errors="replace")


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.parts: list[str] = []
        self._hidden: list[str] = []
        self._is_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_title = tag == "title"
        if tag == "body":  # an end tag of the head may be left out
            self._hidden.clear()
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag not in _INLINE:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._is_title = False
        if tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        elif tag not in _INLINE:
            self.parts.append("\n")

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Skip what begins with <![ as browsers do; the parser's own way raises on most of it."""
        return self.parse_bogus_comment(i)

    def handle_data(self, data: str) -> None:
        if self._is_title:
            self.title += data
        elif not self._hidden:
            self.parts.append(data)


def page_text(html: str) -> str:
    """Return title and text of a page, a line for each block."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    lines = [
        " ".join(line.split()) for line in [reader.title.replace("\n", " "), *"".join(_joined(reader)).split("\n")]
    ]
    return "\n".join(line for line in lines if line)


def _joined(reader: _Reader) -> list[str]:
    """Return the parts with line feeds of the source made spaces, as browsers do; only blocks break lines."""
    return [part if part == "\n" else re.sub(r"\s+", " ", part) for part in reader.parts]


if __name__ == "__main__":
    main()
