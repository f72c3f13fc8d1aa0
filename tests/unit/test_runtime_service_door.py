"""A service that binds every address is known by its hostname; one that binds its own is known by that."""

import socket

import pytest

from headway.runtime.service import Placement, _parse, _placement_of


def placed(*flags: str) -> Placement:
    return _placement_of(_parse("reward", ["--config", "experiment.yaml", *flags]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_advertised_and_named_by_the_hostname(host: str) -> None:
    placement = placed("--host", host)
    assert placement.address(7000) == f"{socket.gethostname()}:7000"
    assert placement.instance == socket.gethostname()


def test_an_address_of_its_own_is_advertised_as_it_is() -> None:
    placement = placed("--host", "10.0.0.7")
    assert placement.address(7000) == "10.0.0.7:7000"
    assert placement.instance == "0"


def test_what_is_given_wins_over_the_hostname() -> None:
    placement = placed("--host", "0.0.0.0", "--advertise", "reward.example", "--instance", "3")
    assert placement.address(7000) == "reward.example:7000"
    assert placement.instance == "3"


def test_the_environment_gives_what_the_command_line_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOST", "0.0.0.0")
    monkeypatch.setenv("HEADWAY_INSTANCE", "5")
    placement = placed("--advertise", "10.1.2.3")
    assert (placement.host, placement.instance, placement.advertise) == ("0.0.0.0", "5", "10.1.2.3")
