"""Evaluations that are ended and go on, on all GPUs there are, with any model in any seat."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig, for_policy
from mcore_mas.evaluation import evaluate as evaluation
from mcore_mas.evaluation.engine_gpus import assign_engine_gpus, share_gpu_memory
from mcore_mas.evaluation.evaluate import EvaluationError, converse, evaluate, playing, seated
from mcore_mas.evaluation.measure import Shards
from mcore_mas.planning.machine import visible_gpu_ids
from mcore_mas.planning.memory import engine_weight_bytes
from mcore_mas.planning.worker_groups import PlacementError
from mcore_mas.runtime.cluster import Node
from mcore_mas.runtime.devices import find_devices
from mcore_mas.runtime.engine_factory import make_engines, sidecar_of
from rollout.base.json_files import write_json
from rollout.base.ownership import FolderError
from rollout.engines.embedded.batching import LocalReplicas
from rollout.engines.sglang.server import Replica, Server
from rollout.models.architecture import read_architecture
from rollout.models.chat_template import Renderer
from rollout.records.files import read_tasks, read_trajectories
from tests.support.run_folder import make_run
from tests.support.slotted_sglang import slotted_server
from tests.unit.evaluation.test_measure import trajectory

pytestmark = pytest.mark.usefixtures("forked_programs")
TEAM = ("solver", "verifier")


def asked(url: str) -> int:
    with urlopen(f"{url}/count") as answer:
        return int(answer.read())


def served(run: Path, url: str, **evaluation: Any) -> Path:
    """The run with its engines at `url`."""
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["engine"] |= {
        "name": "sglang",
        "urls": [url],
        "slots": 8,
        "verify": False,
        "transport": None,
        "start_s": 0.5,
    }
    config["evaluation"] |= evaluation
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_to_the_same_scores(tmp_path: Path) -> None:
    run = make_run(tmp_path, "data.test=60", "evaluation.samples=8")
    answer = read_tasks(run / "tasks" / "test.parquet")[0].answers[0]
    tokens = Renderer(run / "base").encode_reply(f"\\boxed{{{answer}}}")
    with slotted_server(8, 0.02, tokens) as url:
        config = served(run, url)
        command = [sys.executable, "-m", "mcore_mas", "evaluate", str(config), "--state", "base"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
            while (
                not list((run / "evaluation" / "base").glob("part_000001*"))
                and first.poll() is None
            ):
                time.sleep(0.02)
            first.send_signal(signal.SIGKILL)
        out = run / "evaluation" / "base.json"
        assert not out.exists()
        kept = {t.id for t in read_trajectories(run / "evaluation" / "base")}
        assert 256 <= len(kept) < 480
        before = asked(url)
        evaluate(config, "base", out)
        resumed = asked(url) - before
        evaluate(config, "base", run / "evaluation" / "again.json")
        whole = asked(url) - before - resumed
        assert resumed == pytest.approx(whole * (480 - len(kept)) / 480, rel=0.15)
    scores, again = (
        json.loads((run / "evaluation" / name).read_text()) for name in ("base.json", "again.json")
    )
    assert scores == again
    assert (scores["replies"], scores["failed"], len(scores["tasks"])) == (480, {}, 60)
    assert 0 < scores["rows"][-3]["value"] < 1
    ids = [t.id for t in read_trajectories(run / "evaluation" / "base")]
    assert len(ids) == len(set(ids)) == 480


@pytest.mark.slow
def test_what_a_trained_team_says_has_the_step_of_its_weights(tmp_path: Path) -> None:
    """In a chat and in an evaluation; of the base, and of a model that is only named, it is 0."""
    run = make_run(tmp_path, "data.test=1", "evaluation.samples=1")
    config = RunConfig.load(run / "config.yaml")
    model = shutil.copytree(run / "base", run / "train" / "models" / "solver")
    done = {
        "policies": {"solver": str(model), "verifier": str(run / "base")},
        "policies_of_step": 30,
    }
    write_json(run / "train" / "done.json", done)
    versions = {"solver": {30}, "verifier": {0}}
    for state, expected in (("trained", versions), ("base", {agent: {0} for agent in versions})):
        evaluate(config, state, run / "evaluation" / f"{state}.json")
        (said,) = converse(config, state, ["What is 3+4?"])
        for played in (said, *read_trajectories(run / "evaluation" / state)):
            found = {
                agent: {t.policy_version for t in played.turns if t.agent == agent}
                for agent in versions
            }
            assert found == expected


def test_what_another_model_said_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    def one_model_plays() -> None:
        first = Shards(tmp_path, "one model")
        for sample in range(2):
            first._waiting.append(trajectory("t", sample, 1.0, "4"))
        first.flush()

    for damaged in (b"", b"[" * 200_000, b"\xff"):  # whose the trajectories are is then not known
        one_model_plays()
        assert len(list(Shards(tmp_path, "one model").read())) == 2
        (tmp_path / "identity.json").write_bytes(damaged)
        assert list(Shards(tmp_path, "one model").read()) == []
    one_model_plays()
    assert list(Shards(tmp_path, "another").read()) == []
    assert list(tmp_path.glob("*.parquet")) == []


def test_a_model_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(FolderError, match="/nowhere: no such model folder; name one"):
        evaluate(
            run / "config.yaml",
            "swapped",
            run / "swapped.json",
            {"solver": {"model": "/nowhere"}, "verifier": "base"},
        )


def test_a_part_that_a_killed_process_had_not_finished_is_no_end_of_the_others(
    tmp_path: Path,
) -> None:
    """Parts are written side by side: the first of two was under way when the second was there."""
    first = Shards(tmp_path, "one model")
    for task in ("easy", "hard"):
        asyncio.run(first.keep(trajectory(task, 0, 1.0, "4")))
        first.flush()
    (tmp_path / "part_000000.parquet").unlink()
    second = Shards(tmp_path, "one model")
    assert [played.task_id for played in second.read()] == ["hard"]
    asyncio.run(second.keep(trajectory("easy", 0, 1.0, "4")))
    second.flush()
    assert [played.task_id for played in Shards(tmp_path, "one model").read()] == ["hard", "easy"]


@pytest.mark.slow
def test_too_many_failures_are_no_score_and_the_same_command_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, "data.test=2", "evaluation.samples=2")
    with slotted_server(8, 0.0) as url:
        config = served(run, url)  # and gone when it is asked
    out = run / "evaluation" / "base.json"
    with pytest.raises(
        EvaluationError, match=r"4 of 4 trajectories are lost \(4 EngineError\).*max_failed is 0.05"
    ):
        evaluate(config, "base", out)
    assert not out.exists()
    tokens = Renderer(run / "base").encode_reply("\\boxed{1}")
    with slotted_server(8, 0.0, tokens) as url:
        evaluate(served(run, url), "base", out)
    assert json.loads(out.read_text())["failed"] == {}


class TestPlacement:
    @staticmethod
    def config(*overrides: str) -> RunConfig:
        of_gpus = ["cluster.device=auto", "engine.name=sglang", "engine.python=p"]
        return RunConfig.check(resolve(["experiment=demo_math", *of_gpus, *overrides]), "test")

    @pytest.fixture(autouse=True)
    def _eight_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
        monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def test_all_gpus_serve(self) -> None:
        assert assign_engine_gpus(self.config("engine.tp=2")) == {
            "solver": [["8", "9"], ["10", "11"]],
            "verifier": [["12", "13"], ["14", "15"]],
        }
        assert [len(servers) for servers in assign_engine_gpus(self.config()).values()] == [4, 4]

    def test_a_retriever_has_the_last_to_itself(self) -> None:
        searching = [
            "experiment=demo_search",
            "engine.name=sglang",
            "engine.python=p",
            "retriever.device=cuda",
        ]
        searching.append("cluster.device=cuda")
        config = RunConfig.check(resolve(searching), "test")
        used = [gpu for servers in assign_engine_gpus(config).values() for (gpu,) in servers]
        assert used == ["8", "9", "10", "11", "12", "13", "14"]
        assert (find_devices(config).nodes, find_devices(config).ray_gpus) == ({"": 7}, 7)
        assert config.retriever is not None
        assert sidecar_of(config.retriever, Path("index")).command[:2] == [
            "env",
            "CUDA_VISIBLE_DEVICES=15",
        ]
        with pytest.raises(
            PlacementError, match=r"retriever\.device: cuda: a Ray that is joined has all GPUs"
        ):
            find_devices(config, [Node(address="10.0.0.3", id="n3", gpus=8, cpus=64)])

    def test_a_server_that_is_wider_than_the_machine_is_refused(self) -> None:
        with pytest.raises(
            PlacementError,
            match=r"16 GPUs for a server of solver \(engine\.tp\), and there are 8; lower",
        ):
            assign_engine_gpus(self.config("engine.tp=16"))

    def test_embedded_engines_are_on_all_gpus_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        embedded = ["engine.name=embedded", "engine.python=null", "+engine.device=cuda"]
        config = self.config(*embedded)
        gpus = assign_engine_gpus(config)
        assert gpus == {
            policy: [[str(8 + at + n)] for n in range(4)]
            for policy, at in (("solver", 0), ("verifier", 4))
        }
        made: list[Any] = []
        monkeypatch.setattr(
            LocalReplicas, "__init__", lambda _, model, **settings: made.append(settings)
        )
        make_engines(
            config, dict.fromkeys(config.models, "model"), tmp_path, trained=False, gpus=gpus
        )
        assert [own["devices"] for own in made] == [
            [f"cuda:{at + n}" for n in range(4)] for at in (0, 4)
        ]
        assert not any("device" in own for own in made)
        # on the CPU there is one of each in this process, whatever there is beside it
        assert assign_engine_gpus(self.config(*embedded[:2])) == {"solver": [[]], "verifier": [[]]}

    def test_with_fewer_gpus_than_engines_they_share_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        wide = self.config("policies.solver.own.engine.tp=2")
        assert assign_engine_gpus(wide) == {"solver": [["8", "9"]], "verifier": [["8"]]}
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        assert assign_engine_gpus(self.config()) == {"solver": [["8"]], "verifier": [["8"]]}
        embedded = self.config("engine.name=embedded", "engine.python=null", "+engine.device=cuda")
        assert assign_engine_gpus(embedded) == {"solver": [["8"]], "verifier": [["8"]]}

    def test_what_was_trained_on_one_gpu_is_evaluated_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two adapters on one base in one server, trained in the shared pool; two servers in the evaluation."""
        base = make_run(tmp_path, "data.test=1") / "base"
        lora = (
            "{lora: {rank: 4, alpha: 8}, share_base: true, tp: 1, lr: 1.0e-3, model: "
            + f"{base}"
            + "}"
        )
        together = [
            "cluster.pool=shared",
            "engine.adapters=slots",
            *(f"++policies.{p}={lora}" for p in TEAM),
        ]
        config = self.config(
            "cold_start=null", "+engine.options.mem-fraction-static=0.6", *together
        )
        weights = engine_weight_bytes(read_architecture(base), 1)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        find_devices(
            config, [Node(address="10.0.0.3", id="n3", gpus=1, cpus=64)]
        )  # training has room
        gpus = assign_engine_gpus(config)

        def on_gpu(memory: float, config: RunConfig = config) -> dict[str, Any]:
            told = SimpleNamespace(total_memory=memory)
            monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: told)
            return {p: for_policy(share_gpu_memory(config, gpus), p).engine.options for p in TEAM}

        # four fifths, less the weights of both, in two parts, and its own weights
        share = {"mem-fraction-static": 0.4}
        assert on_gpu(10 * weights) == dict.fromkeys(TEAM, share)
        with pytest.raises(
            PlacementError,
            match=r"2 engines on one GPU of .* GB, and they hold solver .*, verifier",
        ):
            on_gpu(2.4 * weights)
        given = self.config("cold_start=null", "+engine.options.mem-fraction-static=0.3", *together)
        assert share_gpu_memory(given, gpus) is given
        assert share_gpu_memory(config, {"solver": [["8"]], "verifier": [["9"]]}) is config

        on_gpu(10 * weights)
        made: list[Any] = []
        monkeypatch.setattr(
            evaluation,
            "make_engines",
            lambda *a, **k: made.append(make_engines(*a, **k)) or made[-1],
        )
        config = self.config(*together, "cold_start=null", f"engine.python={sys.executable}")
        with playing(config, f"{tmp_path}/"):
            for engine in made[0].values():
                [replica] = engine._replicas
                assert (replica.seats, replica.host.share, replica.gpus) == (["8"], 0.4, ["8"])

    def test_a_team_on_cpus_sees_no_gpu(self, tmp_path: Path) -> None:
        config = RunConfig.load(make_run(tmp_path, "data.test=1") / "config.yaml")
        with playing(config, f"{tmp_path}/"):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert os.environ["CUDA_VISIBLE_DEVICES"].startswith("8,9")

    def test_a_server_sees_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[Any] = []
        monkeypatch.setattr(
            Server, "start", lambda _, gpus: started.append(gpus) or "http://127.0.0.1:1"
        )
        config = self.config("engine.tp=2", "engine.python=" + sys.executable)
        run = make_run(tmp_path, "data.test=2")
        models, gpus = dict.fromkeys(config.models, run / "base"), assign_engine_gpus(config)
        engines = make_engines(config, models, tmp_path, trained=False, gpus=gpus)
        for engine in engines.values():
            for replica in engine._replicas:
                assert isinstance(replica, Replica)
                asyncio.run(replica.start())
        assert started == [["8", "9"], ["10", "11"], ["12", "13"], ["14", "15"]]
        assert visible_gpu_ids()[0] == "8"


class TestSeats:
    @pytest.fixture
    def runs(self, tmp_path: Path) -> RunConfig:
        """Two trained runs, `mas` and `alone`; the config of the first."""
        for run in ("mas", "alone"):
            models = [
                f"policies.{policy}.model=models/{run}-{policy}"
                for policy in ("solver", "verifier")
            ]
            values = resolve(
                [
                    "experiment=demo_math",
                    f"results={tmp_path}",
                    f"run={run}",
                    "cold_start=null",
                    *models,
                ]
            )
            folder = tmp_path / run
            (folder / "train").mkdir(parents=True)
            (folder / "config.yaml").write_text(yaml.safe_dump(values))
            trained = {policy: f"{run}/trained/{policy}" for policy in ("solver", "verifier")}
            (folder / "train" / "done.json").write_text(json.dumps({"policies": trained}))
        return RunConfig.load(tmp_path / "mas" / "config.yaml")

    @pytest.mark.parametrize(
        ("state", "seats", "expected"),
        [
            ("base", {}, {"solver": "models/mas-solver", "verifier": "models/mas-verifier"}),
            ("trained", {}, {"solver": "mas/trained/solver", "verifier": "mas/trained/verifier"}),
            # leave one agent out
            (
                "x",
                {"verifier": "base"},
                {"solver": "mas/trained/solver", "base.verifier": "models/mas-verifier"},
            ),
            # Stronger-MAS, Table 3: policies swapped, and agents that were trained alone in one team
            (
                "swapped",
                {"solver": "mas/verifier", "verifier": "mas/solver"},
                {"mas.verifier": "mas/trained/verifier", "mas.solver": "mas/trained/solver"},
            ),
            (
                "from_alone",
                {"solver": "alone", "verifier": "alone"},
                {
                    "alone.solver": "alone/trained/solver",
                    "alone.verifier": "alone/trained/verifier",
                },
            ),
            (
                "x",
                {"solver": {"model": "any"}},
                {"seat.solver.solver": "any", "verifier": "mas/trained/verifier"},
            ),
        ],
    )
    def test_each_agent_plays_what_its_seat_says(
        self, runs: RunConfig, state: str, seats: dict[str, Any], expected: dict[str, str]
    ) -> None:
        played = seated(runs, state, seats)
        assert played.models == expected
        assert [played.agents[agent].policy for agent in ("solver", "verifier")] == list(expected)

    def test_one_agent_of_a_shared_policy_is_left_out_alone(self, runs: RunConfig) -> None:
        agents = {
            name: agent.model_copy(update={"policy": "solver"})
            for name, agent in runs.agents.items()
        }
        shared = runs.model_copy(
            update={"agents": agents, "policies": {"solver": runs.policies["solver"]}}
        )
        played = seated(shared, "x", {"verifier": "base"})
        assert played.models == {"solver": "mas/trained/solver", "base.solver": "models/mas-solver"}

    def test_a_model_behind_an_api_takes_a_seat(self, runs: RunConfig) -> None:
        played = seated(
            runs, "x", {"verifier": {"remote": {"model": "big", "url": "http://127.0.0.1:1"}}}
        )
        assert list(played.models) == ["solver"]
        assert played.remotes["seat.verifier.verifier"].model == "big"

    @pytest.mark.parametrize(
        ("seats", "message"),
        [
            (
                {"judge": "base"},
                "seat of 'judge', who is not in the team; agents: solver, verifier",
            ),
            ({"solver": "alone/judge"}, "seat of 'solver': run 'alone' has no agent 'judge'"),
            ({"solver": "nobody"}, r"nobody/config.yaml: no such file; expected a resolved config"),
            (
                {"solver": {}},
                "a policy has either a model .* expected base, trained, a run, run/agent",
            ),
            ({}, "state 'x' of .*: expected base or trained$"),
        ],
    )
    def test_a_seat_that_cannot_be_taken_is_one_line(
        self, runs: RunConfig, seats: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            seated(runs, "x", seats)
        assert "\n" not in str(error.value)

    def test_training_must_have_finished(self, runs: RunConfig) -> None:
        (runs.results / "alone" / "train" / "done.json").unlink()
        with pytest.raises(FolderError, match=r"alone/train/done.json: no such file; train first"):
            seated(runs, "x", {"solver": "alone"})
