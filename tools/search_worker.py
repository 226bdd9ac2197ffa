"""Matches a regular expression with texts; a program of its own, started by `dlite_agent.tools.search`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice


def main() -> None:
    """Read pattern and files from standard input as JSON; print the lines found as a JSON list."""
    arguments = json.load(sys.stdin)
    try:
        pattern = re.compile(arguments["pattern"])
    except (re.error, OverflowError, RecursionError) as error:
        sys.exit(f"not a regular expression: {error}")
    found = _found(pattern, arguments["files"], arguments["max_chars"])
    print(json.dumps(list(islice(found, arguments["max_found"]))))


def _found(pattern: re.Pattern[str], files: list[tuple[str, str]], max_chars: int) -> Iterator[str]:
    for path, content in files:
        for number, line in enumerate(content.split("\n"), start=1):
            match = pattern.search(line)
            if match:
                first = max(0, match.start() - max_chars // 2) if len(line) > max_chars else 0
                yield f"{path}:{number}: {line[first : first + max_chars].strip()}"


if __name__ == "__main__":
    main()
