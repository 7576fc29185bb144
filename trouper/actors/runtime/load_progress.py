"""How far the loading of each model is."""

from __future__ import annotations

from trouper.protocol.loading import Loading, LoadWatch


class LoadProgress:
    """The latest progress of each model. Engines' threads write, anybody reads: each value replaces
    the one before."""

    def __init__(self) -> None:
        self._latest: dict[str | None, Loading] = {}

    def watching(self, model: str | None, watch: LoadWatch) -> LoadWatch:
        """Return a watch of one model's loading that notes the progress and passes it on."""

        def note(loading: Loading) -> None:
            self._latest[model] = loading
            watch(loading)

        return note

    def of(self, model: str | None) -> Loading | None:
        return self._latest.get(model)
