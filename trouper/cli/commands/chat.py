"""`trouper chat`: talk to a server from a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from io import TextIOWrapper
from typing import Any, TypeAlias

import click
import httpx2

from trouper.cli.attached_images import (
    content_of,
    count_tokens,
    parted,
    read_picture,
    reads_images,
    unattached,
)
from trouper.cli.client import NotTrouper, Where, client_of, first_model, plain
from trouper.cli.conversation import (
    COMMANDS,
    AskAgain,
    CommandRefused,
    Content,
    Conversation,
    EndOfChat,
    follow,
    question_in,
)
from trouper.cli.exits import forget, refuse
from trouper.cli.flags import Finite
from trouper.cli.kept_chats import KeptChats
from trouper.cli.own_server import reach
from trouper.cli.server_checks import ServerChecks
from trouper.cli.streamed_answer import AnswerFailed, StreamedAnswer, StreamedText, stream
from trouper.cli.terminal_text import text_of
from trouper.cli.type_ahead import kept_for_the_next_prompt
from trouper.protocol.problems import SettingsInvalid

STOPPED = "stopped"
Show: TypeAlias = Callable[[StreamedText], None]


@click.command()
@client_of
@click.option(
    "--model",
    "own_model",
    metavar="DIR-OR-HUB-ID",
    help="Start a server with this model for this chat alone, as `trouper run` does.",
)
@click.option("--name", help="Which of the server's models. Default: its first.")
@click.option("--system", default="", help="System prompt.")
@click.option("--temperature", type=Finite(0), help="Default: the server's.")
@click.option("--max-tokens", type=int, help="Of one answer. Default: the server's.")
@click.option(
    "--no-history",
    is_flag=True,
    envvar="TROUPER_NO_HISTORY",
    help="Keep neither questions nor answers in files.",
)
@click.argument("question", nargs=-1)
def chat(
    where: Where,
    /,
    *,
    own_model: str | None,
    name: str | None,
    system: str,
    no_history: bool,
    question: tuple[str, ...],
    **parameters: float | None,
) -> None:
    """Talk to a model. With a QUESTION, or one in stdin, print its answer and end.

    In the terminal /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    conversation = Conversation(text_of(system), name and text_of(name), given)
    text = text_of(" ".join(question)) or ("" if sys.stdin.isatty() else _piped())
    with reach(where, own_model) as server, server.client() as client:
        conversation.checks = ServerChecks(client)
        _require_name(conversation)
        if text or not sys.stdin.isatty():
            _answer_once(client, conversation, text)
        else:
            _converse(client, conversation, server, keeps=not no_history)


def _require_name(conversation: Conversation) -> None:
    """Refuse a --name that the server does not have: with one model it would answer as that."""
    if conversation.model is not None and conversation.checks is not None:
        try:
            conversation.checks.require_model(conversation.model)
        except CommandRefused as refused:
            refuse(f"--name {conversation.model}: {refused}")


def _piped() -> str:
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    return sys.stdin.read().strip()


def _answer_once(client: httpx2.Client, conversation: Conversation, question: str) -> None:
    if not question:
        refuse("there is no question, neither as an argument nor in stdin")
    try:
        text, _ = with_pictures(client, conversation, question, _say)
    except CommandRefused as refused:
        refuse(str(refused))
    conversation.ask(content_of(text, conversation.attached))
    answer = StreamedAnswer()
    try:
        with _shown() as show:
            for piece in stream(client, conversation.body(), answer):
                if piece.kind == "content":
                    show(piece)
    except AnswerFailed as failed:
        refuse(str(failed))
    if answer.ignored:
        _say(f"the server ignored {answer.ignored}")


def _say(line: str) -> None:
    click.echo(f"trouper: {line}", err=True)


@contextmanager
def _shown() -> Iterator[Show]:
    if not _draws():
        yield lambda piece: _print(piece.text)
        _print("\n")
        return
    from trouper.cli.answer_screen import AnswerScreen

    with AnswerScreen() as screen:
        yield screen.write


def _draws() -> bool:
    """Whether stdout is a terminal in which the cursor moves."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _print(text: str) -> None:
    # A full disk is one line; click handles a reader that is gone.
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        forget(sys.stdout)
        refuse(f"the answer cannot be written: {error.strerror}")


def _converse(
    client: httpx2.Client, conversation: Conversation, where: Where, *, keeps: bool
) -> None:
    from trouper.cli.line_editor import session

    conversation.chats = chats = _kept_chats() if keeps else None
    default = first_model(client)
    click.secho(f"{conversation.model or default} at {where.url}; /help lists commands", dim=True)
    read = session(COMMANDS, keeps=keeps).prompt
    while True:
        try:
            line = text_of(read()).strip()
        except KeyboardInterrupt:
            click.secho("Ctrl-D leaves", dim=True)
        except EOFError:
            return
        else:
            if line and not _handled(client, conversation, line):
                return
            if chats is not None:
                _keep(chats, conversation)


def _kept_chats() -> KeptChats | None:
    try:
        return KeptChats.opened()
    except OSError as error:
        click.secho(f"answers are not kept: {error.filename}: {error.strerror}", dim=True)
    except SettingsInvalid as invalid:
        click.secho(f"answers are not kept: {invalid}", dim=True)
    return None


def _keep(chats: KeptChats, conversation: Conversation) -> None:
    try:
        chats.keep(conversation)
    except OSError as error:
        click.secho(f"this conversation is not kept: {error.strerror}", fg="red")


def _handled(client: httpx2.Client, conversation: Conversation, line: str) -> bool:
    """False: the user leaves."""
    try:
        text = question_in(line)
        if text is None:
            click.secho(follow(conversation, line), dim=True)
            return True
        say = partial(click.secho, dim=True)
        text, is_alone = with_pictures(client, conversation, text, say)
        if is_alone:
            return True
        question = content_of(text, conversation.attached)
        conversation.attached = []
    except CommandRefused as refused:
        click.secho(str(refused), fg="red")
        return True
    except KeyboardInterrupt:
        click.secho(STOPPED, dim=True)
        return True
    except EndOfChat:
        return False
    except AskAgain as again:
        question = again.question
    with kept_for_the_next_prompt():
        answer_to(question, client, conversation, click.echo, _shown if _draws() else None)
    return True


def with_pictures(
    client: httpx2.Client, conversation: Conversation, line: str, say: Callable[[str], Any]
) -> tuple[str, bool]:
    """Attach the pictures whose paths are in a line. Return the text without the paths, and whether
    there is none. Raises `CommandRefused`."""
    text, paths = parted(line)
    for unused in unattached(line):
        say(unused)
    if not paths:
        return line, False
    model = conversation.model
    try:
        if not reads_images(client, model or first_model(client)):
            names = ", ".join(path.name for path in paths)
            say(f"the model reads text only: {names} is not attached")
            return line, False
        pictures = [read_picture(path) for path in paths]
        counts = [count_tokens(client, model, picture) for picture in pictures]
    except (NotTrouper, httpx2.HTTPError) as failed:
        raise CommandRefused(plain(failed)) from failed
    for picture, tokens in zip(pictures, counts, strict=True):
        conversation.attached.append(picture.part)
        say(f"{picture.described}, {tokens:,} tokens")
    return text, not text


def answer_to(
    question: Content,
    client: httpx2.Client,
    conversation: Conversation,
    echo: Callable[..., Any],
    shown: Callable[[], AbstractContextManager[Show]] | None = None,
) -> None:
    """Ctrl-C closes the connection and keeps the partial answer. `shown`: what shows its pieces, in
    place of `echo`."""
    conversation.ask(question)
    answer, note = StreamedAnswer(), ""
    pieces = stream(client, conversation.body(), answer)
    try:
        with nullcontext(partial(_echo_piece, echo)) if shown is None else shown() as show:
            for piece in pieces:
                show(piece)
    except KeyboardInterrupt:
        note = STOPPED
    except (AnswerFailed, NotTrouper, httpx2.HTTPError) as failed:
        again = "; /retry asks again" if isinstance(failed, httpx2.HTTPError) else ""
        note = click.style(plain(failed) + again, fg="red", dim=False)
    finally:
        pieces.close()
        conversation.answered(answer.text)
    echo("\n" + click.style(", ".join(filter(None, (note, answer.summary))), dim=True))


def _echo_piece(echo: Callable[..., Any], piece: StreamedText) -> None:
    is_dim = piece.kind == "thinking"
    echo(click.style(piece.text, dim=True) if is_dim else piece.text, nl=False)
