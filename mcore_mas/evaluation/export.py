"""Export of a policy as a model folder that others read: checked by what the run has recorded."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from mcore_mas.config.policy import PolicyConfig
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.machine import hide_gpus_from_cpu_run
from mcore_mas.runtime.checkpoint import newest_checkpoint
from mcore_mas.runtime.recipe import identity_of
from rollout.base.digests import check_tree
from rollout.base.files import write_text
from rollout.base.json_files import read_record, write_json
from rollout.base.text import nearest_hint
from rollout.engines.embedded.batching import LocalEngine
from rollout.models.architecture import read_architecture, read_config
from rollout.models.chat_template import CHAT_TEMPLATES, Renderer, has_chat_template
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Sampling, Turn

_TURNS = 32  # of the newest step, that are replayed
_ANSWERED_BYTES = 4 << 30  # of weights, up to which answers are compared too
_TOLERANCE = 0.01  # nats of a token's log-probability
_ANYTHING = (
    "What is 20+24? Box it.",
    "\\boxed{44} <answer>Alice</answer>",
)  # where nothing is recorded


class ExportError(ValueError):
    """Nothing can be exported as asked: one line that says what, where, what to do."""


def export(
    run: Path, policy: str, to: Path, note: Callable[[str], None], *, adapter: bool = False
) -> None:
    """Write `policy` of the run in folder `run` to the folder `to`, which must be empty or not there.

    Args:
        note: told where the weights come from, and of checkpoints that cannot be trusted.
        adapter: write the adapter alone, in PEFT's format, instead of the whole model.

    Raises:
        ExportError: there is no such policy or adapter, `to` holds something, nothing has been trained yet, or others
            would not read what was written as the run does.
        ConfigError, ModelError: the run's config or model is not there.
        FolderError: a file of the finished model is not as training wrote it.
    """
    config = RunConfig.load(run / "config.yaml")
    _check(config, run, policy, adapter=adapter)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportError(
            f"{to}: something is there already; name a folder that is empty or not there"
        )
    finished = run / "train" / "models" / policy
    if (done := run / "train" / "done.json").is_file():
        check_tree(finished, read_record(done).get("sha256", {}).get(policy, {}))
        source = finished / "adapter" if adapter else finished
        note(f"{policy} from {source}")
        shutil.copytree(source, to, dirs_exist_ok=True)
    else:
        checkpoints = run / "train" / "checkpoints"
        found = (
            newest_checkpoint(checkpoints, identity_of(config), note)
            if checkpoints.is_dir()
            else None
        )
        if found is None:
            raise ExportError(f"{run}: no finished model and no valid checkpoint; train it first")
        note(f"{policy} from {found.folder}")
        _write(config, policy, found.folder / policy, to, adapter=adapter)
    if not adapter:
        _replay(to, config.policies[policy], _recorded(run, policy), note)


def _check(config: RunConfig, run: Path, policy: str, *, adapter: bool) -> None:
    if policy not in config.policies:
        near = nearest_hint(policy, config.policies)
        raise ExportError(
            f"{run}: no policy '{policy}'; policies: {', '.join(config.policies)}{near}"
        )
    if policy not in config.trained:
        raise ExportError(
            f"{run}: policy '{policy}' is frozen; it is {config.policies[policy].model}"
        )
    if adapter and config.policies[policy].lora is None:
        raise ExportError(
            f"{run}: policy '{policy}' trains all weights and has no adapter; leave out --adapter"
        )


def _write(config: RunConfig, policy: str, checkpoint: Path, to: Path, *, adapter: bool) -> None:
    from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer
    from mcore_mas.runtime.trainer_specs import policy_spec

    spec = policy_spec(policy, config)
    spec = replace(
        spec, tp=1, pp=1, vpp=1, cp=1, dp=1, sp=False, distributed_optimizer=False, overlap=False
    )
    to.parent.mkdir(parents=True, exist_ok=True)
    with hide_gpus_from_cpu_run(config):
        init_process_groups(rank=0, threads=config.cluster.threads_per_process or 1)
        try:
            trainer = MegatronTrainer(spec)
            trainer.restore(checkpoint)
            (trainer.model.write_adapter if adapter else trainer.model.write)(to)
        finally:
            destroy_process_groups()


def _recorded(run: Path, policy: str) -> list[Turn]:
    """Turns of a policy in the newest step that the run has recorded."""
    files = sorted((run / "train" / "trajectories").glob("step_*.parquet"))[-1:]
    turns = [
        turn
        for file in files
        for trajectory in read_trajectories(file)
        for turn in trajectory.turns
    ]
    return [turn for turn in turns if turn.policy == policy][:_TURNS]


def _replay(
    folder: Path, policy: PolicyConfig, turns: Sequence[Turn], note: Callable[[str], None]
) -> None:
    """Have transformers read `folder` as everybody does, and compare with what this project reads in it."""
    if policy.chat_template is not None and not has_chat_template(folder):
        write_text(folder / "chat_template.jinja", CHAT_TEMPLATES[policy.chat_template])
    renderer = Renderer(
        folder, template=policy.chat_template, arguments=policy.chat_template_kwargs
    )
    texts = [
        text for turn in turns for text in (*(m.text for m in turn.messages), turn.text)
    ] or list(_ANYTHING)
    prompts = [turn.prompt_ids for turn in turns[:2]] or [renderer.encode(_ANYTHING[0])]
    small = sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= _ANSWERED_BYTES
    answers = (
        _answers(folder, prompts) if small and read_architecture(folder).experts is None else []
    )
    if not _same_ids(folder, renderer, texts):
        _as_llama(folder)
        note(
            "written as a Llama with biases: AutoTokenizer would read the tokenizer of a Qwen2 in another way"
        )
        if not _same_ids(folder, renderer, texts):
            raise ExportError(f"{folder}: AutoTokenizer gives other token ids than the run had")
    gap = _gap(folder, prompts, answers)
    if gap > _TOLERANCE:
        raise ExportError(
            f"{folder}: log-probabilities in transformers are {gap:.2g} nats from the run's engine's"
        )
    compared = (
        f"log-probabilities of {sum(len(ids) for ids, _ in answers)} tokens"
        if answers
        else "no answers"
    )
    note(f"checked: ids of {len(texts)} texts and {compared} are those of transformers")


def _same_ids(folder: Path, renderer: Renderer, texts: Sequence[str]) -> bool:
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return all(
        tuple(tokenizer.encode(text, add_special_tokens=False)) == renderer.encode(text)
        for text in texts
    )


def _answers(
    folder: Path, prompts: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What this project's engine answers to prompts: ids and log-probabilities, [C] each."""
    longest = max(map(len, prompts)) + 16
    engine = LocalEngine(folder, max_length=longest, rows=2)

    async def ask() -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        said = [
            await engine.generate(ids, Sampling(max_tokens=16, seed=n))
            for n, ids in enumerate(prompts)
        ]
        return [(completion.token_ids, completion.logprobs) for completion in said]

    return asyncio.run(ask())


def _gap(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> float:
    """How far transformers' log-probabilities of the answers are from the engine's, at most."""
    if not answers:
        return 0.0
    disable_progress_bar()  # loading takes milliseconds, and the bar would be the longest line
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    ).eval()
    worst = 0.0
    for prompt, (ids, logprobs) in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(logprobs)).abs().max()))
    return worst


def _as_llama(folder: Path) -> None:
    """Write a Qwen2 as what it is too: a Llama whose projections have biases, those of the output being 0.

    transformers replaces the pre-tokeniser of any Qwen2 by that of the published ones.
    """
    config = read_config(folder)
    if config.get("model_type") != "qwen2":
        raise ExportError(f"{folder}: AutoTokenizer gives other token ids than the run had")
    for key in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"):
        config.pop(key, None)
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": False,
    }
    write_json(folder / "config.json", {**config, **llama})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        told = json.loads(index.read_text(encoding="utf-8"))
    else:
        (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
        with safe_open(folder / "model-00001.safetensors", "pt") as held:
            told = {
                "metadata": {},
                "weight_map": dict.fromkeys(held.keys(), "model-00001.safetensors"),
            }
    biases = {
        f"model.layers.{layer}.self_attn.o_proj.bias": torch.zeros(config["hidden_size"])
        for layer in range(config["num_hidden_layers"])
    }
    save_file(biases, folder / "model-biases.safetensors", metadata={"format": "pt"})
    told["weight_map"] |= dict.fromkeys(biases, "model-biases.safetensors")
    write_json(index, told)
