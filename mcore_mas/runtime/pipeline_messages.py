"""The last lines of a pipeline: where its results are, or which jobs failed and why."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_mas.reports.job_failures import CAUSE_PREFIX
from mcore_mas.runtime.joblog import STARTED_AGAIN
from rollout.base.text import escape_line

_CONTINUES = "the same command continues from what is saved"
_STOPPED_MESSAGE = f"the pipeline was stopped; {_CONTINUES}"
_NEXT_STEP = f"When the cause is mended, {_CONTINUES}."
_SILENT_MESSAGE = (
    "the job ended without saying why (killed, or out of memory?); the end of its log:"
)
_SLURM_REFUSED = re.compile(
    r"SLURM sbatch failed\. The error message was '(.*?)'\.$"
    r"|submission failed with exception: (.*?)For further",
    re.MULTILINE | re.DOTALL,
)
_SLURM_ENDED = re.compile(r"SLURM-job '(\w+)' failed, SLURM status is: '(\w+)'")
# Prefix of a cause that is no error, because the job was stopped.
_PREFIX_OF_STOP = re.compile(rf"{CAUSE_PREFIX}(?=stopped by SIG|ended by a second Ctrl-C)")
_SLURM_KILLED = re.compile(r"^slurmstepd[^:]*: error: (.*)", re.MULTILINE)


def success_message(results: Path | str, suite: str) -> str:
    """Return the gains of a pipeline that ended well, and where to look next."""
    gains = _describe_gains(Path(results) / "tables" / f"{suite}.csv")
    parts = ["Done."]
    for name, folder, suffix in (("Report", "reports", "html"), ("Table", "tables", "md")):
        path = Path(results) / folder / f"{suite}.{suffix}"
        if path.is_file():
            parts.append(f"{name}: {path}")

    studio = "mcore-mas studio"
    if str(results) != "results":
        studio += f" {results}"
    return (
        f"\n{gains}{'   '.join(parts)}\n"
        f"`{studio}` opens curves and conversations, and `{mlflow_command(results)}` opens MLflow."
    )


def mlflow_command(results: Path | str) -> str:
    """Return the command that serves MLflow's pages of the runs in a folder."""
    if str(results) == "results":
        return "mcore-mas ui"
    return f"mcore-mas ui --store sqlite:///{results}/mlflow.db"


def _describe_gains(table: Path) -> str:
    """Return a line for each experiment of a table: its score before and after training.

    The scores are those on all test tasks. Experiments that lack one of the two evaluations are
    left out; without a table, return "".
    """
    if not table.is_file():
        return ""
    with table.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"].startswith("avg@")]
    # The row of all data sources comes before those of single ones.
    by_state: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        by_state.setdefault((row["experiment"], row["policy_state"]), row)

    experiments = dict.fromkeys(row["experiment"] for row in rows)
    width = max(map(len, experiments), default=0)
    lines = []
    for experiment in experiments:
        base = by_state.get((experiment, "base"))
        trained = by_state.get((experiment, "trained"))
        gain = by_state.get((experiment, "trained-base"))
        if base is None or trained is None or gain is None:
            continue
        lines.append(
            f"{experiment:{width}}  {gain['metric']}: {_percent(base['value']):.1f} % before training, "
            f"{_percent(trained['value']):.1f} % after: {_percent(gain['value']):+.1f} points "
            f"[{_percent(gain['ci_low']):+.1f}, {_percent(gain['ci_high']):+.1f}]\n"
        )
    return "".join(lines)


def _percent(share: str) -> float:
    """Convert a share in a table, such as "0.4", to percent."""
    return 100 * float(share)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedJob:
    log: str
    cause: str
    slurm_cause: str | None  # from Snakemake's log; None if it has no status of Slurm


def failure_message(
    logs: Iterable[str], since: float, workflow_logs: Iterable[Path | str], lines: int = 15
) -> str:
    """Return one line for each cause of a failure, followed by the logs of the jobs that it ended.

    The last line says what to do next, unless a cause says it.

    A job that ended without a cause in its log (killed, out of memory) is described by Slurm's reason, or else by the
    end of its log, unless Ctrl-C or SIGTERM has stopped the pipeline. Then no job that stopped is called an error.

    Args:
        logs: logs of jobs that have not finished. A job has failed if it wrote its log since `since`, or if Slurm
            says so.
        since: start of the pipeline, in seconds since the epoch.
        workflow_logs: Snakemake's own logs, which describe jobs that failed without writing.
        lines: number of lines that are shown of the end of a log.
    """
    workflow_paths = [Path(log) for log in workflow_logs]
    events = _snakemake_events(workflow_paths)
    end_of_log = {}
    for log in dict.fromkeys(logs):
        path = Path(log)
        written = path.is_file() and path.stat().st_mtime >= since
        end_of_log[log] = _last_lines(path, lines) if written else None
    stopped = _was_stopped(events, end_of_log.values())

    failed = []
    for log, last_lines in end_of_log.items():
        slurm_cause = _slurm_cause(log, events)
        if last_lines is not None or slurm_cause:
            cause = _cause(last_lines or [], slurm_cause, stopped=stopped)
            failed.append(_FailedJob(log=log, cause=cause, slurm_cause=slurm_cause))

    logs_by_cause = _group_by_cause(failed)
    if not logs_by_cause:
        return f"\n{CAUSE_PREFIX}no job wrote a log; see {', '.join(map(str, workflow_paths))}"
    message = "\n".join(
        f"\n{cause}\n  logs: {', '.join(failed_logs)}"
        for cause, failed_logs in logs_by_cause.items()
    )
    says_next_step = any("the same command" in cause for cause in logs_by_cause)
    return message if says_next_step else f"{message}\n{_NEXT_STEP}"


def _was_stopped(events: Iterable[str], ends_of_logs: Iterable[Sequence[str] | None]) -> bool:
    """Return True if Ctrl-C or SIGTERM has stopped the pipeline.

    Snakemake's log says so, but not with --quiet. After Ctrl-C, the last line of a job's log does.
    """
    if any("Terminating processes on user request" in event for event in events):
        return True
    last_lines = [lines[-1] for lines in ends_of_logs if lines]
    return any(line.startswith(f"{CAUSE_PREFIX}stopped by SIGINT") for line in last_lines)


def _snakemake_events(paths: Iterable[Path]) -> list[str]:
    """Split Snakemake's logs into events, each of which begins with a line such as `[Sun Nov 22 15:54:43 2026]`."""
    return [
        event for path in paths for event in re.split(r"^ *\[.*\]", _read(path), flags=re.MULTILINE)
    ]


def _slurm_cause(log: str, events: Sequence[str]) -> str | None:
    """Return Slurm's reason why the job with this log failed; None if no event has one.

    If several events have a reason, it is that of the newest.
    """
    for event in reversed(events):
        if log in event:
            cause = _slurm_cause_in(event)
            if cause:
                return cause
    return None


def _slurm_cause_in(event: str) -> str | None:
    """Return Slurm's reason to refuse or end the job of an event of Snakemake's log, or None."""
    refused = _SLURM_REFUSED.search(event)
    if refused:
        reason = " ".join((refused[1] or refused[2] or "sbatch gave no reason").split())
        return f"{CAUSE_PREFIX}Slurm does not take the job: {reason}"

    ended = _SLURM_ENDED.search(event)
    if ended is None:
        return None
    number, state = ended.groups()
    slurm_log = re.search(rf"[^\s,]*/{number}\.log", event)
    if slurm_log is None:
        return f"{CAUSE_PREFIX}Slurm job {number}: {state}"

    path = Path(slurm_log[0])
    if not path.is_file():
        if state == "CANCELLED":  # it may never have run
            return f"{CAUSE_PREFIX}Slurm job {number}: {state}"
        return (
            f"{CAUSE_PREFIX}Slurm job {number}: {state}, and its log is not here; "
            "do all machines share this folder?"
        )
    killed = _SLURM_KILLED.search(_read(path))
    reason = f"{state}, {killed[1]}" if killed else state
    return f"{CAUSE_PREFIX}Slurm job {number}: {reason}; see {path}"


def _cause(last_lines: Sequence[str], slurm_cause: str | None, *, stopped: bool) -> str:
    """Return the last cause in the job's log, else Slurm's cause, else the end of the log.

    If the pipeline was stopped, the cause of a stopped job is no error, and a job without a cause is
    said to be stopped, without the end of its log.
    """
    logged_causes = [line for line in last_lines if line.startswith(CAUSE_PREFIX)]
    if logged_causes:
        cause = logged_causes[-1]
        return _PREFIX_OF_STOP.sub("", cause) if stopped else cause
    if slurm_cause:
        return slurm_cause
    if stopped:
        return _STOPPED_MESSAGE
    shown = "\n".join(f"  | {escape_line(line)}" for line in last_lines) or "  | (empty)"
    return f"{CAUSE_PREFIX}{_SILENT_MESSAGE}\n{shown}"


def _group_by_cause(failed: Sequence[_FailedJob]) -> Mapping[str, list[str]]:
    """Return the logs of failed jobs by cause.

    Several stages can run in one Slurm job, and Slurm then reports the same cause for all of them. If the log of one
    stage names a cause, the stages for which there is only Slurm's report are left out.
    """
    slurm_causes_with_log = {job.slurm_cause for job in failed if job.slurm_cause != job.cause}
    logs_by_cause: dict[str, list[str]] = {}
    for job in failed:
        if job.cause == job.slurm_cause and job.slurm_cause in slurm_causes_with_log:
            continue
        logs_by_cause.setdefault(job.cause, []).append(job.log)
    return logs_by_cause


def _last_lines(log: Path, lines: int) -> list[str]:
    """Return the last lines of a job's log, as far as the latest start has written them."""
    return _read(log).rpartition(STARTED_AGAIN)[2].rstrip().splitlines()[-lines:]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
