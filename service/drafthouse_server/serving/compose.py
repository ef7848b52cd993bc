"""The scheduler that a configuration describes."""

from __future__ import annotations

from drafthouse_server.config import Config
from drafthouse_server.drafting.adaptive import AdaptiveDraft
from drafthouse_server.drafting.cost import Splitting, StepCost
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.policy import DraftPolicy, FixedDraft
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.scheduling.cells import Windows
from drafthouse_server.scheduling.prefix_cache import PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.tenancy.fairness import Fairness, ServiceWeights

__all__ = ["make_fairness", "make_scheduler"]


def make_scheduler(engine: Engine, config: Config) -> Scheduler:
    """Returns the scheduler of a configuration for an engine.

    Args:
        engine: It will run the steps.
        config: The settings.
    """
    is_recurrent = engine.card.is_recurrent
    splitting = Splitting.NONE if config.kv_unified else Splitting.EQUAL
    if is_recurrent:
        splitting = Splitting.GROUPS
    policy: DraftPolicy = AdaptiveDraft(engine.limits.n_draft_max)
    if config.draft_policy == "fixed":
        policy = FixedDraft(config.draft_default)
    prefixes = None
    if config.prefix_cache:
        prefixes = PrefixCache(
            can_cut=not is_recurrent,
            windows=Windows(engine.limits.n_window, engine.limits.n_window_cells),
            n_host_bytes_max=min(config.prefix_cache_mib << 20, engine.prefix_bytes_max),
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
        cost=StepCost(),
        splitting=splitting,
        gap_s=config.gap_target_ms / 1000,
        n_preempted_bytes_max=config.preempted_mib << 20,
        prefixes=prefixes,
        ngrams=ngrams,
        n_draft_fixed=config.draft_default,
        fairness=make_fairness(config),
    )


def make_fairness(config: Config) -> Fairness:
    """Returns how a configuration shares the server among tenants."""
    prompt, output, rejected = map(float, config.service_weights)
    return Fairness(
        ServiceWeights(prompt, output, rejected, config.mask_service_weight),
        quantum=config.fair_quantum,
        aging_s=config.priority_aging_s,
        preempt_interval_s=config.preempt_interval_s,
        save_bytes_per_s=config.preempt_mib_s * (1 << 20),
    )
