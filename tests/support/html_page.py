"""Elements and text of an HTML page, and a text that attacks a page."""

from __future__ import annotations

from html.parser import HTMLParser

# Ends elements, opens a script, and has control, bidirectional and unpaired characters.
ATTACK = (
    '</pre><script>alert(1)</script><img src=x onerror="alert(2)">" onload=\'x\' &lt;b&gt; '
    "\x00\x1b[31m\u202e\x9b\ud800"
)
_VOID_ELEMENTS = {"meta"}


class HtmlPage(HTMLParser):
    """A parsed page whose elements are all closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID_ELEMENTS:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self._texts.append(data)

    def text(self) -> str:
        """Return the text with single spaces."""
        return " ".join(" ".join(self._texts).split())
