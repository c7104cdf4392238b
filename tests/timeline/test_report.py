"""The page in its markup: no address in it, untrusted names stay text, sections say what is missing."""

from __future__ import annotations

import base64
import hashlib
import math
from html.parser import HTMLParser

import pytest

from instep.timeline.report import headline, json_safe, render
from tests.timeline.report_example import IMAGE, SCRIPT, example


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and what stands in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside:
            self.texts[self._inside][-1] += data

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]

    def count(self, tag: str) -> int:
        return sum(tag == name for name, _ in self.elements)


def shares(**parts: float) -> dict:
    """A report on one rank whose parts are these percents of its step."""
    names = {name.replace("_", " "): value for name, value in parts.items()}
    return {"breakdown": {"parts": list(names), "ranks": [{"rank": 0, "parts": names}]}}


PNG = b"\x89PNG\r\n\x1a\n"
PICTURES = {"timeline": [(SCRIPT, PNG)], "over_time": [("parts", PNG)], "curves": [(IMAGE, PNG)]}


def test_the_page_loads_nothing():
    page = Parsed(render(example(), PICTURES))
    assert page.attributes("src") == ["data:image/png;base64,iVBORw0KGgo="] * 3
    links = {href for href in page.attributes("href") if not href.startswith("#")}
    assert links == {"data:,", "https://ui.perfetto.dev"}  # the latter is a link to follow
    styles = "".join(page.texts["style"])
    assert "url(" not in styles and "@import" not in styles
    assert not page.attributes("style") and not page.attributes("onclick")


def test_the_policy_allows_this_style_and_nothing_else():
    page = Parsed(render(example(), PICTURES))
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digest = base64.b64encode(hashlib.sha256(page.texts["style"][0].encode()).digest()).decode()
    assert (rules["default-src"], rules["style-src"]) == ("'none'", f"'sha256-{digest}'")
    assert "script-src" not in rules and page.count("script") == 0


@pytest.mark.parametrize("name", [SCRIPT, IMAGE, "<!--<script>", "]]>\u2028", '"><svg onload=x>'])
def test_no_name_becomes_an_element(name):
    plain, told = example(), example()
    told["run"] |= {
        "name": name,
        "strategy": name,
        "command": name,
        "notes": [name],
        "versions": {name: name},
    }
    told["advice"][0] |= {"text": name, "try": name, "how": name}
    told["slow"]["phase"] = told["faults"][0]["what"] = name
    told["starts"][0][name] = told["contract"][name] = name
    told["breakdown"]["ranks"][0]["causes"] = {name: 1.0}
    pictures = {"timeline": [(name, PNG)], "curves": [(name, PNG)]}
    named = {"timeline": [("a step", PNG)], "curves": [("a curve", PNG)]}
    page, without = Parsed(render(told, pictures)), Parsed(render(plain, named))
    for tag in ("script", "img", "style", "link", "b"):
        assert page.count(tag) == without.count(tag), tag
    assert not [attribute for _, has in page.elements for attribute in has if attribute.startswith("on")]


def test_what_json_has_no_number_for_is_null():
    told = json_safe({"loss": [1.5, math.nan, math.inf, -math.inf, 1 << 70]})
    assert told == {"loss": [1.5, None, None, None, None]}


@pytest.mark.parametrize("section", [key for key in example() if key != "format"])
@pytest.mark.parametrize("left", [None, "absent"])
def test_any_section_may_be_missing(section, left):
    told = example()
    if left:
        del told[section]
    else:
        told[section] = None
    assert "</html>" in render(told)


def test_unattributed_time_is_said_with_the_span_to_add():
    assert 'with step.span("a name"):' in render(shares(compute=80, unattributed=20)).replace("&#34;", '"')
    assert "step.span" not in render(shares(compute=95, unattributed=5))


def test_any_figure_may_be_null():
    def emptied(value):
        if isinstance(value, dict):
            return {key: emptied(each) for key, each in value.items()}
        if isinstance(value, list):
            return [emptied(each) for each in value]
        return None if isinstance(value, int | float) else value

    assert "</html>" in render(emptied(example()))


def test_the_headline_names_the_slow_rank():
    told = shares(compute=61, waiting_for_a_slower_rank=22, exposed_communication=9, host=8)
    told["slow"] = {"rank": 2}
    said = headline(told).replace("\u00a0", " ")
    assert said == "61 % of a step is compute; 22 % waits for rank 2, 9.0 % for messages"
