"""A strict HTML parser: every element must be closed, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input", "col"}


@dataclass
class Node:
    """An element with its attributes, its children and the text directly inside it."""

    tag: str
    attributes: dict[str, str]
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    pieces: list[str | Node] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()

    def all(self, tag: str, **attributes: str) -> list[Node]:
        """Return every descendant with that tag, those attributes and, for `class_`, that class."""
        class_ = attributes.pop("class_", None)
        return [
            node
            for node in self.walk()
            if node.tag == tag
            and all(node.attributes.get(k.replace("_", "-")) == v for k, v in attributes.items())
            and (class_ is None or class_ in node.attributes.get("class", "").split())
        ]

    @property
    def text(self) -> str:
        raw = "".join(p if isinstance(p, str) else p.text for p in self.pieces)
        return " ".join(raw.split())


class Page(HTMLParser):
    """The parsed page; fails on elements that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("#document", {})
        self._open = [self.root]
        self.doctype = ""
        self.feed(html)
        self.close()
        assert len(self._open) == 1, f"<{self._open[-1].tag}> is never closed"

    def handle_decl(self, decl: str) -> None:
        self.doctype = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add(tag, attrs)
        if tag in VOID:
            self._open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].pieces.append(data)

    def _add(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        node = Node(tag, {k: "" if v is None else v for k, v in attrs}, self._open[-1])
        self._open[-1].children.append(node)
        self._open[-1].pieces.append(node)
        self._open.append(node)

    def all(self, tag: str, **attributes: str) -> list[Node]:
        return self.root.all(tag, **attributes)

    def id(self, name: str) -> Node | None:
        return next((n for n in self.root.walk() if n.attributes.get("id") == name), None)

    def score(self, method: str, key: str) -> float | None:
        """Return the value of a cell of the main table."""
        cells = self.all("data", data_method=method, data_score=key)
        assert len(cells) <= 1
        return float(cells[0].attributes["value"]) if cells else None
