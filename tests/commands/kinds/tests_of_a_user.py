"""Two tests, one of which fails."""


def test_right() -> None:
    assert sum([1, 2]) == 3


def test_wrong() -> None:
    assert sum([1, 2]) == 4
