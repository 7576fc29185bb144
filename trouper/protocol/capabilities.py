"""Capabilities of a model's rows, as found by the self-check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import attrs

Feature = Literal[
    "batch",
    "prefill_together",
    "restore",
    "drafts",
    "banks",
    "images",
    "images_together",
    "images_restore",
    "images_drafts",
]
# Each feature needs the first; the last is the cheapest to lose.
FEATURES: tuple[Feature, ...] = ("batch", "prefill_together", "restore", "drafts", "banks")
IMAGE_FEATURES: tuple[Feature, ...] = (
    "images",
    "images_together",
    "images_restore",
    "images_drafts",
)
"""Of models with an image encoder. Each needs the first."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """Reason why each feature is off; "" means on."""

    batch: str = ""  # Rows share a forward pass.
    # Prompts of different lengths share a padded pass, and a row without KV decodes beside others.
    prefill_together: str = ""
    restore: str = ""  # KV and state come back from cached blocks.
    drafts: str = ""  # Wrong drafts can be undone.
    banks: str = ""  # Long rows do not share buffers with short ones.
    images: str = ""  # Rows have images.
    images_together: str = ""  # Images of several rows share a padded pass.
    images_restore: str = ""  # Cached prefixes have images.
    images_drafts: str = ""  # Rows draft behind images.

    def __attrs_post_init__(self) -> None:
        if self.batch:
            for feature in FEATURES[1:]:
                object.__setattr__(self, feature, getattr(self, feature) or "rows step one by one")

    def allows(self, feature: Feature) -> bool:
        return not getattr(self, feature)

    def without(self, feature: Feature, reason: str) -> Self:
        """Turn a feature off. An earlier reason stays."""
        return self if getattr(self, feature) else attrs.evolve(self, **{feature: reason})

    def without_all(self, reasons: Mapping[Feature, str]) -> Self:
        remaining = self
        for feature, reason in reasons.items():
            remaining = remaining.without(feature, reason)
        return remaining

    @property
    def off(self) -> dict[str, str]:
        return {
            feature: reason
            for feature in (*FEATURES, *IMAGE_FEATURES)
            if (reason := getattr(self, feature))
        }

    @property
    def description(self) -> str:
        if self.batch:
            return f"row by row ({self.batch})"
        if self.prefill_together:
            return f"batched, prompts prefill one by one ({self.prefill_together})"
        return "batched"


SelfCheckMode = Literal["off", "fast", "full"]


@attrs.frozen(kw_only=True)
class SelfCheck:
    """How the capabilities were found."""

    mode: SelfCheckMode = "off"
    checked: str = ""
    seconds: float = 0.0
    remembered: bool = False
    """Whether an earlier start found the result for the same weights, settings, versions and
    device."""


EVERYTHING, UNCHECKED = Capabilities(), SelfCheck()
