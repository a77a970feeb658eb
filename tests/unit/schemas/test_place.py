"""URLs of Redis: what each says, and what is said of wrong ones."""

import pytest

from penstock.schemas.redis.url import Address, BadUrl, Kind, Login, parse


@pytest.mark.parametrize(
    "url, kind, addresses, database, login",
    [
        ("redis://h", Kind.HOSTS, ["h:6379"], 0, (None, None)),
        ("redis://h:1/3", Kind.HOSTS, ["h:1"], 3, (None, None)),
        ("redis://h:1?db=3", Kind.HOSTS, ["h:1"], 3, (None, None)),
        ("redis://:p%40ss@h", Kind.HOSTS, ["h:6379"], 0, (None, "p@ss")),
        ("redis://u:a:b@h", Kind.HOSTS, ["h:6379"], 0, ("u", "a:b")),
        ("redis://[::1]:7,[::2]", Kind.HOSTS, ["::1:7", "::2:6379"], 0, (None, None)),
        ("redis+cluster://a:1,b", Kind.CLUSTER, ["a:1", "b:6379"], 0, (None, None)),
        ("redis+sentinel://a,b:9/main/2", Kind.SENTINELS, ["a:26379", "b:9"], 2, (None, None)),
        ("unix:///run/redis.sock?db=4", Kind.HOSTS, ["/run/redis.sock"], 4, (None, None)),
        ("unix://u:p@/run/r", Kind.HOSTS, ["/run/r"], 0, ("u", "p")),
    ],
)
def test_a_url_says_where_redis_is(
    url: str,
    kind: Kind,
    addresses: list[str],
    database: int,
    login: tuple[str | None, str | None],
) -> None:
    place = parse(url)
    assert (place.kind, [str(each) for each in place.addresses]) == (kind, addresses)
    assert (place.database, place.login) == (database, Login(*login))


def test_what_a_url_leaves_out_is_the_usual() -> None:
    place = parse("redis+sentinel://h/main?timeout_s=0.5&sentinel_password=x")
    assert (place.service, place.timeout_s, place.retry_s) == ("main", 0.5, 0)
    assert parse("unix:///s?retry_s=7").retry_s == parse("redis://h?retry_s=7").retry_s == 7
    assert (place.sentinel_login, place.login) == (Login(None, "x"), Login(None, None))
    assert parse("redis://h").addresses == (Address("h", 6379),)
    assert parse("rediss://h").tls is not None
    assert parse("redis://h").tls is None


@pytest.mark.parametrize(
    "url, part",
    [
        ("localhost:6379", "scheme"),
        ("http://h", "scheme"),
        ("redis+ring://h", "scheme"),
        ("redis://", "host"),
        ("redis://a,,b", "host"),
        ("redis://h:x", "port"),
        ("redis://h:0", "port"),
        ("redis://h:65536", "port"),
        ("redis://h/zero", "database"),
        ("redis://h/0/1", "path"),
        ("redis://secret@h", "password"),
        ("redis://u:secret@h:x", "port"),
        ("redis://h?colour=blue", "option"),
        ("redis://h?timeout_s=never", "timeout_s"),
        ("redis://h?timeout_s=nan", "timeout_s"),
        ("redis://h?retry_s=-1", "retry_s"),
        ("redis://h?ca=/etc/hosts", "ca"),
        ("rediss://h?ca=/no/such/file", "ca"),
        ("rediss://h?ca=/etc/hosts", "ca"),
        ("rediss://h?verify=maybe", "verify"),
        ("rediss://h?key=/etc/hosts", "cert"),
        ("redis+sentinel://h", "service"),
        ("redis+cluster://h/1", "database"),
        ("unix://host/path", "path"),
        ("unix://", "path"),
    ],
)
def test_a_wrong_url_is_refused_by_the_part_that_is_wrong(url: str, part: str) -> None:
    with pytest.raises(BadUrl) as refusal:
        parse(url)
    sentence = str(refusal.value)
    assert part in sentence.split(":")[0]
    assert "secret" not in sentence
