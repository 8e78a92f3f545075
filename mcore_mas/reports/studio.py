"""The studio: a local web page on the runs of a results folder, live while they train; it only reads."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from pydantic import Field, TypeAdapter, ValidationError, validate_call
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.reports.pages import (
    TurnAdvantages,
    TurnGroups,
    TurnPieces,
    render_page,
    trajectory_page,
)
from mcore_mas.reports.runs import (
    config_differences,
    run_states,
    runs_in,
    score_differences,
    who_works,
)
from mcore_mas.reports.terminal import credit_of
from rollout.base.http_server import has_token, listen, listener_url, server_config
from rollout.base.json_files import read_json_lines
from rollout.base.ownership import FolderError
from rollout.base.processes import say
from rollout.base.text import escape_text
from rollout.base.urls import is_loopback
from rollout.records.files import (
    RecordError,
    TrajectoryFilter,
    count_trajectories,
    list_trajectories,
    read_trajectories,
    trajectory_at,
)
from rollout.records.trajectory import Trajectory

_PAGE_ROWS, _LOG_BYTES = 100, 20_000
_MOST_COMPARED = 4096  # trajectories of a file whose advantages are computed to show one
_FILTER = TypeAdapter(TrajectoryFilter)
Whole = Annotated[int, Field(ge=0, lt=10**15)]


class Studio:
    """What the page asks for, by the names of runs in the folder `results` and of files in them, nothing else.

    Parameters are those of the page's addresses, which are checked by their types.
    """

    def __init__(self, results: Path) -> None:
        self._results = results

    def runs(self) -> list[dict[str, Any]]:
        """Every run's name, steps, rewards and scores."""
        return [asdict(state) for state in run_states(self._results)]

    def metrics(self, run: str, start: Whole = 0) -> dict[str, Any]:
        """The rows of metrics.jsonl from byte `start` on, and where the last ends."""
        path = self._run(run) / "train" / "metrics.jsonl"
        rows, end = read_json_lines(path, start) if path.is_file() else ([], 0)
        return {"rows": rows, "end": end}

    def files(self, run: str) -> list[str]:
        """A run's files of trajectories, those of training steps first."""
        folder = self._run(run)
        found = [
            *sorted(folder.glob("train/trajectories/*.parquet")),
            *sorted(folder.glob("evaluation/*/*.parquet")),
        ]
        return [path.relative_to(folder).as_posix() for path in found]

    def trajectories(self, run: str, file: str, first: Whole = 0, **shown: str) -> dict[str, Any]:
        """A page of a file's list, from index `first` on; `shown` are fields of `TrajectoryFilter`."""
        path = self._file(run, file)
        rows = list_trajectories(
            path, _FILTER.validate_python(shown), first=first, limit=_PAGE_ROWS
        )
        return {
            "rows": [asdict(row) for row in rows],
            "of": count_trajectories(path),
            "page": _PAGE_ROWS,
        }

    def trajectory(self, run: str, file: str, index: Whole) -> HTMLResponse:
        """The page of one trajectory: tokens shaded by log-probability, and credit where it can be computed."""
        path = self._file(run, file)
        trajectory = trajectory_at(path, index)
        advantages, groups = _credit(path, path.stat().st_mtime_ns)
        html = trajectory_page(trajectory, advantages, self._pieces(run, trajectory), groups)
        return HTMLResponse(
            html,
            headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    def waits(self, run: str, file: str) -> dict[str, Any]:
        """Who worked for how many of a file's trajectories, moment by moment; {} of a file that is large."""
        path = self._file(run, file)
        return (
            who_works(read_trajectories(path)) if count_trajectories(path) <= _MOST_COMPARED else {}
        )

    def log(self, run: str) -> str:
        """The end of the training's log: what it reports, and what it waits for where it stalls."""
        path = self._run(run) / "logs" / "train.log"
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return escape_text(file.read().decode("utf-8", errors="replace"))

    def compare(self, a: str, b: str) -> dict[str, Any]:
        """How two runs differ, in settings and scores."""
        one, other = self._run(a), self._run(b)
        scores = [asdict(row) for row in score_differences(one, other)]
        return {"settings": config_differences(one, other), "scores": scores}

    def _run(self, name: str) -> Path:
        folder = self._results / name
        if "/" in name or name in ("", ".", "..") or not (folder / "config.yaml").is_file():
            raise HTTPException(404, f"no run '{name[:80]}' in {self._results}")
        return folder

    def _file(self, run: str, name: str) -> Path:
        if name not in self.files(run):
            raise HTTPException(404, f"run '{run}' has no file of trajectories '{name[:80]}'")
        return self._run(run) / name

    def _pieces(self, run: str, trajectory: Trajectory) -> TurnPieces:
        """The text and log-probability of each sampled token, by turn; none of a policy whose tokenizer is not here."""
        folder = self._run(run)
        files = {
            policy: _tokenizer_file(folder, policy)
            for policy in {turn.policy for turn in trajectory.turns}
        }
        return {
            (turn.node, turn.index): list(
                zip(_spelled(file, turn.completion_ids), turn.logprobs, strict=True)
            )
            for turn in trajectory.turns
            if (file := files[turn.policy])
        }


def _tokenizer_file(run: Path, policy: str) -> Path | None:
    """Of a policy's finished model, or of the one that it starts from."""
    homes = [run / "train" / "models" / policy]
    with suppress(ConfigError, KeyError):
        homes.append(Path(RunConfig.load(run / "config.yaml").policies[policy].model))
    return next(
        (home / "tokenizer.json" for home in homes if (home / "tokenizer.json").is_file()), None
    )


@lru_cache(maxsize=8)
def _credit(path: Path, _changed: int) -> tuple[TurnAdvantages, TurnGroups]:
    small = count_trajectories(path) <= _MOST_COMPARED and path.parent.name == "trajectories"
    return credit_of(path, read_trajectories(path)) if small else ({}, {})


_tokenizer = cache(Tokenizer.from_file)


def _spelled(file: Path, ids: tuple[int, ...]) -> list[str]:
    """The text that each token adds; a character of several tokens comes with its last."""
    stream, tokenizer = DecodeStream(skip_special_tokens=False), _tokenizer(str(file))
    return [stream.step(tokenizer, one) or "" for one in ids]


def studio_app(studio: Studio, token: str | None) -> Starlette:
    """The studio's pages: GET only, for this machine's own browser or who has the token.

    Args:
        token: asked for as a bearer's, or as `?token=` of the first page; None where only this machine can ask.
    """
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    safe = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }

    def guarded(answer: Callable[..., Any]) -> Callable[[Request], Any]:
        checked = validate_call(answer)

        async def reply(request: Request) -> Response:
            _admit(request, token)
            asked = {
                name: value
                for name, value in request.query_params.items()
                if value and name != "token"
            }
            try:
                found = await asyncio.to_thread(checked, **asked)
            except ValidationError as error:
                wrong = error.errors()[0]
                raise HTTPException(
                    400, f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
                ) from None
            except (FolderError, RecordError, ConfigError) as error:
                raise HTTPException(404, str(error)) from None
            if not isinstance(found, Response):  # JSON has no number for what is not finite
                found = Response(
                    to_json(_shown(found), inf_nan_mode="null"), media_type="application/json"
                )
            for name, value in safe.items():
                found.headers.setdefault(name, value)
            return found

        return reply

    answers: dict[str, Callable[..., Any]] = {
        "/": lambda: HTMLResponse(render_page("studio.html.jinja", nonce=nonce)),
        "/trajectory": studio.trajectory,
        "/api/runs": studio.runs,
        "/api/metrics": studio.metrics,
        "/api/files": studio.files,
        "/api/waits": studio.waits,
        "/api/log": studio.log,
        "/api/compare": studio.compare,
        "/api/trajectories": studio.trajectories,
    }
    return Starlette(
        routes=[Route(path, guarded(answer), methods=["GET"]) for path, answer in answers.items()]
    )


def _shown(value: Any) -> Any:
    """Apply `escape_text` to all texts of a JSON value."""
    if isinstance(value, Mapping):
        return {name: _shown(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(own) for own in value]
    return escape_text(value) if isinstance(value, str) else value


def _admit(request: Request, token: str | None) -> None:
    host = request.url.hostname or ""
    if token is None and not is_loopback(host):  # a page elsewhere whose name was made to lead here
        raise HTTPException(403, "the studio answers to its address on this machine only")
    if (
        token is not None
        and not has_token(request, token)
        and not secrets.compare_digest(
            request.query_params.get("token", "").encode(), token.encode()
        )
    ):
        raise HTTPException(401, "a bearer token is required")


def open_studio(results: Path, *, host: str, port: int, token_file: Path | None) -> None:
    """Answer until interrupted; a line says where.

    Args:
        results: folder of the runs.
        token_file: has a bearer token; needed for a host that is not loopback.

    Raises:
        ListenError: the token cannot be used, or nobody may listen there.
        FolderError: there is no such folder.
    """
    runs_in(results)
    listener, token = listen(host, port, token_file)
    server = uvicorn.Server(
        server_config(studio_app(Studio(results), token), drain_s=1, lifespan=False)
    )
    say(f"studio of {results}: {listener_url(listener)}; Ctrl-C ends it")
    server.run(sockets=[listener])
