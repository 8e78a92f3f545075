"""The site of the documents is built with every link checked, and has the files outside docs/ that pages link to."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.browser import Browser, needs_chromium

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def generated_pages(forked_programs: None) -> None:
    """Write the pages that are not committed, as `make site` does, in a fork."""
    command = [sys.executable, "-W", "ignore", "-m", "docs.writers", "site"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build the site of a config into a folder."""
    command = [sys.executable, "-m", "mkdocs", "build"]
    command += ["--config-file", str(config), "--site-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def page_names(folder: Path, suffix: str) -> set[str]:
    """Return the relative paths of a folder's pages, without their suffix."""
    return {
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob(f"*{suffix}")
    }


@pytest.mark.slow
@pytest.mark.usefixtures("generated_pages")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    completed = build(tmp_path)
    assert completed.returncode == 0, completed.stderr
    pages = page_names(ROOT / "docs", ".md") | {"index", "contributing", "changelog", "404"}
    notebooks = (ROOT / "docs" / "notebooks").glob("*.ipynb")
    pages |= {f"notebooks/{path.stem}" for path in notebooks}
    assert page_names(tmp_path, ".html") == pages

    start = (tmp_path / "index.html").read_text()
    assert 'href="quickstart.html"' in start and 'src="pictures/demo.svg"' in start
    assert "fonts.googleapis" not in start
    linked = "rollout/orchestras/coding.py"  # a file outside docs/ that a page links to
    assert (tmp_path / "source" / linked).read_bytes() == (ROOT / linked).read_bytes()

    architecture = (tmp_path / "architecture.html").read_text()
    assert 'src="data:image/svg+xml;base64,' in architecture
    assert 'class="mermaid"' not in architecture  # it would load a script

    notebook = (tmp_path / "notebooks" / "first_team.html").read_text()
    assert "<svg" in notebook and "<iframe sandbox srcdoc=" in notebook and "shown-" not in notebook
    environment = (tmp_path / "notebooks" / "own_environment.html").read_text()
    assert 'href="../gateway.html#chats-in-your-own-orchestra"' in environment


def test_the_readme_links_to_every_page_for_beginners() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    readme = (ROOT / "README.md").read_text()
    pages = [page.removesuffix(".md") for page in navigation[0]["Start"] if page != "index.md"]
    assert len(pages) > 5
    assert not [page for page in pages if f"](docs/{page}." not in readme]


def small_site(folder: Path) -> Path:
    """Write the settings of the site for a folder with its own pages; return the file."""
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    config = folder / "mkdocs.yml"
    config.write_text(settings.replace("docs/site/links.py", ""))
    return config


@pytest.mark.slow
@needs_chromium
def test_the_search_works_when_a_page_is_opened_as_a_file(tmp_path: Path) -> None:
    pages = tmp_path / "docs"
    shutil.copytree(ROOT / "docs" / "javascripts", pages / "javascripts")
    (pages / "more").mkdir()
    (pages / "index.md").write_text("# Start\n\nAn orchestra decides who speaks.\n")
    (pages / "more" / "credit.md").write_text("# Credit\n\nAn estimator compares turns.\n")
    completed = build(tmp_path / "site", small_site(tmp_path))
    assert completed.returncode == 0, completed.stderr

    for page, word, result in (
        ("index.html", "estimator", "more/credit.html"),
        ("more/credit.html", "orchestra", "index.html"),
    ):
        with Browser((tmp_path / "site" / page).as_uri(), tmp_path / "profile") as browser:
            browser.value("document.querySelector('.md-search__input').focus()")
            browser.value(
                "const field = document.querySelector('.md-search__input');"
                f"field.value = '{word}';"
                "field.dispatchEvent(new Event('keyup', {bubbles: true}))"
            )
            link = browser.until("document.querySelector('.md-search-result__link')?.href")
            assert link.partition("?")[0] == (tmp_path / "site" / result).as_uri()
            assert not [url for url in browser.requests if url.startswith("http")]


@pytest.mark.parametrize("link", ["gone.md", "quickstart.md#gone"])
def test_a_broken_link_ends_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[there]({link})\n")
    (tmp_path / "docs" / "quickstart.md").write_text("# Quick\n")
    completed = build(tmp_path / "site", small_site(tmp_path))
    assert completed.returncode == 1 and "gone" in completed.stderr
