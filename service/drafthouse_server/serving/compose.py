"""The scheduler that a configuration describes."""

from __future__ import annotations

from typing import Literal

from drafthouse_server.config import Config
from drafthouse_server.drafting.cost import CostModel, Splitting, StepCost
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.plain_cost import PlainCost
from drafthouse_server.drafting.plain_draft import PlainDraft
from drafthouse_server.drafting.policy import AdaptiveDraft, DraftPolicy, FixedDraft
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.scheduling.prefix_cache import PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler

__all__ = ["make_scheduler"]


def make_scheduler(
    engine: Engine, config: Config, *, chooser: Literal["model", "plain"] = "model"
) -> Scheduler:
    """Returns the scheduler of a configuration for an engine.

    Args:
        engine: It will run the steps.
        config: The settings.
        chooser: What chooses K and cuts prompts where the policy is adaptive: the cost model, or
            the plain averages that are on trial beside it (`drafthouse_bench.trial`). No setting.
    """
    is_recurrent = engine.card.is_recurrent
    splitting = Splitting.NONE if config.kv_unified else Splitting.STREAMS
    if is_recurrent:
        splitting = Splitting.GROUPS
    policy, cost = _make_policy(engine, config, splitting, chooser)
    prefixes = None
    if config.prefix_cache:
        prefixes = PrefixCache(
            can_cut=not is_recurrent,
            n_window=engine.limits.n_window,
            n_host_bytes_max=config.prefix_cache_mib << 20,
        )
    ngrams = None
    if config.prompt_lookup:
        ngrams = NgramDrafter(
            config.prompt_lookup_min,
            config.prompt_lookup_pool,
            can_lengthen=config.draft_policy == "adaptive",
        )
    return Scheduler(
        engine.limits,
        policy,
        cost=cost,
        splitting=splitting,
        gap_s=config.gap_target_ms / 1000,
        n_parked_bytes_max=config.preempted_mib << 20,
        prefixes=prefixes,
        ngrams=ngrams,
        n_draft_fixed=config.draft_default,
    )


def _make_policy(
    engine: Engine, config: Config, splitting: Splitting, chooser: str
) -> tuple[DraftPolicy, CostModel]:
    n_draft_max = engine.limits.n_draft_max
    if config.draft_policy == "fixed":
        return FixedDraft(config.draft_default), StepCost()
    if chooser == "plain":
        return PlainDraft(n_draft_max), PlainCost()
    cost = StepCost()
    return AdaptiveDraft(n_draft_max, cost, splitting), cost
