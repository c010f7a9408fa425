"""How a server that is waited for is named."""

import pytest

from weighin.errors import ConfigError
from weighin.run.command_settings import CommandSettings
from weighin.run.readiness import check


@pytest.mark.parametrize(
    "how", [{}, {"ready": "started"}, {"ready_url": "http://127.0.0.1:8000/health"}]
)
def test_a_server_that_can_be_waited_for(how: dict[str, str]) -> None:
    check(CommandSettings("/", **how))  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["https://localhost/", "http:///health", "localhost:8000", "x"])
def test_an_address_that_is_not_of_http_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address of HTTP"):
        check(CommandSettings("/", ready_url=url))


def test_two_ways_to_tell_that_a_server_is_ready_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="each of them tells when the server is ready"):
        check(CommandSettings("/", ready="started", ready_url="http://localhost/"))
