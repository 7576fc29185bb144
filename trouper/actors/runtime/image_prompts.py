"""Puts the images of a conversation into its tokens. Nothing is decoded: sizes come from headers.
Pure, for any thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trouper.actors.runtime.image_headers import ImageRefused, read_size
from trouper.protocol.media import (
    ImageLayout,
    ImageShape,
    ImageSource,
    PromptImage,
    digest_image,
)
from trouper.protocol.model import ModelCard, Tokenizer
from trouper.protocol.problems import RequestFailed, bad_request
from trouper.protocol.requests import ChatPrompt, Prompt
from trouper.protocol.settings import Settings

Tokens = tuple[int, ...]


def images_of(prompt: Prompt) -> tuple[ImageSource, ...]:
    return prompt.images if isinstance(prompt, ChatPrompt) else ()


def check_images(prompt: Prompt, card: ModelCard, output: str = "") -> None:
    """Raises `RequestFailed` (400) for images that the model does not take, or that `output`
    excludes."""
    images = images_of(prompt)
    if not images:
        return
    if card.images is None:
        why = f": {card.no_images}" if card.no_images else ""
        raise _refused(images[0], f"this model takes no images{why}", "images_not_supported")
    if output:
        raise _refused(
            images[0], f"images have no {output}; send text alone", "images_not_supported"
        )


def insert_images(
    tokens: Tokens, prompt: Prompt, card: ModelCard, tokenizer: Tokenizer, settings: Settings
) -> tuple[Tokens, tuple[PromptImage, ...]]:
    """Replace the template's markers, the k-th by the k-th image. Raises `RequestFailed` (400)."""
    # A client's text is never a marker: the tokenizer encodes control tokens in it as text.
    sources, layout = images_of(prompt), card.images
    if not sources or layout is None:
        return tokens, ()
    marker = tokenizer.encode(layout.marker, special=False)
    starts = [*_marker_starts(tokens, marker)]
    if len(starts) != len(sources):
        raise bad_request(
            f"the chat template has {len(starts)} places for {len(sources)} images; send images in "
            "messages of the user alone",
            "messages",
            "image_template_mismatch",
        )
    expanded, images, behind = list[int](), list[PromptImage](), 0
    for start, source in zip(starts, sources, strict=True):
        expanded += tokens[behind:start]
        behind = start + len(marker)
        shape = _shape_of(source, layout, settings.max_image_tokens)
        span = layout.span(len(expanded), shape, digest_image(layout.name, shape, source.data))
        expanded += span.tokens
        images.append(PromptImage(span, source))
    return (*expanded, *tokens[behind:]), tuple(images)


def _marker_starts(tokens: Tokens, marker: Sequence[int]) -> Iterator[int]:
    start = 0
    while True:
        try:
            start = tokens.index(marker[0], start)
        except ValueError:
            return
        if tokens[start : start + len(marker)] == (*marker,):
            yield start
            start += len(marker)
        else:
            start += 1


def _shape_of(source: ImageSource, layout: ImageLayout, max_tokens: int) -> ImageShape:
    try:
        return layout.shape(read_size(source.data), source.detail, max_tokens)
    except ImageRefused as refused:
        raise _refused(source, refused.reason, refused.code) from None
    except ValueError as error:
        raise _refused(source, str(error), "image_too_large") from None


def _refused(source: ImageSource, reason: str, code: str) -> RequestFailed:
    return bad_request(f"{source.origin}: {reason}", source.origin, code)
