"""Capabilities of a model's rows, and what the self-check found about them."""

from __future__ import annotations

from typing import Literal, Self

import attrs

Feature = Literal["batch", "prefill_together", "restore", "drafts", "banks"]
FEATURES: tuple[Feature, ...] = ("batch", "prefill_together", "restore", "drafts", "banks")
"""Features in order: the first is needed by the others, the last is the cheapest to lose."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """Features of a model's rows. Each field is the reason why a feature is off; "" means that it
    is on.

    batch: rows share a forward pass. prefill_together: prompts of different lengths share a padded
    pass, and a row without KV decodes beside others. restore: KV and state come back from cached
    blocks. drafts: drafted tokens are verified, and wrong ones are taken back. banks: long rows do
    not share buffers with short ones.
    """

    batch: str = ""
    prefill_together: str = ""
    restore: str = ""
    drafts: str = ""
    banks: str = ""

    def __attrs_post_init__(self) -> None:
        if self.batch:
            for feature in FEATURES[1:]:
                object.__setattr__(self, feature, getattr(self, feature) or "rows step one by one")

    def allows(self, feature: Feature) -> bool:
        return not getattr(self, feature)

    def without(self, feature: Feature, reason: str) -> Self:
        """Turn a feature off. A reason that is there already stays."""
        return self if getattr(self, feature) else attrs.evolve(self, **{feature: reason})

    @property
    def off(self) -> dict[str, str]:
        """Features that are turned off, each with its reason."""
        return {feature: reason for feature in FEATURES if (reason := getattr(self, feature))}

    @property
    def description(self) -> str:
        """How rows share a step, for a person."""
        if self.batch:
            return f"row by row ({self.batch})"
        if self.prefill_together:
            return f"batched, prompts prefill one by one ({self.prefill_together})"
        return "batched"


SelfCheckMode = Literal["off", "fast", "full"]


@attrs.frozen(kw_only=True)
class SelfCheck:
    """How the capabilities of a model were found."""

    mode: SelfCheckMode = "off"
    """Mode of the check. off: capabilities are guessed from the types of the model's caches."""
    checked: str = ""
    """Models that the check ran, as text for a person."""
    seconds: float = 0.0
    """Duration of the check. For a remembered result it is the duration of the original check."""
    remembered: bool = False
    """The result is from an earlier start with the same weights, settings, versions and device."""


EVERYTHING, UNCHECKED = Capabilities(), SelfCheck()
