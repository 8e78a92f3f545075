"""The web server of the studio, which answers GET requests.

If the server has a token, every request needs it. Without a token, it answers this machine only.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from pydantic import ValidationError, validate_call
from pydantic_core import to_json
from snakemake.assets import Assets
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mcore_mas.config.run import ConfigError
from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.run_states import run_folders
from mcore_mas.reports.step_metrics import MetricsError
from mcore_mas.reports.studio import Studio, WholeNumber, escape_texts
from rollout.base.http_server import has_token, listen, listener_url, server_config
from rollout.base.ownership import FolderError
from rollout.base.terminal import say
from rollout.base.urls import is_loopback_header
from rollout.records.files import RecordError

_TEMPLATES = Path(__file__).with_name("templates")
# Scripts of Vega, which draws the charts: their paths among Snakemake's assets, by address. Snakemake
# ships Vega for its own report.
_VEGA = {"/vega.js": "vega/vega.js", "/vega-embed.js": "vega-embed/vega-embed.js"}
# All scripts of the page by address, in the order in which they run. Those of the studio are in
# `_TEMPLATES`.
_SCRIPTS = {**_VEGA, "/charts.js": "charts.js", "/studio.js": "studio.js"}
# Titles of the page's tabs, by id.
_TABS = {
    "curves": "Curves",
    "trajectories": "Trajectories",
    "waiting": "Waiting",
    "settings": "Config",
    "messages": "Log",
}
# A trajectory's page runs no scripts and loads nothing.
_TRAJECTORY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def run_studio(results: Path, *, host: str, port: int, token_file: Path | None) -> None:
    """Serve the studio until interrupted.

    Args:
        results: folder of the runs.
        host: address to listen on.
        port: port to listen on; 0 for a free one.
        token_file: file of the bearer token; None: without a token. Any host but loopback requires one.

    Raises:
        ListenError: the token cannot be used, or the port cannot be listened on.
        FolderError: there is no such folder.
    """
    run_folders(results)  # raises an error if there is no such folder
    listener, token = listen(host, port, token_file)
    app = studio_app(Studio(results), token)
    server = uvicorn.Server(server_config(app, drain_s=1, lifespan=False))
    say(f"studio of {results}: {listener_url(listener)}; Ctrl-C ends it")
    server.run(sockets=[listener])


def studio_app(studio: Studio, token: str | None) -> Starlette:
    """Return the web application of a studio.

    Args:
        studio: object that answers the requests.
        token: token that every request must have, as bearer token or as `?token=`; None if only
            this machine can reach the server.
    """
    nonce = secrets.token_urlsafe(16)
    headers = {
        "Content-Security-Policy": (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
            "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'self'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }

    def first_page() -> Response:
        # Scripts are requested without a header, so their addresses carry the token.
        query = f"?{urlencode({'token': token})}" if token is not None else ""
        scripts = [f"{path}{query}" for path in _SCRIPTS]
        return HTMLResponse(
            render_page("studio.html.jinja", nonce=nonce, scripts=scripts, tabs=_TABS)
        )

    def trajectory(run: str, file: str, index: WholeNumber) -> Response:
        page = studio.trajectory(run, file, index)
        return HTMLResponse(page, headers={"Content-Security-Policy": _TRAJECTORY_POLICY})

    handlers: dict[str, Callable[..., Any]] = {
        "/": first_page,
        "/trajectory": trajectory,
        **{path: partial(_script, path) for path in _SCRIPTS},
        "/api/runs": studio.runs,
        "/api/agents": studio.agents,
        "/api/config": studio.config,
        "/api/metrics": studio.metrics,
        "/api/files": studio.files,
        "/api/timeline": studio.timeline,
        "/api/log": studio.log,
        "/api/compare": studio.compare,
        "/api/trajectories": studio.trajectories,
    }
    return Starlette(
        routes=[
            Route(path, _endpoint(handler, token, headers), methods=["GET"])
            for path, handler in handlers.items()
        ]
    )


def _script(path: str) -> Response:
    """Return a script of the page. The browser keeps Vega, which is large, for a day."""
    if path in _VEGA:
        content = Assets.get_content(_VEGA[path])
        cache = "private, max-age=86400"
    else:
        content = (_TEMPLATES / _SCRIPTS[path]).read_text(encoding="utf-8")
        cache = "no-store"
    return Response(content, media_type="text/javascript", headers={"Cache-Control": cache})


def _endpoint(
    handler: Callable[..., Any], token: str | None, headers: Mapping[str, str]
) -> Callable[[Request], Any]:
    """Return an endpoint that calls `handler` with the checked parameters of a request.

    The endpoint answers with status 400 if a parameter is invalid, and with 404 if a run or a file
    is missing or cannot be read.

    Args:
        handler: function that returns a response, or a value to send as JSON.
        token: token that a request must have; see `studio_app`.
        headers: headers of the response, unless it sets them itself.
    """
    checked_handler = validate_call(handler)

    async def endpoint(request: Request) -> Response:
        _check_access(request, token)
        # The page sends the unused fields of its forms as empty texts.
        parameters = {
            name: value for name, value in request.query_params.items() if value and name != "token"
        }
        try:
            result = await asyncio.to_thread(checked_handler, **parameters)
        except ValidationError as error:
            first_error = error.errors()[0]
            parameter = ".".join(map(str, first_error["loc"]))
            raise HTTPException(400, f"{parameter}: {first_error['msg']}") from None
        except (FolderError, RecordError, ConfigError, MetricsError) as error:
            raise HTTPException(404, str(error)) from None
        except OSError as error:
            message = f"{error.filename}: cannot be read ({error.strerror})"
            raise HTTPException(404, message) from None

        response = result if isinstance(result, Response) else _json_response(result)
        for name, value in headers.items():
            response.headers.setdefault(name, value)
        return response

    return endpoint


def _json_response(value: Any) -> Response:
    # JSON has no NaN and no infinity. It has no bytes either, which a config in YAML may contain.
    content = to_json(escape_texts(value), inf_nan_mode="null", bytes_mode="base64", fallback=str)
    return Response(content, media_type="application/json")


def _check_access(request: Request, token: str | None) -> None:
    """Refuse a request that may not read the studio.

    If the studio has a token, a request without it is refused (401). If it has none, a request whose
    Host header does not name this machine is refused (403), because a hostile page may have a host
    name that resolves to this machine (DNS rebinding).
    """
    if token is None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not is_loopback_header(hosts[0]):
            raise HTTPException(403, "the studio answers to its address on this machine only")
        return
    query_token = request.query_params.get("token", "")
    has_query_token = secrets.compare_digest(query_token.encode(), token.encode())
    if not has_token(request, token) and not has_query_token:
        raise HTTPException(401, "a bearer token is required")
