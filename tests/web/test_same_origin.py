"""What web pages may ask for: the decision by itself."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper import ServerSettings
from trouper.protocol.hosts import Host, Origin
from trouper.protocol.problems import SettingsInvalid
from trouper.web.http.same_origin import Head, Policy, decide

DEFAULT = Policy.of(ServerSettings())
LOOPBACK = (
    "localhost",
    "127.0.0.1",
    "127.8.9.10",
    "[::1]",
    "[0:0::1]",
    "trouper.localhost",
    "[::ffff:127.0.0.1]",
)
FOREIGN = (
    "evil.example",
    "localhost.evil.example",
    "evil-localhost",
    "127.0.0.1.evil.example",
    "128.0.0.1",
    "192.168.1.5",
    "0.0.0.0",
    "[::2]",
    "localhostx",
    "127.0.0.1x",
    "a b",
    "user@localhost",
    "localhost/x",
    "[::1",
    "évil",
    "127.0.0.1:1:2",
    "localhost:x",
)
ORIGINS = (
    "null",
    "https://evil.example",
    "http://localhost:5173",
    "http://127.0.0.1:8001",
    "https://localhost",
    "file://",
    "",
    "localhost:8000",
    "http://localhost:8000@evil.example",
    "http://localhost:8000.evil.example",
    "http://localhost:8000/",
    "chrome-extension://abc",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW")
SIMPLE_TYPES = (
    None,
    "",
    "text/plain",
    "text/plain;charset=utf-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "TEXT/PLAIN",
    "text/plain; application/json",
    "text/json",
    "application/jsonx",
    "application/json, text/plain",
)
JSON_TYPES = (
    "application/json",
    "application/json; charset=utf-8",
    "Application/JSON",
    "application/vnd.api+json",
    " application/json ;x=y",
)
heads = st.builds(
    Head,
    method=st.sampled_from(METHODS),
    content_type=st.sampled_from((*SIMPLE_TYPES, *JSON_TYPES)),
    has_body=st.booleans(),
    fetch_mode=st.sampled_from((None, "cors", "no-cors", "navigate")),
    fetch_dest=st.sampled_from((None, "empty", "document", "image", "iframe")),
    wants_method=st.sampled_from((None, "POST")),
)
authorities = st.builds(
    lambda name, port, upper: (name.upper() if upper else name) + port,
    st.sampled_from(LOOPBACK),
    st.sampled_from(("", ":8000", ":")),
    st.booleans(),
)


def why(head: Head, **settings: Any) -> str | None:
    problem = decide(head, Policy.of(ServerSettings(**settings)))
    return None if problem is None else problem.code


@given(heads, authorities, st.sampled_from(FOREIGN), st.sampled_from(("", ":8000")))
def test_on_loopback_only_its_names_are_answered(
    head: Head, own: str, foreign: str, port: str
) -> None:
    head = attrs.evolve(head, content_type="application/json", wants_method=None)
    assert decide(attrs.evolve(head, host=own), DEFAULT) is None
    for bad in (
        attrs.evolve(head, host=foreign + port),
        attrs.evolve(
            head, host=foreign + port, origin=f"http://{foreign}{port}", fetch_site="same-origin"
        ),
        attrs.evolve(head, host=own, target=f"http://{foreign.partition('/')[0]}x{port}/v1/models"),
    ):
        problem = decide(bad, DEFAULT)
        assert problem is not None and (problem.status, problem.code) == (403, "host_not_allowed")
        assert "--allowed-hosts" in problem.message
        anything = decide(bad, attrs.evolve(DEFAULT, allowed_hosts=("*",)))
        assert anything is None or anything.code == "origin_not_allowed"


@given(heads, st.sampled_from(ORIGINS), st.sampled_from((None, "cross-site", "same-site", "none")))
def test_a_foreign_origin_is_refused_whatever_it_asks_for(
    head: Head, origin: str, site: str | None
) -> None:
    asked = attrs.evolve(head, host="localhost:8000", origin=origin, fetch_site=site)
    problem = decide(asked, DEFAULT)
    if origin == "http://localhost:8000/":  # Nobody sends that; it is read as the server's own.
        return
    assert problem is not None and (problem.status, problem.code) == (403, "origin_not_allowed")
    assert "--cors-origins" in problem.message
    assert decide(asked, attrs.evolve(DEFAULT, cors_origins=("*",))) == decide(
        attrs.evolve(asked, origin=None, fetch_site=None), DEFAULT
    )


@given(heads, authorities, st.sampled_from(("http", "https")))
def test_what_comes_from_the_server_itself_is_as_without_a_browser(
    head: Head, own: str, scheme: str
) -> None:
    plain = decide(attrs.evolve(head, host=own), DEFAULT)
    page = attrs.evolve(head, host=own, origin=f"{scheme}://{own.removesuffix(':').lower()}")
    assert decide(page, DEFAULT) == plain
    assert decide(attrs.evolve(head, host=own, fetch_site="same-origin"), DEFAULT) == plain
    assert decide(attrs.evolve(head, host=own, fetch_site="none"), DEFAULT) == plain


@given(heads, st.sampled_from(SIMPLE_TYPES), st.sampled_from(("POST", "PUT", "PATCH", "DELETE")))
def test_a_body_that_a_form_could_send_is_refused(
    head: Head, kind: str | None, method: str
) -> None:
    """Also by a client that says nothing of itself, since a page might be behind it."""
    asked = attrs.evolve(head, host="localhost", method=method, has_body=True, content_type=kind)
    problem = decide(asked, attrs.evolve(DEFAULT, cors_origins=("*",)))
    assert problem is not None and (problem.status, problem.code) == (415, "unsupported_media_type")
    assert "Content-Type: application/json" in problem.message
    assert decide(attrs.evolve(asked, has_body=False), DEFAULT) is None


@given(heads, st.sampled_from(JSON_TYPES))
def test_a_program_notices_nothing(head: Head, kind: str) -> None:
    """Node's fetch says sec-fetch-mode: cors, and is none of a page."""
    assert decide(attrs.evolve(head, host="localhost", content_type=kind), DEFAULT) is None


@given(heads, st.sampled_from(("cross-site", "same-site")))
def test_without_an_origin_only_a_link_crosses(head: Head, site: str) -> None:
    asked = attrs.evolve(head, host="localhost", fetch_site=site, content_type="application/json")
    follows = (
        head.method in ("GET", "HEAD")
        and head.fetch_mode == "navigate"
        and head.fetch_dest == "document"
    )
    assert (decide(asked, DEFAULT) is None) == follows
    named = attrs.evolve(DEFAULT, cors_origins=("http://localhost:5173",))
    assert decide(asked, named) == decide(asked, DEFAULT), (
        "it does not say that it is of the origin that is named"
    )
    assert decide(asked, attrs.evolve(DEFAULT, cors_origins=("*",))) is None


@given(
    heads,
    st.sampled_from(("evil.example", "localhost")),
    st.sampled_from((None, *ORIGINS)),
    st.data(),
)
def test_to_allow_more_refuses_nothing(
    head: Head, host: str, origin: str | None, data: st.DataObject
) -> None:
    asked = attrs.evolve(head, host=host, origin=origin)
    hosts = data.draw(st.sampled_from(((), ("evil.example",), (".example",), ("*",))))
    origins = data.draw(st.sampled_from(((), ("https://evil.example",), ("*",))))
    if decide(asked, DEFAULT) is None:
        assert (
            decide(asked, attrs.evolve(DEFAULT, allowed_hosts=hosts, cors_origins=origins)) is None
        )


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        (
            "llm.example.org",
            ("llm.example.org", "LLM.example.org.", "llm.example.org:99"),
            ("example.org", "a.llm.example.org"),
        ),
        (
            ".example.org",
            ("example.org", "a.example.org", "a.b.example.org"),
            ("aexample.org", "example.org.evil"),
        ),
        ("*.example.org", ("a.example.org", "a.b.example.org"), ("example.org", "aexample.org")),
        ("*", ("evil.example", "192.168.1.5"), ()),
        ("192.168.1.5", ("192.168.1.5:8000",), ("192.168.1.50", "evil.example")),
        (
            "host.docker.internal, my_llm",
            ("host.docker.internal:8000", "my_llm"),
            ("docker.internal",),
        ),
    ],
)
def test_hosts_that_are_allowed(
    pattern: str, names: tuple[str, ...], others: tuple[str, ...]
) -> None:
    for name in names:
        assert why(Head(host=name), allowed_hosts=pattern) is None, name
    for name in others:
        assert why(Head(host=name), allowed_hosts=pattern) == "host_not_allowed", name


LAN = {"host": "0.0.0.0", "allow_no_key": True}


@pytest.mark.parametrize(
    "name",
    [
        "192.168.1.5",
        "[fe80::1]",
        "localhost",
        "trouper",
        "box.local",
        "host.docker.internal",
        "a.home.arpa",
    ],
)
def test_beyond_loopback_what_no_page_can_have_is_answered(name: str) -> None:
    """Addresses, names of containers and of home networks: without a key, too."""
    assert why(Head(host=f"{name}:8000"), **LAN) is None
    assert why(Head(host=f"{name}:8000"), **LAN, allowed_hosts="llm.example.org") == (
        None if Host(name).address or name == "localhost" else "host_not_allowed"
    ), "a list says all names"


def test_beyond_loopback_other_names_need_a_key_or_are_named() -> None:
    """A page that rebinds its name has no key."""
    asked = Head(host="llm.example.org")
    assert why(asked, **LAN) == "host_not_allowed"
    assert why(asked, host="0.0.0.0", api_key=("k",)) is None
    assert why(asked, **LAN, allowed_hosts=".example.org") is None
    assert why(asked, host="llm.example.org", allow_no_key=True) is None
    assert (
        why(asked, host="0.0.0.0", api_key=("k",), allowed_hosts="other.example")
        == "host_not_allowed"
    )


def test_what_has_no_host_is_no_browser() -> None:
    assert why(Head()) is None
    assert why(Head(host="")) is None
    assert why(Head(origin="http://localhost")) == "origin_not_allowed", "the same as what?"


def test_a_proxy_may_rewrite_the_host_of_a_page_that_is_its_own() -> None:
    """The browser says itself that page and request are of one origin; no page can."""
    asked = Head(method="POST", host="127.0.0.1:8000", origin="https://llm.example.org")
    assert why(asked) == "origin_not_allowed"
    assert why(attrs.evolve(asked, fetch_site="same-origin")) is None
    assert why(attrs.evolve(asked, fetch_site="same-origin", origin="null")) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("https://llm.example.org", "llm.example.org", True),
        ("http://llm.example.org", "llm.example.org:80", True),
        ("https://llm.example.org", "llm.example.org:443", True),
        ("https://llm.example.org", "llm.example.org:80", False),
        ("http://llm.example.org:8000", "llm.example.org", False),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("app://localhost", "localhost", True),
        ("http://localhost:8000", "127.0.0.1:8000", False),
    ],
)
def test_ports_that_are_left_out_are_those_of_the_scheme(
    origin: str, host: str, *, same: bool
) -> None:
    parsed, of = Origin.parse(origin), Host.parse(host)
    assert parsed is not None and of is not None
    assert parsed.is_of(of) == same


@pytest.mark.parametrize(
    ("given_as", "origin"),
    [
        ("http://localhost:5173", "http://localhost:5173"),
        (("https://App.Example.org/", "x://y"), "https://app.example.org"),
        ("https://app.example.org:443 , http://b", "https://app.example.org"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("*", "null"),
    ],
)
def test_origins_that_are_named(given_as: Any, origin: str) -> None:
    head = Head(host="localhost:8000", origin=origin)
    assert why(head, cors_origins=given_as) is None
    assert why(head) == "origin_not_allowed"
    if given_as != "*":
        for other in (origin + "x", origin + ":1", "null", origin.replace("://", "s://")):
            assert (
                why(attrs.evolve(head, origin=other), cors_origins=given_as) == "origin_not_allowed"
            ), other


@pytest.mark.parametrize(
    "bad", ["http://x", "x:80", "a/b", "a b", "*.", "**", "::1", "*x", "http://"]
)
def test_a_host_that_cannot_be_is_said(bad: str) -> None:
    with pytest.raises(
        SettingsInvalid, match=r"--allowed-hosts: .* is no host; write NAME"
    ) as caught:
        ServerSettings(allowed_hosts=(bad,))
    assert caught.value.flag == "--allowed-hosts"


@pytest.mark.parametrize(
    "bad",
    [
        "null",
        "localhost:5173",
        "http://a/b",
        "http://",
        "a",
        "http://*",
        "https://u@h",
        "http://h:99999999",
    ],
)
def test_an_origin_that_cannot_be_is_said(bad: str) -> None:
    with pytest.raises(
        SettingsInvalid, match=r"--cors-origins: .* is no origin; write SCHEME://HOST"
    ) as caught:
        ServerSettings(cors_origins=(bad,))
    assert caught.value.flag == "--cors-origins"


def test_entries_are_parted_by_commas_or_given_one_by_one() -> None:
    assert ServerSettings(allowed_hosts=("a, .B,,a",)).allowed_hosts == ("a", ".b")
    assert ServerSettings(allowed_hosts=("a,c", "b")).allowed_hosts == ("a", "c", "b")
