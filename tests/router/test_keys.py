"""API keys and TLS: nobody without a key, no key in an engine's hands, no restart for a new key or certificate."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from twinpool.core.errors import InvalidValue
from twinpool.router.logic.keys import Keyring, digest_of
from twinpool.router.settings import Limits
from twinpool.router.shell.client import ClientConnection
from twinpool.router.shell.secrets import Certificate, read_keys

KEY = b"k" * 32
OTHER = b"another-key-of-a-team"


def test_an_entry_is_a_key_or_its_digest() -> None:
    digest = hashlib.sha256(KEY).digest()
    assert digest_of(KEY + b"\n", "a") == digest_of(b"sha256:" + digest.hex().encode(), "a") == digest
    for wrong in (b"", b"short", b"sha256:", b"sha256:00", b"sha256:" + b"x" * 64, b"sha256:\xff"):
        with pytest.raises(InvalidValue, match="'team-a'") as caught:
            digest_of(wrong, "team-a")
        assert wrong.decode("latin-1") not in str(caught.value) or wrong in (b"", b"sha256:")


def test_who_is_let_in() -> None:
    ring = Keyring([("a", digest_of(KEY, "a")), ("b", digest_of(OTHER, "b"))], b"secret")
    assert ring.name_of([(b"authorization", b"Bearer " + KEY)]) == "a"
    assert ring.name_of([(b"authorization", b"bearer  " + OTHER)]) == "b"
    assert ring.name_of([(b"x-api-key", OTHER)]) == "b"
    assert ring.name_of([(b"x-api-key", KEY), (b"authorization", b"Bearer " + KEY)]) == "a"
    for headers in (
        [],
        [(b"authorization", b"Basic " + KEY)],
        [(b"authorization", b"Bearer " + KEY + b"x")],
        [(b"authorization", b"Bearer ")],
        [(b"x-api-key", KEY), (b"authorization", b"Bearer " + OTHER)],
    ):
        assert ring.name_of(headers) is None
    assert Keyring([], b"s").name_of([(b"x-api-key", KEY)]) is None, "without keys nobody is let in"


@pytest.fixture
async def guarded(router):
    router.pool.keyring = Keyring([("team-a", digest_of(KEY, "a"))], os.urandom(16))
    return router


async def test_a_request_needs_a_key_and_the_engine_does_not_see_it(guarded, kit):
    for header in ("", "Authorization: Bearer wrong\r\n", "X-Api-Key: wrong\r\n"):
        client = await guarded.connect()
        client.send(kit.post(kit.STREAM, headers=header))
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert await client.rest() == b""
    assert not any(engine.requests for engine in guarded.engines)
    assert (await guarded.ask(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")).status == 401
    assert (await guarded.ask(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")).status == 200
    for header in ("Authorization: Bearer %s\r\n", "X-Api-Key: %s\r\n"):
        client = await guarded.connect()
        for _ in range(2):
            client.send(kit.post(kit.STREAM, headers=header % KEY.decode()))
            assert (await client.answer()).status == 200
    for engine in guarded.engines:
        for request in engine.requests:
            assert KEY not in request.raw_head
            assert not {"authorization", "x-api-key"} & request.headers.keys()


async def test_without_keys_authorization_is_the_engines_business(router, kit):
    await router.ask(kit.post(kit.STREAM, headers="Authorization: Bearer for-the-engine\r\n"))
    assert all(r.headers["authorization"] == "Bearer for-the-engine" for e in router.engines for r in e.requests)


async def test_a_body_is_not_held_for_somebody_without_a_key(make_router, kit):
    router = await make_router(Limits(bodies=10_000))
    router.pool.keyring = Keyring([], b"s")
    client = await router.connect()
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 50000\r\n\r\n" + b"x" * 40_000)
    assert (await client.answer()).status == 401
    assert router.pool.body_bytes == 0
    client = await router.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    client.send(head)
    assert (await client.answer()).status == 401, "the body is not asked for either"


def test_the_keys_of_a_mounted_secret(tmp_path, caplog) -> None:
    real = tmp_path / "..2026"
    real.mkdir()
    (tmp_path / "..data").symlink_to(real)
    for name, content in (("team-a", KEY), ("team-b", b"sha256:" + b"ab" * 32), ("bad", b"too short")):
        (real / name).write_bytes(content)
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert dict(read_keys(str(tmp_path))) == {"team-a": digest_of(KEY, ""), "team-b": b"\xab" * 32}
    assert "'bad'" in caplog.text
    assert "too short" not in caplog.text
    empty = tmp_path / "empty"
    empty.mkdir()
    assert read_keys(str(empty)) == ()
    assert "every request is refused" in caplog.text
    with pytest.raises(InvalidValue, match=r"routing\.auth"):
        read_keys(str(tmp_path / "nothing"))


def certificate(folder, name="localhost"):
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "tls.key").write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return made.public_bytes(serialization.Encoding.DER)


async def test_https_with_a_certificate_that_is_replaced(router, kit, tmp_path):
    first = certificate(tmp_path)
    held = Certificate(str(tmp_path))
    server = await router.loop.create_server(
        lambda: ClientConnection(router.pool, router.clients, b"{}"), "127.0.0.1", 0, ssl=held.context
    )
    port = server.sockets[0].getsockname()[1]

    async def connect():
        trust = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="localhost")
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        client = kit.RawClient(reader, writer)
        router._raw.append(client)
        return client, shown

    client, shown = await connect()
    assert shown == first
    client.send(kit.post(kit.STREAM) * 2)
    for _ in range(2):
        assert (await client.answer()).body == b"".join(kit.EVENTS)

    (tmp_path / "tls.key").write_text("half replaced")
    held.refresh()
    second = certificate(tmp_path)
    held.refresh()
    held.refresh()
    newer, shown = await connect()
    assert shown == second
    newer.send(kit.post(kit.STREAM, headers="Connection: close\r\n"))
    assert (await newer.answer()).status == 200
    assert await newer.rest() == b""
    client.send(kit.post(kit.STREAM))
    assert (await client.answer()).status == 200, "who is connected stays"
    server.close()


def test_files_that_are_no_certificate_are_named(tmp_path) -> None:
    for content in (None, "nonsense"):
        if content:
            for name in ("tls.crt", "tls.key"):
                (tmp_path / name).write_text(content)
        with pytest.raises(InvalidValue, match=r"tls\.crt.*kubernetes\.io/tls"):
            Certificate(str(tmp_path))
