"""What every page must be, checked without a browser."""

import re
from html.parser import HTMLParser


VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """The elements of a page; a tag that is closed out of order, or not at all, is an error."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_page(text: str) -> Page:
    """Parses, asks nobody for anything, runs nothing, and is readable by all."""
    page = Page(text)
    assert not re.search(r"//[a-z]", re.sub(r'"data:[^"]*"', "", text), flags=re.IGNORECASE), "an address"
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], attributes
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:image/png;base64,", "#")), attributes[name][:80]
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)\)", text))
    metas = {meta.get("name") or meta.get("http-equiv"): meta.get("content") for meta in page.all("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["color-scheme"] == "light dark" and "@media (prefers-color-scheme: dark)" in text
    assert metas["Content-Security-Policy"] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    assert all(image["alt"] for image in page.all("img"))
    assert all(drawing["aria-label"] and drawing["role"] == "img" for drawing in page.all("svg"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    return page
