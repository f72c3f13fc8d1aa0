"""The rules: each a function from evidence to a finding, or None. Thresholds stand beside the rules that use them.

No rule speaks before there is enough to judge by: `MIN_STEPS` steps, or `MIN_ROLLOUTS` rollouts where these count. What
is wrong at once, an engine that is out or work that was lost, is said at once.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headway.doctor.evidence import MIN_ROLLOUTS, Evidence
from headway.doctor.finding import Finding, Severity
from headway.doctor.statistics import Statistic

Rule = Callable[[Evidence], Finding | None]
PROBLEM, ADVICE = Severity.PROBLEM, Severity.ADVICE

# ---- who waits for whom

WAITS, WAITS_LONG = 0.2, 0.5
"""Part of the trainer's time that it waits for batches: worth a word, and a problem."""
NEVER_WAITS = 0.05
"""Below it, faster engines would save the trainer nothing."""
MOST = 0.5
"""More than all the rest together."""
OLDEST = 0.7
"""Part of the tokens at the bound from which it is the bound that engines run against; spread evenly they are fewer."""
IDLE = 0.1
"""Engines that stand idle less than this are busy: between a version and the next there is always a gap."""
IDLE_MOST = 0.75
"""A quarter of the engines would do; a balanced run on shared cores has them idle for up to half of the time."""
REWARD_LARGE = 0.3
"""Part of a rollout from which its reward is worth speeding up; a rule-based reward takes a few hundredths."""
UNEQUAL = 0.5
"""An engine that works less than half as much as the busiest is not just at the end of a queue."""
SLACK = 1
"""Steps below the bound that the oldest token may stay without the bound being useless."""


def bottleneck(evidence: Evidence) -> Finding | None:
    """The trainer waits for batches: because of rewards, the bound, the concurrency, or the engines themselves."""
    waited = evidence.waited
    if not evidence.is_enough or waited is None or waited < WAITS:
        return None
    numbers = {"part of the trainer's time in which it waits": waited}
    severity = PROBLEM if waited >= WAITS_LONG else ADVICE
    for cause in (_reward_bound, _concurrency_bound, _bound_too_tight):
        if (found := cause(evidence, severity, numbers)) is not None:
            return found
    what = "The trainer waits for generation: engines are the slower half."
    return Finding(
        "generation-bound", severity, what, numbers, "allocation_mode", "more engines, or fewer trainer ranks"
    )


def _reward_bound(evidence: Evidence, severity: Severity, numbers: Mapping[str, float]) -> Finding | None:
    timing = evidence.section("timing")
    if not timing or not timing["rollout_s"] or timing["reward_s"] / timing["rollout_s"] < MOST:
        return None
    known = {**numbers, "seconds a reward takes": timing["reward_s"], "seconds a rollout takes": timing["rollout_s"]}
    what = "The trainer waits for rewards: they take most of a rollout's time."
    return Finding("reward-bound", severity, what, known, "reward.num_workers", "raise")


def _concurrency_bound(evidence: Evidence, severity: Severity, numbers: Mapping[str, float]) -> Finding | None:
    """A batch is trained on, and of the rest fewer may run than the bound lets outstand."""
    staleness = evidence.staleness
    concurrent, limit = staleness.get("max_concurrent"), staleness.get("limit")
    if concurrent is None or limit is None:
        return None
    if concurrent >= max(staleness["batch_size"], limit - staleness["batch_size"]):
        return None
    known = {**numbers, "tasks that may run": concurrent, "groups that the bound allows": limit}
    what = "The trainer waits, and fewer tasks may run than the staleness bound allows."
    return Finding("concurrency-too-low", severity, what, known, "rollout.max_concurrent_rollouts", "raise")


def _bound_too_tight(evidence: Evidence, severity: Severity, numbers: Mapping[str, float]) -> Finding | None:
    """Nearly all tokens are as old as they may be, or must be fresh, and engines are not known to be always busy."""
    share = 1.0 if evidence.eta == 0 else evidence.bound_share
    idle = _idle(evidence)
    if share is None or share < OLDEST or (idle is not None and idle < IDLE):
        return None
    known = {**numbers, "bound": float(evidence.eta), "part of the tokens that is as old as the bound allows": share}
    what = "The trainer waits, and engines may not run further ahead: the staleness bound is too tight."
    return Finding("bound-too-tight", severity, what, known, "rollout.max_head_offpolicyness", "raise")


def trainer_bound(evidence: Evidence) -> Finding | None:
    """The trainer never waits, and engines stand idle."""
    waited, idle = evidence.waited, _idle(evidence)
    if not evidence.is_enough or waited is None or waited > NEVER_WAITS:
        return None
    numbers = {"part of the trainer's time in which it waits": waited}
    if idle is not None:
        numbers["part of the engines' time without a request"] = idle
    severity = PROBLEM if idle is not None and idle >= IDLE_MOST else ADVICE
    what = "The trainer is the slower half: batches are always ready for it."
    return Finding("trainer-bound", severity, what, numbers, "allocation_mode", "more trainer ranks, or fewer engines")


def _idle(evidence: Evidence) -> float | None:
    joined = sum(server.get("joined_s", 0.0) for server in evidence.servers)
    return 1 - sum(server["busy_s"] for server in evidence.servers) / joined if joined else None


def bound_useless(evidence: Evidence) -> Finding | None:
    """The bound allows more than is ever used."""
    oldest = max((step.get(Statistic.OLDEST, 0.0) for step in evidence.steps), default=0.0)
    waited = evidence.waited
    if not evidence.is_enough or waited is None or waited > WAITS or evidence.eta < 2 or oldest >= evidence.eta - SLACK:
        return None
    numbers = {"bound": float(evidence.eta), "oldest token trained on": oldest}
    what = "No token comes near the staleness bound: a lower one costs nothing."
    return Finding("bound-useless", ADVICE, what, numbers, "rollout.max_head_offpolicyness", "lower")


def slow_rewards(evidence: Evidence) -> Finding | None:
    """Rewards take a large part of the rollouts' time."""
    timing = evidence.section("timing")
    if not timing or timing["num_groups"] < MIN_ROLLOUTS or not timing["rollout_s"]:
        return None
    share = timing["reward_s"] / timing["rollout_s"]
    if share < REWARD_LARGE:
        return None
    numbers = {"part of a rollout that is its reward": share, "seconds a reward takes": timing["reward_s"]}
    what = "Rewards take a large part of the time of rollouts."
    return Finding("slow-rewards", PROBLEM if share >= MOST else ADVICE, what, numbers, "reward.num_workers", "raise")


def idle_engine(evidence: Evidence) -> Finding | None:
    """An engine does much less than the others, or nothing."""
    shares = {one["name"]: one["busy_s"] / one["joined_s"] for one in evidence.servers if one.get("joined_s")}
    out = [one["name"] for one in evidence.servers if one["state"] in ("silent", "failed")]
    if out:
        what = f"Out of service: {', '.join(out)}."
        numbers = {"engines out of service": float(len(out)), "engines": float(len(evidence.servers))}
        return Finding("engine-out", PROBLEM, what, numbers, "inference.command", "look into the engine's log")
    if not evidence.is_enough or len(shares) < 2 or min(shares.values()) > UNEQUAL * max(shares.values()):
        return None
    name = min(shares, key=lambda one: shares[one])
    numbers = {f"busy part of {name}": shares[name], "of the busiest": max(shares.values())}
    what = f"The engine {name} is idle while others work."
    return Finding("idle-engine", PROBLEM, what, numbers, "rollout.schedule_policy", "least_load")


# ---- what is lost

TOO_MANY = 0.05
"""Part of the rollouts that may come to nothing; the alert on discards has the same."""
TOO_MANY_TIMEOUTS = 0.01
"""A reward has time enough: timeouts are a function that hangs, or too few workers. The alert on them has the same."""
MASKED = 0.1
"""Part of the tokens that may be generated for nothing; a restart alone masks some."""
BY_REASON = {
    "stale": ("rollout.max_concurrent_rollouts", "lower"),
    "cancelled": ("rollout.max_concurrent_rollouts", "lower"),
    "reward_timeout": ("reward.timeout_s", "raise"),
    "reward_error": ("reward.function", "look at the examples in discards"),
    "server_lost": ("rollout.request_retries", "raise"),
    "workflow_error": ("workflow.path", "look at the examples in discards"),
    "evidence_invalid": ("inference.engine", "look at the examples in discards"),
}


def discards_high(evidence: Evidence) -> Finding | None:
    """Much comes to nothing; what a filter refuses is meant."""
    counts = {r: one["count"] for r, one in evidence.section("discards").items() if r in BY_REASON}
    ended, lost = evidence.num_rollouts, sum(counts.values())
    if ended < MIN_ROLLOUTS or lost <= TOO_MANY * ended:
        return None
    most = max(counts, key=lambda reason: counts[reason])
    knob, direction = BY_REASON[most]
    numbers: dict[str, float] = {"part of the rollouts": lost / ended, most: counts[most]}
    return Finding("discards-high", PROBLEM, f"Rollouts come to nothing, most often: {most}.", numbers, knob, direction)


def reward_timeouts(evidence: Evidence) -> Finding | None:
    """Rewards run out of their time, be it for few rollouts."""
    ended = evidence.num_rollouts
    late = evidence.section("num_rollouts").get("reward_timeout", 0)
    if ended < MIN_ROLLOUTS or late <= TOO_MANY_TIMEOUTS * ended:
        return None
    numbers: dict[str, float] = {"part of the rollouts": late / ended, "reward timeouts": late}
    what = "Rewards run out of time: a reward function hangs on some answers, or there are too few workers."
    knob, direction = BY_REASON["reward_timeout"]
    return Finding("reward-timeouts", PROBLEM, what, numbers, knob, direction)


def masked_high(evidence: Evidence) -> Finding | None:
    """Many tokens lose their gradient for being too old."""
    tokens = evidence.section("tokens")
    masked, trained = (sum(tokens.get(kind, {}).values()) for kind in ("masked", "gradient"))
    if not evidence.is_enough or masked <= MASKED * (masked + trained):
        return None
    numbers = {"part of the tokens without gradient": masked / (masked + trained), "bound": float(evidence.eta)}
    what = "Many tokens are too old when they are trained on, and carry no gradient."
    return Finding("masked-high", PROBLEM, what, numbers, "rollout.max_concurrent_rollouts", "lower")


def not_conserved(evidence: Evidence) -> Finding | None:
    """Work was lost or counted twice."""
    tasks = evidence.section("tasks")
    if not tasks or tasks["is_conserved"]:
        return None
    counted = sum(value for name, value in tasks.items() if name not in ("submitted", "is_conserved"))
    numbers: dict[str, float] = {"submitted": tasks["submitted"], "counted": counted}
    what = "Tasks are in no state, or in two: a bug of Headway. Keep the journal, and report it."
    return Finding("not-conserved", PROBLEM, what, numbers, "recover.mode", "restart the controller with recovery on")


# ---- what is learnt

SMALL, FALLS = 0.5, 0.2
"""Of the effective sample size: half of the batch is for nothing; and a fall that is no noise."""
APART, FAR_APART = 0.03, 0.1
"""Nats a token between engine and trainer: more than rounding makes; and a token's weight is off by a tenth."""
NEARLY_ALL = 0.8
"""Of the groups: then a step learns from a fifth of what was paid for."""
SHORTER, LONGER = 0.5, 1.5
"""Of the first length: what time and memory were planned with no longer holds."""
CUT = 0.2
"""Part of the completions that may end at the limit before their rewards are mostly about the limit."""
COLLAPSED = 0.2
"""Of the first entropy; a task that is learnt loses half and more."""
RISE = 0.05
"""Of the training reward; less is noise of a batch."""
MIN_EVALUATIONS = 3


def sample_size_falling(evidence: Evidence) -> Finding | None:
    """Few tokens count: the policy has moved away from the one that made them."""
    name = Statistic.SAMPLE_SIZE
    early, recent = evidence.early(name), evidence.recent(name)
    if not evidence.is_enough or early is None or recent is None or (recent >= SMALL and recent >= early - FALLS):
        return None
    numbers = {"effective sample size at first": early, "now": recent}
    what = "The effective sample size is low or falls: samples are too far from the policy that is trained."
    severity = PROBLEM if recent < SMALL else ADVICE
    return Finding("sample-size-falling", severity, what, numbers, "rollout.max_head_offpolicyness", "lower")


def logp_mismatch(evidence: Evidence) -> Finding | None:
    """Engine and trainer disagree on tokens that the very same weights have made."""
    found = evidence.recent(Statistic.MISMATCH)
    if not evidence.is_enough or found is None or found <= APART:
        return None
    numbers = {"mean difference of log-probs, nats a token": found}
    what = "Engine and trainer give different log-probs for the same weights: precision, kernels or sampling settings."
    severity = PROBLEM if found > FAR_APART else ADVICE
    return Finding("logp-mismatch", severity, what, numbers, "actor.dtype", "as the engine's")


def equal_groups(evidence: Evidence) -> Finding | None:
    """Groups whose samples all have one reward teach nothing."""
    share = evidence.recent(Statistic.EQUAL_GROUPS)
    if not evidence.is_enough or share is None or share < MOST:
        return None
    reward = evidence.recent(Statistic.REWARD) or 0.0
    numbers = {"part of the groups with one reward": share, "mean reward": reward}
    what = "Most groups have one reward for all samples, and so no advantage: tasks are too easy or too hard."
    severity = PROBLEM if share >= NEARLY_ALL else ADVICE
    return Finding("equal-groups", severity, what, numbers, "gconfig.n_samples", "raise, or give other tasks")


def length_drift(evidence: Evidence) -> Finding | None:
    """Completions become much longer, up to the limit, or much shorter."""
    name = Statistic.COMPLETION
    early, recent = evidence.early(name), evidence.recent(name)
    if not evidence.is_enough or not early or recent is None or SHORTER <= recent / early <= LONGER:
        return None
    cut = evidence.recent(Statistic.CUT_OFF) or 0.0
    numbers = {"tokens of a completion at first": early, "now": recent, "part that is cut off": cut}
    severity = PROBLEM if cut > CUT else ADVICE
    if recent > early:
        what, knob, way = "Completions grow.", "gconfig.max_new_tokens", "raise, or actor.overlong_reward_penalty"
    else:
        what, knob, way = "Completions shrink: is it what the reward asks for?", "reward.function", "look at samples"
    return Finding("length-drift", severity, what, numbers, knob, way)


def entropy_collapse(evidence: Evidence) -> Finding | None:
    """The policy hardly explores any more."""
    early, recent = (found(Statistic.ENTROPY) for found in (evidence.early, evidence.recent))
    if not evidence.is_enough or not early or recent is None or recent >= COLLAPSED * early:
        return None
    reward = evidence.recent(Statistic.REWARD) or 0.0
    numbers = {"entropy at first, nats a token": early, "now": recent, "mean reward": reward}
    what = "Entropy has collapsed: samples of a task are hardly different any more."
    return Finding("entropy-collapse", ADVICE, what, numbers, "actor.eps_clip_higher", "raise")


def skipped_steps(evidence: Evidence) -> Finding | None:
    """Steps had no finite gradient."""
    skipped = evidence.steps[-1].get(Statistic.SKIPPED, 0.0) if evidence.steps else 0.0
    if not skipped:
        return None
    what = "Steps were skipped: their loss or gradient was not finite."
    return Finding("skipped-steps", PROBLEM, what, {"skipped steps": skipped}, "actor.optimizer.lr", "lower")


def held_out_behind(evidence: Evidence) -> Finding | None:
    """The training reward rises, and the held-out reward does not."""
    rewards = [one["reward"] for one in evidence.report.get("evaluations", ()) if one["reward"] is not None]
    early, recent = (found(Statistic.REWARD) for found in (evidence.early, evidence.recent))
    if not evidence.is_enough or len(rewards) < MIN_EVALUATIONS or early is None or recent is None:
        return None
    if recent <= early + RISE or rewards[-1] > rewards[0]:
        return None
    numbers: dict[str, Any] = {"training reward at first": early, "now": recent}
    numbers |= {"held-out reward at first": rewards[0], "held-out reward now": rewards[-1]}
    what = "The training reward rises, the held-out reward does not: tasks are learnt by heart, or the reward is gamed."
    return Finding("held-out-behind", ADVICE, what, numbers, "total_train_epochs", "lower, or more rows")


RULES: tuple[Rule, ...] = (
    not_conserved,
    bottleneck,
    trainer_bound,
    bound_useless,
    slow_rewards,
    idle_engine,
    discards_high,
    reward_timeouts,
    masked_high,
    sample_size_falling,
    logp_mismatch,
    equal_groups,
    length_drift,
    entropy_collapse,
    skipped_steps,
    held_out_behind,
)


def diagnose(evidence: Evidence) -> list[Finding]:
    """All findings, problems first."""
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    return sorted(found, key=lambda finding: finding.severity is not PROBLEM)
