"""A page taken apart: its elements with their attributes and text, and whether every one is closed."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img"}


class Page(HTMLParser):
    """Attributes: elements, a list of (name, attributes, texts directly in it); problems, a list of sentences."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.problems, self._open = [], [], []
        self.feed(text)
        self.close()
        self.problems += [f"{name} is not closed" for name, *_ in self._open]

    def handle_starttag(self, name, attributes):
        entry = (name, dict(attributes), [])
        self.elements.append(entry)
        if name not in VOID:
            self._open.append(entry)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes), []))

    def handle_endtag(self, name):
        if not self._open or self._open[-1][0] != name:
            self.problems.append(f"</{name}> ends {self._open[-1][0] if self._open else 'nothing'}")
        else:
            self._open.pop()

    def handle_data(self, data):
        if self._open:
            self._open[-1][2].append(data)

    def named(self, name, class_=None):
        """(attributes, text) of the elements of a name, and of a class if one is given."""
        return [
            (attributes, "".join(texts))
            for found, attributes, texts in self.elements
            if found == name and (class_ is None or class_ in (attributes.get("class") or "").split())
        ]

    @property
    def text(self):
        """Everything that a reader sees or may unfold."""
        return " ".join(" ".join(texts) for name, _, texts in self.elements if name not in ("script", "style"))

    def section(self, key):
        """Whether the page has a section."""
        return any(name == "section" and attributes.get("id") == key for name, attributes, _ in self.elements)
