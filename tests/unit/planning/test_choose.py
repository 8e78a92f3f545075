"""Placements that are chosen fit, use all GPUs and are what a suite then has; what fits nothing says what would."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from docs.writers.plan import PLAN, paper_hardware, plan_row
from mcore_mas.cli.main import app
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import experiments
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.suite import Suite, load_suite
from mcore_mas.pipeline.suite_file import SuiteError
from mcore_mas.planning import choose
from mcore_mas.planning.choose import Cluster, PlanError, choose_placement, placed, shapes_of
from mcore_mas.planning.estimate import Placement, estimate_run, step_seconds, workloads
from mcore_mas.planning.memory import GPUS, count_parameters
from rollout.models.layout import ParallelLayout, check_fit

PUBLISHED = sorted(name for name in experiments() if not name.startswith("demo_"))
FILES = {
    path: name for name, path in experiments().items() if not name.startswith("demo_")
}  # the last row of each
PAGE = PLAN.read_text(encoding="utf-8")


@cache
def config(experiment: str, *overrides: str) -> RunConfig:
    return RunConfig.check(resolve([f"experiment={experiment}", *overrides]), experiment)


def alone(**changes: object) -> Placement:
    """Two GPUs for the trainer, one for the engine."""
    plain = {
        "pool": "split",
        "layouts": {"shared": ParallelLayout(dp=2)},
        "replicas": 1,
        "engine_tp": 1,
    }
    return Placement(**plain | {"recompute": "full", "tokens": 16384} | changes)


def test_turns_by_hand() -> None:
    # 32 x 8 trajectories of two agents, two loops each; replies half of 4096, prompts a quarter of 8192
    work = workloads(config("drmas_t1_4b_shared_drmas"))["shared"]
    assert (work.turns, work.depth, work.prompt, work.reply) == (32 * 8 * 2 * 2, 4, 2048, 2048)
    assert work.tokens == 1024 * 4096
    # a tree of eight branches in each of five turns, by two agents with a policy each
    trees = workloads(config("strongermas_t1_plan_path_separate"))
    assert {name: own.turns for name, own in trees.items()} == {
        "tool": 32 * 8 * 5,
        "planner": 32 * 8 * 5,
    }
    # eight nodes of a tree, shared by two generators
    assert workloads(config("marti_mars2_8b"))["generator_1"].turns == 16 * 4


def test_seconds_of_an_update_by_hand() -> None:
    run = config("marti_single_llama")  # 32 turns, two updates, no reference
    (a,) = shapes_of(run).values()
    seconds = step_seconds(run, {"shared": a}, alone(), GPUS["H100"], kv=1e12, works=workloads(run))
    tokens = 1024 + 1536  # half of 2048, and a quarter of 6144
    # per token 2 flops for each parameter, and 2 for each of 24 heads of 128, 28 layers and token before it
    forward = 32 * tokens * (2 * 3_212_749_824 + 2 * 28 * 24 * 128 * tokens)
    gradients = 2 * 4 * 3_212_749_824 * 2 / 200e9  # two updates, there and back
    assert seconds["update"] == pytest.approx(forward * 4 / 0.25 / (2 * 989e12) + gradients)
    assert seconds["copies"] == pytest.approx(2 * 3_212_749_824 / 20e9)
    plain = step_seconds(
        run, {"shared": a}, alone(recompute="none"), GPUS["H100"], kv=1e12, works=workloads(run)
    )
    assert (plain["update"] - gradients) / (seconds["update"] - gradients) == pytest.approx(3 / 4)


def test_what_goes_to_the_host_and_comes_back_by_hand() -> None:
    """A reference's weights, on each of two ranks all; what gradients of two agents add up to stays, half on each."""
    team = "drmas_t1_4b_shared_drmas", "trainer.updates_per_step=3"
    for overrides, on_host, moved in ((), 0, 0), (("loss.kl.coef=0.1",), 4, 2 * 2 * 2):
        run = config(*team, *overrides)
        models = shapes_of(run)
        n = count_parameters(models["shared"])
        found = estimate_run(run, models, alone(), GPUS["H100"])
        assert found.host == (12 + on_host) * n  # with a checkpoint
        assert found.seconds["copies"] == pytest.approx(
            (2 + moved) * n / 20e9
        )  # and weights to engines


def test_mini_batches_and_passes_are_updates() -> None:
    """Mini-batches of a quarter of the 1024 turns are four updates; a second pass computes and exchanges once more."""

    def updating(*overrides: str) -> float:
        run = config("drmas_t1_4b_shared_drmas", *overrides)
        return step_seconds(
            run,
            {"shared": shapes_of(run)["shared"]},
            alone(),
            GPUS["H100"],
            kv=1e12,
            works=workloads(run),
        )["update"]

    once, parameters = (
        updating(),
        count_parameters(shapes_of(config("drmas_t1_4b_shared_drmas"))["shared"]),
    )
    exchange = 4 * parameters * 2 / 200e9  # of gradients, there and back
    assert updating("trainer.updates_per_step=4") == pytest.approx(once + 3 * exchange)
    assert updating("+trainer.minibatch=256") == pytest.approx(once + 3 * exchange)
    assert updating("trainer.passes=2") == pytest.approx(2 * once)


def test_phases_by_hand() -> None:
    run = config("marti_single_llama")
    models = shapes_of(run)
    n = count_parameters(models["shared"])
    apart = estimate_run(run, models, alone(), GPUS["H100"])
    trainer = apart.trainers["shared", "trainer"]
    assert (trainer.weights, trainer.gradients, trainer.optimizer) == (2 * n, 4 * n, 6 * n)
    assert apart.update == trainer.total + 1e9 and apart.weights == {"shared": 2 * n}
    assert apart.rollout == pytest.approx(0.92 * 80e9)  # keys and values take what is left
    together = alone(pool="shared", layouts={"shared": ParallelLayout(dp=2)}, replicas=2)
    beside = estimate_run(run, models, together, GPUS["H100"])
    assert (
        beside.update
        == pytest.approx(trainer.total + 2 * n + beside.kv + 2.9e9)
        == pytest.approx(0.92 * 80e9)
    )
    in_turn = estimate_run(
        run, models, alone(pool="shared", replicas=2, colocated=True), GPUS["H100"]
    )
    # two processes, and the graphs of a server that sleeps
    assert in_turn.update == trainer.total + 2 * n + 2.9e9 and in_turn.kv > beside.kv
    assert in_turn.host == 2 * (2 * n + 6 * n) + 12 * n  # of two ranks, and a checkpoint
    assert apart.host == 12 * n  # a checkpoint
    only = estimate_run(
        run, models, alone(pool="shared", replicas=2, colocated=True, one_by_one=True), GPUS["H100"]
    ).trainers["shared", "trainer"]
    # of moments the 128256 x 3072 embedding's are on the GPU, and 4 bytes of master weight, shared by two ranks
    assert (only.optimizer, only.on_host) == (2 * n + 8 * 128256 * 3072, 4 * n)
    assert (
        in_turn.disk == 3 * 12 * n + 2 * n
    )  # two checkpoints, one being written, and the finished model


def test_one_by_one_the_largest_trainer_counts() -> None:
    """Of two 14.8B policies with critics each model is alone beside the engines' weights, and moves at every update."""
    run = config("unitymas_t3_nq_decompose_14b")
    models = shapes_of(run)
    layouts = dict.fromkeys(models, ParallelLayout(tp=8, sp=True))
    place = alone(pool="shared", layouts=layouts, engine_tp=8, colocated=True)
    together, single = (
        estimate_run(run, models, made, GPUS["H100"])
        for made in (place, replace(place, one_by_one=True))
    )
    assert len(single.trainers) == 4
    engines = sum(single.weights.values()) + 7.8e9  # and six processes, with graphs of two servers
    assert single.update == pytest.approx(max(m.total for m in single.trainers.values()) + engines)
    assert together.update == pytest.approx(
        sum(m.total for m in together.trainers.values()) + engines
    )
    # one update a step: each model goes out and in to score and to learn, its moments through the GPU once
    moved = sum(4 * (m.weights + m.optimizer) + 2 * m.on_host for m in single.trainers.values())
    handed_over = sum(2 * count_parameters(a) / 8 for a in models.values())
    assert single.seconds["copies"] == pytest.approx((moved + handed_over) / 20e9, rel=0.01)
    assert single.host == 8 * sum(
        m.weights + m.optimizer + m.on_host for m in single.trainers.values()
    ) + sum(
        12 * (count_parameters(a) + count_parameters(a, value_head=True)) for a in models.values()
    )


@pytest.mark.parametrize("name", sorted(FILES.values()))
@pytest.mark.parametrize("gpus", ["4xH100", "8xH100", "16xH100", "8xH200", "its paper's"])
def test_what_is_chosen_fits_and_uses_every_gpu(name: str, gpus: str) -> None:
    gpus = paper_hardware(name) or "24xA100" if gpus == "its paper's" else gpus
    run, cluster = config(name), Cluster.parse(gpus)
    try:
        placement, estimate = choose_placement(run, cluster)
    except PlanError as error:
        assert f"nothing fits {gpus}; " in str(error) and "\n" not in str(error)
        nearest = str(error).rpartition("nearest that fits: ")[2]
        placement, estimate = choose_placement(run, cluster := Cluster.parse(nearest))
        smaller = cluster.gpus // 2
        if smaller > Cluster.parse(gpus).gpus:
            with pytest.raises(PlanError):
                choose_placement(run, replace(cluster, gpus=smaller))
    assert (
        estimate.lack == 0
        and max(estimate.update, estimate.rollout) <= 0.92 * cluster.gpu.memory * 1e9 + 1
    )
    engines = placement.replicas * placement.engine_tp
    parts = [
        layout.ranks for (policy, _) in estimate.trainers for layout in [placement.layouts[policy]]
    ]
    if placement.pool == "shared":
        assert {engines, *parts} == {cluster.gpus}
    else:
        assert engines * len(run.models) + sum(parts) == cluster.gpus
    for policy, a in shapes_of(run).items():
        check_fit(a, placement.layouts[policy])


def test_runs_that_differ_in_no_cost_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    search = choose._searched
    monkeypatch.setattr(
        choose, "_searched", lambda run, *rest: (searched.append(run.run), search(run, *rest))[1]
    )
    monkeypatch.setattr(choose, "_known", {})
    name, cluster = "drmas_t1_4b_shared_drmas", Cluster.parse("8xH100")
    others = ("seed=7", "advantage=dr_grpo", "trainer.group_size=4")
    found = [
        choose_placement(config(name, *own), cluster)
        for own in ((), *((f"run=r{i}", x) for i, x in enumerate(others)))
    ]
    assert searched == [name, "r2"]
    assert found[0] == found[1] == found[2] != found[3]


def test_a_run_that_fits_nothing_says_what_would() -> None:
    run = config("marti_mars2_32b")
    with pytest.raises(
        PlanError, match=r"^marti_mars2_32b: nothing fits 4xH100; the fullest GPU is short of"
    ):
        choose_placement(run, Cluster.parse("4xH100"))
    with pytest.raises(PlanError, match=r"nearest that fits: 8xH100$"):
        choose_placement(run, Cluster.parse("4xH100"))
    with pytest.raises(PlanError, match=r"demo_math: its engine takes no GPUs of its own"):
        choose_placement(config("demo_math"), Cluster.parse("4xH100"))
    ahead = choose_placement(
        config("drmas_t1_4b_shared_drmas", "trainer.staleness=1"), Cluster.parse("8xH100")
    )[0]
    assert not ahead.colocated  # nothing rests while the team acts beside the training


def test_a_policys_own_settings_are_planned_with() -> None:
    """Twice the micro-batch is twice the activations of that policy; an engine of another cut is no plan's."""
    name, kind = "drmas_t1_4b_separate_drmas", Cluster.parse("8xH100")
    plain, own = (
        config(name),
        config(name, "policies.verifier.own.trainer={microbatch_tokens: 32768}"),
    )
    place = alone(layouts=dict.fromkeys(("solver", "verifier"), ParallelLayout(dp=2)))
    found, more = (estimate_run(run, shapes_of(run), place, GPUS["H100"]) for run in (plain, own))
    before, after = (found.trainers[name, "trainer"].activations for name in ("solver", "verifier"))
    assert before == after and more.trainers["solver", "trainer"].activations == before
    assert more.trainers["verifier", "trainer"].activations == 2 * before
    short = config(
        name,
        *(
            f"policies.{p}.own.engine={{max_length: 12288, slots: 1}}"
            for p in ("solver", "verifier")
        ),
    )
    # one sequence of 36 layers, eight heads of 128, keys and values of two bytes
    assert (
        estimate_run(short, shapes_of(short), place, GPUS["H100"]).kv
        == 12288 * 36 * 8 * 128 * 2 * 2
        == 12288 * 147_456
    )
    with pytest.raises(
        PlanError,
        match=r"policies.verifier.own.engine.tp: plans cut the engines of all policies alike",
    ):
        choose_placement(config(name, "policies.verifier.own.engine={tp: 2}"), kind)


@pytest.mark.parametrize("text", ["8", "0xH100", "8xH1000", "x"])
def test_gpus_that_nobody_knows_are_refused(text: str) -> None:
    with pytest.raises(
        PlanError,
        match=r"expected a number and a kind, for example 8xH100; kinds: H100, H200, A100",
    ):
        Cluster.parse(text)


def test_a_cluster_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("{gpus: 8xH100, node: 4, memory: 94}")
    found = Cluster.read(file)
    assert (found.gpus, found.node, found.gpu.memory, found.gpu.flops) == (8, 4, 94, 989)
    assert (
        max(
            layout.tp
            for layout in choose_placement(config("drmas_t1_8b_single_grpo"), found)[
                0
            ].layouts.values()
        )
        <= 4
    )
    file.write_text("{gpus: 8xH100, memroy: 94}")
    with pytest.raises(
        PlanError, match="memroy; expected gpus: 16xH100, and node, memory, flops, bandwidth"
    ):
        Cluster.read(file)
    for text, line in {
        "{gpus: 6}": "GPUs '6': expected a number and a kind, for example 8xH100",
        "{gpus: 8xH100, memory: much}": "cluster.yaml: memory: 'much'; expected a number above 0, in GB",
        "{gpus: 8xH100, node: 0}": "cluster.yaml: node: 0; expected a number above 0 of GPUs in a machine",
        "{gpus: 8xH100, bandwidth: null}": "cluster.yaml: bandwidth: None; expected a number above 0, in TB/s",
        "{gpus: 8xH100, 7: 7}": "cluster.yaml: 7; expected gpus: 16xH100, and node",
    }.items():
        file.write_text(text)
        with pytest.raises(PlanError, match=line):
            Cluster.read(file)


def test_a_plan_is_of_the_gpus_that_a_suite_names(tmp_path: Path) -> None:
    suite = tmp_path / "s.yaml"
    one, other = "experiment=drmas_t1_4b_single_grpo", "experiment=drmas_t1_8b_single_grpo"
    suite.write_text(f"suite: s\nexperiments: {{a: [{one}, cluster.gpus=2xH200], b: [{other}]}}\n")
    done = CliRunner().invoke(app, ["plan", str(suite)])
    assert re.findall(r"^(?:no: )?(\w) on (\w+)", done.stdout, re.MULTILINE) == [
        ("a", "2xH200"),
        ("b", "8xH100"),
    ]
    done = CliRunner().invoke(app, ["plan", str(suite), "--gpus", "4xH100"])
    assert re.findall(r"^(?:no: )?(\w) on (\w+)", done.stdout, re.MULTILINE) == [
        ("a", "4xH100"),
        ("b", "4xH100"),
    ]


def own_placement(config: RunConfig) -> Placement:
    """The placement that a config spells out."""
    layouts = {
        name: ParallelLayout(tp=p.tp, pp=p.pp, vpp=p.vpp, cp=p.cp, dp=p.dp, ep=p.ep, sp=p.sp)
        for name, p in config.policies.items()
        if name in config.trained
    }
    own = [config.policies[name] for name in config.trained]
    return Placement(
        pool=config.cluster.pool,
        layouts=layouts,
        replicas=config.engine.replicas,
        engine_tp=config.engine.tp,
        colocated=config.engine.sleep and all(policy.offload for policy in own),
        one_by_one=config.cluster.one_by_one and all(policy.host_moments for policy in own),
        recompute=own[0].recompute,
        tokens=config.trainer.microbatch_tokens,
    )


@pytest.mark.parametrize("run", ["drmas_t2_7b_separate_drmas", "marti_mars2_32b"])
def test_a_suite_has_what_was_chosen(tmp_path: Path, run: str) -> None:
    suite = {
        "suite": "s",
        "results": str(tmp_path),
        "experiments": {"a": [f"experiment={run}", "cluster=auto"]},
    }
    made = RunConfig.check(dict(Suite.load(suite).runs["a"]), "a")
    placement, estimate = choose_placement(config(run), Cluster.parse("8xH100"))
    assert own_placement(made) == placement
    assert (made.cluster.pool, made.engine.transport, made.engine.sleep) == (
        "shared",
        "tensor",
        True,
    )
    assert (
        "enable-memory-saver" not in made.engine.options
    )  # a training's engines are started with it where they sleep
    held = (max(estimate.weights.values()) + estimate.kv) / 80e9
    assert made.engine.options["mem-fraction-static"] == pytest.approx(held, abs=1e-3)
    plain = config(run, "run=a", f"results={tmp_path}", "cluster=auto").model_dump(mode="json")
    same = ("agents", "loss", "reward", "advantage", "evaluation", "data", "orchestra", "seed")
    assert {key: made.model_dump(mode="json")[key] for key in same} == {
        key: plain[key] for key in same
    }
    plain["tracking"]["tags"] = {"suite": "s", "experiment": "a"}  # of MLflow's runs
    assert placed(plain) == made.model_dump(mode="json")
    suite["experiments"]["a"].append("cluster.gpus=1xH100")
    with pytest.raises(
        SuiteError, match=r"^run 'a': a: nothing fits 1xH100; .* nearest that fits: \dxH100"
    ):
        Suite.load(suite)
    file = tmp_path / "suite.yaml"
    file.write_text(yaml.safe_dump({"suite": "s", "experiments": {"b": [f"experiment={run}"]}}))
    assert [*load_suite(str(file)).runs] == ["b"]
    with pytest.raises(SuiteError, match="nobody: no such file, and no experiment of this name"):
        load_suite("nobody")


def test_every_published_experiment_fits_one_machine_and_four_gpus_where_its_paper_had_four() -> (
    None
):
    lines = [
        line.removesuffix(" |")
        for line in PAGE.splitlines()
        if line.startswith("| `") and " x " in line
    ]
    rows = {
        name: line.split(" | ")[2:]
        for line in lines
        for name in re.findall(r"`(\w+)`", line.partition(" | ")[0])
    }
    assert sorted(rows) == PUBLISHED
    assert not [name for name, (_, on_8, _, _) in rows.items() if on_8.startswith("**no**")]
    # Dr.MAS: 3B and 4B on four H100, the rest on eight; MARTI: machines of eight A800, which are A100 of 80 GB
    assert not [name for name, cells in rows.items() if "**no**" in cells[3]]
    assert rows["unitymas_t3_hotpotqa_m_ask_7b"][3].startswith("32xH100: ")
    assert rows["unitymas_t4_code_8b"][3].startswith("24xH100: ")
    small = [name for name in rows if name.startswith(("drmas_t1_4b", "drmas_t2_3b"))]
    assert len(small) == 10 and not [name for name in small if rows[name][0].startswith("**no**")]


@pytest.mark.parametrize("name", sorted(FILES.values()))
def test_the_page_is_up_to_date(name: str) -> None:
    (row,) = (
        line
        for line in PAGE.splitlines()
        if re.match(rf"\| (`\w+`, )*`{name}`[,` \w]* \| \d", line)
    )
    assert row.endswith(f"` | {' | '.join(plan_row(name))} |"), "run python -m docs.writers plan"


def test_trainers_take_turns_where_otherwise_only_a_split_fits() -> None:
    """Four 3B policies with critics: with a split, half of 16 GPUs compute; sharing all is three times as fast."""
    run = config("unitymas_f5_m_ask_3b_separate")
    place, estimate = choose_placement(run, Cluster.parse("16xH100"))
    assert (place.pool, place.one_by_one) == ("shared", True)
    split = replace(
        place,
        pool="split",
        one_by_one=False,
        colocated=False,
        recompute="full",
        replicas=1,
        engine_tp=2,
    )
    split = replace(split, layouts=dict.fromkeys(place.layouts, ParallelLayout()))
    apart = estimate_run(run, shapes_of(run), split, GPUS["H100"])
    assert not apart.lack and 2.5 < apart.step_s / estimate.step_s < 3.5
