"""Section of a config about experiment trackers."""

import re
from importlib.metadata import entry_points
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, field_validator

from rollout.base.section import Section

# URL schemes of the stores that MLflow and its installed plugins open; "" is a folder's path.
_STORE_SCHEMES = {
    "",
    "file",
    "http",
    "https",
    "sqlite",
    "postgresql",
    "mysql",
    "mssql",
    "databricks",
    "uc",
    "databricks-uc",
    *(entry.name for entry in entry_points(group="mlflow.tracking_store")),
}
# Searched in the unquoted query: an ODBC connection string in it writes PWD= as PWD%3D.
_PASSWORD_IN_QUERY = re.compile("(?i)(password|passwd|pwd|token|secret|api_?key)=")
# Searched in the whole URI: a password may have a slash, at which urlsplit ends the host.
_PASSWORD_BEFORE_HOST = re.compile(r"[\w+.-]+://[^:/]*:[^@]+@")
_TagName = Annotated[str, Field(pattern=r"^[\w.\-:/ ]+$", max_length=250)]


class TrackingConfig(Section):
    """Trackers that get the metrics, besides the run folder."""

    # MLflow's tracking store.
    uri: str
    # MLflow's experiment, and the project of wandb.
    experiment: str
    # Number of trajectories that are sent as traces in each step with a validation.
    traces: int = Field(2, ge=0)
    # Tags of MLflow's runs. A suite adds the tags `suite` and `experiment`; the suite of a paper also adds `table`.
    tags: dict[_TagName, str] = Field(default_factory=dict)
    # Trackers that get the training metrics in addition to MLflow.
    further_trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, uri: str) -> str:
        parts = urlsplit(uri)
        is_server = parts.scheme.startswith("http")
        password_in_query = _PASSWORD_IN_QUERY.search(unquote(parts.query))
        # A server may take a token as its user name. The user name of a database is no secret.
        may_be_token = is_server and parts.username
        password = parts.password or _PASSWORD_BEFORE_HOST.match(uri)
        if password_in_query or password or may_be_token:
            raise ValueError(
                "must not hold a password, a token or, for an HTTP server, a user name, because config.yaml and "
                "MLflow would show it; see docs/mlflow.md"
            )
        has_store_scheme = parts.scheme.partition("+")[0] in _STORE_SCHEMES
        if not uri or not has_store_scheme or (is_server and not parts.hostname):
            raise ValueError(
                f"'{uri}' is not a store of MLflow; expected http(s)://HOST:PORT or sqlite:///FILE"
            )
        return uri
