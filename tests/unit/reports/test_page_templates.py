"""Templates of pages escape every value, and their pages run and load nothing."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_mas.reports import page_templates
from mcore_mas.reports.page_templates import render_page
from tests.support.html_page import ATTACK, HtmlPage


def test_no_template_of_a_page_lifts_the_escape() -> None:
    templates = sorted(Path(page_templates.__file__).with_name("templates").glob("*.html.jinja"))
    with_policy = {path.name for path in templates if "default-src 'none'" in path.read_text()}
    assert with_policy == {
        "charts.html.jinja",
        "runs.html.jinja",
        "table.html.jinja",
        "trajectory.html.jinja",
    }
    # The studio's server sends the policy of its page in a header.
    assert {path.name for path in templates} - with_policy == {"studio.html.jinja"}
    colours = templates[0].with_name("colours.css.jinja")
    assert "{{" not in colours.read_text()
    for path in templates:
        text = path.read_text().replace('{% include "colours.css.jinja" %}', "")
        lifted = re.search(r"\|\s*safe\b|autoescape|Markup|xmlattr|\binclude\b|\bimport\b", text)
        assert not lifted, path.name


def test_the_studios_scripts_write_text_only() -> None:
    folder = Path(page_templates.__file__).with_name("templates")
    for path in sorted(folder.glob("*.js")):
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|srcdoc", text
        ), path.name


def test_a_table_shows_names_as_text() -> None:
    page = HtmlPage(
        render_page("table.html.jinja", rows=[{"policy": ATTACK}], numbers=(), note=ATTACK)
    )
    assert {tag for tag, _ in page.elements} == {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "p",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    assert page.text().count("</pre><script>alert(1)</script>") == 2
