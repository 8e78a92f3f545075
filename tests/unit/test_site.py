"""The site of the documents is built with every link checked, and what is outside docs/ is in it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def generated_pages() -> None:
    """Write the pages that are not committed, as `make site` does."""
    command = [sys.executable, "-W", "ignore", "-m", "docs.writers", "site"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(config),
        "--site-dir",
        str(folder),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {
        path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")
    }
    docs = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    docs |= {f"notebooks/{path.stem}" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert pages == docs | {"index", "contributing", "changelog", "404"}
    start = (tmp_path / "index.html").read_text()
    assert 'href="quickstart.html"' in start and 'src="pictures/studio.png"' in start
    linked = "rollout/orchestras/coding.py"  # a file outside docs/ that a page links to
    assert (tmp_path / "source" / linked).read_bytes() == (ROOT / linked).read_bytes()
    assert "fonts.googleapis" not in start
    architecture = (tmp_path / "architecture.html").read_text()
    assert 'src="data:image/svg+xml;base64,' in architecture
    assert 'class="mermaid"' not in architecture  # it would load a script
    notebook = (tmp_path / "notebooks" / "first_team.html").read_text()
    assert "<svg" in notebook and "<iframe sandbox srcdoc=" in notebook and "shown-" not in notebook
    assert (
        'href="../gateway.html#chats-in-your-own-orchestra"'
        in (tmp_path / "notebooks" / "own_environment.html").read_text()
    )


def test_the_first_page_leads_to_all_that_one_begins_with() -> None:
    nav = {
        name: pages
        for part in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
        for name, pages in part.items()
    }
    readme = (ROOT / "README.md").read_text()
    begin = [page.removesuffix(".md") for page in nav["Start"] if page != "index.md"]
    assert len(begin) > 6 and not [page for page in begin if f"](docs/{page}." not in readme]


@pytest.mark.slow
@pytest.mark.parametrize("link", ["gone.md", "quickstart.md#gone"])
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[there]({link})\n")
    (tmp_path / "docs" / "quickstart.md").write_text("# Quick\n")
    settings = (
        (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0].replace("docs/site/links.py", "")
    )
    config = tmp_path / "mkdocs.yml"
    config.write_text(settings)
    done = build(tmp_path / "site", config)
    assert done.returncode == 1 and "gone" in done.stderr
