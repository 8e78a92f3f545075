"""A run gets the smallest tensor parallelism that fits; a cluster that is too small is refused."""

import re
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import experiments
from mcore_mas.config.models import layout_of
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.suite import Suite, load_suite
from mcore_mas.pipeline.suite_file import SuiteError
from mcore_mas.planning.estimate import estimate_peak_memory, load_architectures
from mcore_mas.planning.gpus import Cluster, PlanError
from mcore_mas.planning.place import check_placement, place_run
from mcore_mas.planning.worker_groups import count_devices, list_worker_groups
from mcore_mas.reports.published_values import read_published
from mcore_mas.runtime.trainer_specs import policy_spec
from rollout.models.layout import check_fit

PUBLISHED = sorted(name for name in experiments() if not name.startswith("demo_"))
# One experiment of each file: the last row of its grid.
ONE_OF_EACH_FILE = sorted(
    {path: name for name, path in experiments().items() if name in PUBLISHED}.values()
)
EIGHT = Cluster.parse("8xH100")


@cache
def config(experiment: str, *overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve([f"experiment={experiment}", *overrides]), experiment)


def paper_gpus(experiment: str) -> str | None:
    """Return the GPUs that an experiment's paper names, or None."""
    named = [
        entry["gpus"]
        for entry in read_published()["hardware"]
        if any(fnmatch(experiment, pattern) for pattern in entry["experiments"])
    ]
    return named[-1] if named else None


def assert_fits(placed: RunConfig, cluster: Cluster) -> None:
    """Check that a placement is valid, uses every GPU and has enough memory."""
    models = load_architectures(placed)
    assert estimate_peak_memory(placed, models, cluster.gpu).shortfall(cluster.gpu) == 0
    check_placement(placed, cluster)
    groups = list_worker_groups(placed, "GPU")
    assert {workers.devices for workers in groups} == {cluster.gpus}
    assert {workers.tp for workers in groups} == {placed.engine.tp}
    assert count_devices(groups, placed.cluster.pool) == cluster.gpus
    for policy in placed.trained:
        check_fit(models[policy], layout_of(placed.policies[policy]))


@pytest.mark.parametrize("experiment", ONE_OF_EACH_FILE)
@pytest.mark.parametrize("gpus", ["8xH100", "16xH100", "8xH200"])
def test_a_placement_fits_and_uses_every_gpu(experiment: str, gpus: str) -> None:
    cluster = Cluster.parse(gpus)
    assert_fits(place_run(config(experiment), cluster), cluster)


@pytest.mark.parametrize("experiment", ONE_OF_EACH_FILE)
def test_an_experiment_fits_the_gpus_of_its_paper(experiment: str) -> None:
    gpus = paper_gpus(experiment)
    if gpus is None:
        pytest.skip("its paper names no GPUs")
    cluster = Cluster.parse(gpus)
    assert_fits(place_run(config(experiment), cluster), cluster)


def test_the_smallest_tensor_parallelism_that_fits_is_taken() -> None:
    """On 80 GB a 4B policy fits with tp 1 and an 8B policy with tp 2; on 141 GB both fit with 1."""
    small = place_run(config("drmas_t1_4b_shared_drmas"), EIGHT)
    large = place_run(config("drmas_t1_8b_shared_drmas"), EIGHT)
    assert (small.engine.tp, small.engine.replicas) == (1, 8)
    assert (large.engine.tp, large.engine.replicas) == (2, 4)
    trainer = large.policies["shared"]
    assert (trainer.tp, trainer.dp, trainer.sp) == (2, 4, True)
    assert large.cluster.pool == "shared"
    assert large.engine.sleep
    assert trainer.offload
    assert not large.cluster.one_by_one

    on_larger_gpus = place_run(config("drmas_t1_8b_shared_drmas"), Cluster.parse("8xH200"))
    assert on_larger_gpus.engine.tp == 1


def test_trainers_take_turns_where_they_do_not_fit_together() -> None:
    experiment = "unitymas_f5_m_ask_3b_separate"  # four policies with critics
    placed = place_run(config(experiment), EIGHT)
    assert placed.cluster.one_by_one
    assert all(placed.policies[policy].host_moments for policy in placed.trained)


def saving(placed: RunConfig) -> tuple[bool, set[str | None]]:
    """Return whether trainers take turns, and what they recompute."""
    recomputation = {placed.policies[policy].recompute for policy in placed.trained}
    return placed.cluster.one_by_one, recomputation


def test_the_fastest_saving_that_fits_is_taken() -> None:
    """An update of a 1.7B policy takes 73.2, 63.8, 62.0, 52.6, 43.2 or 31.9 GB, of which 92 % of a GPU must do."""
    experiment = "strongermas_t3_code_alone"
    expected = {
        80: (False, {"none"}),
        70: (False, {"selective"}),
        68: (True, {"none"}),
        60: (True, {"selective"}),
        50: (False, {"full"}),
        40: (True, {"full"}),
    }
    one = Cluster.parse("1xH100")
    for memory, choice in expected.items():
        cluster = replace(one, gpu=replace(one.gpu, memory=memory))
        placed = place_run(config(experiment), cluster)
        assert_fits(placed, cluster)
        assert saving(placed) == choice, memory


def test_a_stated_recomputation_is_kept() -> None:
    experiment = "strongermas_t3_code_alone"
    for stated in ("none", "selective", "full"):
        run = config(experiment, f"policy_defaults.recompute={stated}")
        assert saving(place_run(run, EIGHT)) == (False, {stated})

    run = config(experiment, "policy_defaults.recompute=none")
    with pytest.raises(PlanError) as error:
        place_run(run, Cluster.parse("1xA100-40GB"))
    assert re.search(
        r"nothing fits 1xA100-40GB; the fullest GPU lacks .* GB with tp 1; policies.shared.recompute: none "
        "is kept, and recomputing more saves memory; the least that fits: ",
        str(error.value),
    )


def test_without_a_plan_nothing_is_recomputed() -> None:
    run = config("strongermas_t3_code_alone")
    assert run.policies["shared"].recompute is None
    assert policy_spec("shared", run).recompute == "none"
    assert policy_spec("shared", place_run(run, Cluster.parse("8xA100-40GB"))).recompute == "full"


def test_a_run_that_trains_ahead_keeps_its_memory() -> None:
    placed = place_run(config("drmas_t1_4b_shared_drmas", "trainer.staleness=1"), EIGHT)
    assert not placed.engine.sleep
    assert not placed.policies["shared"].offload


def test_a_run_that_trains_ahead_recomputes_where_its_caches_need_the_memory() -> None:
    """256 slots of 6,144 tokens have 180 GB of keys and values, and two slots 1.4 GB."""
    ahead = ("strongermas_t3_code_alone", "trainer.staleness=1")
    assert saving(place_run(config(*ahead), EIGHT)) == (False, {"full"})
    few_slots = config(*ahead, "engine.slots=2")
    assert saving(place_run(few_slots, EIGHT)) == (False, {"none"})


def test_machines_limit_the_tensor_parallelism(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("{gpus: 16xH100, node: 4}")
    experiment = "marti_mars2_32b"
    assert place_run(config(experiment), Cluster.parse("16xH100")).engine.tp == 8
    with pytest.raises(
        PlanError, match=r"nothing fits 16xH100; the fullest GPU lacks .* with tp 4"
    ):
        place_run(config(experiment), Cluster.read(file))


def test_the_servers_get_the_share_of_memory_that_was_planned() -> None:
    placed = place_run(config("drmas_t2_7b_separate_drmas"), EIGHT)
    models = load_architectures(placed)
    peak = estimate_peak_memory(placed, models, EIGHT.gpu)
    weights = 2 * 7_615_616_512 / placed.engine.tp
    share = placed.engine.options["mem-fraction-static"]
    assert share == pytest.approx((weights + peak.kv_cache) / 80e9, abs=1e-3)


def test_a_run_that_does_not_fit_names_the_least_cluster_that_does() -> None:
    with pytest.raises(PlanError) as error:
        place_run(config("marti_mars2_32b"), Cluster.parse("4xH100"))
    message = str(error.value)
    assert message.startswith("marti_mars2_32b: nothing fits 4xH100; the fullest GPU lacks ")
    assert message.endswith("; the least that fits: 8xH100")


def test_a_run_whose_models_do_not_divide_the_cluster_is_refused() -> None:
    with pytest.raises(PlanError, match=r"lacks .* GB with tp 1; the least that fits"):
        place_run(config("drmas_t1_8b_shared_drmas"), Cluster.parse("3xH100"))


def test_an_embedded_engine_gets_the_slots_for_which_there_is_memory() -> None:
    """Two policies of 1.7B and 192 slots of 8,192 tokens: 115 kB a token are 180 GB an engine."""
    embedded = "engine={name: embedded, python: null, slots: 192, max_length: 8192}"
    run = config(
        "drmas_t1_4b_separate_drmas",
        embedded,
        "policy_defaults.model=Qwen/Qwen3-1.7B",
        "policy_defaults.recompute=full",
    )
    cluster = Cluster.parse("1xH100")
    placed = place_run(run, cluster)
    assert_fits(placed, cluster)
    assert (placed.engine.device, placed.engine.sleep, placed.cluster.pool) == (
        "cuda",
        True,
        "shared",
    )
    sequence = 8192 * 28 * 8 * 128 * 2 * 2
    weights = 2 * 1_720_574_976
    # Two trainers and two engines, each of which computes prompts of 16,384 tokens and one more at a time
    prefill = (16_384 + 8192) * (4 * 2048 + 2 * (2 * 2048 + 3 * 6144))
    processes = 4 * 1e9 + 2 * prefill
    free = 0.92 * 80e9 - processes - 2 * weights
    assert placed.engine.slots == free // (2 * sequence)

    few = config(
        "drmas_t1_4b_separate_drmas",
        embedded,
        "engine.slots=4",
        "policy_defaults.model=Qwen/Qwen3-1.7B",
    )
    assert place_run(few, cluster).engine.slots == 4
    assert "mem-fraction-static" not in placed.engine.options


def test_runs_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"demo_math: it computes on CPUs .* add cluster.device=auto"
    ):
        place_run(config("demo_math"), EIGHT)
    engine_on_cpu = config("demo_math", "cluster.device=auto", "engine.device=cpu")
    with pytest.raises(PlanError, match="demo_math: a plan places engines on the run"):
        place_run(engine_on_cpu, EIGHT)
    different_tp = config(
        "drmas_t1_4b_separate_drmas", "policies.verifier.overrides.engine={tp: 2}"
    )
    message = r"policies.verifier.overrides.engine.tp: a plan gives all engines the same"
    with pytest.raises(PlanError, match=message):
        place_run(different_tp, EIGHT)


def test_a_placement_by_hand_is_checked() -> None:
    check_placement(config("drmas_t1_4b_shared_drmas"), EIGHT)
    with pytest.raises(PlanError, match="it takes 5 GPUs, and 4xH100 has 4"):
        check_placement(config("drmas_t1_4b_shared_drmas"), Cluster.parse("4xH100"))
    with pytest.raises(PlanError, match=r"the fullest GPU lacks .* GB; raise tp"):
        check_placement(config("drmas_t1_8b_shared_drmas"), Cluster.parse("9xA100-40GB"))


def test_a_suite_places_its_runs() -> None:
    run = "drmas_t2_7b_separate_drmas"
    suite = Suite.load({"suite": "s", "experiments": {run: [f"experiment={run}", "cluster=auto"]}})
    placed = place_run(config(run), EIGHT)
    placed_by_suite = suite.run_config(run)
    assert placed_by_suite.policies == placed.policies
    assert placed_by_suite.engine == placed.engine
    assert placed_by_suite.cluster.pool == "shared"


def test_a_suite_refuses_a_run_that_does_not_fit() -> None:
    overrides = ["experiment=drmas_t1_8b_shared_drmas", "cluster.gpus=1xH100"]
    message = r"^run 'a': a: nothing fits 1xH100; .* the least that fits: \dxH100"
    with pytest.raises(SuiteError, match=message):
        Suite.load({"suite": "s", "experiments": {"a": overrides}})


def test_plan_prints_each_run_on_its_own_gpus(tmp_path: Path) -> None:
    suite = tmp_path / "s.yaml"
    runs = {
        "a": ["experiment=drmas_t1_4b_single_grpo", "cluster.gpus=2xH200"],
        "b": ["experiment=drmas_t1_8b_single_grpo"],
    }
    suite.write_text(yaml.safe_dump({"suite": "s", "experiments": runs}))
    assert list(load_suite(str(suite)).runs) == ["a", "b"]

    result = CliRunner().invoke(app, ["plan", str(suite)])
    assert result.exit_code == 0
    assert "a on 2xH200: shared GPUs, trainers shared dp 2" in result.stdout
    assert "b on 8xH100: shared GPUs, trainers shared tp 2 dp 4" in result.stdout

    result = CliRunner().invoke(app, ["plan", str(suite), "--gpus", "4xH100"])
    assert "a on 4xH100" in result.stdout
    assert "b on 4xH100" in result.stdout


def test_plan_on_other_gpus_keeps_no_choice_for_the_suites_own(tmp_path: Path) -> None:
    experiment = "strongermas_t3_code_alone"
    suite = tmp_path / "s.yaml"
    for gpus in ("8xH100", "1xL4"):  # all of it fits the former, and nothing the latter
        run = [f"experiment={experiment}", f"cluster.gpus={gpus}"]
        suite.write_text(yaml.safe_dump({"suite": "s", "experiments": {experiment: run}}))
        result = CliRunner().invoke(app, ["plan", str(suite), "--gpus", "8xA100-40GB"])
        assert result.exit_code == 0
        assert "trainers shared dp 8 with full recomputation," in result.stdout


def test_the_page_shows_what_plan_prints() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")
    [(command, output)] = re.findall(r"```\n\$ mcore-mas (plan .*)\n((?:.|\n)*?)```", page)
    result = CliRunner().invoke(app, command.split())
    assert (result.exit_code, result.output) == (0, output)


def test_plan_fails_if_a_run_does_not_fit() -> None:
    result = CliRunner().invoke(app, ["plan", "marti_mars2_32b", "--gpus", "4xH100"])
    assert result.exit_code == 1
    assert result.stdout.startswith("error: marti_mars2_32b: nothing fits 4xH100")


def test_plan_checks_the_placement_in_the_config() -> None:
    arguments = ["plan", "drmas_t1_4b_shared_drmas", "--as-configured"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "split GPUs, trainers shared tp 2 dp 2, engines 1 x tp 1" in result.stdout
