"""Hook of the documentation site, which MkDocs calls for each page (see mkdocs.yml)."""

import re
from typing import Any

_FENCE = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with fences that MkDocs reads.

    The word after the language, which tests/test_docs.py uses, becomes a title if it is the name of a file.
    """

    def fence(found: re.Match[str]) -> str:
        language, note = found.groups()
        return f'```{language} title="{note}"' if "." in note else f"```{language}"

    return _FENCE.sub(fence, markdown)
