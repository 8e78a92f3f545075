"""A user's own project, as `mcore-mas new` writes it."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import yaml

from mcore_mas import SHIPPED
from rollout.base.files import write_text

# Files of a project. Its models/tiny is a copy of the model that `make_tiny_model` writes: importing
# torch and drawing weights would take ten times as long as everything else here.
_TEMPLATE = Path(__file__).with_name("scaffold")
_TEMPLATE_NAME = "my_team"  # the project's name in these files
# Not nan or inf, in any case, which Hydra reads as numbers.
_PACKAGE_NAME = re.compile(r"(?!(?i:nan|inf)$)[A-Za-z]\w{0,99}", re.ASCII)


class ProjectError(ValueError):
    """A project cannot be made; the message says why, and what to do."""


def new_project(name: str, parent: Path) -> Path:
    """Write a project with a small random model into the folder `parent`/`name`; return the folder.

    Raises:
        ProjectError: the name is not that of a Python package or is taken, or the folder is not
            empty or cannot be written. Nothing is written then.
    """
    folder = parent / name
    _check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProjectError(
            f"{folder}: something is there already; name another project, or remove it"
        )
    try:
        # The project is complete before it takes its place.
        with TemporaryDirectory(dir=parent, prefix=f".{name}-") as temporary:
            project = Path(temporary, name)
            for file in sorted(_TEMPLATE.rglob("*.txt")):
                path = str(file.relative_to(_TEMPLATE)).removesuffix(".txt")
                text = file.read_text(encoding="utf-8")
                text = text.replace(_TEMPLATE_NAME, name).replace("SHIPPED", str(SHIPPED))
                write_text(project / path.replace(_TEMPLATE_NAME, name), text)
            copytree(_TEMPLATE / "models", project / "models")
            project.rename(folder)
    except OSError as error:
        raise ProjectError(
            f"{folder.absolute()}: cannot be written ({error.strerror}); change to a folder in which "
            "you may write"
        ) from error
    return folder


def _check_name(name: str) -> None:
    """Refuse a name that is no package's, or that another module or folder has."""
    # YAML reads some names as other values, such as "yes".
    if not _PACKAGE_NAME.fullmatch(name) or keyword.iskeyword(name) or yaml.safe_load(name) != name:
        raise ProjectError(
            f"'{name}' cannot be a Python package; expected letters, digits and _, at most 100, such as "
            "my_team"
        )
    template_folders = {file.name for file in _TEMPLATE.iterdir()} - {_TEMPLATE_NAME}
    if name in {*template_folders, "results"}:
        raise ProjectError(
            f"'{name}' is one of a project's own folders; take another name, such as my_{name}"
        )
    spec = find_spec(name)
    if spec is not None and spec.origin:  # a folder without modules has no origin
        raise ProjectError(
            f"'{name}' is a Python module that is installed here; take another name, "
            f"such as my_{name}"
        )
