"""Options of commands that talk to a server."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import attrs
import click
import httpx2
from click.core import ParameterSource

from trouper.cli.address import EVERYWHERE, url_to
from trouper.cli.exits import refuse
from trouper.cli.flags import HomePath, NeverEmpty, UnsplitText
from trouper.cli.settings_file import configured
from trouper.cli.terminal_text import line_shown
from trouper.cli.usage_errors import origin_of, settings_error
from trouper.protocol.api_keys import keys_in, sendable
from trouper.protocol.hosts import is_loopback
from trouper.protocol.problems import SettingsInvalid, causes_of
from trouper.protocol.settings import ServerSettings

Command = TypeVar("Command", bound=Callable[..., Any])
Client = TypeVar("Client", httpx2.Client, httpx2.AsyncClient)
CONNECT_S = 5.0
SILENCE_S = 300.0  # Read timeout. A live server sends something sooner.
DEFAULT = ServerSettings()


@attrs.frozen
class Where:
    url: str
    """Without /v1"""
    _key: str | None = attrs.field(default=None, repr=False)
    key_from: str = ""
    """The flag, the variable, or the file and its key"""
    url_from: str = ""
    """"" for a flag or the default"""
    key_stays_here: bool = False
    """A file's key goes to no other machine than the file's `url`."""

    @property
    def key(self) -> str | None:
        return None if self.key_stays_here and not self.is_local else self._key

    def say(self, condition: str = "") -> None:
        """Print to stderr which server is asked and whose key goes along."""
        if self.key is not None:
            key = f"with the key of {self.key_from}{condition}"
        elif self._key is not None:
            reason = "which is for the server of that file: --api-key sends one"
            key = f"without the key of {self.key_from}, {reason}"
        else:
            key = "without a key"
        url = f"{self.url} ({self.url_from})" if self.url_from else self.url
        click.echo(line_shown(f"trouper: asking {url} {key}"), err=True)

    @property
    def is_local(self) -> bool:
        host = httpx2.URL(self.url).host
        # Some resolvers ask DNS for names below localhost, and a key must not follow them.
        return host in EVERYWHERE or (is_loopback(host) and not host.endswith(".localhost"))

    def client(self) -> httpx2.Client:
        return self.opened(httpx2.Client)

    def opened(self, kind: Callable[..., Client], **options: Any) -> Client:
        """Return a client without proxies for this machine. Raises `ProxyUnusable`, or httpx2's
        errors."""
        self._require_name()
        try:
            return kind(
                base_url=self.url,
                headers=self.headers(),
                timeout=self.timeout(),
                trust_env=not self.is_local,
                verify=httpx2.create_ssl_context(),  # Also here as SSL_CERT_FILE says.
                **options,
            )
        except (
            ImportError,
            ValueError,
        ) as error:
            # Socks5:// without its package, a scheme that is none.
            message = (
                f"{self.url}: the proxy of the environment (ALL_PROXY, HTTPS_PROXY, HTTP_PROXY) "
                f"cannot be used: {error}"
            )
            raise ProxyUnusable(
                f"{message.rstrip('.')}; unset it, or name the host in NO_PROXY"
            ) from error

    def _require_name(self) -> None:
        # The system's look-up raises UnicodeError, which httpx2 lets through.
        try:
            httpx2.URL(self.url).raw_host.decode().encode("idna")
        except UnicodeError as error:
            raise httpx2.InvalidURL("no host has such a name") from error

    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    @staticmethod
    def timeout() -> httpx2.Timeout:
        return httpx2.Timeout(SILENCE_S, connect=CONNECT_S)


key_option = functools.partial(click.option, cls=NeverEmpty)


def client_of(command: Command) -> Command:
    """Add --url and --api-key, by default as `trouper serve` would listen, and pass a `Where`."""

    @functools.wraps(command)
    def run(
        *more: Any,
        url: str | None,
        host: str,
        port: int,
        api_key: tuple[str, ...],
        api_key_file: Path | None,
        **given: Any,
    ) -> Any:
        if url and not url.lower().startswith(("http://", "https://")):
            refuse(
                f"--url {url}: begin it with http:// or https://, as in "
                f"http://{DEFAULT.host}:{DEFAULT.port}"
            )
        _require_reachable(url, port)
        found = (url or url_to(host, port)).rstrip("/").removesuffix("/v1")
        where = _with_origins(Where(found, _key(api_key, api_key_file)), bool(api_key))
        return command(where, *more, **given)

    for option in (
        key_option(
            "--api-key-file",
            type=HomePath(path_type=Path),
            envvar="TROUPER_API_KEY_FILE",
            hidden=True,
        ),
        key_option(
            "--api-key",
            type=UnsplitText(),
            multiple=True,
            envvar="TROUPER_API_KEY",
            help="Key to send to the server.",
        ),
        click.option("--port", type=int, envvar="TROUPER_PORT", default=DEFAULT.port, hidden=True),
        click.option("--host", envvar="TROUPER_HOST", default=DEFAULT.host, hidden=True),
        click.option(
            "--url",
            envvar="TROUPER_URL",
            help=f"URL of the server. Default: http://{DEFAULT.host}:{DEFAULT.port}",
        ),
        configured,
    ):
        run = option(run)
    return run  # type: ignore[return-value]


def _with_origins(where: Where, is_key_given: bool) -> Where:
    context = click.get_current_context()
    names = ("url",) if context.params["url"] else ("host", "port")
    sources = {name: context.get_parameter_source(name) for name in names}
    plain = (ParameterSource.DEFAULT, ParameterSource.COMMANDLINE)
    given = (ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)
    key = "api_key" if is_key_given else "api_key_file"
    is_of_file = context.get_parameter_source(key) is ParameterSource.DEFAULT_MAP
    return attrs.evolve(
        where,
        key_from=origin_of(context, key),
        url_from=", ".join(origin_of(context, one) for one in names if sources[one] not in plain),
        key_stays_here=is_of_file and any(source in given for source in sources.values()),
    )


def _require_reachable(url: str | None, port: int) -> None:
    if not url:
        try:
            attrs.evolve(DEFAULT, port=port)
        except SettingsInvalid as invalid:
            refuse(settings_error(click.get_current_context(), invalid))
        return
    try:
        parts = urlsplit(url)
    except ValueError as error:  # Half of an IPv6 address.
        refuse(f"--url {url}: {error}")
    try:
        _ = parts.port
    except ValueError:
        refuse(f"--url {url}: its port is no number from 0 to 65535")
    if not parts.hostname:
        refuse(f"--url {url}: it names no host, as http://{DEFAULT.host}:{DEFAULT.port} does")


def _key(keys: tuple[str, ...], path: Path | None) -> str | None:
    """Return the first key; of a file, the first with the most rights."""
    try:
        if keys:
            return sendable(keys[0], "--api-key")
        return None if path is None else max(keys_in(path), key=lambda key: len(key.rights)).key
    except SettingsInvalid as invalid:
        refuse(str(invalid))


@contextmanager
def refused_in_one_line(where: Where) -> Iterator[None]:
    """End the command with one line if the server cannot be reached."""
    try:
        yield
    except (UnusableAnswer, ProxyUnusable) as other:
        refuse(str(other))
    except httpx2.ConnectError as error:
        refuse(_why_unreachable(where.url, error))
    except httpx2.HTTPStatusError as error:
        refuse(f"{where.url}: {problem_of(error.response)}")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        refuse(f"{where.url}: {plain(error)}")


def _why_unreachable(url: str, error: BaseException) -> str:
    cause = next((each for each in causes_of(error) if isinstance(each, ssl.SSLError)), None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"{url}: its certificate is not trusted ({cause.verify_message}); name the file of its "
            "authority in SSL_CERT_FILE"
        )
    if cause is not None:
        return f"{url} speaks no TLS that fits; without TLS its URL begins with http://"
    return f"no server answers at {url}: start one by `trouper serve`, or say where it is by --url"


def plain(error: Exception) -> str:
    """Say for a person what became of a request."""
    match error:
        case httpx2.ConnectError():
            return "no server answers any more; start it again by `trouper serve`"
        case httpx2.RemoteProtocolError() | httpx2.ReadError() | httpx2.WriteError():
            return "the server went away before its answer was complete"
        case httpx2.ReadTimeout():
            return f"the server said nothing for {SILENCE_S:g} s"
        case _:
            return str(error) or type(error).__name__


class ProxyUnusable(Exception):
    """The client cannot use a proxy that the environment names."""


class UnusableAnswer(Exception):
    """A command cannot use the server's answer."""


class DetailsHidden(UnusableAnswer):
    """The key has no right to the server's health."""


class NotTrouper(UnusableAnswer):
    """Another program listens at the URL."""


@contextmanager
def read_as_trouper(client: httpx2.Client | httpx2.AsyncClient) -> Iterator[None]:
    """Raise `NotTrouper` if parsing fails. Nothing but parsing stands inside."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        where = str(client.base_url).rstrip("/")
        raise NotTrouper(f"{where} answers, but not as a Trouper server does") from error


def first_model(client: httpx2.Client) -> str:
    """Raises `NotTrouper`, or httpx2's errors."""
    names = served_models(client)
    with read_as_trouper(client):
        return names[0]


def served_models(client: httpx2.Client) -> list[str]:
    """Raises `NotTrouper`, or httpx2's errors."""
    answer = client.get("/v1/models").raise_for_status()
    with read_as_trouper(client):
        return [line_shown(str(model["id"])) for model in answer.json()["data"]]


def problem_of(response: httpx2.Response) -> str:
    """Return the message in an error's body, else the status."""
    try:
        response.read()
        return line_shown(str(response.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError, httpx2.HTTPError):
        return line_shown(f"answered {response.status_code} {response.reason_phrase}")
