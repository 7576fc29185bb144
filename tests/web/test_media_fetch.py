"""Images that clients name by address: what is fetched from real servers, and that nothing else
is ever dialled."""

from __future__ import annotations

import gzip
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest
import trio

from tests.fake_images import png_file
from tests.media_servers import PUBLIC, answer, elsewhere, redirects, sends
from trouper.protocol.media_domains import media_domain
from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.settings import ServerSettings
from trouper.web.http import media_fetch
from trouper.web.http.image_source import MAX_IMAGE_BYTES, RemoteImage
from trouper.web.http.media_fetch import MediaFetcher, is_public

PNG = png_file(20, 10)
PATH = "messages.0.content.1"
SECRET = "a-secret-of-the-other-server"
NAMES = {
    "images.test": [[PUBLIC]],
    "a.cdn.test": [[PUBLIC]],
    "mixed.test": [[PUBLIC, "10.0.0.1"]],
    "inside.test": [["127.0.0.1"]],
    "rebinding.test": [[PUBLIC], ["127.0.0.1"]],
    "other.test": [[PUBLIC]],
}


async def refusal(fetcher: MediaFetcher, url: str) -> Problem:
    """The error of a fetch, which must name the part and repeat nothing."""
    with pytest.raises(RequestFailed) as raised:
        await fetch(fetcher, url)
    problem = raised.value.problem
    assert problem.status == 400
    assert problem.param == PATH
    assert problem.message.startswith(PATH)
    assert SECRET not in problem.message
    return problem


async def fetch(fetcher: MediaFetcher, url: str, held: list[int] | None = None) -> bytes:
    fetcher.check(url, PATH)
    held = [] if held is None else held
    files = await fetcher.fetch_all([RemoteImage(url, PATH, "auto")], held.append)
    return files[url]


# -- what is fetched -----------------------------------------------------------------------------


async def test_authorities_are_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read them takes 0.1 s, in which no other stream could go on."""
    threads, create = list[threading.Thread](), httpx2.create_ssl_context

    def noted() -> ssl.SSLContext:
        threads.append(threading.current_thread())
        return create()

    monkeypatch.setattr(httpx2, "create_ssl_context", noted)
    async with elsewhere(monkeypatch, {"/a.png": sends(answer(PNG))}, NAMES) as at:
        fetcher = MediaFetcher([f"images.test:{at.tls_port}"])
        await fetch(fetcher, f"https://images.test:{at.tls_port}/a.png")
    assert len(threads) == 1
    assert threading.main_thread() not in threads


async def test_a_file_is_fetched_by_https(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {"/a%20b.png?c=%C3%BC": sends(answer(PNG))}, NAMES) as at:
        fetcher = MediaFetcher([f"images.test:{at.tls_port}"])
        held = list[int]()
        url = f"https://images.test:{at.tls_port}/a b.png?c=\u00fc#fragment"
        assert await fetch(fetcher, url, held) == PNG
    assert sum(held) == len(PNG)
    assert at.dialled == [(PUBLIC, at.tls_port)]
    assert at.resolver.lookups == ["images.test"]
    [head] = at.heads
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    assert fields[b"host"] == f"images.test:{at.tls_port}".encode()
    assert fields[b"accept-encoding"] == b"identity"
    assert fields.keys() == {b"host", b"user-agent", b"accept", b"accept-encoding", b"connection"}


async def test_names_below_a_domain_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {"/": sends(answer(PNG))}, NAMES) as at:
        fetcher = MediaFetcher([f"*.cdn.test:{at.tls_port}"])
        assert await fetch(fetcher, f"https://A.CDN.test:{at.tls_port}") == PNG


async def test_a_file_of_the_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {"/": sends(answer(PNG))}, NAMES) as at:
        entry = f"http://inside.test:{at.port}"
        assert await fetch(MediaFetcher([f"private:{entry}"]), entry) == PNG
        problem = await refusal(MediaFetcher([entry]), entry)
    assert problem.code == "media_not_allowed"
    assert at.dialled == [("127.0.0.1", at.port)]


async def test_an_address_is_fetched_once_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {"/": sends(answer(PNG))}, NAMES) as at:
        url = f"http://images.test:{at.port}/"
        image = RemoteImage(url, PATH, "auto")
        files = await MediaFetcher([url[:-1]]).fetch_all([image, image], lambda _: None)
    assert files == {url: PNG}
    assert len(at.heads) == 1


async def test_three_redirects_are_followed_and_four_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {f"/{n}": redirects(f"/{n - 1}", 307) for n in range(1, 9)}
    answers["/0"] = sends(answer(PNG))
    async with elsewhere(monkeypatch, answers, NAMES) as at:
        site = f"http://images.test:{at.port}"
        fetcher = MediaFetcher([site])
        assert await fetch(fetcher, f"{site}/3") == PNG
        assert len(at.heads) == 4
        problem = await refusal(fetcher, f"{site}/4")
    assert (problem.code, len(at.heads)) == ("media_unreachable", 8)


async def test_a_file_in_chunks_and_one_without_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(PNG), PNG)
    answers = {
        "/chunked": sends(head + chunked),
        "/endless": sends(head + b"\r\n" + PNG),
        "/later": sends(b"HTTP/1.1 103 Early Hints\r\n\r\n" + answer(PNG)),
    }
    async with elsewhere(monkeypatch, answers, NAMES) as at:
        site = f"http://images.test:{at.port}"
        for path in answers:
            assert await fetch(MediaFetcher([site]), site + path) == PNG


# -- what is not ---------------------------------------------------------------------------------


async def test_nothing_leaves_that_the_list_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {"/": sends(answer(PNG))}, NAMES) as at:
        port = at.port
        fetcher = MediaFetcher([f"http://images.test:{port}", f"https://*.cdn.test:{port}"])
        for url in [
            f"https://images.test:{port}/",  # The list says http.
            "http://images.test/",  # Another port.
            f"http://images.test.other.test:{port}/",
            f"http://other.test:{port}/?http://images.test:{port}/",
            f"http://other.test:{port}#@images.test:{port}/",
            f"http://other.test:{port}\\@images.test:{port}/",
            f"http://images.test:{port}@other.test/",
            f"http://user:{SECRET}@images.test:{port}/",
            f"http://images.test :{port}/",
            f"http://images.test\0.other.test:{port}/",
            f"https://a\r\nX: b.cdn.test:{port}/",
            f"https://cdn.test:{port}/",
            f"https://.cdn.test:{port}/",
            f"http://127.0.0.1:{port}/",
            f"http://2130706433:{port}/",
            f"http://0177.0.0.1:{port}/",
            f"http://0x7f.1:{port}/",
            f"http://[::1]:{port}/",
            f"http://[::ffff:127.0.0.1]:{port}/",
            f"http://\uff49mages.test:{port}/",
            "http:///etc/passwd",
            "http:images.test",
            f"http://images.test:{port}/" + "a" * 9000,
        ]:
            problem = await refusal(fetcher, url)
            assert problem.code == "media_not_allowed", url
    assert (at.dialled, at.resolver.lookups) == ([], [])


@pytest.mark.parametrize(
    "ips",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["172.16.0.1"],
        ["192.168.1.1"],
        ["169.254.169.254"],
        ["100.64.0.1"],
        ["0.0.0.0"],
        ["224.0.0.1"],
        ["255.255.255.255"],
        ["::1"],
        ["fe80::1%eth0"],
        ["fd00::1"],
        ["fec0::1"],
        ["::ffff:127.0.0.1"],
        ["::127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"],
        ["2001:0:7f00:1::"],
        ["ff02::1"],
        [PUBLIC, "10.0.0.1"],
    ],
)
async def test_a_name_with_an_address_that_is_not_public(
    monkeypatch: pytest.MonkeyPatch, ips: Sequence[str]
) -> None:
    async with elsewhere(monkeypatch, {}, {"images.test": [ips]}) as at:
        site = f"http://images.test:{at.port}"
        assert (await refusal(MediaFetcher([site]), site)).code == "media_not_allowed"
    assert at.dialled == []


def test_public_addresses() -> None:
    for ip in (PUBLIC, "2606:4700::1111", "64:ff9b::5db8:d822", "::ffff:93.184.216.34"):
        assert is_public(ip), ip


async def test_addresses_in_digits_that_the_list_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reads them as 127.0.0.1."""
    async with elsewhere(monkeypatch, {}, {}) as at:
        for host in ("127.0.0.1", "2130706433", "0177.0.0.1", "0x7f.1"):
            site = f"http://{host}:{at.port}"
            assert (await refusal(MediaFetcher([site]), site)).code == "media_not_allowed"
    assert at.dialled == []


async def test_a_name_is_lookups_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer of its name server would be this machine."""
    async with elsewhere(monkeypatch, {"/": sends(answer(PNG))}, NAMES) as at:
        site = f"http://rebinding.test:{at.port}"
        fetcher = MediaFetcher([site])
        assert await fetch(fetcher, site) == PNG
        assert at.dialled == [(PUBLIC, at.port)]
        assert (await refusal(fetcher, site)).code == "media_not_allowed"
    assert at.dialled == [(PUBLIC, at.port)]


@pytest.mark.parametrize(
    "location",
    [
        "http://inside.test:{port}/",
        "http://127.0.0.1:{port}/",
        "http://169.254.169.254/latest/meta-data",
        "http://other.test:{port}/",
        "//other.test:{port}/",
        "http://images.test:1/",
        "https://images.test:{port}/",
        "file:///etc/passwd",
        "gopher://images.test:{port}/",
        "data:image/png;base64,AAAA",
        f"http://{SECRET}:b@images.test:{{port}}/",
        "\\\\other.test\\",
        "http://[",
        "//images.test]/",
    ],
)
async def test_redirects_are_checked(monkeypatch: pytest.MonkeyPatch, location: str) -> None:
    async with elsewhere(monkeypatch, {}, NAMES) as at:
        at.answers["/"] = redirects(location.format(port=at.port))
        site = f"http://images.test:{at.port}"
        fetcher = MediaFetcher([site, f"http://inside.test:{at.port}"])
        problem = await refusal(fetcher, site)
        expected = "media_unreachable" if location.startswith("\\") else "media_not_allowed"
    assert problem.code == expected
    assert {ip for ip, _ in at.dialled} == {PUBLIC}
    assert len(at.dialled) == (1 if expected == "media_not_allowed" else 2)


async def test_a_thousand_redirects_end_after_three(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {"/": redirects("/")}, NAMES) as at:
        site = f"http://images.test:{at.port}"
        assert (await refusal(MediaFetcher([site]), site)).code == "media_unreachable"
    assert len(at.heads) == 4


BROKEN = {
    "status": (answer(SECRET.encode(), status=403), "media_unreachable"),
    "nowhere": (answer(SECRET.encode(), status=302), "media_unreachable"),
    "partial": (answer(PNG, status=206), "media_unreachable"),
    "empty": (answer(b""), "media_unreachable"),
    "gzip": (answer(gzip.compress(bytes(10**6)), "Content-Encoding: gzip"), "media_unreachable"),
    "html": (answer(SECRET.encode(), f"Content-Type: text/html; a={SECRET}"), "image_format"),
    "svg": (answer(PNG, "Content-Type: image/svg+xml"), "image_format"),
    "short": (answer(PNG, length=len(PNG) + 1), "media_unreachable"),
    "huge": (answer(PNG, length=10**12), "image_too_large"),
    "rude": (SECRET.encode() * 9 + b"\r\n\r\n", "media_unreachable"),
    "silent": (b"", "media_unreachable"),
    "two lengths": (answer(PNG, "Content-Length: 3"), "media_unreachable"),
    "long head": (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 10**5, "media_unreachable"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_answers_that_hold_no_image(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sent, code = BROKEN[name]
    async with elsewhere(monkeypatch, {"/": sends(sent)}, NAMES) as at:
        site = f"http://images.test:{at.port}"
        assert (await refusal(MediaFetcher([site]), site)).code == code


async def test_types_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {}, NAMES) as at:
        site = f"http://images.test:{at.port}"
        for kind in ("binary/octet-stream", "application/octet-stream", "image/jpg; a=b", ""):
            at.answers["/"] = sends(answer(PNG, f"Content-Type: {kind}"))
            assert await fetch(MediaFetcher([site]), site) == PNG


async def test_an_endless_file_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def flood(stream: trio.abc.Stream, _: bytes) -> None:
        nonlocal sent
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await stream.send_all(bytes(2**20))
            sent += 2**20

    held = list[int]()
    async with elsewhere(monkeypatch, {"/": flood}, NAMES) as at:
        site = f"http://images.test:{at.port}"
        with pytest.raises(RequestFailed) as raised:
            await fetch(MediaFetcher([site]), site, held)
    assert raised.value.problem.code == "image_too_large"
    assert sum(held) <= MAX_IMAGE_BYTES


async def test_a_slow_server_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, the file does not."""
    monkeypatch.setattr(media_fetch, "FETCH_S", 0.2)

    async def trickle(stream: trio.abc.Stream, _: bytes) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await stream.send_all(b"a")
            await trio.sleep(0.01)

    async def never(stream: trio.abc.Stream, _: bytes) -> None:
        await trio.sleep_forever()

    async with elsewhere(monkeypatch, {"/": trickle, "/never": never}, NAMES) as at:
        site = f"http://images.test:{at.port}"
        for path in ("/", "/never"):
            problem = await refusal(MediaFetcher([site]), site + path)
            assert problem.code == "media_unreachable"
            assert "took more than" in problem.message


async def test_certificates_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {"/": sends(answer(PNG))}, NAMES) as at:
        named = MediaFetcher([f"other.test:{at.tls_port}"])
        problem = await refusal(named, f"https://other.test:{at.tls_port}")
        assert problem.code == "media_unreachable"
        assert "SSLCertVerificationError" in problem.message
        monkeypatch.delenv("SSL_CERT_FILE")
        unknown = MediaFetcher([f"images.test:{at.tls_port}"])
        problem = await refusal(unknown, f"https://images.test:{at.tls_port}")
        assert "SSLCertVerificationError" in problem.message
    assert at.heads == []


async def test_without_authorities_nothing_is_dialled_and_the_error_names_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with elsewhere(monkeypatch, {"/": sends(answer(PNG))}, NAMES) as at:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
        site = f"https://images.test:{at.tls_port}"
        problem = await refusal(MediaFetcher([site.removeprefix("https://")]), site)
    assert "FileNotFoundError" in problem.message
    assert not at.dialled


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {"/": sends(answer(PNG))}, NAMES) as at:
        for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        site = f"http://images.test:{at.port}"
        assert await fetch(MediaFetcher([site]), site) == PNG


async def test_names_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, {}, {}) as at:
        for host in ("unknown.test", "a" * 300 + ".test"):
            site = f"http://{host}:{at.port}"
            assert (await refusal(MediaFetcher([site]), site)).code == "media_unreachable"


# -- the setting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("images.example", "https://images.example"),
        ("HTTPS://Images.example:443", "https://images.example"),
        ("http://images.example", "http://images.example"),
        ("*.example.com:8443", "https://*.example.com:8443"),
        ("private:http://minio:9000", "private:http://minio:9000"),
        ("private:192.168.1.5", "private:https://192.168.1.5"),
    ],
)
def test_entries(text: str, normal: str) -> None:
    assert media_domain(text) == media_domain(normal) == normal
    assert ServerSettings(allowed_media_domains=(text,)).allowed_media_domains == (normal,)


@pytest.mark.parametrize(
    "text",
    [
        "*",
        "*.",
        "",
        "ftp://a.b",
        "https://a.b/path",
        "a b",
        "a@b",
        "[::1]",
        "a.b:0",
        "a.b:99999",
        "a.*.b",
        "http:a.b",
    ],
)
def test_entries_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no server of images|there is no port"):
        media_domain(text)
