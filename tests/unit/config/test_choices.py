"""Options of every registry are typed and bounded, and a wrong value is refused in one line before anything starts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from mcore_mas.config.compose import resolve
from mcore_mas.config.credit import CorrectionConfig, LossConfig
from mcore_mas.config.estimators import AdvantageConfig, FilterConfig
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.equations.kl import KL_ESTIMATES, KLName
from mcore_mas.equations.losses import AGGREGATIONS, AggregationName
from rollout.base.errors import OptionsError
from rollout.base.options import Registry, json_schema
from rollout.base.signatures import check_call
from rollout.config.environment import EnvConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.config.reward import PENALTY_REGISTRY, RewardConfig
from rollout.engines import TrainedEngine
from rollout.tasks.generators import GENERATORS
from rollout.teams.roles import Role

REGISTRIES = (
    EnvConfig.registry,
    OrchestraConfig.registry,
    RewardConfig.registry,
    PENALTY_REGISTRY,
    AdvantageConfig.registry,
    FilterConfig.registry,
    LossConfig.registry,
    CorrectionConfig.registry,
)


def models() -> Iterator[tuple[str, type[BaseModel]]]:
    for registry in REGISTRIES:
        yield from (
            (f"{registry.kind} {name}", registry.model(name)) for name in registry.registered
        )
    for name, generator in GENERATORS.items():
        yield f"tasks {name}", generator.task_options
        if generator.demonstration_options is not None:
            yield f"demonstrations {name}", generator.demonstration_options


MODELS = dict(models())


def leaves(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every part of a JSON schema that describes a value."""
    if isinstance(schema, dict):
        if "type" in schema and isinstance(schema["type"], str):
            yield schema
        for name, part in schema.items():
            if name != "default":
                yield from leaves(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from leaves(part)


FREE = {("env gymnasium", "make")}  # options that another library checks
UNBOUNDED = {("tasks sudoku", "givens")}  # options whose bound is the size of the puzzle


@pytest.mark.parametrize("label", MODELS)
def test_every_option_is_typed_and_bounded(label: str) -> None:
    schema = json_schema(MODELS[label])
    for name, option in schema.get("properties", {}).items():
        assert {"type", "anyOf", "$ref", "enum"} & set(option), (
            f"{label}: option {name} has no type"
        )
        if (label, name) in FREE | UNBOUNDED:
            continue
        for part in leaves(option):
            if part["type"] == "integer" and "enum" not in part:
                bounds = {"minimum", "exclusiveMinimum"} & set(part)
                assert bounds, f"{label}: option {name} is an integer without a lower bound"
            assert part["type"] != "object" or part.get("additionalProperties") is not True, (
                f"{label}: {name}"
            )


@pytest.mark.parametrize("label", MODELS)
def test_defaults_are_values_that_could_be_given(label: str) -> None:
    model = MODELS[label]
    defaults = {
        name: field.default for name, field in model.model_fields.items() if not field.is_required()
    }
    try:
        model.model_validate_json(to_json(defaults, inf_nan_mode="constants"))
    except ValidationError as error:
        assert {details["type"] for details in error.errors()} == {"missing"}, error


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_registered_objects_are_called_as_their_kind_is(registry: Registry) -> None:
    refused = []
    for name, target in registry.registered.items():
        try:
            check_call(name, target, registry.takes, coroutine=registry.coroutine)
        except OptionsError as error:
            refused.append(str(error))
    assert registry.registered and not refused


@pytest.mark.parametrize(
    ("names", "table"), [(KLName, KL_ESTIMATES), (AggregationName, AGGREGATIONS)]
)
def test_names_of_the_equations_are_their_tables(names: Any, table: dict[str, Any]) -> None:
    assert get_args(names) == tuple(table)


@cache
def composed(experiment: str) -> dict[str, Any]:
    return resolve([f"experiment={experiment}"])


def changed(experiment: str, path: str, value: Any) -> dict[str, Any]:
    """Return the values of an experiment, with one of them changed."""
    values = copy.deepcopy(composed(experiment))
    section = values
    *names, key = path.split(".")
    for name in names:
        section[name] = section.get(name) or {}
        section = section[name]
    section[key] = value
    return values


MATH = "demo_math"
GAME = "demo_path"
SEARCH = "demo_search"
NUMBER = "Input should be a valid number"
INTEGER = "Input should be a valid integer"
FINITE = "Input should be a finite number"
WRONG = [
    (MATH, "loss.options.clip_high", "banana", f'{NUMBER} (got "banana")'),
    (MATH, "loss.options.clip_low", 1.5, "less than or equal to 1 (got 1.5)"),
    (MATH, "loss.options.dual_clip", 1, "greater than 1 (got 1)"),
    (MATH, "loss.options.clip_high", math.inf, FINITE),
    (MATH, "loss.correction", {"name": "mis", "options": {"low": 3.0}}, "above low, which is 3"),
    (MATH, "loss.aggregation", "mean", "Input should be 'token_mean', 'agent_mean', "),
    (MATH, "loss.kl.estimate", "k4", "Input should be 'k1', 'k2', 'k3', 'k1+' or 'k3+'"),
    (MATH, "loss.entropy", math.inf, FINITE),
    (MATH, "advantage.options.eps", "small", NUMBER),
    (MATH, "advantage.options.lone", "rwa", "Input should be 'zero' or 'raw'"),
    (MATH, "advantage.options.ddof", 2, "Input should be 0 or 1 (got 2)"),
    (
        MATH,
        "advantage",
        {"name": "gigpo", "options": {"step": {"gama": 1}}},
        "step.gama: unknown key; nearest: gamma",
    ),
    (MATH, "filter", {"name": "lowest_mean", "options": {"ratio": 2}}, "less than 1 (got 2)"),
    (MATH, "filter", {"name": "outliers", "options": {"ratio": 1}}, "less than 1 (got 1)"),
    (MATH, "filter", {"name": "mean_range", "options": {"low": 1.0}}, "above low, which is 1"),
    (GAME, "orchestra.options.max_turns", "5", f'{INTEGER} (got "5")'),
    (GAME, "orchestra.options.max_turns", -3, "greater than 0 (got -3)"),
    (GAME, "orchestra.options.max_turns", 2.5, f"{INTEGER} (got 2.5)"),
    (GAME, "orchestra.options.order", "random", "Input should be 'sequential' or 'simultaneous'"),
    (GAME, "orchestra.options.actions_from", "magic", "Input should be 'reply' or 'program'"),
    (
        MATH,
        "orchestra",
        {"name": "program", "options": {"rules": {"deadline_s": 0}}},
        "greater than 0 (got 0)",
    ),
    (GAME, "env.options.max_turns", True, f"{INTEGER} (got true)"),
    (
        GAME,
        "env.options.rewards.win",
        1.0,
        "rewards.win: unknown key; known here: step, impossible, goal",
    ),
    (GAME, "env.options.rewards.goal", "lots", NUMBER),
    (GAME, "env.options.rewards.goal", math.nan, f"{FINITE} (got NaN)"),
    (GAME, "env.options.cpu_s", "never", INTEGER),
    (GAME, "env.options.tier", "none", "Input should be 'auto', 'namespaces', 'landlock' or "),
    (SEARCH, "env.options.style", "r2", "Input should be 'search_r1', 'verl', 'text' or 'id'"),
    (SEARCH, "env.options.reward", "f1", "Input should be 'exact_match' or 'token_f1'"),
    (
        MATH,
        "env",
        {"name": "mcp", "options": {"servers": {"plain": {"command": 3}}}},
        "valid string (got 3)",
    ),
    (
        MATH,
        "env",
        {"name": "mcp", "options": {"servers": {"plain": {"command": "x", "comand": "x"}}}},
        "env.options.servers.plain.comand: unknown key; nearest: command",
    ),
    (MATH, "env", {"name": "mcp", "options": {"servers": {}}}, "at least 1 item"),
    (
        MATH,
        "env",
        {"name": "webshop", "options": {"num_products": 5}},
        "Input should be 100, 1000 or 100000 (got 5)",
    ),
    (GAME, "data.options.size", "tiny", INTEGER),
    (GAME, "data.options.size", 101, "less than or equal to 100 (got 101)"),
    (GAME, "cold_start.options.slips", "often", "Input should be an object"),
    (GAME, "cold_start.options.slips", {"tool": 2}, "less than or equal to 1 (got 2)"),
    (MATH, "cold_start.options.slips", "often", NUMBER),
    (
        MATH,
        "reward",
        {"name": "shares", "options": {"split": "halves"}},
        "Input should be 'full', 'turns' or 'agents'",
    ),
    (
        MATH,
        "reward",
        {"name": "shares", "options": {"weights": {"solver": -1}}},
        "greater than or equal to 0 (got -1)",
    ),
    (MATH, "reward", {"name": "coach", "options": {"clip": [1, 0]}}, "expected [low, high]"),
    (MATH, "reward.penalties", {"overlong": {"buffer": 0}}, "greater than 0 (got 0)"),
    (MATH, "reward.penalties", {"invalid": {"coef": -1}}, "greater than or equal to 0 (got -1)"),
    (MATH, "trainer.steps", "5", f'{INTEGER} (got "5")'),
    (MATH, "trainer.max_advantage", math.inf, FINITE),
    (MATH, "trainer.branching", {"width": 2, "alpha": math.nan}, FINITE),
    (MATH, "coach", {"model": "m", "retries": "many"}, INTEGER),
    (SEARCH, "retriever.threads", "2", INTEGER),
    (SEARCH, "retriever.patience_s", math.inf, FINITE),
    (MATH, "engine.slots", "many", INTEGER),
    (MATH, "engine.timeout_s", math.inf, FINITE),
    (MATH, "agents.solver.temperature", math.inf, FINITE),
    (MATH, "collection.call_s", math.inf, FINITE),
    (MATH, "policies.solver.lr", "fast", NUMBER),
    (MATH, "policies.solver.lr", math.inf, FINITE),
    (MATH, "policies.solver.clip_grad", math.inf, FINITE),
    (MATH, "policies.solver.overrides.loss", {"entropy": math.inf}, FINITE),
    (MATH, "policies.solver.betas", [0.9, 1.0], "less than 1 (got 1.0)"),
    (MATH, "policies.solver.betas", [-0.9, 0.5], "greater than or equal to 0 (got -0.9)"),
]
# Location of the error, for values in which a key below the changed one is wrong.
LOCATIONS = {
    "loss.correction": "loss.correction.options",
    "filter": "filter.options",
    "orchestra": "orchestra.options.rules.deadline_s: ",
    "advantage": "advantage.options.",
    "reward": "reward.options.",
    "reward.penalties": "reward.penalties.",
    "coach": "coach.retries",
    "cold_start.options.slips": "cold_start.options.slips",
    "policies.solver.betas": "policies.solver.betas.",
}


@pytest.mark.parametrize(("experiment", "path", "value", "message"), WRONG)
def test_a_wrong_value_is_one_line(experiment: str, path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_values(changed(experiment, path, value), "run 'x'")
    line = str(refused.value)
    assert line.startswith(f"run 'x': {LOCATIONS.get(path, path)}")
    assert message in line
    assert "\n" not in line


UNKNOWN = [
    (
        MATH,
        "loss.options.clip",
        "loss.options: loss 'ppo_clip' has no option 'clip'; its options: clip_low, clip_high",
    ),
    (
        GAME,
        "env.options.goal",
        "env.options: env 'plan_path' has no option 'goal'; its options: server, tier, cpu_s, memory_mb, cores, "
        "max_turns, rewards",
    ),
    (
        MATH,
        "orchestra.options.loops",
        "orchestra.options: orchestra 'solver_verifier' has no option 'loops'; its opti",
    ),
    (
        GAME,
        "env.options.retriever",
        "env.options: env 'plan_path' has no option 'retriever'; its options: server",
    ),
    (
        GAME,
        "data.options.sise",
        "data.options: task generator 'plan_path' has no option 'sise'; its options: size",
    ),
    (
        GAME,
        "cold_start.options.slip",
        "the demonstration function of task generator 'plan_path' has no option 'slip'",
    ),
    (
        MATH,
        "reward.penalties.late",
        "reward.penalties: unknown penalty 'late'; known: invalid, mask_truncated",
    ),
    (MATH, "engine.slot", "engine.slot: unknown key; nearest: slots"),
]


@pytest.mark.parametrize(("experiment", "path", "message"), UNKNOWN)
def test_an_unknown_option_is_one_line(experiment: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_values(
            changed(experiment, path, {} if "penalties" in path else 1), "run 'x'"
        )
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def race(task: object, *, laps: int = 3) -> None: ...


def race_backwards(env: object, track: object) -> None: ...


async def relay(task: object, team: object, env: object, *, loops: int = 1) -> None: ...


def pay_a_trajectory(trajectory: object) -> float: ...


def synchronous_relay(task: object, team: object, env: object) -> None: ...


class WithoutGenerate:
    def __init__(self, model: str, *, rows: int, max_length: int, place: object = None) -> None: ...


class WithoutCommit(WithoutGenerate, TrainedEngine):
    async def generate(self, prompt_ids, sampling): ...

    async def begin_update(self): ...


class CompleteEngine(WithoutCommit):
    async def commit_update(self, update): ...


class WithoutSampling(CompleteEngine):
    async def generate(self, prompt_ids): ...


class WithoutTask:
    def __init__(self, task): ...

    def reset(self): ...

    async def step(self, action): ...


class AsyncReset(WithoutTask):
    async def reset(self, task): ...


ROLE_WITHOUT_TEXT = Role(name="none", system="", user="", parse=lambda: None)


USER_OBJECTS = [
    (
        "env",
        {"name": f"{__name__}:race_backwards"},
        f"env.name: env '{__name__}:race_backwards' must take (task, *, ...), not (env, track)",
    ),
    (
        "env",
        {"name": f"{__name__}:race", "options": {"laps": "3"}},
        "env.options.laps: Input should be a valid integer (got",
    ),
    (
        "orchestra",
        {"name": f"{__name__}:relay", "options": {"loops": "many"}},
        "orchestra.options.loops: Input should be a valid integer (got",
    ),
    (
        "orchestra",
        {"name": f"{__name__}:synchronous_relay"},
        f"orchestra '{__name__}:synchronous_relay' must take (task, team, env, *, ...) as an async function",
    ),
    (
        "reward",
        {"name": f"{__name__}:relay"},
        "must take (group, *, ...), not (task, team, env, *, loops=1)",
    ),
    (
        "reward",
        {"name": f"{__name__}:pay_a_trajectory"},
        f"reward '{__name__}:pay_a_trajectory' takes a trajectory, and a config's reward takes the group",
    ),
    (
        "advantage",
        {"name": f"{__name__}:race_backwards"},
        "must take (turns, *, ...), not (env, track)",
    ),
    (
        "engine",
        {"name": f"{__name__}:race"},
        f"engine '{__name__}:race' must take (model, *, rows, max_length, place)",
    ),
    (
        "engine",
        {"name": f"{__name__}:WithoutGenerate"},
        f"engine '{__name__}:WithoutGenerate' lacks a method generate; expected async gene",
    ),
    (
        "engine",
        {"name": f"{__name__}:WithoutCommit"},
        f"engine '{__name__}:WithoutCommit' lacks a method commit_update; expec",
    ),
    (
        "engine",
        {"name": f"{__name__}:WithoutSampling"},
        "its method generate must take (prompt_ids, sampling), not (prompt_ids)",
    ),
    (
        "engine",
        {"name": f"{__name__}:CompleteEngine", "options": {"x": 1}},
        "engine: options: only for SGLang's servers, and name is",
    ),
    (
        "env",
        {"name": f"{__name__}:WithoutTask"},
        f"env '{__name__}:WithoutTask': its method reset must take (task), not ()",
    ),
    (
        "env",
        {"name": f"{__name__}:AsyncReset"},
        "its method reset must take (task) and may not be async",
    ),
    (
        "agents.solver.role",
        f"{__name__}:LOCATIONS",
        f"agents.solver.role '{__name__}:LOCATIONS' must take (text); it is of type dict",
    ),
    (
        "agents.solver.role",
        f"{__name__}:ROLE_WITHOUT_TEXT",
        f"agents.solver.role '{__name__}:ROLE_WITHOUT_TEXT' must take (text), not ()",
    ),
    (
        "loss",
        {"name": f"{__name__}:race"},
        f"loss.name: unknown loss '{__name__}:race'; known: cross_entropy, gspo",
    ),
]


@pytest.mark.parametrize(("section", "value", "message"), USER_OBJECTS)
def test_own_code_is_checked_before_any_process_starts(
    section: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_values(changed(MATH, section, value), "run 'x'")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_whole_numbers_and_lists_are_taken_as_yaml_gives_them() -> None:
    config = RunConfig.from_values(changed(MATH, "loss.options", {"clip_high": 1}), "run 'x'")
    assert config.loss.arguments == {"clip_high": 1.0}
    assert isinstance(config.loss.arguments["clip_high"], float)
    config = RunConfig.from_values(changed(MATH, "policies.solver.betas", [0, 0.5]), "run 'x'")
    assert config.policies["solver"].betas == (0.0, 0.5)
    # An infinite dual clip is none.
    values = changed(MATH, "loss.options", {"dual_clip": math.inf})
    config = RunConfig.from_values(values, "run 'x'")
    assert config.loss.arguments == {"dual_clip": math.inf}


def test_an_engine_of_the_user_that_has_the_methods_is_accepted() -> None:
    config = RunConfig.from_values(
        changed(MATH, "engine", {"name": f"{__name__}:CompleteEngine"}), "run 'x'"
    )
    assert config.engine.name == f"{__name__}:CompleteEngine"


def test_a_team_that_searches_needs_a_retriever() -> None:
    with pytest.raises(
        ConfigError, match=r"env 'search' needs a retriever; add retriever: \{\}, or name"
    ):
        RunConfig.from_values(changed(SEARCH, "retriever", None), "run 'x'")


def test_tasks_without_demonstrations_make_no_cold_start() -> None:
    values = changed(
        MATH, "data", {"generator": "repositories", "train": 1, "validation": 1, "test": 1}
    )
    with pytest.raises(
        ConfigError, match="task generator 'repositories' has no demonstrations; name models that"
    ):
        RunConfig.from_values(values, "run 'x'")
