"""Checks that the sections of a run go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_mas.config.credit import check_vote_sources
from mcore_mas.config.opponents import OpponentConfig, PastConfig
from mcore_mas.config.policy import check_shared_bases, policies_on_base
from mcore_mas.config.run_sections import RunSections, for_policy, schedule_length
from mcore_mas.equations.advantages import REQUIRED_COLUMN, estimator_grouping
from mcore_mas.equations.filters import filter_grouping
from rollout.base.hints import nearest_hint
from rollout.base.lookup import UnknownName, lookup
from rollout.config.choice import check_agent_names
from rollout.engines.sglang.settings import adapter_error
from rollout.environments.openenv import openenv_sessions
from rollout.orchestras import TREE_ORCHESTRAS
from rollout.tasks.generators import GENERATORS
from rollout.teams.roles import ROLES


def check_sections(config: RunSections) -> None:
    """Check that the sections of a run go together.

    Raises:
        ValueError: two settings exclude each other, or one needs another that is missing.
    """
    _check_agents(config)
    _check_team(config)
    _check_sessions(config)
    _check_cold_start(config)
    _check_lengths(config)
    _check_replays(config)
    _check_credit(config)
    _check_team_weight(config)
    _check_schedules(config)
    check_shared_bases(config.policies, config.trained)
    _check_engines(config)
    _check_teachers(config)
    _check_collection_ahead(config)
    _check_opponents(config)


def check_policy_names(agents: Any, policies: Any, opponents: Any) -> None:
    """Check that the policy of each agent is defined, and that each policy is played or is a teacher.

    The sections are not validated yet. An override such as `policies.solvr.lr=1e-4`, with a misspelt policy, adds a
    policy that has only this key; the validation would report its missing keys, and not the misspelt name.

    Args:
        agents: section `agents`, as YAML yields it; other types than mappings are left to the validation.
        policies: section `policies`.
        opponents: section `opponents`.

    Raises:
        ValueError: an agent names a policy that is not defined, or a policy is neither a teacher nor played by an
            agent or an opponent.
    """
    if not isinstance(agents, dict) or not isinstance(policies, dict):
        return
    if not all(isinstance(agent, Mapping) for agent in agents.values()):
        return
    # YAML reads an unquoted name such as 1 as a number; the validation makes it a text again.
    policies = {str(name): policy for name, policy in policies.items()}
    policy_of_agent = {
        str(name): agent["policy"]
        for name, agent in agents.items()
        if isinstance(agent.get("policy"), str)
    }
    _check_policies_defined(policy_of_agent, policies)
    if len(policy_of_agent) < len(agents):
        return  # the validation reports the agents that name no policy
    used = set(policy_of_agent.values()) | _teacher_names(policies)
    if isinstance(opponents, Mapping):
        used.update(map(str, opponents))
    unused = sorted(policies.keys() - used)
    if unused:
        nearest_policies = nearest_hint(unused[0], policies.keys() - unused)
        raise ValueError(
            f"policy '{unused[0]}' is played by no agent; remove it or name it in agents{nearest_policies}"
        )


def _check_policies_defined(
    policy_of_agent: Mapping[str, str], policies: Mapping[str, Any]
) -> None:
    """Refuse an agent whose policy is not defined; the error names similar policies, or else similar agents."""
    for agent, policy in policy_of_agent.items():
        if policy in policies:
            continue
        hint = nearest_hint(policy, policies)
        if not hint:
            # The agent may be misspelt: with `sharing: separate`, an override of `agents.solvr` adds this agent, with
            # policy `solvr`. Nothing defines this policy if the config has no `policy_defaults`.
            others = [other for other in policy_of_agent if policy_of_agent[other] in policies]
            hint = nearest_hint(agent, others, label="nearest agents")
        raise ValueError(
            f"agent '{agent}' plays policy '{policy}', which is not defined; policies: {', '.join(policies)}"
            f"{hint}; set agents.{agent}.policy to one of them, define policies.{policy}, or "
            "take an experiment of this team (`mcore-mas list experiments`)"
        )


def _teacher_names(policies: Mapping[str, Any]) -> set[str]:
    """Return the names of the policies that are teachers, from the section `policies` before its validation."""
    names = set()
    for policy in policies.values():
        teacher = policy.get("teacher") if isinstance(policy, Mapping) else None
        name = teacher.get("policy") if isinstance(teacher, Mapping) else None
        if isinstance(name, str):
            names.add(name)
    return names


def _check_agents(config: RunSections) -> None:
    """Check that the role of each agent is known, and that each trained agent can train its policy.

    An agent with a loss weight must sample at a temperature above 0. Its policy must have a learning rate, and may not
    be a remote model.
    """
    for name, agent in config.agents.items():
        try:
            lookup("agent role", agent.role or name, ROLES)
        except UnknownName as error:
            raise ValueError(
                f"agents.{name}: {error}; set agents.{name}.role, or import the module that registers this role"
            ) from None
        if not agent.loss_weight:
            continue
        policy = config.policies[agent.policy]
        if policy.remote is not None:
            raise ValueError(
                f"agent '{name}' plays policy '{agent.policy}', a remote model, which cannot be trained; "
                f"set agents.{name}.loss_weight=0"
            )
        if not agent.temperature:
            raise ValueError(
                f"agent '{name}' is trained and samples at temperature 0, where log-probabilities have no gradient; "
                f"set agents.{name}.temperature above 0, or loss_weight to 0"
            )
        if not policy.lr:
            key = f"policies.{agent.policy}.lr"
            if "lr" in policy.model_fields_set:
                raise ValueError(
                    f"{key} is 0, and agent '{name}' trains this policy; set it above 0, or "
                    f"agents.{name}.loss_weight=0"
                )
            raise ValueError(f"{key} is missing; agent '{name}' trains this policy")


def _check_team(config: RunSections) -> None:
    """Check that orchestra, environment, reward and coach go with the agents, and that no part of the team is missing.

    The orchestra must be able to play with these agents (see `OrchestraConfig.check_agents`). Tools that query env
    `search` need this environment or one of the user's own. The options of the coach, and of shipped rewards and
    penalties, may only name agents of the team. The reward `coach` needs a coach, and some environments need a
    retriever. An orchestra that grows its own tree excludes `trainer.branching`.
    """
    config.orchestra.check_agents(config.agents)
    config.env.check_tools(config.agents)
    if config.orchestra.name in TREE_ORCHESTRAS and config.trainer.branching is not None:
        raise ValueError(
            f"orchestra '{config.orchestra.name}' grows its own tree; leave trainer.branching out"
        )
    config.reward.check_agents(config.agents)
    if config.reward.name == "coach" and config.coach is None:
        raise ValueError("reward 'coach' needs a coach; choose one, for example coach=openai")
    if config.coach is not None:
        options_with_agents = {"agents", "judged_with_answer", "metrics_for"}
        options = config.coach.model_dump(include=options_with_agents)
        check_agent_names("coach", options, config.agents)
    if "retriever" in config.env.needs and config.retriever is None:
        raise ValueError(
            f"env '{config.env.name}' needs a retriever; add retriever: {{}}, or name the urls of servers in it"
        )


def _check_sessions(config: RunSections) -> None:
    """Check that OpenEnv's servers have enough sessions, if a run with `trainer.branching` plays in env `openenv`.

    A round of a tree needs `width` sessions at once, and the tree gives none back before the round ends. In the worst
    case, each of the trees that grow at the same time holds width - 1 sessions and waits for its last one. A single
    further session then lets a tree end its round, and its free sessions serve the next tree.
    """
    branching = config.trainer.branching
    if config.env.name != "openenv" or branching is None:
        return
    trees = config.concurrent_steps * config.trainer.trajectories_per_step
    needed = trees * (branching.width - 1) + 1
    sessions = openenv_sessions(**config.env.options)
    if sessions < needed:
        options = "sessions" if config.env.options.get("url") else "sessions (or servers)"
        raise ValueError(
            f"trainer.branching.width {branching.width} needs {needed} sessions of OpenEnv, and env.options allow "
            f"{sessions}: with fewer, the {trees} trees that grow at a time may take all and wait for each other; "
            f"raise env.options.{options}, or lower width or tasks_per_step"
        )


def _check_cold_start(config: RunSections) -> None:
    """Check a cold start, if there is one, against the data's generator, the team and the policies.

    The generator must write demonstrations and take the cold start's options. Options for a shipped generator may only
    name agents of the team. No policy may set a chat template or its arguments.
    """
    if config.cold_start is None:
        return
    options = config.cold_start.options
    # Building the arguments raises an error if the generator does not take these options.
    config.data.demonstration_arguments(options)
    if config.data.generator in GENERATORS:
        # The lists and mappings in a shipped generator's options for demonstrations name agents.
        check_agent_names("cold_start.options", options, config.agents)
    for name, policy in config.policies.items():
        if policy.chat_template or policy.chat_template_kwargs:
            raise ValueError(
                f"policies.{name}: a cold start makes the model with a chat template of its own that takes no "
                "arguments; leave chat_template and chat_template_kwargs out"
            )


def _check_lengths(config: RunSections) -> None:
    """Check that each agent's replies fit the engine, and that the buffer of the penalty `overlong` fits the replies.

    A reply of `max_tokens` must leave room for a prompt in `engine.max_length`, unless the policy is a remote model,
    whose length is not known. The buffer may be no longer than the agent's longest reply.
    """
    overlong = config.reward.penalties.get("overlong", {})
    buffer = overlong.get("buffer", 0)
    limits = overlong.get("max_tokens") or {}
    for name, agent in config.agents.items():
        limit = limits.get(name, agent.max_tokens)
        if buffer > limit:
            raise ValueError(
                f"reward.penalties.overlong.buffer {buffer} is more than max_tokens {limit} of agent '{name}'; "
                "lower it"
            )
        length = for_policy(config, agent.policy).engine.max_length
        if agent.max_tokens >= length and config.policies[agent.policy].remote is None:
            raise ValueError(
                f"agents.{name}.max_tokens {agent.max_tokens} leaves no room for a prompt in engine.max_length "
                f"{length}; lower it, or raise max_length"
            )


def _check_replays(config: RunSections) -> None:
    """Check that alternatives are sampled if a trained agent has the advantage c3, and only then.

    If they are sampled, `trainer.replays.budget` must allow one for each trajectory of a step, and no other setting may
    exclude `trainer.replays` (see `_conflict_with_replays`).
    """
    agents = config.replayed_agents
    replays = config.trainer.replays
    if replays is None and agents:
        raise ValueError(
            f"agent '{agents[0]}': advantage '{config.advantage_of(agents[0]).name}' compares a reply with "
            "alternatives, and this run samples none; set trainer.replays.alternatives"
        )
    if replays is None:
        return
    if not agents:
        raise ValueError(
            "trainer.replays samples alternatives for the advantage 'c3', which no trained agent has; "
            "leave trainer.replays out, or choose advantage=c3"
        )
    trajectories = config.trainer.trajectories_per_step
    if replays.budget is not None and replays.budget < trajectories:
        raise ValueError(
            f"trainer.replays.budget {replays.budget} is less than one alternative for each of the "
            f"{trajectories} trajectories of a step; raise it, or leave it out"
        )
    conflict = _conflict_with_replays(config)
    if conflict:
        raise ValueError(f"trainer.replays cannot be used with {conflict}")


def _conflict_with_replays(config: RunSections) -> str:
    """Return the first setting that excludes `trainer.replays`, with the reason; "" if there is none."""
    if config.trainer.branching is not None:
        return (
            "trainer.branching, because a trajectory that is sampled as a tree cannot be replayed"
        )
    if config.orchestra.name in TREE_ORCHESTRAS:
        return f"orchestra '{config.orchestra.name}', which grows its own tree"
    if config.reward.name != "shared_outcome":
        return (
            f"reward '{config.reward.name}'; expected 'shared_outcome', because an alternative is paid the "
            "outcome of its replay"
        )
    if config.filter is not None:
        return (
            "a filter, because filters choose turns by their rewards, and c3 compares turns with their alternatives; "
            "leave filter out"
        )
    return ""


def _check_credit(config: RunSections) -> None:
    """Check the advantage estimator of each agent, and that a filter has trajectories or branches to compare."""
    for agent in config.agents:
        _check_advantage(config, agent)
    if config.filter is not None:
        grouping = filter_grouping(config.filter.name, config.filter.options)
        check_vote_sources(f"filter '{config.filter.name}'", grouping, config.vote_sources)


def _check_team_weight(config: RunSections) -> None:
    """Check that the reward `local_team` and `trainer.branching` do not both weigh the team's reward.

    Their options `alpha` are multiplied in trees, so only one of the two may differ from 1.
    """
    if config.reward.name == "local_team" and config.trainer.branching is not None:
        team_weight = config.reward.options.get("alpha", 1.0)
        branch_weight = config.trainer.branching.alpha
        if team_weight != 1.0 and branch_weight != 1.0:
            raise ValueError(
                f"reward.options.alpha {team_weight:g} would multiply trainer.branching.alpha {branch_weight:g}, "
                "which is in a branch's score already; leave one of them out"
            )


def _check_advantage(config: RunSections, name: str) -> None:
    """Check that a run has the inputs of an agent's advantage estimator, and trajectories or branches to compare.

    The inputs are the critic of a trained policy, a greedy trajectory with a reward, or the rewards of consecutive
    steps (see `REQUIRED_COLUMN`). Several trajectories or branches are needed if the agent learns from its reward: it
    has a loss weight, and its policy does not learn from a teacher alone. With the estimator's option `lone: raw`, one
    is enough.
    """
    agent = config.agents[name]
    advantage = config.advantage_of(name)
    label = f"agent '{name}': advantage '{advantage.name}'"
    required_column = REQUIRED_COLUMN.get(advantage.name)
    policy_is_trained = agent.policy in config.trained
    has_critic = config.policies[agent.policy].critic is not None
    if required_column == "values" and policy_is_trained and not has_critic:
        raise ValueError(
            f"{label} needs policies.{agent.policy}.critic; define it, or choose another advantage"
        )
    if required_column == "greedy_rewards" and config.reward.name == "tree_shaping":
        raise ValueError(
            f"{label} compares with a greedy trajectory, which reward 'tree_shaping' has no reward for; choose another "
            "advantage or reward"
        )
    if required_column == "step_rewards" and "trees" in config.vote_sources:
        raise ValueError(
            f"{label} needs the rewards of consecutive steps, which trees do not have; choose another advantage"
        )

    teacher = config.teachers.get(agent.policy)
    learns_from_reward = agent.loss_weight and not (teacher and teacher.alone)
    # With `lone: raw`, a single vote has an advantage too.
    if learns_from_reward and advantage.options.get("lone") != "raw":
        grouping = estimator_grouping(advantage.name, advantage.options)
        check_vote_sources(label, grouping, config.vote_sources)


def _check_schedules(config: RunSections) -> None:
    """Check that `trainer.alternate` lists every trained policy once, and that schedules outlast their warm-ups.

    Constant schedules, and those of frozen policies, are not checked.
    """
    alternate = config.trainer.alternate
    trained = config.trained
    if alternate is not None and sorted(alternate.order) != sorted(trained):
        raise ValueError(
            f"trainer.alternate.order is {', '.join(alternate.order)}; expected every trained policy once: "
            f"{', '.join(trained)}"
        )
    for name in trained:
        policy = config.policies[name]
        unit = "training step" if for_policy(config, name).trainer.minibatch else "update"
        for key, rate in ((name, policy), (f"{name}.critic", policy.critic)):
            if rate is None or rate.schedule == "constant":
                continue
            length = schedule_length(config, name, of_critic=rate is policy.critic)
            end = rate.decay_steps or length
            if end <= rate.warmup_steps:
                setting_to_raise = "decay_steps" if rate.decay_steps else "trainer.steps"
                raise ValueError(
                    f"policies.{key}: schedule '{rate.schedule}' ends with {unit} {end}, but warmup_steps is "
                    f"{rate.warmup_steps}; lower warmup_steps, or raise {setting_to_raise}"
                )


def _check_engines(config: RunSections) -> None:
    """Check the section `cluster` against the policies, and the engine of each policy (see `_check_policy_engine`).

    Also refuse `engine.router_replay` if all policies are remote models.
    """
    groups = {name: policies_on_base(config.policies, name) for name in config.policies}
    resident = [name for name in config.trained if not config.policies[name].offload]
    config.cluster.check_policies(groups, resident)

    if config.engine.router_replay and not config.models:
        raise ValueError(
            "engine.router_replay: remote models do not report their experts; leave it out"
        )
    for name in config.models:
        _check_policy_engine(config, name)


def _check_policy_engine(config: RunSections, name: str) -> None:
    """Check that a policy's engine goes with the cluster, and can take the policy's adapter.

    If the policy shares its base model, its engine must also go with that of the base model's holder (see
    `ClusterConfig.check_shared_engine`). With `engine.adapters: slots`, a trained policy must have adapters, on
    projections whose adapters SGLang takes.
    """
    policy = config.policies[name]
    engine = for_policy(config, name).engine
    config.cluster.check_engine(name, engine)
    if policy.share_base:
        holder = config.holder(name)
        holder_engine = for_policy(config, holder).engine
        config.cluster.check_shared_engine(name, engine, holder, holder_engine)
    if engine.adapters == "slots" and name in config.trained:
        if policy.lora is None:
            raise ValueError(
                f"policies.{name}: engine.adapters: slots is for policies with lora; add policies.{name}.lora, or set "
                "engine.adapters: merged"
            )
        error = adapter_error(policy.lora.targets)
        if error:
            raise ValueError(f"policies.{name}: {error}")


def _check_teachers(config: RunSections) -> None:
    """Check that each policy with a teacher is trained, and that its teacher exists and can score its tokens.

    A policy may be its own teacher only with a context. The student's engine must not use a grammar, because its
    teacher has none.
    """
    for name, teacher in config.teachers.items():
        key = f"policies.{name}.teacher"
        if name not in config.trained:
            raise ValueError(f"{key}: nothing trains this policy; leave it out")
        others = [other for other in config.policies if other != name]
        listed_others = f": {', '.join(others)}" if others else ""
        if teacher.policy not in config.policies:
            raise ValueError(
                f"{key}.policy is '{teacher.policy}'; expected another policy of the run{listed_others}; define "
                f"policies.{teacher.policy} with its model or remote"
            )
        # A policy can learn from itself only if the context lets it know more as the teacher than as the student.
        if teacher.policy == name and teacher.context is None:
            raise ValueError(
                f"{key}.policy is '{name}' itself; expected another policy of the run{listed_others}; or give the "
                "teacher a context, from which it knows more than the student"
            )
        _check_teacher_engine(config, name, teacher.policy)
        if for_policy(config, name).engine.grammar:
            raise ValueError(
                f"{key}: engine.grammar changes the probabilities of the policy, and its teacher has no grammar; "
                "set engine.grammar to false, or leave the teacher out"
            )


def _check_teacher_engine(config: RunSections, student: str, teacher: str) -> None:
    """Check that a teacher can score the replies of its student.

    A remote teacher must be a server with a completions API (provider openai and a url) and without a budget. The
    engine of any other teacher must take sequences as long as the student's. The teacher's context is not counted:
    `Teachers.score` leaves out replies that are too long with it. The student's trained agents must sample at
    temperature 1, unless the teacher has the embedded engine, which scores at any temperature.
    """
    key = f"policies.{student}.teacher"
    remote = config.policies[teacher].remote
    engine = for_policy(config, teacher).engine
    student_length = for_policy(config, student).engine.max_length
    if remote is not None:
        if remote.provider != "openai" or remote.url is None:
            raise ValueError(
                f"{key}: policies.{teacher}.remote has provider '{remote.provider}' and url {remote.url}; expected "
                "provider openai and the url of a server whose completions API gives log-probabilities of a prompt, "
                "such as vLLM or SGLang"
            )
        if remote.budget.model_fields_set:
            raise ValueError(
                f"{key}: policies.{teacher}.remote.budget: a teacher's scores are not counted against a budget; leave "
                "it out"
            )
    elif engine.max_length < student_length:
        raise ValueError(
            f"{key}: the engine of '{teacher}' takes {engine.max_length} tokens, and that of '{student}' "
            f"{student_length}; set policies.{teacher}.overrides.engine.max_length: {student_length}"
        )
    if remote is None and engine.name == "embedded":
        return  # the embedded engine scores at any temperature
    for name in config.trained_agents(student):
        temperature = config.agents[name].temperature
        if temperature != 1:
            fix = f"set agents.{name}.temperature: 1"
            if remote is None:
                fix += f", or give '{teacher}' the engine embedded"
            raise ValueError(
                f"{key}: servers score at temperature 1, and agent '{name}' samples at {temperature:g}; {fix}"
            )


def _check_collection_ahead(config: RunSections) -> None:
    """Refuse a staleness of frozen policies, and settings that exclude collecting ahead of training.

    If trajectories of later steps are collected while a step is trained, engines cannot sleep (`engine.sleep`), and
    trainers cannot free their memory (`policies.NAME.offload`).
    """
    for name, policy in config.policies.items():
        if policy.staleness is not None and name not in config.trained:
            raise ValueError(f"policies.{name}.staleness: nothing trains this policy; leave it out")
    if not config.collects_ahead:
        return
    staleness = max(config.staleness_of(name) for name in config.trained)
    if config.engine.sleep:
        raise ValueError(
            f"engine.sleep: with a staleness of {staleness}, engines sample while policies are trained, and cannot "
            "sleep; set engine.sleep to false, or staleness to 0"
        )
    for name in config.trained:
        if config.policies[name].offload:
            raise ValueError(
                f"policy '{name}': offload frees the trainer's memory while the team acts, and with a "
                f"staleness of {staleness}, the team acts while the trainer works; set offload to false, or "
                "staleness to 0"
            )


def _check_opponents(config: RunSections) -> None:
    """Check the opponents of a run, if there are any.

    They need the orchestra `duel` and a trained agent, in whose place they play. Their shares may add up to at most 1.
    `_check_opponent` checks each of them.
    """
    if not config.opponents:
        return
    if config.orchestra.name != "duel":
        raise ValueError(
            f"opponents play an agent of the orchestra 'duel', and this run's is '{config.orchestra.name}'; choose "
            "team=duel, or leave opponents out"
        )
    if not config.trained:
        raise ValueError(
            "opponents play in place of trained agents, and this run trains none; set the loss_weight of an agent, or "
            "leave opponents out"
        )
    total = sum(opponent.share for opponent in config.opponents.values())
    if total > 1 + 1e-9:
        raise ValueError(
            f"the shares of opponents add up to {total:g}; expected at most 1, and the rest is self-play"
        )
    for policy, opponent in config.opponents.items():
        _check_opponent(config, policy, opponent)


def _check_opponent(config: RunSections, policy: str, opponent: OpponentConfig) -> None:
    """Check that an opponent is a defined, frozen policy that plays trained agents; check `past` if it is set."""
    if policy not in config.policies:
        raise ValueError(
            f"opponents names '{policy}', which is not defined; policies: {', '.join(config.policies)}; "
            f"define policies.{policy}"
        )
    if policy in config.trained:
        raise ValueError(
            f"opponents names '{policy}', which is trained; define another policy for the opponent"
        )
    trained_agents = [name for name, agent in config.agents.items() if agent.loss_weight]
    for name in opponent.agents:
        if name not in trained_agents:
            raise ValueError(
                f"opponents.{policy}.agents names '{name}'; expected trained agents: {', '.join(trained_agents)}"
            )
    if opponent.past is not None:
        _check_past(config, policy, opponent.past)


def _check_past(config: RunSections, policy: str, past: PastConfig) -> None:
    """Check that an opponent's engine can be given the earlier weights of a trained policy before each step.

    The opponent must start from the same model as the trained policy, all of whose weights must be trained. Nothing may
    be collected ahead of training, the engine may not sleep, and its transport must take weights from files.
    """
    if past.of not in config.trained:
        raise ValueError(
            f"opponents.{policy}.past.of is '{past.of}'; expected a trained policy: {', '.join(config.trained)}"
        )
    if config.policies[policy].model != config.policies[past.of].model:
        raise ValueError(
            f"policies.{policy} plays with earlier weights of '{past.of}', and starts from another model; "
            f"set policies.{policy}.model to {config.policies[past.of].model}"
        )
    if config.policies[past.of].lora is not None:
        raise ValueError(
            f"opponents.{policy}.past keeps copies of all weights, and '{past.of}' trains only adapters; leave out "
            f"opponents.{policy}.past or policies.{past.of}.lora"
        )
    if config.collects_ahead or config.engine.sleep:
        raise ValueError(
            f"opponents.{policy}.past gives the opponent's engine new weights before each step; "
            "use a staleness of 0 and engine.sleep: false"
        )
    transport = for_policy(config, policy).engine.transport
    if transport in ("tensor", "distributed"):
        raise ValueError(
            f"opponents.{policy}.past: its weights come from files, and transport '{transport}' sends weights from "
            f"a trainer's GPUs; set policies.{policy}.overrides.engine.transport to disk"
        )
